"""The names in a run's folder."""

METRICS, ROLLOUTS, REWARDS = "metrics.jsonl", "rollouts.jsonl", "rewards.json"
DESCRIPTION, MODEL, ALLOCATOR = "run.json", "model", "allocator.json"
CHECKPOINTS = "checkpoints"
