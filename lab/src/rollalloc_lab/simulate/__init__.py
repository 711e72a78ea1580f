"""Simulates a cluster with the real allocator, to estimate the seconds that a recipe takes before GPUs are rented."""
