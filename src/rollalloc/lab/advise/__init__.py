"""Advice on a recipe and on rollouts per prompt: profiles a model on its prompts, and derives a verdict."""
