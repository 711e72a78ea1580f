"""Writes files completely or not at all, opens them safely, and records which files rollalloc wrote."""
