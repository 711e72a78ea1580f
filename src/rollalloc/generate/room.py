"""A key-value cache layer with spare columns: appending a token copies only that token, not the whole cache."""

from __future__ import annotations

from torch import Tensor
from transformers.cache_utils import DynamicLayer

ROOM = 32  # number of spare columns, one per token, added whenever the tensors grow


class RoomyLayer(DynamicLayer):
    """The keys and values of one layer, in tensors with spare columns. The model sees only rows and columns in use."""

    def __init__(self) -> None:
        super().__init__()
        self._held: list[Tensor] = []  # keys and values, shape (rows, heads, columns, width)
        self._rows = self._filled = 0

    def get_seq_length(self, *args: object) -> int:
        return self._filled

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append tokens to each row. Return all keys and values."""
        self.begin((key_states, value_states))
        before, after = self._filled, self._filled + key_states.shape[-2]
        if after > self._held[0].shape[-2]:
            self.grow(len(key_states), after + ROOM)
        self.put(slice(len(key_states)), slice(before, after), key_states, value_states)
        return self.show(len(key_states), after)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows, in this order."""
        self._held = [held.index_select(0, indices) for held in self._held]
        self.show(len(indices), self._filled)

    def begin(self, like: tuple[Tensor, Tensor]) -> None:
        """Initialise an empty layer with the number and the width of heads of `like`. A second call does nothing."""
        if not self._held:
            self._held = [each[:0, :, :0] for each in like]
            self.dtype, self.device, self.is_initialized = like[0].dtype, like[0].device, True

    def grow(self, rows: int, columns: int) -> None:
        """Enlarge the tensors. New entries are 0: they are masked with weight 0, but 0 · NaN would be NaN."""
        for at, held in enumerate(self._held):
            larger = held.new_zeros((rows, held.shape[1], columns, held.shape[3]))
            larger[: held.shape[0], :, : held.shape[2]] = held
            self._held[at] = larger

    def put(self, rows: slice, columns: slice, keys: Tensor, values: Tensor) -> None:
        for held, new in zip(self._held, (keys, values), strict=True):
            held[rows, :, columns] = new

    def move(self, to: Tensor, movers: Tensor, columns: slice) -> None:
        for held in self._held:
            held[to, :, columns] = held[movers, :, columns]

    def shift(self, by: int, rows: int, filled: int) -> None:
        for held in self._held:
            there = held[:rows, :, max(0, -by) : filled].clone()
            held[:rows, :, max(0, by) : filled + by] = there

    def show(self, rows: int, filled: int) -> tuple[Tensor, Tensor]:
        self._rows, self._filled = rows, filled
        keys, values = (held[:rows, :, :filled] for held in self._held)
        self.keys, self.values = keys, values
        return keys, values
