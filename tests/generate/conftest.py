"""A tiny policy, prompts for it and a trainer."""

from tiny_policy import one_thread, policy, policy_of, prompts_of, trainer_of

__all__ = ["one_thread", "policy", "policy_of", "prompts_of", "trainer_of"]
