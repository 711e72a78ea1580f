"""A recipe in AReaL: write `RecipeWorkflow = recipe_workflow()` in a module of yours.

Give `PPOTrainer.train` the class as `workflow="my_module.RecipeWorkflow"`, with `workflow_kwargs`, and set
`gconfig.n_samples: 1`, because an episode is a whole group here. `inner` is the workflow that you have, for example an
`RLVRWorkflow`; `prompts` are the rows of its data set.
"""

# pyright: reportMissingImports=false

import asyncio

from loops import Groups


def recipe_workflow():
    from areal.api import RolloutWorkflow
    from areal.utils.data import concat_padded_tensors

    class RecipeWorkflow(RolloutWorkflow):
        def __init__(self, inner, prompts, recipe, seed=0):
            self.inner, self.prompts = inner, prompts
            self.groups = Groups(recipe, len(prompts), seed)

        async def arun_episode(self, engine, data):
            prompt, n = self.groups.next()  # and not `data`, which AReaL drew
            episodes = (self.inner.arun_episode(engine, self.prompts[prompt]) for _ in range(n))
            rows = await asyncio.gather(*episodes)
            rewards = [None if row is None else float(row["rewards"]) for row in rows]
            rows = [row for row in rows if row is not None]
            return concat_padded_tensors(rows) if self.groups.end(prompt, rewards) and rows else None

    return RecipeWorkflow
