"""The sampler and the engines; `engine` has the protocol that the training loop uses."""
