"""The native trainer: its loop, update, checkpoints, evaluation and settings; a run as a value, and its execution."""
