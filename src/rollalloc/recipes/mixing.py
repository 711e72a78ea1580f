"""`mix`: two methods in one recipe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from rollalloc.core.recipe import Budget, Recipe, Stage, one_of
from rollalloc.core.rule import PromptRule, SizeRule
from rollalloc.recipes.grpo import QUARANTINE_AFTER
from rollalloc.recipes.knapsack import LastVisit
from rollalloc.rules import advantages, intake, judges, promote, prompts, rows, sizes

Side = Literal["first", "second"]

# The slots that `mix` joins and, for each, what passes for saying nothing there. Of the stages it is those of the last one.
_PLAIN: Mapping[str, Any] = {
    "prompts": prompts.Shuffled(),
    "intake": intake.Fill(),
    "rows": rows.Everything(),
    "max_staleness": 0,
    "max_candidates": None,
    "budget": Budget(),
    "quarantine_after": QUARANTINE_AFTER,
    "over_batch": None,
    "replay": None,
}
_PLAIN_STAGE: Mapping[str, Any] = {"judge": judges.Complete(), "stop": None, "promote": promote.Oldest()}
SLOTS = (*_PLAIN, "advantage", "size", *_PLAIN_STAGE)


def mix(first: Recipe, second: Recipe, take: Mapping[str, Side] | None = None) -> Recipe:
    """Both methods at once: each slot from the one of the two that says something there.

    | slot | what says nothing |
    |---|---|
    | `prompts` | in random order, each once an epoch; Knapsack's record beside a method that expects a success rate |
    | `intake` | just as many groups as the batch needs |
    | `rows` | all of a group |
    | `max_staleness`, `max_candidates`, `budget`, `over_batch`, `replay` | 0, or none |
    | `quarantine_after` | 3 |
    | `advantage` | GRPO's kernel; what is over the chosen rows goes with any other kernel |
    | `size` | a fixed number, beside a method that has its own way to size groups; and beside one of several stages |
    | `judge` | every group is trained on, and its prompt comes back in the next epoch |
    | `stop`, `promote` | none, the oldest |

    `mix(pilot_commit(...), pods(...))` takes the stages of the first and the rows *and* the advantage of the second;
    `mix(dapo(...), darts(...))` takes the judge and the intake of the first, the sizes, the stop and the rows of the second.
    A single stage of one method applies to the last stage of the other, whose judges say when a prompt comes back: under
    `mix(pilot_commit(...), foresight(...))` each prompt once an epoch, in foresight's order. What is known of a prompt
    without its other rollouts, foresight's advantage say, is not replaced by PODS's or DARTS's over the chosen rows: of
    those methods only the rows, the sizes and the stops are taken then.

    Where both say something else, they cannot be joined without your word: `mix(pilot_commit(...), darts(...),
    take={"size": "first"})` has Pilot-Commit's numbers of rollouts, and DARTS's rows.

    Args:
        first: says how many rollouts a prompt gets where both only fix a number.
        second: another method with the same number of groups.
        take: which of the two holds in a slot of the table, whatever the other one says; by default none is named. What the
            batch makes of the advantages goes with them, unless it is named too.

    Raises:
        ValueError: batches of different size, two methods of several stages, a slot in which both say something else, a
            slot that there is not: it names the slot and the remedy; or a mixture that could never train: fewer rollouts
            than are chosen, or one alone that is to differ from itself.
    """
    take = _checked_take(take)
    if first.groups != second.groups:
        raise ValueError(
            f"both recipes must train on the same number of groups, got {first.groups} and {second.groups}; give one of "
            f"them the other's, dataclasses.replace(recipe, groups={first.groups})"
        )
    if len(first.stages) < len(second.stages):
        first, second = second, first
        take = {slot: "second" if side == "first" else "first" for slot, side in take.items()}
    *before, last = first.stages
    single, *others = second.stages
    if others:
        raise ValueError(
            f"both recipes have several stages, {_names(first)} and {_names(second)}; write one recipe with both"
        )
    mixed: dict[str, Any] = {
        slot: _either(slot, getattr(first, slot), getattr(second, slot), plain, take)
        for slot, plain in _PLAIN.items()
        if slot not in ("prompts", "intake")
    }
    mixed["prompts"] = _mix_prompts(first.prompts, second.prompts, take)
    mixed["intake"] = _mix_intakes(first.intake, second.intake, take)
    mixed["advantage"] = _mix_advantages(first.advantage, second.advantage, take)
    last = _mix_stages(last, single, take, staged=bool(before))
    recipe = Recipe(groups=first.groups, stages=(*before, last), **mixed)
    _refuse_too_few_rollouts(recipe)
    return recipe


def _mix_intakes(first: Any, second: Any, take: Mapping[str, Side]) -> Any:
    # To order ahead is for several stages, and the first recipe is the one that has them.
    both = isinstance(first, intake.KeepInFlight) and isinstance(second, intake.KeepInFlight)
    if both and first.groups == second.groups and "intake" not in take:
        return first
    return _either("intake", first, second, _PLAIN["intake"], take)


def _checked_take(take: Mapping[str, Side] | None) -> Mapping[str, Side]:
    for slot, side in (take or {}).items():
        if slot not in SLOTS:
            raise ValueError(f"take names the slot {slot!r}; there are {', '.join(SLOTS)}")
        one_of(f"take[{slot!r}]", side, ("first", "second"))
    # A baseline over the batch belongs to the advantages that it is taken from.
    return {"over_batch": take["advantage"], **take} if take and "advantage" in take else take or {}


def _mix_stages(first: Stage, second: Stage, take: Mapping[str, Side], *, staged: bool) -> Stage:
    made: dict[str, Any] = {
        slot: _either(slot, getattr(first, slot), getattr(second, slot), plain, take)
        for slot, plain in _PLAIN_STAGE.items()
        # A judge that trains on all says nothing but when a prompt comes back, which the stages before have a mind of.
        if slot in take or not (staged and slot == "judge" and isinstance(second.judge, judges.Complete))
    }
    return replace(first, size=_mix_sizes(first.size, second.size, take, staged), **made)


def _mix_sizes(first: SizeRule, second: SizeRule, take: Mapping[str, Side], staged: bool) -> SizeRule:
    # A number of rollouts is not a method: a way to size groups goes before it, but not before the number of a last stage,
    # which was chosen with those of the stages before.
    if "size" not in take and isinstance(second, sizes.Fixed):
        return first
    if "size" not in take and isinstance(first, sizes.Fixed) and not staged:
        return second
    return _either("size", first, second, None, take)


def _mix_prompts(first: PromptRule, second: PromptRule, take: Mapping[str, Side]) -> PromptRule:
    # What Knapsack RL expects of a prompt, how it went last, gives way to a method that has expectations of its own.
    others = [rule for rule in (first, second) if rule != LastVisit()]
    if "prompts" not in take and len(others) == 1 and others[0].traits.predicts:
        return others[0]
    return _either("prompts", first, second, _PLAIN["prompts"], take)


def _mix_advantages(first: Any, second: Any, take: Mapping[str, Side]) -> Any:
    """Over the chosen rows where one of the two is, with the kernel that is not the plain one.

    A rule that compares no rollouts of a prompt goes before the statistics that PODS and DARTS bring along, but not before
    a kernel that the user named.
    """
    plain = advantages.OverGroup(advantages.grpo)
    along = (advantages.OverChosen(advantages.grpo), advantages.OverChosen(advantages.pods))
    over = {type(rule) for rule in (first, second)}
    if "advantage" in take:
        return _either("advantage", first, second, plain, take)
    if not over <= {advantages.OverGroup, advantages.OverChosen}:
        others = [rule for rule in (first, second) if rule not in along]
        return others[0] if len(others) == 1 else _either("advantage", first, second, plain, take)
    kind = advantages.OverChosen if advantages.OverChosen in over else advantages.OverGroup
    return kind(_either("advantage", first.kernel, second.kernel, plain.kernel, take))


def _either(slot: str, first: Any, second: Any, plain: Any, take: Mapping[str, Side]) -> Any:
    """What holds in a slot: what the user takes, else the one of the two that is not the plain one."""
    if slot in take:
        return first if take[slot] == "first" else second
    if first == second or second == plain:
        return first
    if first == plain:
        return second
    said = [getattr(value, "__name__", repr(value)) for value in (first, second)]
    raise ValueError(
        f"both recipes change {slot}: {said[0]} and {said[1]}; name the one that holds, 'first' or 'second', in mix(..., "
        f"take={{{slot!r}: ...}}), or make one plain with dataclasses.replace before mixing"
    )


def _refuse_too_few_rollouts(recipe: Recipe) -> None:
    total, m = 0, recipe.group_rows
    for stage in recipe.stages:
        if not isinstance(stage.size, sizes.Fixed):
            return
        total += stage.size.n
        if total < 2 and isinstance(stage.judge, judges.NonzeroVariance):
            raise ValueError(
                f"{stage.judge!r} waits for results that differ, and a group has {total} rollout by then; give the recipe "
                "that says how many, the first of the two, n of at least 2"
            )
    if m is not None and m > total:
        raise ValueError(
            f"{recipe.rows!r} trains on {m} rollouts but the stages give only {total}; give the recipe that says how many, "
            f"the first of the two, n of at least {m}"
        )


def _names(recipe: Recipe) -> list[str]:
    return [stage.name for stage in recipe.stages]
