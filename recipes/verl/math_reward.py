"""The reward of these runs: math-verify in processes that may be killed, shared by verl's reward workers."""

from pathlib import Path

from rollalloc.rewards.frameworks import Reward
from rollalloc.rewards.scorers import WorkerScorer

reward = Reward(WorkerScorer(f"{Path(__file__).with_name('signed.py')}:compute_score", workers=2))
