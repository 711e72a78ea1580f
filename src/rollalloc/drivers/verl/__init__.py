"""verl's V1 trainers under our recipes: `trainer.v1.trainer_mode=rollalloc`, and its asynchronous modes.

`rounds`, `settings`, `modes` and `minibatches` decide nothing and know nothing of verl: they translate between its words and
the core's. `trainer`, `workers` and `loader` are the glue; `plugin` is what verl finds by itself.
"""
