"""A tiny policy, prompts for it and a trainer; a small `sort` task and runs on it."""

from small_run import run_of, task
from tiny_policy import one_thread, policy, policy_of, prompts_of, trainer_of

__all__ = ["one_thread", "policy", "policy_of", "prompts_of", "run_of", "task", "trainer_of"]
