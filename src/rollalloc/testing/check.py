"""`check_recipe` tests a recipe against every law in simulated runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

from rollalloc.core.allocator import Allocator
from rollalloc.core.prompts import PromptTable
from rollalloc.core.recipe import Budget, Recipe
from rollalloc.core.rule import OfferedPromptRule
from rollalloc.testing.audit import ConformanceError, expect
from rollalloc.testing.feeder import AuditedRun
from rollalloc.testing.scale import check_work
from rollalloc.testing.world import World


def check_recipe(
    recipe: Recipe,
    *,
    prompts: int | None = None,
    seeds: Sequence[int] = (0, 1),
    batches: int = 6,
    allocator: type[Allocator] = Allocator,
    like: Recipe | None = None,
    rewards: tuple[float, float] = (-1.5, 1.0),
    table: Callable[[int], PromptTable] = PromptTable.of,
) -> None:
    """Test a recipe against every law, in synchronous and asynchronous runs, with and without failing rollouts.

    Args:
        recipe: the recipe.
        prompts: size of the simulated data set. Default: eight times the number of groups that the first `ask` opens.
        seeds: seeds of the runs, each 0 or more.
        batches: number of batches to train in each run, at least 2.
        allocator: the allocator class to test, for example a subclass of your own.
        like: the recipe whose promises are checked. It must have the same number of stages. Default: `recipe`.
        rewards: the lowest and the highest simulated reward. Change these limits for rules that do not accept every reward.
        table: function that makes a data set of a given number of prompts, with the keys, priors and features that the
            rules need. Default: prompts without keys, priors and features.

    Raises:
        ConformanceError: the recipe breaks a law. The message names the law, the seed and the mode.
    """
    make = _sized(table)
    first = len(AuditedRun(recipe, make(4096 + recipe.groups), World(0, rewards=rewards)).ask(None).generate)
    count = prompts or 8 * max(first, recipe.groups)
    check = _Check(recipe, count, seeds, batches, allocator, like or recipe, rewards, first, make)
    paid_a_batch = check.runs()
    check_work(recipe, allocator, World(seeds[0], hard=True, rewards=rewards), count, make)
    check.back_pressure()
    check.budgets(paid_a_batch)
    check.quarantine()


def _sized(table: Callable[[int], PromptTable]) -> Callable[[int], PromptTable]:
    def make(prompts: int) -> PromptTable:
        made = table(prompts)
        if len(made) != prompts:
            raise ValueError(f"table must make a data set of {prompts} prompts, got {len(made)}")
        return made

    return make


def trace(recipe: Recipe, prompts: int | PromptTable, seed: int, batches: int = 4) -> str:
    """A digest of all actions of an asynchronous run with failures. It is the same in every process."""
    digest = blake2b(digest_size=16)
    for actions in AuditedRun(recipe, prompts, World(seed), seed=0).asynchronous(batches, trouble=0.05):
        digest.update(repr(actions).encode())
    return digest.hexdigest()


@dataclass(frozen=True)
class _Check:
    recipe: Recipe
    prompts: int
    seeds: Sequence[int]
    batches: int
    allocator: type[Allocator]
    like: Recipe
    rewards: tuple[float, float]
    first: int  # number of groups that the first `ask` opens
    table: Callable[[int], PromptTable]

    def _run(
        self, seed: int, *, reload: float = 0.0, hard: bool = False, failing: int = 0, prompts: int | None = None,
        budget: Budget | None = None,
    ) -> AuditedRun:  # fmt: skip
        return AuditedRun(
            self.recipe if budget is None else replace(self.recipe, budget=budget),
            self.table(prompts or self.prompts),
            World(seed, hard=hard, failing=failing, rewards=self.rewards),
            seed=seed,
            allocator=self.allocator,
            like=self.like,
            reload=reload,
        )

    def runs(self) -> int:
        """Audit whole runs. Return the largest number of rollouts ordered per batch."""
        paid: list[int] = []
        for seed in self.seeds:
            for mode, batches, trouble, reload, slots in (
                ("synchronous", self.batches, 0.0, 0.0, 0),
                ("asynchronous", self.batches, 0.0, 0.0, 24),
                ("asynchronous, one slot", 2, 0.02, 0.0, 1),
                ("asynchronous, trouble and reloads", self.batches, 0.06, 0.25, 24),
            ):
                try:
                    run = self._run(seed, reload=reload)
                    steps = run.asynchronous(batches, trouble, slots) if slots else run.synchronous(batches)
                    made = sum(actions.batch is not None for actions in steps)
                    expect(4, made > 0 or bool(run.finished), "no batch and no reason")
                    paid.append(run.allocator.paid // max(1, made))
                except ConformanceError as error:
                    raise ConformanceError(f"{error} (seed {seed}, {mode})") from None
        return max(paid)

    def back_pressure(self) -> None:
        """Check law 3: the number of open groups is limited. The simulated metrics vary, so that few groups are dropped.

        The limit is three batches plus a few times the number of groups that one `ask` opens.
        """
        run = self._run(self.seeds[0], hard=True)
        intakes = 2 + self.recipe.max_staleness * self.recipe.intake.traits.until_stale
        bound = 3 * self.recipe.groups + intakes * self.first
        for _ in run.synchronous(4 * self.batches):
            alive = set(run.audit.order_of) - run.audit.released - run.audit.in_batch
            groups = {run.audit.order_of[rollout].group for rollout in alive}
            expect(
                3,
                len(groups) <= bound,
                f"{len(groups)} groups held and running, of batches of {self.recipe.groups}",
            )

    def budgets(self, paid_a_batch: int) -> None:
        """Check laws 7 and 2: a budget ends the run and is never exceeded, and no rollout is lost at the end."""
        for budget in (
            Budget(run_rollouts=3 * paid_a_batch + 1),
            Budget(run_tokens=100 * paid_a_batch),
        ):
            run = self._run(self.seeds[0], reload=0.1, budget=budget)
            for actions in run.asynchronous(10_000, trouble=0.03):
                ordered, tokens = len(run.audit.order_of), run.audit.tokens
                within = budget.run_rollouts is None or ordered <= budget.run_rollouts
                expect(7, within, f"{ordered} rollouts ordered under {budget}")
                within = budget.run_tokens is None or not actions.generate or tokens < budget.run_tokens
                expect(7, within, f"rollouts ordered after {tokens} tokens under {budget}")
            expect(7, run.finished is not None, f"{budget} does not end the run")
            open_rollouts = run.allocator.accounts()["open"]
            expect(8, open_rollouts == 0, f"{open_rollouts} rollouts are open after the end of the run")

    def quarantine(self) -> None:
        """Check law 10 with prompts that always fail: exactly the prompts with enough failed visits are quarantined."""
        recipe = self.recipe
        if isinstance(recipe.prompts, OfferedPromptRule):
            return  # with so few prompts, the loader would soon offer only prompts that are in flight
        prompts = 2 * max(self.first, recipe.groups)
        run = self._run(self.seeds[0], hard=True, failing=3, reload=0.1, prompts=prompts)
        for _ in run.synchronous(8 * prompts // recipe.groups):
            pass
        found = {prompt for prompt in range(prompts) if run.audit.always_failed(prompt)}
        expect(10, recipe.quarantine_after is None or bool(found), "too few visits")
        given_up = set(run.allocator.quarantined())
        expect(
            10,
            found == given_up,
            f"prompts {sorted(found ^ given_up)[:5]} are wrongly quarantined, or wrongly not quarantined",
        )
