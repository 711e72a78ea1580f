"""Reads the files of a run, and computes its cost to reach a target."""
