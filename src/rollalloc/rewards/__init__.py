"""Reward functions and the processes that run them. Three-valued: right, wrong, and unscored, which is not wrong."""
