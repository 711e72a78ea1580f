"""Predict a prompt's success rate before its rollouts are generated. Needs only numpy; no I/O."""
