"""Analyzes training logs: which rollouts gave a learning signal and which did not."""
