"""The names in a run's folder."""

METRICS, ROLLOUTS, REWARDS = "metrics.jsonl", "rollouts.jsonl", "rewards.json"
DESCRIPTION, MODEL, ALLOCATOR, FEATURES = "run.json", "model", "allocator.json", "features.safetensors"
CHECKPOINTS = "checkpoints"
