# pyright: reportMissingImports=false
# (verl and what it needs live in an environment of their own: constraints/verl-cpu.txt)
"""verl's data set and loader, by index: the core knows no more of a prompt."""

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

from rollalloc.core.table import PromptTable
from rollalloc.data.feature_file import read_features
from rollalloc.data.prompts import prompt_keys
from rollalloc.drivers.verl.names import refuse_columns
from rollalloc.drivers.verl.rounds import Submission


class Prompts:
    """The prompts of a run: in verl's order, and as the rows that verl submits.

    Args:
        config: verl's `data` section.
        dataset: verl's training set.

    Raises:
        ValueError: a column has a name that verl or this driver uses itself.
    """

    def __init__(self, config: Any, dataset: Any) -> None:
        refuse_columns_of(dataset, "data.train_files")
        self._dataset, self._prompt_key = dataset, config.get("prompt_key", "prompt")
        # Indices instead of rows, in the batches that verl's own loader would make: verl saves and restores its position.
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
        """The next batch of verl's loader, and its epoch."""
        if self._remaining is None:
            self._remaining = iter(self.index_loader)
        indices = next(self._remaining, None)
        if indices is None:
            self.epoch += 1
            self._remaining = iter(self.index_loader)
            indices = next(self._remaining)
        return indices, self.epoch

    def table(self, features: str | None) -> PromptTable:
        """Keys that outlive a re-ordering of the files, and features; without verl's own data set class, indices only.

        Raises:
            ValueError: features without keys, or a file that is corrupt or lacks prompts.
        """
        frame = getattr(self._dataset, "dataframe", None)
        if frame is None:
            if features is not None:
                raise ValueError(
                    f"features are found by the prompts' keys, which data.custom_cls, {type(self._dataset).__name__}, does "
                    "not give; leave features out, or use verl's own data set class"
                )
            return PromptTable(len(self._dataset))
        keys = _keys(frame, self._prompt_key)
        return PromptTable(keys, features=None if features is None else read_features(Path(features), keys).blocks)

    def rows(self, submissions: Sequence[Submission], step: int) -> TensorDict:
        """The submissions as verl's workers take them."""
        batch = collate_fn([self._dataset[submission.prompt] for submission in submissions])
        batch["uid"] = np.array([submission.uid for submission in submissions], dtype=object)
        batch["__rollout_n__"] = np.array([len(submission.rollouts) for submission in submissions], dtype=object)
        rows = tu.get_tensordict(batch)
        tu.assign_non_tensor_data(rows, "global_steps", step)
        return rows


def refuse_columns_of(dataset: Any, files: str, allowed: frozenset[str] = frozenset()) -> None:
    """Refuse a data set of verl's, or of `data.custom_cls`, by what its first row has; see `names.refuse_columns`."""
    if dataset is not None and len(dataset):
        row = dataset[0]
        refuse_columns(row, row.get("extra_info"), files, allowed)


def _keys(frame: Iterable[dict[str, Any]], prompt_key: str) -> list[str]:
    """One key a row; the second of two equal rows gets a number, since verl trains on both."""
    rows = [
        (
            str(row.get("data_source")),
            (row.get("extra_info") or {}).get("index"),
            [row[prompt_key], (row.get("reward_model") or {}).get("ground_truth")],
        )
        for row in frame
    ]
    seen: Counter[str] = Counter()
    keys: list[str] = []
    for key in prompt_keys(rows):
        seen[key] += 1
        keys.append(key if seen[key] == 1 else f"{key}~{seen[key]}")
    return keys
