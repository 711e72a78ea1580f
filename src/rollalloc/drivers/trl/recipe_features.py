"""Features of the prompts, from which a recipe predicts success rates: read from a file, or computed with the model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from accelerate.utils import broadcast_object_list
from numpy.typing import NDArray

from rollalloc.core.recipe import Recipe
from rollalloc.data.feature_file import read_features
from rollalloc.drivers.trl.chats import encode
from rollalloc.drivers.trl.dataset import blocks_of, check_key, keyed
from rollalloc.drivers.trl.sharding import is_sharded
from rollalloc.models.featurizer import features_of

log = logging.getLogger(__name__)

AUTO, MODEL = "auto", "model"

Blocks = Mapping[str, NDArray[np.float32]]


def features_for(
    trainer: Any, recipe: Recipe, given: Path | str | None, key: str | None
) -> Blocks | Callable[[], Blocks]:
    """The features that a trainer uses, or a function that computes them when training begins.

    Args:
        trainer: TRL's trainer.
        recipe: the recipe.
        given: path of a file that `rollalloc features` or `write_features` wrote. "model": compute the features with the
            model when training begins. None: no features. "auto": as "model" if the recipe predicts and the data set has
            prompts, otherwise as None.
        key: column of the prompts' keys, by which features are found in a file. None: the prompts are the keys.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the file is corrupt or lacks prompts; or features cannot be computed, because the model is sharded or
            environments supply the prompts.
    """
    if given == AUTO:
        there = "prompt" in trainer.train_dataset[0]  # False if environments supply the prompts
        given = MODEL if recipe.reads_features and there else None
    if given == MODEL:
        if is_sharded(trainer):
            raise ValueError(
                'features="model" needs the whole model in each process, but it is sharded; make a file of features once '
                "(`rollalloc features`) and give features=FILE, or features=None"
            )
        if "prompt" not in trainer.train_dataset[0]:
            raise ValueError('features="model": environments create the prompts during training; give features=None')
        return partial(_of_model, trainer)
    if given is None:
        if recipe.reads_features:
            log.warning(
                "no features: until a prompt has outcomes, it is predicted to succeed as often as the average prompt"
            )
        return {}
    check_key(trainer.train_dataset, key)
    keys: Any = keyed(trainer.train_dataset, key).keys
    return read_features(Path(given), keys).blocks


def _of_model(trainer: Any) -> Blocks:
    dataset, accelerator = trainer.train_dataset, trainer.accelerator
    tokens = encode(trainer, [prompt for _, prompts in blocks_of(dataset) for prompt in prompts])
    model = accelerator.unwrap_model(trainer.model_wrapped)
    made = features_of(model, tokens, pad_id=int(trainer.processing_class.pad_token_id), seed=trainer.args.seed)
    blocks: list[Any] = [made.blocks]
    if accelerator.num_processes > 1:  # processes may round differently, but must have equal features
        broadcast_object_list(blocks)
    log.info(
        "features of %d prompts from the model: %d tokens forwarded, %.1f s",
        made.cost.prompts,
        made.cost.tokens,
        made.cost.seconds,
    )
    return blocks[0]
