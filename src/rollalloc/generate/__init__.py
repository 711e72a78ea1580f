"""The sampler and the engines. `engine` contains the protocol that the training loop uses."""
