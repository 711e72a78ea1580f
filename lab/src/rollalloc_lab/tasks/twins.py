"""The ladder's U-shaped twins: most questions are hopeless or solved, as in the pools that people train on.

A twin has the model of a rung, made surer of itself: its warm-up goes on with the same facts and mistakes, but with
sharper rates. A fact that was shown right at rate r is now shown right at rate r^s / (r^s + (1 - r)^s). Then new questions
are drawn, and the model's exact success rate on each decides which of them the pool gets: a third below .02, a third at .95
or more, a third between. There are two held-out sets: one of the pool's own shape, and a balanced one, with a tenth of its
questions in each tenth of the rates.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch
from numpy.typing import NDArray

from rollalloc.models.likelihood import exact_answers
from rollalloc.models.policy import Policy, computing
from rollalloc.tasks import skills
from rollalloc.tasks.files import Problem, Shown, TaskFiles, make_once, unseen, write_splits
from rollalloc.tasks.skills import Pool
from rollalloc.tasks.tiny import WarmUp, one_thread, supervise
from rollalloc_lab.tasks import ladder
from rollalloc_lab.tasks.bands import chosen_by_rate
from rollalloc_lab.tasks.ladder import Mixture, Part
from rollalloc_lab.tasks.rungs import PREFIX, LadderRung

SUFFIX = "-u"  # ends the names of the twins' tasks
HOPELESS, SOLVED = 0.02, 0.95
U_SHAPED = Pool(edges=(HOPELESS, SOLVED), shares=(1 / 3, 1 / 3, 1 / 3))
LADDER = Mixture()
BALANCED = skills.POOLS["balanced"]
_CANDIDATES = 4  # questions drawn for each prompt of a split
_CHECKED = 1024  # candidates on which a warm-up is checked


@dataclass(frozen=True)
class Sharpened(Mixture):
    """The mixture with rates that are nearer to 0 and 1.

    Attributes:
        sharpness: s; a rate r becomes r^s / (r^s + (1 - r)^s). With 1, nothing changes.
    """

    sharpness: float = 4.0

    def _shown(self, part: Part) -> tuple[float, int]:
        rate, kind = super()._shown(part)
        right, wrong = rate**self.sharpness, (1 - rate) ** self.sharpness
        return right / (right + wrong), kind


@dataclass(frozen=True, kw_only=True)
class Twin:
    """How a twin is made from its rung.

    Attributes:
        steps: maximum number of steps of the further warm-up.
        learning_rate: its peak learning rate; see `rollalloc.tasks.tiny.WarmUp`.
        check_every: steps between two checks.
        solved: the warm-up ends when the model's rate is at least .95 on this share of new questions.
        train: prompts of the pool.
        heldout: prompts of each held-out set.
        shape: rates of the pool and of the first held-out set.
        balanced: rates of the second held-out set.
        mixture: what is shown; its seed is also that of the twin's draws.
    """

    steps: int
    learning_rate: float
    check_every: int
    solved: float = 0.11
    train: int = 4096
    heldout: int = 512
    shape: Pool = U_SHAPED
    balanced: Pool = BALANCED
    mixture: Sharpened = field(default_factory=Sharpened)

    @property
    def splits(self) -> Mapping[str, tuple[int, Pool]]:
        """Number of prompts and shape of each split."""
        return {
            "train": (self.train, self.shape),
            "heldout": (self.heldout, self.shape),
            "balanced": (self.heldout, self.balanced),
        }

    def candidates(self) -> dict[str, list[Problem]]:
        """The questions among which each split's prompts are chosen. No question belongs to two splits."""
        taken: set[str] = set()
        return {
            split: self.mixture.problems(np.random.default_rng([self.mixture.seed, 7, at]), _CANDIDATES * size, taken)
            for at, (split, (size, _)) in enumerate(self.splits.items())
        }


TWINS: Mapping[str, Twin] = MappingProxyType(
    {
        "0.15m": Twin(steps=800, learning_rate=3e-3, check_every=50),
        "8m": Twin(steps=400, learning_rate=7.5e-4, check_every=25),
        "135m": Twin(steps=200, learning_rate=5e-5, check_every=10),
    }
)


def name_of(rung: str) -> str:
    """The name of the task of a rung's twin."""
    return f"{PREFIX}{rung}{SUFFIX}"


def balanced_of(files: TaskFiles) -> Path:
    """The file with a twin's balanced held-out prompts."""
    return files.heldout.with_name("balanced.parquet")


@dataclass(frozen=True)
class _Made:
    """The settings that a twin's folder was created with; `base` names the rung's model."""

    base: str
    twin: Twin


def prepare(
    folder: Path,
    rung: LadderRung,
    twin: Twin,
    mixture: Mixture = LADDER,
    *,
    device: str | None = "cpu",
    progress: Shown = unseen,
) -> TaskFiles:
    """Create a twin's files unless they exist: those of its rung, its own model, and its prompts.

    Args:
        folder: the ladder's folder, in which the rung's files are too.
        rung: the rung whose model is sharpened.
        twin: how.
        mixture: the rung's questions.
        device: device of a pretrained model's warm-up, and of all runs; None: a GPU if there is one.
        progress: shows the progress of the warm-ups.

    Raises:
        FileNotFoundError: the rung's pretrained model is missing.
        ValueError: a warm-up did not come to its band, a band of rates has too few questions, or a folder was created with
            other settings.
    """
    files = ladder.prepare(folder, rung, mixture, device=device, progress=progress)
    settings = _Made(files.model.name, twin)
    model = make_once(
        folder / f"{files.model.name}{SUFFIX}-model",
        settings,
        lambda to: _sharpen(to, files.model, rung, twin, device, progress),
    )
    made = make_once(
        folder / f"{files.model.name}{SUFFIX}", settings, lambda to: _choose(to, model, rung, twin, device)
    )
    return replace(files, model=model, train=made / "train.parquet", heldout=made / "heldout.parquet")


def _sharpen(to: Path, base: Path, rung: LadderRung, twin: Twin, device: str | None, progress: Shown) -> None:
    """Go on with the warm-up of a rung's model until it is sure of enough questions, and save it.

    Raises:
        ValueError: it is not after all steps.
    """
    candidates = twin.candidates()
    heldout = frozenset(each.prompt for split in ("heldout", "balanced") for each in candidates[split])
    warm_up = WarmUp(twin.steps, rung.warm_up.batch, twin.learning_rate)
    draw = partial(twin.mixture.examples, np.random.default_rng([twin.mixture.seed, 8]), heldout=heldout)
    looks: list[dict[str, float]] = []
    with torch.random.fork_rng(devices=[]), one_thread():
        torch.manual_seed(twin.mixture.seed)
        policy = Policy.load(str(base), device=device)

        def sure(step: int) -> bool:
            policy.model.eval()
            looks.append({"step": step, **shape_of(rates(policy, rung, candidates["train"][:_CHECKED]))})
            policy.model.train()
            return looks[-1]["solved"] >= twin.solved

        def enough(step: int) -> bool:
            return step > 0 and step % twin.check_every == 0 and sure(step)

        precision = rung.warm_up.precision
        supervise(policy.model, policy.tokenizer, warm_up, draw, shown=progress, enough=enough, precision=precision)
        if not ((looks and looks[-1]["solved"] >= twin.solved) or sure(twin.steps)):
            raise ValueError(
                f"the warm-up of {name_of(rung.name)} ended after {twin.steps} steps with rates of at least {SOLVED} on "
                f"{looks[-1]['solved']:.1%} of the questions, expected {twin.solved:.1%}; try more steps, or another "
                "learning_rate"
            )
    policy.model.eval()
    policy.model.save_pretrained(to)
    policy.tokenizer.save_pretrained(to)
    (to / "warm_up.json").write_text(json.dumps(looks, indent=1))


def rates(policy: Policy, rung: LadderRung, problems: Sequence[Problem]) -> NDArray[np.float64]:
    """The model's exact success rate on each question, by teacher forcing at temperature 1, shape (N,)."""
    tokens = [tuple(policy.tokenizer(each.prompt)["input_ids"]) for each in problems]
    answers = [policy.answer(each.answer) for each in problems]
    with computing(policy.model, rung.warm_up.precision):
        rate_N, _ = exact_answers(policy.model, tokens, answers, pad_id=policy.pad_id)
    return rate_N


def shape_of(rate_N: NDArray[np.float64]) -> dict[str, float]:
    """Mean rate, pass@8, and the shares of hopeless and of solved questions."""
    found = ladder.spread(rate_N)
    return {
        "accuracy": found["accuracy"],
        "pass_at_8": found["pass_at_8"],
        "hopeless": float((rate_N < HOPELESS).mean()),
        "solved": float((rate_N >= SOLVED).mean()),
    }


def _choose(to: Path, model: Path, rung: LadderRung, twin: Twin, device: str | None) -> None:
    """Write the splits: of the candidates of each, those whose exact rates give its shape; `extra` has the rate."""
    policy = Policy.load(str(model), device=device)
    candidates = twin.candidates()
    splits = iter(twin.splits.items())

    def draw(rng: np.random.Generator, count: int, taken: set[str]) -> list[Problem]:
        split, (_, pool) = next(splits)
        with one_thread():
            rate_N = rates(policy, rung, candidates[split])
        chosen = [(candidates[split][at], float(rate_N[at])) for at in chosen_by_rate(rate_N, count, pool, rng)]
        taken.update(each.prompt for each, _ in chosen)
        return [replace(each, extra={**each.extra, "exact_p": rate}) for each, rate in chosen]

    sizes = {split: size for split, (size, _) in twin.splits.items()}
    write_splits(to, sizes, draw, data_source=name_of(rung.name), seed=twin.mixture.seed)
