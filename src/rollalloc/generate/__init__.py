"""The sampler, and rollouts in waves; `stream` lets them join and leave."""
