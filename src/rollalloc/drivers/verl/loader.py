# pyright: reportMissingImports=false
# (verl and its dependencies are installed in a separate environment: constraints/verl-cpu.txt)
"""verl's data set and loader. The core knows a prompt only by its index in the data set."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tensordict import TensorDict
from torchdata.stateful_dataloader import StatefulDataLoader
from verl.trainer.ppo.utils import create_rl_sampler
from verl.utils import tensordict_utils as tu
from verl.utils.dataset.rl_dataset import collate_fn

from rollalloc.core.prompts import PromptTable
from rollalloc.data.feature_file import read_features
from rollalloc.data.prompts import prompt_keys
from rollalloc.data.public import SAMPLES
from rollalloc.drivers.verl.reserved import LIMIT, refuse_columns, refuse_turns
from rollalloc.drivers.verl.rounds import Submission

_FILES = "data.train_files"
_LOOP = "agent_name"  # the column that chooses an agent loop for a prompt


class Prompts:
    """The prompts of a run. Draws them in the order of verl's loader, and makes rows for verl's workers.

    Args:
        config: verl's `data` section.
        dataset: verl's training set.
        limited: whether the recipe stops rollouts at a length, so that a rollout may have only one turn.

    Raises:
        ValueError: a column has a name that verl or this driver reserves; or, with `limited`, a row has an agent loop of
            several turns.
    """

    def __init__(self, config: Any, dataset: Any, limited: bool = False) -> None:
        refuse_columns_of(dataset, _FILES)
        self._dataset, self._prompt_key, self._limited = dataset, config.get("prompt_key", "prompt"), limited
        frame = getattr(dataset, "dataframe", None)
        if limited and frame is not None and _LOOP in getattr(frame, "column_names", ()):
            refuse_turns(frame[_LOOP], _FILES)
        # Like verl's own loader, but its batches contain indices instead of rows. verl saves and restores its position.
        self.index_loader = StatefulDataLoader(
            dataset=range(len(dataset)),  # pyright: ignore[reportArgumentType]
            batch_size=config.train_batch_size,
            drop_last=True,
            collate_fn=list,
            sampler=create_rl_sampler(config, dataset),
        )
        self.epoch = 0
        self._remaining: Any = None

    def __len__(self) -> int:
        return len(self._dataset)

    def next_prompts(self) -> tuple[Sequence[int], int]:
        """The indices of the next batch of verl's loader, and the number of the epoch, from 0."""
        if self._remaining is None:
            self._remaining = iter(self.index_loader)
        indices = next(self._remaining, None)
        if indices is None:
            self.epoch += 1
            self._remaining = iter(self.index_loader)
            indices = next(self._remaining)
        return indices, self.epoch

    def table(self, features: str | None) -> PromptTable:
        """The table of prompts for the core.

        The keys identify the prompts, even if the files are reordered. A data set of a custom class has no keys.

        Args:
            features: file of the prompts' features. None: no features.

        Raises:
            ValueError: the data set has no keys to find features by; or the file is corrupt or lacks prompts.
        """
        frame = getattr(self._dataset, "dataframe", None)
        if frame is None:
            if features is not None:
                raise ValueError(
                    f"features are looked up by the keys of prompts, but data.custom_cls ({type(self._dataset).__name__}) "
                    "has no keys; leave features out, or use verl's own data set class"
                )
            return PromptTable(len(self._dataset))
        keys = _keys(frame, self._prompt_key)
        return PromptTable(keys, features=None if features is None else read_features(Path(features), keys).blocks)

    def rows(self, submissions: Sequence[Submission], step: int) -> TensorDict:
        """Convert submissions to the format of verl's workers.

        Raises:
            ValueError: with `limited`, a row has an agent loop of several turns. A data set of a custom class shows its rows
                only here.
        """
        batch = collate_fn([self._dataset[submission.prompt] for submission in submissions])
        if self._limited and _LOOP in batch:
            refuse_turns(batch[_LOOP], _FILES)
        batch["uid"] = np.array([submission.uid for submission in submissions], dtype=object)
        batch[SAMPLES] = np.array([len(submission.rollouts) for submission in submissions], dtype=object)
        batch[LIMIT] = np.array([submission.limit or 0 for submission in submissions], dtype=object)
        rows = tu.get_tensordict(batch)
        tu.assign_non_tensor_data(rows, "global_steps", step)
        return rows


def refuse_columns_of(dataset: Any, files: str, allowed: frozenset[str] = frozenset()) -> None:
    """Raise an error if the first row of a data set has columns with reserved names; see `reserved.refuse_columns`."""
    if dataset is not None and len(dataset):
        row = dataset[0]
        refuse_columns(row, row.get("extra_info"), files, allowed)


def fill_samples(dataset: Any, n: int) -> None:
    """Give every validation prompt a number of answers to sample, if only some of the files contain this number.

    verl concatenates its files. In rows of files without this column, the value becomes null, and verl fails.

    Args:
        dataset: verl's validation set. A data set without a `dataframe`, such as one of a custom class, is not changed.
        n: verl's `val_kwargs.n`, the number for rows without a value.
    """
    frame = getattr(dataset, "dataframe", None)
    if frame is not None and SAMPLES in frame.column_names and None in frame[SAMPLES]:
        dataset.dataframe = frame.map(lambda row: {SAMPLES: n if row[SAMPLES] is None else row[SAMPLES]})


def _keys(frame: Iterable[dict[str, Any]], prompt_key: str) -> list[str]:
    """A key for each row. The keys of equal rows are numbered, because verl trains on all of them."""
    rows = [
        (
            str(row.get("data_source")),
            (row.get("extra_info") or {}).get("index"),
            [row[prompt_key], (row.get("reward_model") or {}).get("ground_truth")],
        )
        for row in frame
    ]
    counts: Counter[str] = Counter()
    keys: list[str] = []
    for key in prompt_keys(rows):
        counts[key] += 1
        keys.append(key if counts[key] == 1 else f"{key}~{counts[key]}")
    return keys
