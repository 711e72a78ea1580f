"""The reward of these runs: math-verify in processes that may be killed, shared by verl's reward workers."""

from rollalloc.rewards.frameworks import Reward
from rollalloc.rewards.scorers import WorkerScorer

reward = Reward(WorkerScorer("rollalloc.rewards.math:compute_score", workers=2))
