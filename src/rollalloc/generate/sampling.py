"""Settings of sampling and of the asynchronous engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sampling:
    """Settings of sampling. There is no top-k or top-p, because training needs log-probabilities of all tokens.

    Attributes:
        max_new_tokens: maximum number of tokens of a rollout, including its last token, such as EOS; at least 1.
        temperature: sampling temperature, which divides the logits; above 0.
        max_rows: maximum number of rollouts in the batch at once, at least 1. The others wait.
        kv_tokens: maximum number of tokens in the key-value cache at once, at least 1. A rollout takes the
            length of the longest prompt of its wave, plus `max_new_tokens`. Rollouts that do not fit wait. None: no limit
            except `max_rows`.
        stop_ids: tokens other than EOS that end a rollout, each in the vocabulary. They stay in the text.

    Raises:
        ValueError: a value is out of its range.
    """

    max_new_tokens: int
    temperature: float = 1.0
    max_rows: int = 1024
    kv_tokens: int | None = None
    stop_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop_ids", tuple(self.stop_ids))
        ranges = {
            "max_new_tokens": (self.max_new_tokens >= 1, "at least 1"),
            "temperature": (0 < self.temperature < float("inf"), "above 0 and finite"),
            "max_rows": (self.max_rows >= 1, "at least 1"),
            "kv_tokens": (self.kv_tokens is None or self.kv_tokens >= 1, "at least 1, or None"),
        }
        for name, (holds, expected) in ranges.items():
            if not holds:
                raise ValueError(f"{name} must be {expected}, got {getattr(self, name)}")

    def refuse_small_cache(self, tokens: int) -> None:
        """Raise a ValueError if `kv_tokens` is below `tokens`, the number that one prompt with its rollout needs."""
        if self.kv_tokens is not None and self.kv_tokens < tokens:
            raise ValueError(
                f"kv_tokens must hold at least one rollout with its prompt ({tokens} tokens), got {self.kv_tokens}"
            )


@dataclass(frozen=True, kw_only=True)
class Streaming:
    """Settings of the asynchronous engine; see docs/streaming.md.

    Attributes:
        overlap: True: generation runs in its own process while rewards are scored and batches are trained. False:
            generation runs in this process, with one decoding step after each forward pass of an update. The run
            then does not depend on timing, and a run that was killed and resumed gives the same result.
    """

    overlap: bool = True
