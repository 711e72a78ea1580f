"""The names in a run's folder, and in that of a sampled profile."""

METRICS, ROLLOUTS, REWARDS = "metrics.jsonl", "rollouts.jsonl", "rewards.json"
DESCRIPTION, MODEL, ALLOCATOR, FEATURES = "run.json", "model", "allocator.json", "features.safetensors"
CHECKPOINTS = "checkpoints"
PROFILE, PROMPTS = "profile.json", "prompts.jsonl"
