"""Simulates a cluster with the real allocator, to estimate what a recipe costs in seconds before GPUs are rented."""
