"""Predict a prompt's success rate before paying for a rollout of it. Needs only numpy; no I/O."""
