"""Child processes that end with this one, and requests to stop by signals."""
