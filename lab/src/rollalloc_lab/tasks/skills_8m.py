"""The tasks of skills with a model of eight million parameters, for measurements at a second size."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np

from rollalloc.tasks.skills import Skills, SkillsConfig
from rollalloc.tasks.tiny import Shape, WarmUp, save_warm_model, word_tokenizer


def model_8m(tasks: Path) -> Path:
    """A Llama of eight million parameters, warmed up on the tasks' examples; made in the folder if missing."""
    place, config = tasks / "skills-8m", SkillsConfig()
    if not (place / "config.json").exists():
        drawn, rng = Skills(config), np.random.default_rng([config.seed, 0])
        warm_up = WarmUp(steps=500, batch=64, learning_rate=1.5e-3)
        draw, shape = partial(drawn.noisy_examples, rng), Shape(hidden=288, layers=6)
        save_warm_model(place, word_tokenizer(drawn.words), warm_up, draw, shape)
    return place
