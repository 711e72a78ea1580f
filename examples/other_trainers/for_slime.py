"""A recipe in slime: `--rollout-function-path for_slime.generate_rollout --disable-rewards-normalization`.

The code puts the advantage in place of the reward. `--global-batch-size` is the number of rows of the recipe's batch.
"""

# pyright: reportMissingImports=false

import asyncio
import copy

from loops import Batches

from rollalloc import recipes

batches, prompts = None, []


def generate_rollout(args, rollout_id, data_source, evaluation=False):
    from slime.rollout.base_types import RolloutFnTrainOutput
    from slime.rollout.sglang_rollout import GenerateState, eval_rollout, generate_and_rm_group
    from slime.utils.async_utils import run

    global batches, prompts
    if evaluation:
        return run(eval_rollout(args, rollout_id))[0]
    if batches is None:
        prompts = [group[0] for group in data_source.get_samples(len(data_source))]
        recipe = recipes.dapo(groups=args.rollout_batch_size, n=args.n_samples_per_prompt, gen_groups=64)
        batches = Batches(recipe, len(prompts))

    async def play(orders):
        groups = [[copy.deepcopy(prompts[prompt]) for _ in range(n)] for prompt, n in orders]
        params = GenerateState(args).sampling_params
        return await asyncio.gather(*(generate_and_rm_group(args, group, params.copy()) for group in groups))

    def roll_out(orders):
        return [
            [(float(sample.get_reward_value(args)), sample.response_length, sample) for sample in group]
            for group in run(play(orders))
        ]

    rows = batches.next(roll_out)
    if rows is None:
        raise StopIteration("the recipe has ended")
    for row, sample in rows:
        sample.reward, sample.group_index = row.advantage * row.weight, row.group
        sample.index = sample.rollout_id = row.rollout  # slime needs different ids; copies of a prompt have the same
    return RolloutFnTrainOutput(samples=[[sample] for _, sample in rows])
