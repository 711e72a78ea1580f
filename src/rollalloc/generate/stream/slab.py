"""A key-value cache in fixed tensors, for rows that join and leave.

The first `live` rows of each tensor are in use. All rows write their next token into the same column, so a decoding step
moves no data. The first token of a row is in column `start_R` of that row; columns to its left are masked. When rows
leave, the last rows take their places.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from rollalloc.generate.sampler import ROOM, RoomyLayer
from rollalloc.models.likelihood import sent


class Slab:
    """A model's key-value cache with rows that join and leave.

    Args:
        model: the model. Its cache must only append tokens (`rollalloc.models.likelihood.appends_only`).

    Attributes:
        cache: the cache to pass to the model.
        live: number of rows in use.
        filled: number of columns with tokens. The next token goes into the column after them.
        start_R: column of the first token of each row in use.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.cache = DynamicCache(config=model.config)
        self._layers = [RoomyLayer() for _ in self.cache.layers]
        self.cache.layers = list[Any](self._layers)
        self._device = model.device
        self.live = self.filled = 0
        self.start_R = np.zeros(0, np.int64)
        self._mask_RC = torch.zeros((0, 0), dtype=torch.bool, device=self._device)

    @property
    def mask_BC(self) -> Tensor | None:
        """The columns to which each row attends, including the column of the next token. None: all columns."""
        return self._mask_RC[: self.live, : self.filled + 1] if self.start_R[: self.live].any() else None

    def make_room(self) -> None:
        """Make sure that there is a column for the next token, and drop columns that no row attends to.

        Call it before each forward pass.
        """
        spare = int(self.start_R[: self.live].min(initial=self.filled))
        if 4 * spare > self.filled:  # shift rarely, so that at most four tokens are copied per token written
            self._shift(-spare)
        if self.filled == self._mask_RC.shape[1]:
            self._grow(len(self.start_R), self.filled + ROOM)

    def wrote(self) -> None:
        """Record that a forward pass wrote the next column of every row in use."""
        self.filled += 1

    def join(self, held: Sequence[tuple[Tensor, Tensor]], length_K: NDArray[np.int64]) -> None:
        """Add rows after the present ones.

        Args:
            held: keys and values of each layer, shape (K, heads, columns, width), with the last token in the last column.
            length_K: number of tokens of each row, at most the number of columns.
        """
        rows, columns = self.live + len(length_K), held[0][0].shape[-2]
        if not self.live:
            self.filled = columns
        for layer, like in zip(self._layers, held, strict=True):
            layer.begin(like)
        self._grow(rows, max(self.filled, columns) + 1)
        if columns > self.filled:
            self._shift(columns - self.filled)
        new, first = slice(self.live, rows), self.filled - columns
        for layer, (keys, values) in zip(self._layers, held, strict=True):
            layer.put(new, slice(first, self.filled), keys, values)
        self.start_R[new] = self.filled - length_K
        start_K = sent(self.start_R[new], self._device)
        self._mask_RC[new] = torch.arange(self._mask_RC.shape[1], device=self._device) >= start_K[:, None]
        self._show(rows)

    @torch.inference_mode()
    def leave(self, rows_K: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Remove rows and move others into their places. Return the new places of the moved rows, and their old places."""
        stay = self.live - len(rows_K)
        leaves_B = np.zeros(self.live, bool)
        leaves_B[rows_K] = True
        to, movers = np.flatnonzero(leaves_B[:stay]), stay + np.flatnonzero(~leaves_B[stay:])
        if to.size:
            first = int(self.start_R[movers].min())
            to_at, from_at = sent(np.stack([to, movers]), self._device)
            for layer in self._layers:
                layer.move(to_at, from_at, slice(first, self.filled))
            self.start_R[to] = self.start_R[movers]
            self._mask_RC[to_at] = self._mask_RC[from_at]
        self._show(stay)
        return to, movers

    def _grow(self, rows: int, columns: int) -> None:
        """Enlarge the tensors to at least this size, with the same contents."""
        had_rows, had_columns = self._mask_RC.shape
        if rows <= had_rows and columns <= had_columns:
            return
        rows = had_rows if rows <= had_rows else max(rows, 2 * had_rows)
        columns = max(columns, had_columns)
        for layer in self._layers:
            layer.grow(rows, columns)
        mask_RC = torch.ones((rows, columns), dtype=torch.bool, device=self._device)
        mask_RC[:had_rows, :had_columns] = self._mask_RC
        self._mask_RC = mask_RC
        self.start_R = np.concatenate([self.start_R, np.zeros(rows - had_rows, np.int64)])

    def _shift(self, by: int) -> None:
        """Move the contents to the right or, if `by` is negative, to the left."""
        for layer in self._layers:
            layer.shift(by, self.live, self.filled)
        self.filled += by
        self.start_R[: self.live] += by
        self._mask_RC[: self.live] = self._mask_RC[: self.live].roll(by, dims=1)
        self._mask_RC[: self.live, self.filled :] = True
        if by > 0:
            self._mask_RC[: self.live, :by] = False
        self._show(self.live)

    def _show(self, live: int) -> None:
        self.live = live
        for layer in self._layers:
            layer.show(live, self.filled)
