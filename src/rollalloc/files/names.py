"""Names of the files in the folders of runs and of sampled profiles."""

METRICS, ROLLOUTS, REWARDS = "metrics.jsonl", "rollouts.jsonl", "rewards.json"
DECISIONS = "decisions.jsonl"
ENCODED = "encoded.safetensors"  # token ids of the prompts
DESCRIPTION, MODEL, ALLOCATOR, FEATURES = "run.json", "model", "allocator.json", "features.safetensors"
CHECKPOINTS = "checkpoints"
PROFILE, PROMPTS, ANSWERS = "profile.json", "prompts.jsonl", "answers.jsonl"
