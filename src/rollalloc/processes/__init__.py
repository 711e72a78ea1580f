"""Child processes that end together with this process, and signals that ask a run to stop."""
