"""The same reward for verl, for TRL and for rollalloc's own commands; loaded by this file's path."""

from pathlib import Path

from rollalloc.rewards.frameworks import Reward
from rollalloc.rewards.overlong import OverlongScorer
from rollalloc.rewards.scorers import WorkerScorer

workers = WorkerScorer(f"{Path(__file__).with_name('reward_samples.py')}:obey", workers=2, limit_s=1.0)
reward = Reward(workers, ground_truth="answer", name="obedience")
shaped = Reward(OverlongScorer(workers, max_tokens=8, buffer=4), ground_truth="answer")
