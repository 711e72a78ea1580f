"""A recipe behind a trainer for which we have no driver.

`Batches` is for a trainer that lets you provide batches, `Groups` for one that draws prompts one by one.
"""

from itertools import zip_longest

from rollalloc import Allocator
from rollalloc.core.events import Done, Failed, Updated


class Batches:
    """A recipe behind a trainer that asks for a batch, trains on it, and asks for the next."""

    def __init__(self, recipe, prompts, seed=0):
        self.allocator = Allocator(recipe, prompts, seed)
        self.payloads = {}  # the trainer's data of each rollout, until the rollout is released

    def next(self, roll_out):
        """Return [(row, payload), ...], each row with its advantage and weight; None if the run is over.

        roll_out([(prompt, n), ...]) generates and scores. For each prompt, it returns a list of n items: (reward, tokens,
        payload), or None for a rollout that failed.
        """
        if self.allocator.batch:  # `next` is called again, so the previous batch was trained on
            self.allocator.tell([Updated(self.allocator.version + 1)])
        while not (actions := self.allocator.ask()).finished:
            for rollout in actions.release:
                self.payloads.pop(rollout, None)
            if actions.batch:
                return [(row, self.payloads[row.rollout]) for row in actions.batch.rows]
            made = roll_out([(order.prompt, len(order.rollouts)) for order in actions.generate])
            for order, of_prompt in zip(actions.generate, made, strict=True):
                for rollout, one in zip(order.rollouts, of_prompt, strict=True):
                    self.allocator.tell([self._event(rollout, one)])
        return None

    def _event(self, rollout, one):
        if one is None:
            return Failed(rollout, "no score")
        reward, tokens, self.payloads[rollout] = one
        return Done(rollout, reward, reward, tokens, self.allocator.version)


class Groups:
    """A recipe behind a trainer that draws one prompt after the other, and reports each group when it has ended."""

    def __init__(self, recipe, prompts, seed=0):
        self.allocator = Allocator(recipe, prompts, seed)
        self.ordered, self.running = [], {}  # prompts with their rollouts: to be drawn, and drawn

    def next(self):
        """Return (prompt, n). If the recipe opens no further group, the oldest one counts as failed: the trainer lost it."""
        self._decide()
        while not self.ordered:
            self.end(next(iter(self.running)), [])
        prompt, rollouts = self.ordered.pop(0)
        self.running[prompt] = rollouts
        return prompt, len(rollouts)

    def end(self, prompt, rewards):
        """Report a group, with None for a rollout without a reward; return whether to train on it."""
        rollouts = self.running.pop(prompt, ())
        if len(rewards) > len(rollouts):
            return False  # it counted as failed before
        events = [
            Failed(rollout, "no reward") if reward is None else Done(rollout, reward, reward, 1, self.allocator.version)
            for rollout, reward in zip_longest(rollouts, rewards)
        ]
        self.allocator.tell(events)
        return not self._decide() & set(rollouts)

    def _decide(self):
        """Take the recipe's orders; return the rollouts that it does not train on. A full batch counts as trained."""
        released, trained = set(), set()
        while True:
            actions = self.allocator.ask()
            released |= set(actions.release)
            self.ordered += [(order.prompt, order.rollouts) for order in actions.generate]
            if not actions.batch:
                return released - trained
            trained |= {row.rollout for row in actions.batch.rows}
            self.allocator.tell([Updated(self.allocator.version + 1)])

    def state_dict(self):
        return {
            "allocator": self.allocator.state_dict(),
            "ordered": self.ordered,
            "running": list(self.running.items()),
        }

    def load_state_dict(self, state):
        """What was running when the state was saved counts as failed."""
        self.allocator.load_state_dict(state["allocator"])
        self.ordered, self.running = list(state["ordered"]), dict(state["running"])
        for prompt in list(self.running):
            self.end(prompt, [])
