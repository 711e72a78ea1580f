"""Names of the files in the folder of a run, and in that of a sampled profile."""

METRICS, ROLLOUTS, REWARDS = "metrics.jsonl", "rollouts.jsonl", "rewards.json"
DESCRIPTION, MODEL, ALLOCATOR, FEATURES = "run.json", "model", "allocator.json", "features.safetensors"
CHECKPOINTS = "checkpoints"
PROFILE, PROMPTS, ANSWERS = "profile.json", "prompts.jsonl", "answers.jsonl"
