"""Advises on a recipe and on rollouts per prompt. It profiles a model on its prompts, and derives a verdict."""
