"""What may change without notice."""
