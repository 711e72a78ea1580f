"""The comparison of recipes on one task: runs side by side, and what they say together."""
