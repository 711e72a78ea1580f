"""Rollouts that stream: they start and end one by one, and the next batch is generated while a batch is trained."""
