"""Save a run as JSON data, and load it again. If loading fails, the current run is unchanged."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf, isfinite
from operator import attrgetter
from typing import Any, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rollalloc.core.events import Batch, Row
from rollalloc.core.group import OVER, Drawn, Group, Phase
from rollalloc.core.packing import (
    amount,
    differences,
    exact_keys,
    is_rate,
    natural,
    naturals,
    number,
    pack_tree,
    reading,
    unpack_tree,
)
from rollalloc.core.prompts import GONE, PromptStatistics, PromptTable, place
from rollalloc.core.recipe import Recipe
from rollalloc.core.rule import CAUSES, PromptRule
from rollalloc.core.run import Run

SCHEMA = 20
_IN_FLIGHT = frozenset({Phase.RUNNING, Phase.WAITING, Phase.READY})
_GROUP = tuple(Group(0, Drawn(GONE), 0, PromptStatistics(1)).state_dict())
_COUNTS = (
    *("version", "next_group", "next_rollout", "barren", "failing", "replayed"),
    *("left_out", "shut", "replay_from"),
)


# What a state contains, and how each part is made of a run. `load` compares only the names, without making the parts.
_PARTS: dict[str, Callable[[Run], Any]] = {
    **{name: attrgetter(name) for name in _COUNTS},
    "schema": lambda run: SCHEMA,
    "recipe": lambda run: run.recipe.description,
    "seed": lambda run: run.seed,
    "prompts": lambda run: run.table.state_dict(),
    "kl_sum": lambda run: run.kl_sum,
    "right_lengths": lambda run: [list(each) for each in run.right_lengths],
    "finished": lambda run: run.finished,
    "cancel": lambda run: [int(rollout) for rollout in run.cancel],
    "release": lambda run: [int(rollout) for rollout in run.release],
    "accounts": lambda run: dict(run.accounts),
    "budgets": lambda run: run.budgets.state_dict(),
    "statistics": lambda run: run.statistics.state_dict(),
    "pool": lambda run: run.pool.state_dict(),
    "memory": lambda run: pack_tree(run.memory),
    "size_memory": lambda run: pack_tree(run.size_memory),
    "drawn": lambda run: [[*drawn, epoch] for drawn, epoch in run.drawn],
    "groups": lambda run: [group.state_dict() for group in run.flight.groups.values()],
    "touched": lambda run: list(run.flight.touched),
    "stopped": lambda run: [[rollout, group.id] for rollout, group in run.flight.stopped.items()],
    "trailing": lambda run: [group.state_dict() for group in run.flight.trailing()],
    "batch": lambda run: (
        run.batch
        and {
            "rows": [*map(list, run.batch.rows)],
            "version": run.batch.version,
            "short_because": run.batch.short_because,
        }
    ),
    "kept": lambda run: [list(row) for row in run.kept.values()],
    "teaching": lambda run: run.teaching.state_dict(),
    "selection": lambda run: run.selection.state_dict(),
}


def dump(run: Run) -> dict[str, Any]:
    """The complete state as JSON data. Arrays are stored as {dtype, shape, base64}."""
    return {name: part(run) for name, part in _PARTS.items()}


def load(
    state: dict[str, Any],
    recipe: Recipe,
    table: PromptTable,
    seed: int,
    accept_recipe: bool,
    remap: ArrayLike | str | None,
) -> Run:
    """Build the run from a saved state. The caller must then call `lifecycle.adapt_after_load`.

    Raises:
        ValueError: the state has another schema, missing or unknown keys, another recipe, seed or data set, or
            impossible values. The message names the place and the difference.
    """
    run = Run(recipe, table, seed)
    with reading("allocator state"):
        _check_origin(run, state, accept_recipe)
        with reading("prompts"):
            exact_keys(state["prompts"], ("count", "keys", "features"), "keys")
            source_N = table.source_of(state["prompts"], remap)
        # Before the groups, which are checked against the version and the ids in the books.
        _load_books(run, state, source_N)
        _load_in_flight(run, state, _Renumbering(source_N))
        _check_sums(run)
    return run


def another(differences: Sequence[str]) -> str:
    """Return "another budget" if only the budgets of two recipes differ, else "another recipe"."""
    return "another budget" if all(line.startswith("recipe.budget.") for line in differences) else "another recipe"


def _check_origin(run: Run, state: dict[str, Any], accept_recipe: bool) -> None:
    """Raise an error if the state has another schema, seed or recipe."""
    if isinstance(state, Mapping) and state.get("schema", SCHEMA) != SCHEMA:  # pyright: ignore
        raise ValueError(
            f"expected schema {SCHEMA}, got {state['schema']!r}; resume with the version of rollalloc that saved it"
        )
    exact_keys(state, _PARTS, "keys")
    if state["seed"] != run.seed:
        raise ValueError(
            f"saved with seed {state['seed']!r}, got seed {run.seed}; construct the allocator with the saved seed"
        )
    lines = list(differences(state["recipe"], run.recipe.description))
    if lines and not accept_recipe:
        others = another(lines)
        raise ValueError(f"saved under {others} (accept_recipe=True continues with the new recipe): {'; '.join(lines)}")
    stages = len(state["recipe"]["stages"])
    if state["groups"] and stages != len(run.recipe.stages):
        raise ValueError(
            f"{len(state['groups'])} groups are in flight under a recipe with {stages} stages, but this recipe has "
            f"{len(run.recipe.stages)}; finish the groups under the saved recipe first"
        )


def _load_books(run: Run, state: dict[str, Any], source_N: NDArray[np.int64] | None) -> None:
    """Load everything except the groups in flight."""
    for name in _COUNTS:
        setattr(run, name, natural(state[name], name))
    if _gate(state["recipe"]) != _gate(run.recipe.description):
        run.shut = run.replay_from = 0  # a gate's pause ends with the gate; another gate is asked at once
    run.kl_sum = float(number(state["kl_sum"], "kl_sum", "0 or more and finite", lambda value: 0 <= value < inf))
    # Right answers to other prompts may be longer, so the limit of another data set is not kept.
    if run.recipe.limit is not None and source_N is None:
        known = [naturals(each, "right_lengths") for each in state["right_lengths"]]
        run.right_lengths = sorted((rollout, tokens) for rollout, tokens in known)[-run.recipe.limit.last :]
    run.cancel, run.release = naturals(state["cancel"], "cancel"), naturals(state["release"], "release")
    if not isinstance(state["finished"], str | None):
        raise ValueError(f"finished: expected a reason or null, got {state['finished']!r}")
    run.finished = state["finished"]
    exact_keys(state["accounts"], CAUSES[:-1], "accounts")
    run.accounts = {cause: natural(state["accounts"][cause], f"accounts, {cause}") for cause in CAUSES[:-1]}
    run.budgets.load_state_dict(state["budgets"])
    run.statistics.load_state_dict(state["statistics"], source_N)
    run.pool.load_state_dict(state["pool"], source_N)
    with reading("teaching"):
        run.teaching.load_state_dict(state["teaching"])
    with reading("selection"):
        run.selection.load_state_dict(state["selection"])
    with reading("memory"):
        _load_memory(run, unpack_tree(state["memory"]), source_N, state["recipe"]["prompts"])
        run.recipe.prompts.check(run.memory, run.table)
    with reading("size_memory"):
        _load_size_memory(run, unpack_tree(state["size_memory"]), source_N, state["recipe"]["stages"])


def _gate(recipe: Mapping[str, Any]) -> Any:
    """The gate of a described recipe's replay; None without replay or gate."""
    return None if recipe["replay"] is None else recipe["replay"]["gate"]


def _load_memory(run: Run, saved: dict[str, Any], source_N: NDArray[np.int64] | None, rule: Any) -> None:
    """Load the prompt rule's memory.

    If another rule saved the memory, and the saved arrays do not match this rule's arrays, keep the initial memory.
    """
    memory, own = run.memory, run.recipe.prompts
    same = rule == run.recipe.description["prompts"]
    if source_N is not None:
        # A `remap` of the rule's own may rely on what the rule wrote, so it is not given another rule's memory. The
        # inherited one compares names and shapes.
        if same or type(own).remap is PromptRule.remap:
            run.memory = own.remap(saved, source_N, run.table)
    elif _is_alike(saved, memory):
        memory.update(saved)
    elif same:
        raise ValueError(f"expected {_shapes(memory)}, got {_shapes(saved)}; the state is corrupt")


def _load_size_memory(
    run: Run, saved: dict[str, Any], source_N: NDArray[np.int64] | None, stages: Sequence[Any]
) -> None:
    """Load the memory of each size rule, as in `_load_memory`."""
    exact_keys(saved, [str(at) for at in range(len(stages))], "stages")
    for at, memory in list(run.size_memory.items()):
        before = saved.get(at)
        if before is None:  # the saved recipe had fewer stages
            continue
        if source_N is not None and before.keys() == memory.keys():
            run.size_memory[at] = run.recipe.stages[int(at)].size.remap(before, source_N, run.table)
        elif source_N is None and _is_alike(before, memory):
            memory.update(before)
        elif stages[int(at)]["size"] == run.recipe.description["stages"][int(at)]["size"]:
            raise ValueError(f"expected {_shapes(memory)}, got {_shapes(before)}; the state is corrupt")


def _load_in_flight(run: Run, state: dict[str, Any], here: _Renumbering) -> None:
    """Load groups, rollouts and the batch."""
    # With groups in flight, both recipes have the same number of stages. Groups that are over may have any saved stage.
    stages = len(state["recipe"]["stages"])
    groups: list[Group] = []
    for at, saved in enumerate(state["groups"]):
        with reading(f"groups[{at}]"):
            groups.append(_load_group(run, saved, here, stages, trailing=False))
    run.flight.restore(groups)
    trailing: list[Group] = []
    for at, saved in enumerate(state["trailing"]):
        with reading(f"trailing[{at}]"):
            trailing.append(_load_group(run, saved, here, stages, trailing=True))
    run.flight.touched = {group: run.flight.groups[group] for group in naturals(state["touched"], "touched")}
    stopping = {group.id: group for group in [*trailing, *groups]}
    for rollout, group in state["stopped"]:
        run.flight.stopped[natural(rollout, "stopped")] = stopping[natural(group, "stopped")]
        stopping[group].awaited += 1
    if len(stopping) < len(trailing) + len(groups) or not all(group.awaited for group in trailing):
        raise ValueError("trailing: a group occurs twice, or waits for no rollout; the state is corrupt")
    drawn = [(_load_drawn(saved, here), natural(epoch, "drawn")) for *saved, epoch in state["drawn"]]
    run.drawn = [(each, epoch) for each, epoch in drawn if each.prompt != GONE]
    indices = [group.prompt for group in [*groups, *trailing]] + [each.prompt for each, _ in drawn]
    if max(indices, default=0) >= len(run.table):
        raise ValueError(
            f"prompt {max(indices)} is in flight, but there are only {len(run.table)} prompts; the state is corrupt"
        )
    with reading("batch"):
        run.batch = None if state["batch"] is None else _load_batch(state["batch"], here)
    with reading("kept"):
        kept = [_load_row(row, here) for row in state["kept"]]
        run.kept = {row.rollout: row for row in kept}
        _check_kept(run, kept)


def _check_kept(run: Run, kept: list[Row]) -> None:
    alive = {rollout for group in run.flight.groups.values() for rollout in [*group.running, *group.owed]}
    alive |= {done.rollout for group in run.flight.groups.values() for done in group.done}
    over = alive.isdisjoint(run.kept) and run.flight.stopped.keys().isdisjoint(run.kept)
    if len(run.kept) < len(kept) or not over or any(row.rollout >= run.next_rollout for row in kept):
        raise ValueError("a row occurs twice, is in flight, or was never ordered; the state is corrupt")
    if any(row.version > run.version or max(row.prompt, 0) >= len(run.table) for row in kept):
        raise ValueError(f"a row has a version above {run.version}, or an unknown prompt; the state is corrupt")


def _load_drawn(saved: Sequence[Any], here: _Renumbering) -> Drawn:
    prompt, predicted, baseline, ratio = saved
    return Drawn(
        here[prompt],
        amount(predicted, "drawn: predicted", "in [0, 1]", is_rate),
        amount(baseline, "drawn: baseline"),
        amount(ratio, "drawn: sampling_ratio", "above 0 and finite", lambda value: 0 < value < inf),
    )


def _load_group(run: Run, saved: dict[str, Any], here: _Renumbering, stages: int, *, trailing: bool) -> Group:
    """Load a group in flight. A `trailing` group is over, but has cancelled rollouts in flight."""
    exact_keys(saved, _GROUP, "group")
    group = Group.of_state(saved, _load_drawn(saved["drawn"], here), run.statistics)
    _check_group(run, group, stages, OVER if trailing else _IN_FLIGHT)
    if trailing and (group.running or group.owed):
        raise ValueError("a group that is over has rollouts that are not cancelled; the state is corrupt")
    return group


def _check_group(run: Run, group: Group, stages: int, phases: frozenset[Phase]) -> None:
    if not (0 <= group.stage < stages and 0 < len(group.spans) <= stages and 0 <= group.id < run.next_group):
        raise ValueError(
            f"expected a stage below {stages} and an id below {run.next_group}, got stage {group.stage} and id {group.id}"
        )
    if any(
        not (isfinite(done.reward) and isfinite(done.metric) and done.version <= run.version)
        or (done.uncertainty or 0) < 0
        for done in group.done
    ):
        raise ValueError(
            f"a scored rollout has a number that is not finite, a version above {run.version} or a negative uncertainty; "
            "the state is corrupt"
        )
    if group.phase not in phases:
        raise ValueError(
            f"phase {group.phase.value!r} is not one of {', '.join(sorted(phase.value for phase in phases))}"
        )


def _check_sums(run: Run) -> None:
    """Check law 8 on the loaded state: each rollout paid for is either over or in flight, and none occurs twice."""
    flight = run.flight
    rollouts = [done.rollout for group in flight.groups.values() for done in group.done]
    rollouts += [rollout for group in flight.groups.values() for rollout in group.running]
    rollouts += flight.stopped
    paid = sum(run.accounts.values()) + len(rollouts)
    owed = [rollout for group in flight.groups.values() for rollout in group.owed]
    distinct = len(set(rollouts + owed)) == len(rollouts) + len(owed)
    known = all(0 <= rollout < run.next_rollout for rollout in rollouts + owed)
    if paid != run.budgets.paid or len(owed) != run.budgets.owed or not distinct or not known:
        raise ValueError(
            f"{run.budgets.paid} rollouts were paid and {run.budgets.owed} are owed, but {paid} and "
            f"{len(owed)} are accounted for{'' if distinct and known else ', some twice or never ordered'}; the state is "
            "corrupt"
        )


class _Renumbering:
    """Maps saved indices of prompts to indices in the current data set, or to GONE."""

    def __init__(self, source_N: NDArray[np.int64] | None) -> None:
        self._new = None if source_N is None else {old: new for new, old in enumerate(source_N.tolist()) if old >= 0}

    def __getitem__(self, prompt: int) -> int:
        return place(prompt) if self._new is None else self._new.get(prompt, GONE)


def _load_batch(state: dict[str, Any], here: _Renumbering) -> Batch:
    exact_keys(state, ("rows", "version", "short_because"), "batch")
    rows = [_load_row(row, here) for row in state["rows"]]
    return Batch(tuple(rows), natural(state["version"], "batch, version"), state["short_because"])


def _load_row(saved: list[Any], here: _Renumbering) -> Row:
    if len(saved) != len(Row._fields):
        raise ValueError(f"expected a row of {len(Row._fields)} entries, got {saved!r}; the state is corrupt")
    rollout, prompt, group, advantage, weight, version, replays = saved
    return Row(
        natural(rollout, "rollout"),
        here[prompt],
        natural(group, "group"),
        number(advantage, "advantage"),
        number(weight, "weight"),
        natural(version, "version"),
        natural(replays, "replays"),
    )


def _is_alike(saved: dict[str, Any], memory: dict[str, Any]) -> bool:
    return saved.keys() == memory.keys() and _shapes(saved) == _shapes(memory)


def _shapes(memory: dict[str, Any]) -> dict[str, Any]:
    return {
        name: (cast("NDArray[Any]", value).shape, cast("NDArray[Any]", value).dtype.str)
        for name, value in memory.items()
        if isinstance(value, np.ndarray)
    }
