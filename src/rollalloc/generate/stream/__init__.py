"""Rollouts that stream: rows join and leave while others run, and a batch is trained while the next one is generated."""
