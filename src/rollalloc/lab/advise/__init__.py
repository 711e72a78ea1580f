"""Which recipe, how many rollouts a prompt: a profile of a model on its prompts, and the verdict that follows."""
