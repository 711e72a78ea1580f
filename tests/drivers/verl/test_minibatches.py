"""Tests of the padding of verl's mini-batches: their number of rows fits ranks, steps and micro-batches."""

from hypothesis import given
from hypothesis import strategies as st

from rollalloc.drivers.verl.minibatches import rows_multiple, spread


def test_the_multiple_fits_ranks_steps_and_micro_batches():
    assert rows_multiple(2, [4], None, None) == 8
    assert rows_multiple(2, [4], 3, 8) == 2 * 24
    assert rows_multiple(1, [2, 3], 1, 1) == 6


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.data())
def test_every_mini_batch_has_a_row_that_is_no_padding(ranks, steps, size, data):
    rows = ranks * steps * size
    padding = data.draw(st.integers(0, rows - steps))
    flags = data.draw(st.permutations([True] * padding + [False] * (rows - padding)))
    order = spread(flags, ranks, steps)
    share = rows // ranks
    assert sorted(order) == list(range(rows))
    for rank in range(ranks):
        block = order[rank * share : (rank + 1) * share]
        assert sorted(block) == list(range(rank * share, (rank + 1) * share))
    for step in range(steps):
        at = [rank * share + step * size + row for rank in range(ranks) for row in range(size)]
        assert not all(flags[order[row]] for row in at)
