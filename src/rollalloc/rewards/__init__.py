"""Reward functions and the processes that run them. A rollout is right, wrong or unscored. An unscored rollout does not
count as wrong.
"""
