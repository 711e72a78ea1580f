"""Analyze training logs: which rollouts taught something, and which did not."""
