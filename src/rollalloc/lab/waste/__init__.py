"""What a run's rollouts taught, and what another recipe would have paid, from logs that people already have."""
