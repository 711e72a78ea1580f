"""Skills: a prompt names one to eight skills. Each skill has a symbol, which is called its image. The only right answer is
the list of the images of these skills.

In the warm-up data, the image of a skill is right at that skill's own rate. So a prompt's initial success rate is known: it
is the product of its skills' rates. Because each prompt has one right answer, later success rates are computed exactly, by
teacher forcing. In the pool "graded", each right image earns marks, so that the rewards of a group are rarely equal.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rollalloc.tasks.files import (
    Problem,
    Shown,
    TaskFiles,
    compute_score,
    graded_score,
    make_once,
    prompt_files,
    unseen,
)
from rollalloc.tasks.tiny import SEPARATOR, Examples, WarmUp, save_warm_model, spell, word_tokenizer

__all__ = ["POOLS", "Pool", "Skills", "SkillsConfig", "compute_score", "graded_score", "prepare"]

LONGEST = 8
GRADED = "graded"  # the pool whose answers can be partly right
_GRADED_SHARE = 4  # the number of held-out prompts is divided by this, because each prompt is sampled several times


@dataclass(frozen=True)
class Pool:
    """The distribution of a pool's prompts over the initial success rate p.

    Attributes:
        edges: ascending values of p that cut [0, 1] into bands; a band includes its lower edge.
        shares: share of prompts in each band, from low p to high. The sum is 1. There is one more band than there are edges.
    """

    edges: tuple[float, ...]
    shares: tuple[float, ...]

    def counts(self, prompts: int) -> NDArray[np.int64]:
        """Number of prompts in each band. The sum is `prompts`."""
        return np.diff(np.rint(np.cumsum([0.0, *self.shares]) * prompts)).astype(np.int64)


_MIXED = Pool(edges=(0.01, 0.93), shares=(0.40, 0.25, 0.35))
POOLS = {
    # Ten bands of width 0.1 with a tenth of the prompts each, so p is nearly uniform.
    "balanced": Pool(edges=(0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9), shares=(0.1,) * 10),
    "mixed": _MIXED,
    "late": Pool(edges=(0.01, 0.93), shares=(0.30, 0.20, 0.50)),
    GRADED: _MIXED,
}


@dataclass(frozen=True)
class SkillsConfig:
    """Sizes and seeds of the task. The defaults define the task; other values are for tests.

    `images` is the number of answer symbols, at least 2; numbers of prompts are per pool.
    """

    skills: int = 256
    images: int = 64
    train: int = 8192
    heldout: int = 1024
    warm_up: WarmUp = field(default_factory=lambda: WarmUp(steps=1000))
    seed: int = 11


class Skills:
    """The skills' images, rates and frequencies, and prompts drawn from them."""

    def __init__(self, config: SkillsConfig) -> None:
        rng = np.random.default_rng(config.seed)
        self.right_K = rng.integers(config.images, size=config.skills)
        self.wrong_K = (self.right_K + rng.integers(1, config.images, size=config.skills)) % config.images
        self.rate_K = np.clip(rng.beta(1.5, 0.6, size=config.skills), 0.03, 0.995)
        frequency_K = np.arange(1, config.skills + 1) ** -0.7
        self.frequency_K = frequency_K / frequency_K.sum()
        self.words = [*spell("k", np.arange(config.skills)).split(), *spell("a", np.arange(config.images)).split()]

    def draw(self, rng: np.random.Generator, prompts: int) -> list[NDArray[np.int64]]:
        """Draw the skills of each prompt: their number uniformly, and each skill by its frequency."""
        lengths_N = rng.integers(1, LONGEST + 1, size=prompts)
        skills_S = rng.choice(len(self.frequency_K), size=lengths_N.sum(), p=self.frequency_K)
        return np.split(skills_S, np.cumsum(lengths_N)[:-1])

    def noisy_examples(self, rng: np.random.Generator, examples: int) -> Examples:
        """Draw warm-up data: skill k has its right image with probability rate_K[k], and otherwise its wrong image."""
        drawn = self.draw(rng, examples)
        answers = [np.where(rng.random(len(s)) < self.rate_K[s], self.right_K[s], self.wrong_K[s]) for s in drawn]
        return [_prompt(skills_L) for skills_L in drawn], [spell("a", images_L) for images_L in answers]

    def problems(self, pool: Pool, rng: np.random.Generator, count: int, taken: set[str]) -> list[Problem]:
        """Draw prompts until every band of the pool is full, and add them to `taken`.

        Returns:
            The problems in random order; `extra` holds `initial_p`, the product of the prompt's rates.

        Raises:
            ValueError: the skills give too few new prompts for some band.
        """
        wanting = pool.counts(count)
        found: list[Problem] = []
        for _ in range(1000):
            drawn = self.draw(rng, 4096)
            p_N = np.array([self.rate_K[skills_L].prod() for skills_L in drawn])
            for skills_L, p, band in zip(drawn, p_N.tolist(), np.digitize(p_N, pool.edges), strict=True):
                if wanting[band] and (prompt := _prompt(skills_L)) not in taken:
                    wanting[band] -= 1
                    taken.add(prompt)
                    found.append(Problem(prompt, spell("a", self.right_K[skills_L]), {"initial_p": p}))
            if not wanting.any():
                return [found[index] for index in rng.permutation(count)]
        raise ValueError(
            f"could not draw {count} new prompts for {pool}: after 4,096,000 draws from {len(self.rate_K)} skills, its "
            f"bands of success rates still lack {wanting.tolist()} prompts; ask for fewer prompts or take more skills"
        )


def prepare(
    folder: Path, pool: str = "late", config: SkillsConfig = SkillsConfig(), *, progress: Shown = unseen
) -> TaskFiles:
    """Create the task's files unless they exist: the model that all pools share, and one folder per pool.

    The graded pool has a quarter as many held-out prompts as the other pools.

    Raises:
        ValueError: the pool is unknown, or a folder was created with another configuration.
    """
    if pool not in POOLS:
        raise ValueError(f"expected one of the pools {', '.join(POOLS)}, got {pool!r}")
    skills, graded = Skills(config), pool == GRADED

    def make_model(to: Path) -> None:
        rng = np.random.default_rng([config.seed, 0])
        save_warm_model(
            to, word_tokenizer(skills.words), config.warm_up, partial(skills.noisy_examples, rng), shown=progress
        )

    sized = replace(config, heldout=-(-config.heldout // _GRADED_SHARE)) if graded else config
    model = make_once(folder / "model", config, make_model)
    prompts = prompt_files(folder / pool, sized, partial(skills.problems, POOLS[pool]), f"skills/{pool}")
    return TaskFiles(
        model=model,
        train=prompts / "train.parquet",
        heldout=prompts / "heldout.parquet",
        reward=f"{__name__}:{'graded_score' if graded else 'compute_score'}",
        max_new_tokens=LONGEST + 1,
        single_answer=not graded,
    )


def _prompt(skills_L: NDArray[np.int64]) -> str:
    return f"{spell('k', skills_L)} {SEPARATOR}"
