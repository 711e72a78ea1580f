"""Rollouts that stream: each starts and ends while others run, and a batch is trained while the next one is generated."""
