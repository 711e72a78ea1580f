"""Processes that end with ours, and being asked to stop."""
