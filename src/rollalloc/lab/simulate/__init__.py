"""Simulates a cluster under the real allocator, to estimate a recipe's cost in seconds before GPUs are rented."""
