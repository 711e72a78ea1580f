"""`mix` composes two methods into one recipe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from rollalloc.core.recipe import Budget, Recipe, Stage, one_of
from rollalloc.core.rule import PromptRule, SizeRule, called
from rollalloc.recipes.grpo import QUARANTINE_AFTER
from rollalloc.recipes.knapsack import LastVisit
from rollalloc.rules import advantages, intake, judges, promote, prompts, rows, sizes

Side = Literal["first", "second"]

# The slots of a recipe that `mix` combines, and the plain value of each. `_PLAIN_STAGE` does the same for
# the slots of a stage.
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
    "retire": None,
    "limit": None,
}
_PLAIN_STAGE: Mapping[str, Any] = {"judge": judges.Complete(), "stop": None, "promote": promote.Oldest()}
SLOTS = (*_PLAIN, "advantage", "size", *_PLAIN_STAGE)


def mix(first: Recipe, second: Recipe, take: Mapping[str, Side] | None = None) -> Recipe:
    """Compose two methods. For each slot, the mixture takes the rule or number that is not the plain value.

    | slot | plain value |
    |---|---|
    | `prompts` | random order, each once an epoch; also Knapsack's rule, if the other method predicts success rates |
    | `intake` | as many groups as the batch needs |
    | `rows` | all rollouts of a group |
    | `max_staleness`, `max_candidates`, `budget`, `over_batch`, `replay`, `retire`, `limit` | 0, or none |
    | `quarantine_after` | 3 |
    | `advantage` | GRPO's kernel; the kernel is applied to the chosen rows alone if one of the methods does so |
    | `size` | a fixed number, if the other method computes sizes or has several stages |
    | `judge` | train on every group; its prompt may be drawn again in the next epoch |
    | `stop`, `promote` | no stop; oldest first |

    For example, `mix(pilot_commit(...), pods(...))` has the stages of Pilot-Commit and the rows *and* the advantage
    of PODS. `mix(dapo(...), darts(...))` has the judge and the intake of DAPO and the sizes, stops and rows of
    DARTS.

    If one recipe has several stages, its last stage is merged with the single stage of the other recipe. The judges of
    the recipe with several stages decide when a prompt may be drawn again. For example,
    `mix(pilot_commit(...), foresight(...))` draws each prompt once an epoch, by foresight's prediction. In a mixture with
    PODS or DARTS, an advantage that does not compare rollouts of one prompt, such as foresight's, is kept. PODS and DARTS
    then contribute only rows, sizes and stops.

    If neither recipe has the plain value in a slot, `take` must name one recipe: `mix(pilot_commit(...), darts(...),
    take={"size": "first"})` has Pilot-Commit's numbers of rollouts and DARTS's rows. With "second", DARTS sets the number of
    rollouts of a group in all stages together, and the pilots are subtracted (`rules.sizes.InAll`).

    Args:
        first: a method. If both methods have a fixed number of rollouts per prompt, this method's number is used.
        second: another method with the same number of groups.
        take: for a slot of the table, the recipe that fills the slot: "first" or "second". Without an entry,
            `over_batch` follows `advantage`. None: choose by the table.

    Raises:
        ValueError: the batches have different sizes; both methods have several stages; neither has the plain value in a
            slot; `take` names an unknown slot; or the groups of the mixture have too few rollouts.
    """
    take = _checked_take(take)
    if first.groups != second.groups:
        raise ValueError(
            f"both recipes must train on the same number of groups, got {first.groups} and {second.groups}; change "
            f"one of them, for example by dataclasses.replace(second, groups={first.groups})"
        )
    if len(first.stages) < len(second.stages):
        first, second = second, first
        take = {slot: "second" if side == "first" else "first" for slot, side in take.items()}
    *before, last = first.stages
    single, *others = second.stages
    if others:
        names = [[stage.name for stage in recipe.stages] for recipe in (first, second)]
        raise ValueError(
            f"both recipes have several stages, {names[0]} and {names[1]}; write one recipe with all of them"
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
    # With equal `groups`, the rules differ only in `ahead`. `ahead` matters only with several stages, so `first` decides.
    both = isinstance(first, intake.KeepInFlight) and isinstance(second, intake.KeepInFlight)
    if both and first.groups == second.groups and "intake" not in take:
        return first
    return _either("intake", first, second, _PLAIN["intake"], take)


def _checked_take(take: Mapping[str, Side] | None) -> Mapping[str, Side]:
    for slot, side in (take or {}).items():
        if slot not in SLOTS:
            raise ValueError(f"take: unknown slot {slot!r}; the slots are {', '.join(SLOTS)}")
        one_of(f"take[{slot!r}]", side, ("first", "second"))
    # By default, `over_batch` comes from the same recipe as `advantage`: it changes the advantages that this rule gives.
    return {"over_batch": take["advantage"], **take} if take and "advantage" in take else take or {}


def _mix_stages(first: Stage, second: Stage, take: Mapping[str, Side], *, staged: bool) -> Stage:
    made: dict[str, Any] = {
        slot: _either(slot, getattr(first, slot), getattr(second, slot), plain, take)
        for slot, plain in _PLAIN_STAGE.items()
        # `Complete` only says when a prompt may be drawn again. If there are several stages, their judges decide this.
        if slot in take or not (staged and slot == "judge" and isinstance(second.judge, judges.Complete))
    }
    return replace(first, size=_mix_sizes(first.size, second.size, take, staged), **made)


def _mix_sizes(first: SizeRule, second: SizeRule, take: Mapping[str, Side], staged: bool) -> SizeRule:
    # A rule that computes sizes replaces a fixed number of rollouts. In the last of several stages, the fixed number is
    # kept, because it fits the numbers of the earlier stages.
    if "size" not in take and isinstance(second, sizes.Fixed):
        return first
    if "size" not in take and isinstance(first, sizes.Fixed) and not staged:
        return second
    chosen = _either("size", first, second, None, take)
    # A method with a single stage says how many rollouts a group has in all, and earlier stages give it some of them.
    return sizes.InAll(chosen) if staged and take.get("size") == "second" else chosen


def _mix_prompts(first: PromptRule, second: PromptRule, take: Mapping[str, Side]) -> PromptRule:
    # Knapsack predicts only the mean of the last visit, so another method that predicts success rates takes precedence.
    others = [rule for rule in (first, second) if rule != LastVisit()]
    if "prompts" not in take and len(others) == 1 and others[0].traits.predicts:
        return others[0]
    return _either("prompts", first, second, _PLAIN["prompts"], take)


def _mix_advantages(first: Any, second: Any, take: Mapping[str, Side]) -> Any:
    """Choose the kernel that is not the plain value. Apply it to the chosen rows alone if one of the recipes does so.

    A rule that does not compare rollouts of one prompt replaces the default kernels of PODS and DARTS, but not a kernel
    that the user chose.
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
    """The value from the recipe that `take` names for this slot. Without an entry, the value that is not plain."""
    if slot in take:
        return first if take[slot] == "first" else second
    if first == second or second == plain:
        return first
    if first == plain:
        return second
    said = [getattr(value, "__name__", repr(value)) for value in (first, second)]
    raise ValueError(
        f"both recipes change {slot}: {said[0]} and {said[1]}; choose one, 'first' or 'second', by mix(..., "
        f"take={{{slot!r}: ...}}), or give one of them the plain value with dataclasses.replace before mixing"
    )


def _refuse_too_few_rollouts(recipe: Recipe) -> None:
    total, m = 0, recipe.group_rows
    for stage in recipe.stages:
        if not isinstance(stage.size, sizes.Fixed):
            return
        total += stage.size.n
    if m is not None and m > total:
        raise ValueError(
            f"{called(recipe.rows)} trains on {m} rollouts but the stages generate only {total}; give n of at least {m} to "
            "the first recipe, which sets the number of rollouts"
        )
