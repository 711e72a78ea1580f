"""Updates of the weights in tests that make no batch: of each, the core is told as of one that trained a batch."""

from rollalloc import Allocator
from rollalloc.core.events import Batch, Updated


def update(allocator: Allocator, *approx_kl: float | None) -> None:
    """Tell `Updated` once, or once for each divergence."""
    for moved in approx_kl or (None,):
        if allocator.batch is None:
            allocator._run.batch = Batch((), allocator.version)
        allocator.tell([Updated(allocator.version + 1, moved)])
