"""A recipe in ART. `roll_out(model, prompt)` is your own.

It plays a prompt once, and returns an `art.Trajectory` with its reward, and the number of its tokens. `Batches.next` runs in
a thread, because ART's loop is asynchronous.
"""

# pyright: reportMissingImports=false

import asyncio
from collections import defaultdict

from loops import Batches


async def train(backend, model, recipe, prompts, roll_out):
    import art

    loop, batches = asyncio.get_running_loop(), Batches(recipe, len(prompts))

    async def play(orders):
        groups = [[roll_out(model, prompts[prompt]) for _ in range(n)] for prompt, n in orders]
        return await asyncio.gather(*(asyncio.gather(*group, return_exceptions=True) for group in groups))

    def results(orders):
        played = asyncio.run_coroutine_threadsafe(play(orders), loop).result()
        return [
            [None if isinstance(one, BaseException) else (one[0].reward, one[1], one[0]) for one in group]
            for group in played
        ]

    while (rows := await asyncio.to_thread(batches.next, results)) is not None:
        groups = defaultdict(list)
        for row, trajectory in rows:
            trajectory.reward = row.advantage * row.weight
            groups[row.group].append(trajectory)
        made = [art.TrajectoryGroup(trajectories) for trajectories in groups.values()]
        await backend.train(model, made, normalize_advantages=False)
    return batches.allocator.accounts()
