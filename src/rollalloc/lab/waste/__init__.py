"""What a run's rollouts taught, from logs that people already have."""
