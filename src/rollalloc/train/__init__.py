"""The native trainer: its configuration, loop, update, checkpoints and evaluation."""
