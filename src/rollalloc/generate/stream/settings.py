"""How the asynchronous engine works, as a value."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Streaming:
    """How the asynchronous engine works; see docs/streaming.md.

    Attributes:
        overlap: generation has a process of its own, which goes on while rewards are scored and batches trained. False: it
            is one decoding step after the other in this process, a few of them while a batch is trained, so that a run
            depends on no clock.
    """

    overlap: bool = True
