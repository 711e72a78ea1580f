"""Reads the files of a run, and computes what it cost to reach a target."""
