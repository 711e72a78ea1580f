"""Runs recipes in verl's V1 trainers: `trainer.v1.trainer_mode=rollalloc`, and two asynchronous modes.

`rounds`, `settings`, `modes` and `minibatches` translate between verl and the core, and do not import verl. `trainer`,
`workers` and `loader` derive from verl's classes. `plugin` is the entry point that verl loads when it starts.
"""
