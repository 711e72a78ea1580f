"""verl's V1 trainer under our recipes: `trainer.v1.trainer_mode=rollalloc`.

`rounds`, `settings` and `minibatches` decide nothing and know nothing of verl: they translate between its words and the
core's. `trainer`, `workers` and `loader` are the glue; `plugin` is what verl finds by itself.
"""
