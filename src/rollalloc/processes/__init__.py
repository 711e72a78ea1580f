"""Child processes that end when this one ends, and signals that ask a run to stop."""
