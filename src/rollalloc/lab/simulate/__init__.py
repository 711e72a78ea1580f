"""A simulated cluster driven by the real allocator: estimates a recipe's cost in seconds before GPUs are rented."""
