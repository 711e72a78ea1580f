"""How the asynchronous engine works, as a value."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Streaming:
    """How the asynchronous engine works; see docs/streaming.md.

    Attributes:
        overlap: generation has a process of its own, which goes on while rewards are scored and batches trained. False: it
            is one decoding step after the other in this process, one of them after each forward pass of an update, so that
            a run depends on no clock, and is the same after a kill and a resume.
    """

    overlap: bool = True
