"""A cluster in simulation, driven by the real allocator: what a recipe costs in seconds before GPUs are rented."""
