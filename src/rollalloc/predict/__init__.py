"""What a prompt's success rate will be, said before a rollout of it is paid for: numpy only, no I/O."""
