"""Settings that trainers, engines and drivers share: number formats, adapters, sampling, the loss. Needs no PyTorch."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf, log
from typing import Any, Literal, get_args

from rollalloc.core.recipe import at_least

Precision = Literal["auto", "fp32", "bf16"]
SamplingDtype = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True)
class Lora:
    """LoRA: train a low-rank addition to some of a model's matrices, and freeze everything else (arXiv 2106.09685).

        W' = W + alpha / rank · B A,   A of shape (rank, in), B of shape (out, rank)

    A begins random and B begins as 0, so training begins at the base model. There is no dropout: with it, the update and
    the sampler would compute different log-probabilities.

    Attributes:
        rank: rank of the adapters B A, at least 1 and at most the smaller side of each adapted matrix.
        alpha: scale of the adapters, above 0. None: 2 · rank.
        targets: names of the linear layers to adapt, or ends of their names, for example "q_proj" or "mlp.up_proj".
            Empty: all linear layers except the head.

    Raises:
        ValueError: a value is out of range.
    """

    rank: int
    alpha: float | None = None
    targets: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        at_least("the rank of LoRA", self.rank, 1)
        if self.alpha is not None and not 0 < self.alpha < inf:
            raise ValueError(f"the alpha of LoRA must be above 0 and finite, got {self.alpha}")
        object.__setattr__(self, "targets", tuple(self.targets))
        if not all(target.strip() for target in self.targets):
            raise ValueError("the targets of LoRA must be names of layers, got an empty name")

    @property
    def scale(self) -> float:
        """alpha, or 2 · rank if alpha is None."""
        return 2.0 * self.rank if self.alpha is None else self.alpha


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


Aggregation = Literal["token_mean", "sequence_mean", "dr_grpo"]


@dataclass(frozen=True, slots=True)
class Clip:
    """Limits of the importance ratios.

    Attributes:
        low: ratios below 1 - low are clipped; in (0, 1].
        high: ratios above 1 + high are clipped; above 0. A value above low is "clip-higher" (DAPO, arXiv 2503.14476).
        dual: dual clip, a number above 1. The loss of a token with a negative advantage A is at most dual · |A|
            (arXiv 1912.09729). None: no limit.
        stale: maximum importance weight of rows sampled from older weights, at least 1.

    Raises:
        ValueError: a value is out of its range.
    """

    low: float = 0.2
    high: float = 0.28
    dual: float | None = None
    stale: float = 2.0

    def __post_init__(self) -> None:
        if not (0 < self.low <= 1 and self.high > 0 and self.stale >= 1):
            raise ValueError(f"expected low in (0, 1], high above 0 and stale of at least 1, got {self}")
        if self.dual is not None and not 1 < self.dual < inf:
            raise ValueError(f"expected dual above 1 and finite, or None for no bound, got {self.dual}")


def has_moved(change_T: Any) -> Any:
    """Whether a token's probability has changed so much that the loss would clip its ratio, by the default limits.

        exp(change) < 1 - low  or  exp(change) > 1 + high

    Args:
        change_T: log-probability now, minus the log-probability when the token was sampled. A tensor or an array.
    """
    clip = Clip()
    return (change_T < log(1 - clip.low)) | (change_T > log(1 + clip.high))


@dataclass(frozen=True, slots=True)
class Loss:
    """The loss that an optimizer step minimises.

    Attributes:
        clip: limits of the importance ratios.
        aggregation: how the token losses of a mini-batch are combined (`rollalloc.train.update.shares`): "token_mean",
            as in DAPO, "sequence_mean", as in GRPO, or "dr_grpo".
        kl: weight of the KL divergence to the initial policy, 0 or more. The KL term includes rows without an advantage,
            because the divergence is a mean over everything that the policy samples.

    Raises:
        ValueError: a value is out of its range.
    """

    clip: Clip = field(default_factory=Clip)
    aggregation: Aggregation = "token_mean"
    kl: float = 0.0

    def __post_init__(self) -> None:
        if self.aggregation not in get_args(Aggregation):
            raise ValueError(f"aggregation must be one of {', '.join(get_args(Aggregation))}, got {self.aggregation!r}")
        if not 0 <= self.kl < inf:
            raise ValueError(f"kl must be 0 or more, and finite, got {self.kl}")
