"""Advice on a recipe and rollouts per prompt: a profile of a model on its prompts, and the verdict that follows."""
