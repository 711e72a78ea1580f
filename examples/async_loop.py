"""The core in an asynchronous loop: every completion is told as it comes, and its slot is asked for at once.

DARTS with a sampled tail stops rollouts while they run. Generation is a sleep of random length. Run it:

    python examples/async_loop.py
"""

import asyncio
import random
from dataclasses import replace

from rollalloc import Allocator, Budget, recipes
from rollalloc.core.events import Cancelled, Done, Event, Updated

SLOTS = 64  # rollouts that your engine runs at a time


async def roll_out(rollout: int, prompt: int, version: int) -> Event:
    """Stands for a request to your engine and its verifier; a cancelled request still reports what it cost."""
    tokens = int(random.Random(rollout).expovariate(1 / 200)) + 1
    try:
        await asyncio.sleep(tokens / 100_000)
    except asyncio.CancelledError:
        return Cancelled(rollout, tokens=tokens // 2)
    win = float(random.Random(-rollout).random() < (prompt % 10) / 10)
    return Done(rollout, reward=win, metric=win, tokens=tokens, version=version)


async def main() -> None:
    recipe = recipes.mix(
        recipes.dapo(groups=8, n=8, gen_groups=24), recipes.darts(groups=8, shortest=7, longest=1, tail="sampled")
    )
    allocator = Allocator(replace(recipe, budget=Budget(run_rollouts=5000)), prompts=1000, seed=0)
    running: dict[int, asyncio.Task[Event]] = {}
    batches = 0
    while not (actions := allocator.ask(capacity=SLOTS - len(running))).finished:
        for rollout in actions.cancel:
            running[rollout].cancel()
        for order in actions.generate:
            for rollout in order.rollouts:
                running[rollout] = asyncio.create_task(roll_out(rollout, order.prompt, allocator.version))
        if actions.batch:
            batches += 1  # a real trainer would run beside this loop, and tell Updated when it is through
            allocator.tell([Updated(allocator.version + 1)])
        elif running:
            done, _ = await asyncio.wait(running.values(), return_when=asyncio.FIRST_COMPLETED)
            events = [task.result() for task in done]
            for event in events:
                del running[event.rollout]  # pyright: ignore[reportAttributeAccessIssue]
            allocator.tell(events)
    print(f"{batches} batches; { ({cause: n for cause, n in allocator.accounts().items() if n}) }")
    print(f"{allocator.tokens_paid:,} tokens; {actions.finished}")


if __name__ == "__main__":
    asyncio.run(main())
