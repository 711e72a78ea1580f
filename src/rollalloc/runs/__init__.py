"""What is known of a run: the one reader of its files, and what it cost to reach a target."""
