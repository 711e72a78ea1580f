"""Reward functions and the processes that run them. A rollout is right, wrong or unscored; unscored does not count as
wrong.
"""
