"""The one stateful class: told what happened, asked what to do.

A group's way: its prompt is drawn and its rollouts are decided (`_intake`, `_enter`), handed out (`_hand_out`), results
come in (`tell`), a judge sends it on, to a batch or away (`_judge`), and it ends exactly once: in a batch (`_train`) or
dropped (`_drop`). A call costs in proportion to the groups it touches, never to the number of prompts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from math import isfinite
from operator import index
from typing import Any, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rollalloc.core.events import (
    Actions,
    Batch,
    Cancelled,
    Done,
    Event,
    Failed,
    Offered,
    Order,
    Progress,
    Row,
    Updated,
)
from rollalloc.core.group import Group, GroupView
from rollalloc.core.ledger import QUARANTINED, Ledger, moved
from rollalloc.core.packing import differences, exact_keys, pack_tree, unpack_tree
from rollalloc.core.purse import Ends, Halt, Purse
from rollalloc.core.recipe import CAUSES, Act, Memory, OfferedPromptRule, Recipe, View
from rollalloc.core.roster import NEXT_EPOCH, NOW, Roster, Until
from rollalloc.core.seeds import rng, rng_when_used
from rollalloc.core.table import GONE, PromptTable

SCHEMA = 2  # of the saved state
_PATIENCE = 256  # candidates, at least, that come to nothing before a run is given up
_OUTAGE = 64  # candidates in a row whose rollouts failed, none with a score between them, before a run is given up
_ROUNDING = 1e-6  # a mean of float32 scores may lie beyond 1 by as much


class EventError(ValueError):
    """An event that cannot be. The events before it in the same `tell` were taken; it and those after it were not."""


class MetricError(EventError):
    """A metric outside [0, 1] under a recipe whose rules take it for a success rate."""


class RuleError(ValueError):
    """A rule of the recipe returned something it may not."""


class Starved(RuntimeError):
    """There is nothing to do, nothing is running, and the recipe or the driver must change for that to change."""


class Allocator:
    """Decides, from what it is told, which rollouts to generate, to stop, to release and to train on.

    Its state is a function of the recipe, the seed and the events told so far.

    Args:
        recipe: what to do.
        prompts: the data set, as a `PromptTable` or as a number of prompts.
        seed: 0 or more.

    Raises:
        ValueError: more groups in a batch than there are prompts, or a negative seed.
    """

    def __init__(self, recipe: Recipe, prompts: int | PromptTable, seed: int) -> None:
        table = PromptTable.of(prompts)
        if recipe.groups > len(table):
            raise ValueError(
                f"the recipe trains on {recipe.groups} groups a batch but there are only {len(table)} prompts; "
                "use fewer groups or more prompts"
            )
        if seed < 0:
            raise ValueError(f"seed must be 0 or more, got {seed}")
        self.recipe, self.table, self.seed = recipe, table, int(seed)
        self._reads_rate = bool(recipe.rate_readers)
        self.version = 0
        self.ledger = Ledger(len(table))
        self._roster = Roster(len(table))
        self._memory = _checked_memory(recipe, recipe.prompts.init(table))
        self._groups: dict[int, Group] = {}
        self._owner: dict[int, Group] = {}  # rollouts handed out, without a terminal event, of a living group
        self._stopped: dict[int, int] = {}  # rollouts cancelled, without a terminal event -> prompt
        self._waiting: list[dict[int, Group]] = [{} for _ in recipe.stages]  # by the stage passed; the last are ready
        self._running_S = [0] * len(recipe.stages)
        self._owing: list[deque[Group]] = [deque() for _ in recipe.stages]  # groups with rollouts to hand out
        self._purse = Purse(recipe.budget)
        self._touched: dict[int, Group] = {}  # groups a stop rule has to look at
        self._drawn: list[tuple[int, int]] = []  # prompts drawn for which no budget had room yet, and the epoch of it
        self._cancel: list[int] = []
        self._release: list[int] = []
        self._batch: Batch | None = None  # handed out, not yet followed by Updated
        self._finished: str | None = None
        self._next_group = self._next_rollout = 0
        self._accounts: dict[str, int] = dict.fromkeys(CAUSES[:-1], 0)
        self._barren = 0  # candidates dropped since a group last became ready
        self._failing = 0  # groups that ended without a score, because rollouts failed, since a rollout last had one
        self._settled = False  # nothing changed since the last decision, which need not be taken again
        self._cached_view: View | None = None

    # ------------------------------------------------------------------------------------------ what a driver calls

    def tell(self, events: Iterable[Event]) -> None:
        """Take what happened.

        Args:
            events: in the order in which they happened.

        Raises:
            EventError: an event for a rollout that is unknown or already over, a number that is not finite or not
                possible, a version that goes back. The events before it were taken.
            MetricError: a metric outside [0, 1] under a recipe whose rules take it for a success rate.
        """
        for number, event in enumerate(events):
            try:
                if type(event) is Done:
                    self._on_done(event)
                else:
                    self._on_other(event)
            except EventError as error:
                raise type(error)(f"event {number}, {error}") from None

    def ask(self, capacity: int | None = None) -> Actions:
        """What to do now. Each action is handed out once.

        Args:
            capacity: rollouts that may be started now; None: any number. Too few give fewer or split orders.

        Raises:
            Starved: nothing to do, nothing running, and nothing left to be told that would change it.
            RuleError: a rule of the recipe broke its contract.
        """
        if capacity is not None and capacity < 0:
            raise ValueError(f"capacity must be 0 or more rollouts, or None for no limit, got {capacity}")
        self._stop_early()
        if self._purse.overdrawn():
            self._withhold()
        batch = self._full_batch()
        orders: tuple[Order, ...] = ()
        if batch is None and self._finished is None:
            halt = self._decide()
            if self._idle():
                batch = self._resolve(halt)
            orders = self._hand_out(capacity)
        # A rollout may have ended between the decision to stop it and now.
        cancel = tuple(rollout for rollout in self._cancel if rollout in self._stopped)
        release = tuple(self._release)
        self._cancel, self._release = [], []
        return Actions(orders, cancel, release, batch, self._finished)

    def outstanding(self) -> Actions:
        """After a load: orders in flight, cancellations without a terminal event, the batch not yet trained."""
        orders = [
            Order(group.id, group.prompt, stage, rollouts)
            for group in self._groups.values()
            for stage, rollouts in group.by_stage(sorted(group.running))
        ]
        not_handed_out = set(self._cancel)
        cancel = tuple(rollout for rollout in self._stopped if rollout not in not_handed_out)
        return Actions(tuple(orders), cancel, (), self._batch, self._finished)

    def wanted(self) -> int:
        """Prompts that a loader should offer now; 0 for a recipe that draws its own."""
        rule = self.recipe.prompts
        if not isinstance(rule, OfferedPromptRule) or rule.ended(self._memory):
            return 0
        if self._blocked() or self._finished or self._opening_halt() or self._roster.exhausted():
            return 0
        groups = self._at_most_candidates(self.recipe.intake(self._view(), self._memory))
        return max(0, groups - len(self._drawn) - rule.waiting(self._memory))

    @property
    def batch(self) -> Batch | None:
        """The batch handed out and not yet trained."""
        return self._batch

    def quarantined(self) -> list[int]:
        """The prompts that are not drawn again because their rollouts always failed."""
        return self.ledger.with_fate(QUARANTINED)

    def away(self) -> dict[str, int]:
        """Prompts `evicted` and `quarantined` now, and visits so far to prompts that had been evicted (`revived`)."""
        return {
            "evicted": self._roster.evicted(),
            "revived": self._roster.revived,
            "quarantined": len(self.quarantined()),
        }

    def accounts(self) -> dict[str, int]:
        """Rollouts paid, by cause; the sum is what was ordered."""
        return self._accounts | {"open": self.paid - sum(self._accounts.values())}

    @property
    def paid(self) -> int:
        """Rollouts ordered since the run began."""
        return self._purse.paid

    @property
    def tokens_paid(self) -> int:
        """Tokens of the rollouts that ended."""
        return self._purse.tokens

    @property
    def epoch(self) -> int:
        """Passes over the prompts begun, from 0."""
        return self._roster.epoch

    # --------------------------------------------------------------------------------------------- saving and loading

    _PLAIN = ("version", "finished", "next_group", "next_rollout", "barren", "failing", "cancel", "release")
    _NESTED = ("schema", "recipe", "seed", "prompts", "accounts", "purse", "ledger", "roster", "memory", "drawn")
    _IN_FLIGHT = ("groups", "waiting", "owing", "touched", "stopped", "batch")

    def state_dict(self) -> dict[str, Any]:
        """The complete state as JSON holds it: arrays as {dtype, shape, base64}."""
        plain = {name: getattr(self, name if name == "version" else f"_{name}") for name in self._PLAIN}
        plain |= {name: [int(rollout) for rollout in plain[name]] for name in ("cancel", "release")}
        return plain | {
            "schema": SCHEMA,
            "recipe": self.recipe.description,
            "seed": self.seed,
            "prompts": self.table.state_dict(),
            "accounts": dict(self._accounts),
            "purse": self._purse.state_dict(),
            "ledger": self.ledger.state_dict(),
            "roster": self._roster.state_dict(),
            "memory": pack_tree(self._memory),
            "drawn": [list(drawn) for drawn in self._drawn],
            "groups": [group.state_dict() for group in self._groups.values()],
            "waiting": [list(waiting) for waiting in self._waiting],
            "owing": [[group.id for group in owing if group.owed] for owing in self._owing],
            "touched": list(self._touched),
            "stopped": list(self._stopped.items()),
            "batch": None if self._batch is None else _dump_batch(self._batch),
        }

    def load_state_dict(
        self, state: dict[str, Any], *, accept_recipe: bool = False, remap: ArrayLike | str | None = None
    ) -> None:
        """Go on from a saved state: all of it or, on an error, none.

        Args:
            state: what `state_dict` gave, also after a passage through JSON.
            accept_recipe: go on under this allocator's recipe although the state was saved under another.
            remap: for a data set that changed: "keys" to find each prompt by its key, or shape (N,), for each prompt its
                index in the saved data set, -1 where it is new. Groups in flight of prompts that are gone are dropped.

        Raises:
            ValueError: another schema, keys missing or unknown, another recipe, seed or data set; names the difference.
        """
        exact_keys(state, (*self._PLAIN, *self._NESTED, *self._IN_FLIGHT), "allocator state")
        loaded = Allocator(self.recipe, self.table, self.seed)
        loaded._check_origin(state, accept_recipe)
        source_N = self.table.source_of(state["prompts"], remap)
        loaded._load(state, source_N)
        loaded._load_in_flight(state, source_N)
        self.__dict__.update(loaded.__dict__)

    def _check_origin(self, state: dict[str, Any], accept_recipe: bool) -> None:
        """Refuse a state of another schema, seed or recipe."""
        if state["schema"] != SCHEMA or state["seed"] != self.seed:
            raise ValueError(
                f"expected a state of schema {SCHEMA} and seed {self.seed}, got schema {state['schema']} and seed "
                f"{state['seed']}; make the allocator with the saved seed"
            )
        lines = list(differences(state["recipe"], self.recipe.description))
        if lines and not accept_recipe:
            raise ValueError(
                "the state was saved under another recipe (accept_recipe=True goes on all the same): "
                + "; ".join(lines)
            )
        if state["groups"] and len(state["waiting"]) != len(self.recipe.stages):
            raise ValueError(
                f"{len(state['groups'])} groups are in flight in {len(state['waiting'])} stages, this recipe has "
                f"{len(self.recipe.stages)}; finish them under the saved recipe first"
            )

    def _load(self, state: dict[str, Any], source_N: NDArray[np.int64] | None) -> None:
        """Everything that is not in flight."""
        for name in self._PLAIN:
            setattr(self, name if name == "version" else f"_{name}", state[name])
        self._cancel, self._release = list(state["cancel"]), list(state["release"])
        if state["recipe"] != self.recipe.description or source_N is not None:
            self._finished = None  # what ended the run under another recipe or data set need not end it under this one
        if source_N is not None:
            self._barren = self._failing = 0  # counted prompts of the old data set
        exact_keys(state["accounts"], CAUSES[:-1], "accounts")
        self._accounts = dict(state["accounts"])
        self._purse.load_state_dict(state["purse"])
        self.ledger.load_state_dict(state["ledger"], source_N)
        self._roster.load_state_dict(state["roster"], source_N)
        saved = unpack_tree(state["memory"])
        if saved.keys() != self._memory.keys() or (source_N is None and _shapes(saved) != _shapes(self._memory)):
            return  # another prompt rule, accepted: it begins with an empty memory
        for name, value in saved.items():
            if source_N is None:
                self._memory[name] = value
            elif name.endswith("_N"):  # one entry a prompt; what is not so is an order of the old data set
                moved(self._memory[name], value, source_N)

    def _load_in_flight(self, state: dict[str, Any], source_N: NDArray[np.int64] | None) -> None:
        """Groups, rollouts and the batch; those of prompts that are gone are dropped."""
        here = _Renumbering(source_N)
        for saved in state["groups"]:
            group = Group.of_state(saved, self.ledger)
            group.prompt = here[group.prompt]
            self._groups[group.id] = group
            self._owner.update(dict.fromkeys(group.running, group))
            if group.waits is None:
                self._running_S[group.stage] += 1
        if self._groups:  # without any, the stages of an accepted recipe may be others
            self._waiting = [{group: self._groups[group] for group in waiting} for waiting in state["waiting"]]
            self._owing = [deque(self._groups[group] for group in owing) for owing in state["owing"]]
        self._touched = {group: self._groups[group] for group in state["touched"]}
        self._stopped = {rollout: here[prompt] for rollout, prompt in state["stopped"]}
        self._drawn = [(here[prompt], epoch) for prompt, epoch in state["drawn"] if here[prompt] != GONE]
        self._batch = None if state["batch"] is None else _load_batch(state["batch"], here)
        for group in [group for group in self._groups.values() if group.prompt == GONE]:
            self._drop(group, "surplus", NOW)

    # ------------------------------------------------------------------------------------------------------- events

    def _on_done(self, event: Done) -> None:
        first, last = event.version, event.last_version
        if not _are_finite(event.reward, event.metric):
            raise EventError(
                f"rollout {event.rollout}: reward {event.reward!r} and metric {event.metric!r} must be finite numbers; "
                "tell Failed for a rollout without a score"
            )
        try:
            possible = 0 <= first <= (first if last is None else last) <= self.version
        except TypeError:  # None
            possible = False
        if not possible:
            raise EventError(
                f"rollout {event.rollout}: versions {first} to {first if last is None else last} must lie between 0 and "
                f"the weights' {self.version}; tell Updated before results of newer weights"
            )
        if self._reads_rate and not -_ROUNDING <= event.metric <= 1 + _ROUNDING:
            raise MetricError(
                f"rollout {event.rollout}: {', '.join(self.recipe.rate_readers)} takes the metric for a success rate in "
                f"[0, 1], got {event.metric!r}; give selection a metric of its own, such as 1 for right and 0 for wrong, "
                "apart from the reward that training uses"
            )
        group = self._end(event.rollout, event.tokens)
        if group is None:  # it was done before the cancellation reached it
            self._accounts["cancelled"] += 1
            self._release.append(event.rollout)
        else:
            group.add(event)
            self._failing = 0
            self._judge(group)

    def _on_other(self, event: Event) -> None:
        match event:
            case Failed() | Cancelled():
                group = self._end(event.rollout, event.tokens)
                failed = isinstance(event, Failed)
                self._accounts["failed" if failed else "cancelled"] += 1
                self._release.append(event.rollout)
                if group is not None:
                    group.failed += failed
                    self._judge(group)
            case Progress():
                group = self._owner.get(event.rollout)
                if group is not None:
                    group.running[event.rollout] = _whole(event.tokens, f"rollout {event.rollout}: tokens")
                    self._touched[group.id] = group
                elif event.rollout not in self._stopped:
                    raise EventError(self._unknown(event.rollout))
            case Updated():
                self._on_updated(event.version)
            case Offered():
                self._on_offered(event)
            case _:
                raise EventError(f"expected an event of rollalloc.core.events, got {type(event).__name__}")

    def _end(self, rollout: int, tokens: int) -> Group | None:
        """Book a rollout's terminal event; None where it had been cancelled."""
        tokens = _whole(tokens, f"rollout {rollout}: tokens")
        group = self._owner.pop(rollout, None)
        if group is not None:
            del group.running[rollout]
            group.tokens += tokens
        elif rollout in self._stopped:
            prompt = self._stopped.pop(rollout)
            if prompt != GONE:
                self.ledger.pay(prompt, tokens)
        else:
            raise EventError(self._unknown(rollout))
        self._purse.generate(tokens)
        return group

    def _unknown(self, rollout: int) -> str:
        known = 0 <= rollout < self._next_rollout
        why = "already had its terminal event, or was not handed out" if known else "was never ordered"
        return f"rollout {rollout!r}: {why}; tell just one of Done, Failed and Cancelled for each rollout of an Order"

    def _on_updated(self, version: int) -> None:
        version = _whole(version, "Updated: version")
        if version <= self.version:
            raise EventError(f"Updated({version}): the version must grow, the weights are at {self.version}")
        self.version = version
        self._changed()
        if self._batch is not None:
            self._release.extend(row.rollout for row in self._batch.rows)
            self._batch = None
        self._roster.on_version(version)
        for group in [group for group in self._groups.values() if self._stale(group)]:
            self._drop(group, "stale", NOW)

    def _on_offered(self, event: Offered) -> None:
        rule = self.recipe.prompts
        if not isinstance(rule, OfferedPromptRule):
            raise EventError(f"Offered: the recipe draws its own prompts ({rule!r}); use the prompt rule as_offered()")
        wrong = [prompt for prompt in event.prompts if not 0 <= prompt < len(self.table)]
        if wrong or event.epoch < self._roster.epoch:
            raise EventError(
                f"Offered: expected prompts below {len(self.table)} and an epoch of at least {self._roster.epoch}, got "
                f"epoch {event.epoch} and prompts {wrong[:5]}"
            )
        if event.epoch > self._roster.epoch:
            self._roster.begin(event.epoch)
        self._changed()
        # What may never be drawn must not pass for what waits to be: the driver would be told that it has offered enough.
        useful = [prompt for prompt in event.prompts if not self._roster.is_barred(prompt)]
        if useful or not event.prompts:
            rule.offer(self._memory, useful)

    # ----------------------------------------------------------------------------------------------- a group's way

    def _judge(self, group: Group) -> None:
        if group.waits is not None:  # a rollout that came after the verdict
            self._changed()
            if self._stale(group):  # and was begun earlier than any before it
                self._drop(group, "stale", NOW)
            return
        if not group.done and not group.unfinished:
            self._drop(group, "failed", NEXT_EPOCH)
            return
        stage = self.recipe.stages[group.stage]
        verdict = stage.judge(group.view, self._view())
        if verdict is None:
            if not group.unfinished:
                raise RuleError(f"judge {stage.judge!r} has no verdict although nothing more is to come")
            if stage.stop is not None:
                self._touched[group.id] = group
        elif verdict.act is Act.DROP:
            self._drop(group, verdict.reason, verdict.until)
        elif not group.done or self._stale(group):
            self._drop(group, "stale" if group.done else "failed", NOW)
        else:
            self._pass(group, verdict.act, verdict.until)

    def _pass(self, group: Group, act: Act, until: Until) -> None:
        """The group waits to go on: into its next stage, or ready for a batch."""
        last = len(self.recipe.stages) - 1
        if act is Act.NEXT and group.stage == last:
            raise RuleError(f"judge {self.recipe.stages[last].judge!r} returned NEXT in the last stage; expected TRAIN")
        self._running_S[group.stage] -= 1
        group.until = until
        group.waits = group.stage if act is Act.NEXT else last
        self._waiting[group.waits][group.id] = group
        if act is Act.TRAIN:
            self._stop(group, [*group.running, *group.owed])
            self._barren = 0
        self._changed()

    def _drop(self, group: Group, reason: str, until: Until) -> None:
        """The group ends without training."""
        self._stop(group, [*group.running, *group.owed])
        self._accounts[reason.partition("/")[0]] += len(group.done)
        self._release.extend(done.rollout for done in group.done)
        self._barren += group.waits is None
        self._close(group, reason, until)

    def _close(self, group: Group, fate: str, until: Until) -> None:
        if group.waits is None:
            self._running_S[group.stage] -= 1
        else:
            del self._waiting[group.waits][group.id]
        del self._groups[group.id]
        self._touched.pop(group.id, None)
        self._changed()
        if group.prompt == GONE:
            return
        self.recipe.prompts.observe(self._memory, group.view)
        quarantined = bool(group.failed) and not group.done and self._fail(group.prompt)
        if quarantined:
            fate = QUARANTINED
        self.ledger.close_visit(
            group.prompt, fate, self.version, [d.metric for d in group.done], [d.tokens for d in group.done]
        )
        self.ledger.pay(group.prompt, group.tokens)
        if quarantined:
            self._roster.bar(group.prompt)
        else:
            self._roster.give_back(group.prompt, until, group.epoch, self.version)

    def _fail(self, prompt: int) -> bool:
        """Count a visit that gave no score because rollouts failed; whether it is one too many."""
        self._failing += 1
        failures, limit = self.ledger.fail(prompt), self.recipe.quarantine_after
        return limit is not None and failures >= limit

    def _stop(self, group: Group, rollouts: Sequence[int]) -> None:
        """Cancel rollouts of a group; those not handed out yet are simply not ordered."""
        owed = set(rollouts).intersection(group.owed) if group.owed else set[int]()
        if owed:
            group.owed = deque(rollout for rollout in group.owed if rollout not in owed)
            self._purse.owed -= len(owed)
            self._changed()
        for rollout in rollouts:
            if rollout in group.running:
                del group.running[rollout], self._owner[rollout]
                self._stopped[rollout] = group.prompt
                self._cancel.append(rollout)
                group.cancelled += 1
            elif rollout not in owed:
                raise RuleError(f"a stop rule named rollout {rollout}, which is not running in group {group.id}")

    def _stop_early(self) -> None:
        touched, self._touched = list(self._touched.values()), {}
        for group in touched:
            stop = self.recipe.stages[group.stage].stop
            if stop is None or group.waits is not None:
                continue
            named = stop(group.view, self._view(), rng_when_used(self.seed, "stop", group.id))
            rollouts = [int(rollout) for rollout in named]
            if rollouts:
                owed = len(group.owed)
                self._stop(group, rollouts)
                group.cancelled += owed - len(group.owed)  # the rule chose among these, too: its weights count them
                self._judge(group)

    def _withhold(self) -> None:
        """The budget is spent: what was decided and not handed out yet is not ordered."""
        for group in {group.id: group for owing in self._owing for group in owing if group.owed}.values():
            self._stop(group, list(group.owed))
            if not group.unfinished and not group.done:
                self._drop(group, "surplus", NOW)
            else:
                self._judge(group)

    def _stale(self, group: Group, updates: int = 0) -> bool:
        """Whether it is too old to train on, or will be after so many more updates."""
        age = 0 if group.first_version is None else self.version + updates - group.first_version
        return age > self.recipe.max_staleness

    # ----------------------------------------------------------------------------------------------------- decisions

    def _decide(self) -> Halt | None:
        """Decide rollouts for groups that wait and for new ones; says what kept it from opening more, if anything did."""
        if self._blocked() or (self._settled and self._owner):
            return None
        self._settled = True
        halt = None
        for stage in reversed(range(len(self.recipe.stages) - 1)):  # finish what is begun, the furthest first
            halt = self._promote(stage) or halt
        return halt or self._intake()

    def _promote(self, stage: int) -> Halt | None:
        """Send groups that passed a stage into the next one, as far as the batch needs them."""
        ahead = sum(self._running_S[stage + 1 :]) + sum(map(len, self._waiting[stage + 1 : -1]))
        k = self._need() - ahead
        if k <= 0:
            return None
        chosen = self._choose(stage, k)
        entered = self._enter(chosen, stage + 1)
        for group in chosen[:entered]:
            del self._waiting[stage][group.id]
        return None if entered == len(chosen) else self._purse.halt()

    def _choose(self, stage: int, k: int) -> list[Group]:
        """Let a stage's promote rule choose at most k of the groups that wait after it; in order of group id."""
        awaited = int(self._batch is not None)  # what that update makes stale needs no more rollouts
        waiting = {group.id: group for group in self._waiting[stage].values() if not self._stale(group, awaited)}
        if not waiting:
            return []
        k = min(k, len(waiting))
        views = [waiting[group].view for group in sorted(waiting)]
        promote = self.recipe.stages[stage].promote
        chosen = promote(views, k, self._view(), rng_when_used(self.seed, "promote", stage, self._next_rollout))
        ids = [view.group for view in chosen]
        if len(ids) > k or len(set(ids)) < len(ids) or not waiting.keys() >= set(ids):
            raise RuleError(f"{promote!r} must choose at most {k} different groups of {sorted(waiting)}, got {ids}")
        return [waiting[group] for group in ids]

    def _intake(self) -> Halt | None:
        """Draw prompts and open groups, as far as the recipe wants and its limits allow."""
        wanted = self.recipe.intake(self._view(), self._memory)
        if wanted <= 0:
            return None
        if halt := self._opening_halt():
            return halt
        prompts = self._draw(self._at_most_candidates(wanted))
        if not prompts:
            return self._prompts_halt()
        groups: list[Group] = []
        for prompt, epoch in prompts:
            groups.append(Group(self._next_group, prompt, epoch, self.ledger))
            self._next_group += 1
        entered = self._enter(groups, 0)
        for group in groups[:entered]:
            self._groups[group.id] = group
        self._purse.batch_opened += entered
        self._drawn = prompts[entered:] + self._drawn
        return None if entered == len(groups) else self._purse.halt()

    def _enter(self, groups: list[Group], stage: int) -> int:
        """Decide the rollouts of groups that enter a stage together; returns how many of them the budgets had room for."""
        if not groups:
            return 0
        rule = self.recipe.stages[stage].size
        sizes = [int(size) for size in rule([group.view for group in groups], self._view(), self._memory)]
        if len(sizes) != len(groups) or min(sizes) < 1:
            raise RuleError(f"{rule!r} must give each of {len(groups)} groups at least 1 rollout, got {sizes}")
        room = self._purse.room()
        entered = 0
        for group, size in zip(groups, sizes, strict=True):
            if room is not None:
                if size > room:
                    break
                room -= size
            group.stage, group.waits = stage, None
            group.extend(self._next_rollout, size)
            self._next_rollout += size
            self._purse.owed += size
            self._running_S[stage] += 1
            self._owing[stage].append(group)
            entered += 1
        self._changed()
        return entered

    def _draw(self, k: int) -> list[tuple[int, int]]:
        """At most k prompts, each with the epoch it was drawn in, beginning the next one where this one has no more."""
        drawn, self._drawn = self._drawn[:k], self._drawn[k:]
        offered = isinstance(self.recipe.prompts, OfferedPromptRule)

        def pick() -> bool:
            picked = self._pick(k - len(drawn), len(drawn)) if len(drawn) < k else []
            drawn.extend((prompt, self._roster.epoch) for prompt in picked)
            return len(drawn) == k

        # The second pick of a new epoch is for rules that share their draws among sources: they learn that one has nothing.
        if not self._roster.dry and not pick() and not offered and self._roster.roll():
            self._roster.dry = not pick() and not pick()
        return drawn

    def _pick(self, k: int, already: int) -> list[int]:
        rule, free_N = self.recipe.prompts, self._roster.free_N.view()
        free_N.flags.writeable = False
        draw = rng(self.seed, "pick", self._next_group + already, self._roster.epoch)
        picked = [int(prompt) for prompt in rule.pick(self._memory, k, free_N, draw)]
        if len(picked) > k or len(set(picked)) < len(picked) or not all(free_N[picked]):
            raise RuleError(f"{rule!r} must pick at most {k} different free prompts, got {picked[:20]}")
        for prompt in picked:
            self._roster.take(prompt)
        return picked

    def _hand_out(self, capacity: int | None) -> tuple[Order, ...]:
        """Orders for what was decided, the furthest stage first, split where the capacity ends."""
        orders: list[Order] = []
        room = self._purse.owed if capacity is None else min(capacity, self._purse.owed)
        for owing in reversed(self._owing):
            while owing and (room or not owing[0].owed):
                group = owing[0]
                now = [group.owed.popleft() for _ in range(min(room, len(group.owed)))]
                if not group.owed:  # handed out in full; or dropped before its turn came
                    owing.popleft()
                room -= len(now)
                group.running.update(dict.fromkeys(now, 0))
                self._owner.update(dict.fromkeys(now, group))
                orders += [Order(group.id, group.prompt, stage, ids) for stage, ids in group.by_stage(now)]
        handed = sum(len(order.rollouts) for order in orders)
        if handed:
            self._purse.order(handed)
        return tuple(orders)

    # ------------------------------------------------------------------------------------------------------- batches

    def _full_batch(self) -> Batch | None:
        if self._batch is not None or self._finished is not None or self._need() > 0:
            return None
        for group in [group for group in self._waiting[-1].values() if self._stale(group)]:
            self._drop(group, "stale", NOW)
        # Without staleness a batch ends its round, so it waits for the round's last rollout: what is in it must not
        # depend on what finished first.
        if self._need() > 0 or (self.recipe.max_staleness == 0 and any(self._running_S)):
            return None
        return self._make_batch(None)

    def _make_batch(self, short_because: str | None) -> Batch | None:
        chosen = self._choose(len(self.recipe.stages) - 1, min(self.recipe.groups, len(self._waiting[-1])))
        if not chosen or (short_because is None and len(chosen) < self.recipe.groups):
            return None
        rows = [row for group in sorted(chosen, key=_id) for row in self._train(group)]
        if self.recipe.max_staleness == 0:
            self._discard_waiting()
        self._purse.next_batch()
        self._barren = 0  # the weights will be others
        self._batch = Batch(tuple(rows), self.version, short_because)
        self._changed()
        return self._batch

    def _train(self, group: Group) -> list[Row]:
        """The group's rows; the group ends."""
        recipe, view = self.recipe, group.view
        rows = recipe.rows(view, self._view(), rng_when_used(self.seed, "rows", group.id))
        chosen_M, weights_M = np.asarray(rows[0]), np.asarray(rows[1], np.float64)
        _check_rows(recipe, chosen_M, weights_M, len(group.done))
        advantages_M = np.asarray(recipe.advantage(view, chosen_M), np.float64)
        if advantages_M.shape != chosen_M.shape or not np.isfinite(advantages_M).all():
            raise RuleError(f"{recipe.advantage!r} must give {len(chosen_M)} finite advantages, got {advantages_M}")
        kept = set(view.rollouts_G[chosen_M].tolist())
        self._release.extend(done.rollout for done in group.done if done.rollout not in kept)
        fate = "trained" if advantages_M.any() else "zero_variance"
        self._accounts[fate] += len(chosen_M)
        self._accounts["unselected"] += len(group.done) - len(chosen_M)
        made = [
            Row(rollout, group.prompt, group.id, advantage, weight, version)
            for rollout, advantage, weight, version in zip(
                view.rollouts_G[chosen_M].tolist(),
                advantages_M.tolist(),
                weights_M.tolist(),
                view.versions_G[chosen_M].tolist(),
                strict=True,
            )
        ]
        self._close(group, fate, group.until)
        return made

    def _discard_waiting(self) -> None:
        for group in [group for waiting in self._waiting for group in waiting.values()]:
            self._drop(group, "surplus", group.until)

    # -------------------------------------------------------------------------------------------------- nothing to do

    def _blocked(self) -> bool:
        """Whether a new rollout could only be too old: its batch comes after the update that is awaited."""
        return self._batch is not None and self.recipe.max_staleness == 0

    def _idle(self) -> bool:
        return not (self._owner or self._stopped or self._purse.owed or self._batch)

    def _resolve(self, halt: Halt | None) -> Batch | None:
        """Nothing is running and nothing was decided: a short batch, a fresh round, the end of the run, or an error."""
        if halt is not None and halt.ends is Ends.NOTHING:
            raise Starved(halt.why)
        if self._waiting[-1]:
            why = halt.why if halt else f"the intake rule {self.recipe.intake!r} opens no more groups"
            if batch := self._make_batch(why):
                return batch
            raise Starved(f"{self.recipe.stages[-1].promote!r} promotes no group although nothing is running")
        if halt is not None and halt.ends is Ends.BATCH:
            self._purse.batch_opened = 0  # what was paid stays paid: the batch's budget holds
            halt = self._decide()
            if not self._idle():
                return None
        if halt is None or halt.ends is not Ends.RUN:
            raise Starved(halt.why if halt else self._starved())
        self._discard_waiting()
        self._finished = halt.why
        return None

    def _starved(self) -> str:
        if any(self._waiting):
            promote = [stage.promote for stage in self.recipe.stages]
            return f"groups wait but no promote rule of {promote} sends one on although nothing is running"
        return f"{self.recipe.intake!r} opens no group although none is there and nothing is running"

    def _opening_halt(self) -> Halt | None:
        """What forbids to open even one more group."""
        limit = self.recipe.max_candidates
        if limit is not None and self._purse.batch_opened >= limit:
            ready = f"{len(self._waiting[-1])} of {self.recipe.groups} groups ready"
            return Halt(f"max_candidates: {limit} prompts tried, {ready}", Ends.BATCH)
        if self._failing >= _OUTAGE:
            return Halt(
                f"failed: the last {self._failing} prompts tried gave no score, because their rollouts failed; prompts by "
                f"the fate of their last visit: {self._fates()}",
                Ends.RUN,
            )
        if self._barren >= max(_PATIENCE, len(self.table)):
            return Halt(
                f"barren: none of the last {self._barren} prompts tried gave a group to train on; prompts by the fate of "
                f"their last visit: {self._fates()}. Unless rollouts failed or went stale, they are solved or impossible "
                "for this model",
                Ends.RUN,
            )
        return self._purse.halt() if self._purse.room() == 0 else None

    def _prompts_halt(self) -> Halt:
        """No prompt can be drawn."""
        rule = self.recipe.prompts
        if isinstance(rule, OfferedPromptRule) and not rule.ended(self._memory) and not self._roster.exhausted():
            why = "the prompts offered are used up; tell Offered with more (Allocator.wanted() says how many), or with none"
            return Halt(f"{why} where the loader has ended", Ends.NOTHING)
        if isinstance(rule, OfferedPromptRule) and not self._roster.exhausted():
            return Halt("prompts: the loader has ended and all that it offered is used up", Ends.RUN)
        return Halt(
            f"prompts: none of {len(self.table)} may be drawn, {self._roster.evicted()} are evicted and "
            f"{len(self.quarantined())} quarantined; prompts by the fate of their last visit: {self._fates()}",
            Ends.RUN,
        )

    def _fates(self) -> str:
        return ", ".join(f"{count} {fate}" for fate, count in self.ledger.counts().items() if count)

    # --------------------------------------------------------------------------------------------------------- figures

    def _need(self) -> int:
        return max(0, self.recipe.groups - len(self._waiting[-1]))

    def _at_most_candidates(self, groups: int) -> int:
        limit = self.recipe.max_candidates
        return min(groups, len(self.table), *([] if limit is None else [limit - self._purse.batch_opened]))

    def _changed(self) -> None:
        """Something changed that a decision may depend on."""
        self._cached_view = None
        self._settled = False

    def _view(self) -> View:
        if self._cached_view is None:
            self._cached_view = View(
                version=self.version,
                epoch=self._roster.epoch,
                need=self._need(),
                held_S=tuple(map(len, self._waiting)),
                running_S=tuple(self._running_S),
                paid=self._purse.paid + self._purse.owed,
                left=self._purse.room(),
                ledger=self.ledger,
            )
        return self._cached_view


def _checked_memory(recipe: Recipe, memory: Any) -> Memory:
    if not isinstance(memory, dict):
        raise TypeError(
            f"{recipe.prompts!r} must keep its memory in a dict of arrays and plain data, which a checkpoint can hold, got "
            f"{type(memory).__name__}"
        )
    return cast("Memory", memory)


def _are_finite(reward: float, metric: float) -> bool:
    try:
        return isfinite(reward) and isfinite(metric)
    except TypeError:  # None, or a tensor of several values
        return False


def _whole(number: int, name: str) -> int:
    """The number as a plain int: a driver's NumPy number would end up in the saved state."""
    try:
        whole = index(number)
    except TypeError:
        whole = -1
    if whole < 0:
        raise EventError(f"{name} must be a whole number of 0 or more, got {number!r}")
    return whole


class _Renumbering:
    """Saved index of a prompt -> its index now, GONE where it left the data set."""

    def __init__(self, source_N: NDArray[np.int64] | None) -> None:
        self._new = None if source_N is None else {old: new for new, old in enumerate(source_N.tolist()) if old >= 0}

    def __getitem__(self, prompt: int) -> int:
        return prompt if self._new is None else self._new.get(prompt, GONE)


def _dump_batch(batch: Batch) -> dict[str, Any]:
    rows = [[getattr(row, name) for name in Row.__slots__] for row in batch.rows]
    return {"rows": rows, "version": batch.version, "short_because": batch.short_because}


def _load_batch(state: dict[str, Any], here: _Renumbering) -> Batch:
    rows = [Row(rollout, here[prompt], *rest) for rollout, prompt, *rest in state["rows"]]
    return Batch(tuple(rows), state["version"], state["short_because"])


def _shapes(memory: dict[str, Any]) -> dict[str, Any]:
    return {
        name: np.shape(cast("NDArray[Any]", value)) for name, value in memory.items() if isinstance(value, np.ndarray)
    }


def _id(group: Group) -> int:
    return group.id


def _check_rows(recipe: Recipe, chosen_M: NDArray[np.int64], weights_M: NDArray[np.float64], scored: int) -> None:
    whole = np.issubdtype(chosen_M.dtype, np.integer)
    distinct = len(set(chosen_M.tolist())) == len(chosen_M) > 0
    if not whole or not distinct or chosen_M.min() < 0 or chosen_M.max() >= scored:
        raise RuleError(
            f"{recipe.rows!r} must choose different rollouts of {scored} by index, at least one, got {chosen_M}"
        )
    if weights_M.shape != chosen_M.shape or not (np.isfinite(weights_M) & (weights_M >= 0)).all():
        raise RuleError(f"{recipe.rows!r} must give each row a finite weight of 0 or more, got {weights_M}")


__all__ = ["Allocator", "EventError", "GroupView", "MetricError", "RuleError", "Starved"]
