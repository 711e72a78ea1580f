"""Checks the trainer's own loss on the first rows of a run, so that no patch of TRL trains on something else unnoticed.

`losses` computes TRL's losses from the tensors that the trainer's own loss gets; `origin` says whose code a trainer runs.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import signature
from math import isfinite
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor

from rollalloc.drivers.trl.generation import Generator
from rollalloc.files.text import error_text
from rollalloc.models.likelihood import in_eval_mode

_BY_TOKENS = ("cispo", "dapo", "vespo")
KNOWN = ("grpo", "sapo", "bnpo", "dr_grpo", "luspo", *_BY_TOKENS)
NEED_LOGPROBS = ("cispo", "vespo")  # these multiply by log-probabilities, and not only by their ratios
MEANS_OVER_TOKENS = ("grpo", "sapo")  # of a row, so that an advantage of the whole row hides which of its tokens count


def counted(inputs: Mapping[str, Tensor]) -> Tensor:
    """The mask of the tokens that the loss counts, shape (B, T): completion tokens, without tokens of tools' answers."""
    mask_BT = inputs["completion_mask"]
    return (mask_BT * inputs["tool_mask"] if "tool_mask" in inputs else mask_BT).float()


def losses(
    trainer: Any, inputs: Mapping[str, Tensor], log_ratio_BT: Tensor, logprobs_BT: Tensor | None
) -> list[Tensor]:
    """The loss of a micro-batch, one value for each way in which releases of TRL divide it.

    Args:
        trainer: TRL's trainer. Its settings are used, but none of its methods except `get_gamma_weights`.
        inputs: TRL's tensors. Advantages are above 0, so that ratios below 1 are never clipped.
        log_ratio_BT: logarithm of the policy's probability over the one in `old_per_token_logps`.
        logprobs_BT: the policy's log-probabilities; needed for the losses `NEED_LOGPROBS`, and for a KL term.

    Returns:
        Scalars, one or two.
    """
    mask_BT, args = counted(inputs), trainer.args
    of_tokens_BT = _of_tokens(trainer, inputs, log_ratio_BT * mask_BT, logprobs_BT) * mask_BT
    lengths_B = mask_BT.sum(dim=1)
    parts = trainer.current_gradient_accumulation_steps if trainer.model.training else 1
    if trainer.loss_type in _BY_TOKENS:
        items = inputs["num_items_in_batch"].float().clamp(min=1) / trainer.accelerator.num_processes
        # Since 1.10, TRL divides by the tokens of one optimizer step, and no longer by those of the generation batch.
        windows = [1.0, parts / args.steps_per_generation] if trainer.model.training else [1.0]
        return [of_tokens_BT.sum() / (items * window) for window in windows]
    match trainer.loss_type:
        case "grpo" | "sapo":
            loss = (of_tokens_BT.sum(dim=1) / lengths_B.clamp(min=1)).mean()
        case "bnpo":
            loss = of_tokens_BT.sum() / mask_BT.sum().clamp(min=1)
        case "dr_grpo":
            loss = of_tokens_BT.sum() / (len(mask_BT) * trainer.max_completion_length)
        case _:
            loss = of_tokens_BT.sum(dim=1).mean()
    return [loss / parts]


def _of_tokens(trainer: Any, inputs: Mapping[str, Tensor], log_ratio_BT: Tensor, logprobs_BT: Tensor | None) -> Tensor:
    """The loss of each token, shape (B, T)."""
    advantages = inputs["advantages"]
    advantages_BT = (advantages[:, None] if advantages.dim() == 1 else advantages).expand_as(log_ratio_BT)
    mask_BT, args = counted(inputs), trainer.args
    log_ratio = log_ratio_BT
    if trainer.importance_sampling_level == "sequence":
        log_ratio = (log_ratio_BT.sum(dim=1) / mask_BT.sum(dim=1).clamp(min=1))[:, None].expand_as(log_ratio_BT)
    ratio_BT = log_ratio.exp()
    importance_BT = inputs.get("importance_sampling_ratio")
    match trainer.loss_type:
        case "cispo":
            loss_BT = -ratio_BT.clamp(max=trainer.epsilon_high) * advantages_BT * _given(logprobs_BT)
        case "vespo":
            weights = {name: getattr(args, f"vespo_{name}") for name in ("k_pos", "lambda_pos", "k_neg", "lambda_neg")}
            phi_B1 = trainer.get_gamma_weights(
                advantages=advantages_BT[:, :1],
                log_ratio_per_token=log_ratio_BT,
                mask=mask_BT,
                importance_sampling_ratio=importance_BT,
                **weights,
            )
            return -phi_B1 * advantages_BT * _given(logprobs_BT) + _kl(trainer, inputs, ratio_BT, logprobs_BT)
        case "sapo":
            hot = args.sapo_temperature_pos
            loss_BT = -torch.sigmoid(hot * (ratio_BT - 1)) * 4 / hot * advantages_BT
        case _:
            clipped_BT = ratio_BT.clamp(1 - trainer.epsilon_low, 1 + trainer.epsilon_high)
            loss_BT = -torch.minimum(ratio_BT * advantages_BT, clipped_BT * advantages_BT)
    if importance_BT is not None:
        loss_BT = loss_BT * importance_BT
    return loss_BT + _kl(trainer, inputs, ratio_BT, logprobs_BT)


def _kl(trainer: Any, inputs: Mapping[str, Tensor], ratio_BT: Tensor, logprobs_BT: Tensor | None) -> Tensor | float:
    """beta · (exp(reference - policy) - (reference - policy) - 1), as TRL estimates the KL divergence of each token."""
    if trainer.beta == 0.0 or "ref_per_token_logps" not in inputs:
        return 0.0
    difference_BT = inputs["ref_per_token_logps"] - _given(logprobs_BT)
    kl_BT = trainer.beta * (difference_BT.expm1() - difference_BT)
    return kl_BT * ratio_BT if getattr(trainer.args, "use_bias_correction_kl", False) else kl_BT


def _given(logprobs_BT: Tensor | None) -> Tensor:
    assert logprobs_BT is not None
    return logprobs_BT


_OWN = ("trl", "transformers", "rollalloc")
# The methods through which a row passes from the driver to the optimizer.
_METHODS = ("compute_loss", "_compute_loss", "_prepare_inputs", "training_step", "_get_per_token_logps_and_entropies")


def origin(trainer: Any) -> str:
    """A sentence that names the classes and methods which are not TRL's own, with their modules."""
    kind = type(trainer)
    others = [
        f"class {base.__name__} of module {base.__module__}"
        for base in kind.__mro__
        if base is not object and base.__module__.partition(".")[0] not in _OWN
    ]
    for name in _METHODS:
        method = vars(trainer).get(name) or next(
            (vars(base)[name] for base in kind.__mro__ if name in vars(base) and not _ours(base)), None
        )
        inner = getattr(method, "__func__", method)
        module = getattr(inner, "__module__", None) or ""
        if module.partition(".")[0] not in ("", *_OWN):
            others.append(f"{name} of module {module}")
    if getattr(trainer.args, "use_liger_kernel", False):
        others.append("Liger's kernels (use_liger_kernel=True)")
    if not others:
        return "No class of the trainer is patched: the loss is TRL's own, of a release that rollalloc does not know"
    return f"Not TRL's own: {', '.join(dict.fromkeys(others))}"


def arguments_of(kind: type, positional: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by the names that TRL's `__init__` gives them, even if a wrapper of it hides its parameters."""
    own = next(
        vars(base)["__init__"]
        for base in kind.__mro__
        if "__init__" in vars(base) and "train_dataset" in signature(vars(base)["__init__"]).parameters
    )
    return signature(own).bind_partial(None, *positional, **named).arguments


def _ours(base: type) -> bool:
    return base.__module__.partition(".")[0] == "rollalloc"


log = logging.getLogger(__name__)

Inputs = Mapping[str, Tensor]

_OLD, _IMPORTANCE, _REFERENCE = "old_per_token_logps", "importance_sampling_ratio", "ref_per_token_logps"
_NOT_FINITE = "it is not finite"
# Relative tolerance. Without log-probabilities of another forward pass, ratios are exactly 1 and only sums are rounded.
_EXACT, _SINGLE, _HALF = 1e-4, 1e-2, 5e-2
# Which settings make the driver hand over a tensor, and what avoids it.
_AVOIDED = {
    _OLD: "one optimizer step per batch (num_iterations=1, steps_per_generation left out) and averaging=0",
    _IMPORTANCE: "vllm_importance_sampling_correction=False",
    _REFERENCE: "beta=0",
    "advantages": "a recipe that trains on fresh rows only (max_staleness=0, no replay)",
}
# Terms that are not of the rows alone, but of entropies and routers. They are switched off while the loss is checked.
_OTHER_TERMS = {
    "top_entropy_quantile": 1.0,
    "entropy_coef": 0.0,
    "use_adaptive_entropy": False,
    "_entropy_bonus_enabled": False,
    "aux_loss_enabled": False,
}


class LossError(RuntimeError):
    """The trainer's loss is not the loss of the rows that it was given."""


class LossCheck:
    """Passes the first micro-batch of each call of `train` through the trainer's own loss, and compares the result with
    `losses`.

    The rows, masks and lengths are those that will be trained. Their values are replaced by ones that show what a loss may
    do wrong: advantages are positive and differ between rows (and tokens, if a loss is a mean over the tokens of a row), and
    the last token of a row weighs as much as all others. Log-probabilities of the sampled weights are moved by known
    amounts, so that a loss that ignores them differs, too. If the loss is right, it equals the arithmetic for known ratios.

    The check takes one forward pass without gradients; two if log-probabilities are handed over, or for Liger; and one
    more, of the driver's own, if these are not of the current weights, for a KL term, or for Liger. It changes neither
    weights nor random numbers nor metrics.

    Args:
        trainer: TRL's trainer.
        generate: computes log-probabilities.
        wanted: False: check nothing.

    Attributes:
        due: whether the next micro-batch is to be checked.
    """

    def __init__(self, trainer: Any, generate: Generator, *, wanted: bool = True) -> None:
        self._trainer, self._generate, self._wanted = trainer, generate, wanted
        self.due = False

    def begin(self) -> None:
        """Check the next micro-batch. This is called when training begins or resumes."""
        self.due = self._wanted
        if self.due and self._trainer.loss_type not in KNOWN:
            log.warning("loss_type=%r is new to rollalloc, so the loss is not checked", self._trainer.loss_type)
            self.due = False

    def __call__(self, inputs: Inputs, loss: Callable[[dict[str, Tensor]], Tensor]) -> None:
        """Check the loss.

        Args:
            inputs: a micro-batch, as `training_inputs` makes it. Every process must have a micro-batch.
            loss: computes the trainer's own loss of such inputs.

        Raises:
            LossError: the loss of this or another process is wrong. Nothing was trained yet.
        """
        with _without_traces(self._trainer), torch.no_grad():
            found = self._problem(inputs, loss)
        several = self._trainer.accelerator.num_processes > 1
        everywhere = gather_object([(found, counts(inputs))]) if several else [(found, counts(inputs))]
        for process, (problem, _) in enumerate(everywhere):
            if problem:
                where = f" in process {process}" if several else ""
                raise LossError(f"nothing was trained, because the loss{where} is not that of the rows: {problem}")
        # A micro-batch that is all padding shows nothing of ratios, so the next one is checked as well.
        self.due = not any(shown for _, shown in everywhere)

    def _problem(self, inputs: Inputs, loss: Callable[[dict[str, Tensor]], Tensor]) -> str:
        """What is wrong with the loss, who patched it and what works; empty if it is right."""
        current_BT = self._current(inputs)
        inputs = self._revealed(inputs, current_BT)
        given = self._probe(inputs, current_BT)
        plain = {name: tensor for name, tensor in given.items() if name != _OLD}
        for probe in (plain, given)[: 2 if _OLD in given else 1]:
            wrong = self._wrong(probe, loss, current_BT)
            if wrong == _NOT_FINITE and not isfinite(float(loss(dict(inputs)))):
                return ""  # `FiniteTraining` says which prompts these are
            if wrong:
                return f"{wrong}. {origin(self._trainer)}. {self._remedy(inputs, loss, current_BT)}"
        return ""

    def _wrong(self, probe: Inputs, loss: Callable[[dict[str, Tensor]], Tensor], current_BT: Tensor | None) -> str:
        """Which part of the loss is wrong; empty if none is."""
        try:
            found = float(loss(dict(probe)))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in probe.items())
            return f"it raised {error_text(error)} (given {shapes})"
        if not isfinite(found):
            return _NOT_FINITE
        right = [float(each) for each in self._expected(probe, current_BT)]
        if any(self._agree(found, each, probe) for each in right):
            return ""
        for name, without in self._ignored(probe):
            if any(self._agree(found, float(each), probe) for each in self._expected(without, current_BT)):
                return f"it ignores {name}: it is {found:.6g}, and {right[0]:.6g} with them"
        if _OLD in probe:  # without them the loss was right, so masks and advantages are, too
            return (
                f"the importance ratio is {found / right[0] if right[0] else found:.4g} on average, where it must be 1, as "
                f"{_OLD} are those of the weights that are trained: the loss reads them at other tokens"
                + (", or counts other tokens" if self._hides_masks(probe) else "")
            )
        return self._by_rows(probe, loss, current_BT, found, right[0])

    def _by_rows(
        self,
        probe: Inputs,
        loss: Callable[[dict[str, Tensor]], Tensor],
        current_BT: Tensor | None,
        found: float,
        right: float,
    ) -> str:
        """Tell a wrong scale of all rows from a wrong mask of some, by the loss of each row alone."""
        shares: dict[int, float] = {}
        nothing = dict(probe) | {"advantages": torch.zeros_like(probe["advantages"])}
        base, base_right = float(loss(nothing)), float(self._expected(nothing, current_BT)[0])
        for row in counted(probe).sum(dim=1).nonzero().flatten().tolist():
            alone = torch.zeros_like(probe["advantages"])
            alone[row] = probe["advantages"][row]
            only = dict(probe) | {"advantages": alone}
            due = float(self._expected(only, current_BT)[0]) - base_right
            shares[row] = (float(loss(only)) - base) / due if due else 1.0
        said = f"it is {found:.6g}, and must be {right:.6g}"
        if not shares:
            return f"the masks are wrong: {said}, though no token of these rows counts"
        scale = next(iter(shares.values()))
        if all(abs(share - scale) <= _EXACT * abs(scale) for share in shares.values()) and abs(scale - 1) > _EXACT:
            return f"the advantages are scaled: each counts {scale:.4g} times ({said})"
        row, share = max(shares.items(), key=lambda item: abs(item[1] - 1))
        length = int(counted(probe)[row].sum())
        return (
            f"the masks do not cover exactly the completion tokens: row {row} of the micro-batch, with {length} tokens, "
            f"counts {share:.4g} times what it must ({said})"
        )

    def _remedy(self, inputs: Inputs, loss: Callable[[dict[str, Tensor]], Tensor], current_BT: Tensor | None) -> str:
        """Which settings work with this loss, tried on the same rows."""
        simple = {name: tensor for name, tensor in inputs.items() if name not in (_OLD, _IMPORTANCE, _REFERENCE)}
        simple["advantages"] = simple["advantages"].reshape(len(inputs["prompt_ids"]), -1)[:, 0]
        handed = [name for name in (_OLD, _IMPORTANCE, _REFERENCE) if name in inputs]
        handed += ["advantages"] if inputs["advantages"].dim() > 1 else []
        trainer = self._trainer
        with _set(trainer, {"beta": 0.0, "vllm_importance_sampling_correction": False}):
            simple = self._revealed(simple, current_BT)
            if handed and not self._wrong(self._probe(simple, current_BT), loss, current_BT):
                return f"These settings work: {'; '.join(_AVOIDED[name] for name in handed)}"
        return (
            "No setting mends this: train with TRL's own GRPOTrainer, in a process that does not import what patched it. If "
            "you know why the loss differs, pass check_loss=False"
        )

    # -------------------------------------------------------------------------------------------------------- arithmetic

    def _probe(self, inputs: Inputs, current_BT: Tensor | None) -> dict[str, Tensor]:
        """The inputs with advantages, log-probabilities and importance weights that show what is ignored or moved."""
        probe, mask_BT = dict(inputs), counted(inputs)
        spread_BT = _spread(mask_BT)
        by_token = inputs["advantages"].dim() > 1 or self._trainer.loss_type in MEANS_OVER_TOKENS
        if by_token and not self._hides_masks(inputs):
            lengths_B = mask_BT.sum(dim=1)
            last_BT = (mask_BT.cumsum(dim=1) == lengths_B[:, None]) * mask_BT
            probe["advantages"] = 0.5 + spread_BT + last_BT * lengths_B[:, None]
        else:
            probe["advantages"] = 0.5 + spread_BT[:, 0]
        if _OLD in inputs:
            sampled_BT = inputs[_OLD] if current_BT is None else current_BT
            probe[_OLD] = sampled_BT - self._log_ratio(inputs)
        if _IMPORTANCE in inputs:
            probe[_IMPORTANCE] = inputs[_IMPORTANCE] * (0.7 + 0.6 * spread_BT)
        if _REFERENCE in inputs and current_BT is not None:
            probe[_REFERENCE] = current_BT + 0.6 * (spread_BT - 0.5)
        return probe

    def _hides_masks(self, inputs: Inputs) -> bool:
        """Whether the loss is a mean over the tokens of each row, and takes only one advantage for the row, as Liger's does.

        If all ratios are 1, such a loss is the same whichever tokens it counts.
        """
        of_rows = inputs["advantages"].dim() == 1 and self._trainer.args.use_liger_kernel
        return of_rows and self._trainer.loss_type in MEANS_OVER_TOKENS

    def _revealed(self, inputs: Inputs, current_BT: Tensor | None) -> Inputs:
        """The inputs, and log-probabilities if only ratios can show which tokens the loss counts."""
        if current_BT is None or not self._hides_masks(inputs):
            return inputs
        return {**inputs, _OLD: current_BT}

    def _log_ratio(self, inputs: Inputs) -> Tensor:
        """Logarithms of the known ratios, which are in (0.6, 0.9): for a positive advantage, these are never clipped."""
        mask_BT = counted(inputs)
        return (0.9 - 0.3 * _spread(mask_BT)).log() * mask_BT if _OLD in inputs else torch.zeros_like(mask_BT)

    def _expected(self, probe: Inputs, current_BT: Tensor | None) -> list[Tensor]:
        return losses(self._trainer, probe, self._log_ratio(probe), current_BT)

    def _ignored(self, probe: Inputs) -> Iterator[tuple[str, Inputs]]:
        """The probe without one of the tensors that a loss may ignore."""
        for name in (_OLD, _IMPORTANCE, _REFERENCE):
            if name in probe:
                yield name, {other: tensor for other, tensor in probe.items() if other != name}

    def _agree(self, found: float, right: float, probe: Inputs) -> bool:
        trainer = self._trainer
        half = trainer.args.bf16 or trainer.args.fp16 or trainer.model.dtype != torch.float32
        compared = _OLD in probe or _REFERENCE in probe or trainer.loss_type in NEED_LOGPROBS
        tolerance = _EXACT if not compared else _HALF if half else _SINGLE
        return abs(found - right) <= tolerance * abs(right) + 1e-7

    def _current(self, inputs: Inputs) -> Tensor | None:
        """The log-probabilities of the current weights, shape (B, T), by the driver's own forward pass.

        None if they are not needed: without averaging, those that are handed over are the current weights' already.
        """
        trainer = self._trainer
        old = _OLD in inputs and trainer.averaged.window > 0
        if not (old or _REFERENCE in inputs or trainer.loss_type in NEED_LOGPROBS or self._hides_masks(inputs)):
            return None
        mask_BT = inputs["completion_mask"].bool()
        logprobs_BT = torch.zeros(mask_BT.shape, device=mask_BT.device)
        # A row without any token that counts gets its first token, so that every process passes equally many rows.
        seen_BT = mask_BT | (
            ~mask_BT.any(dim=1, keepdim=True) & (torch.arange(mask_BT.shape[1]) == 0).to(mask_BT.device)
        )
        pairs = [
            (tuple(ids[seen].tolist()), tuple(row[here].tolist()))
            for ids, seen, row, here in zip(
                inputs["prompt_ids"], inputs["prompt_mask"].bool(), inputs["completion_ids"], seen_BT, strict=True
            )
        ]
        for at, row_T in enumerate(self._generate.logprobs(pairs)):
            logprobs_BT[at, : len(row_T)] = torch.from_numpy(row_T).to(logprobs_BT)
        return logprobs_BT * mask_BT


def counts(inputs: Inputs) -> bool:
    """Whether any token of the micro-batch counts."""
    return bool(counted(inputs).any())


def _spread(mask_BT: Tensor) -> Tensor:
    """Numbers in [0, 1) that differ between neighbours in both directions, without random numbers."""
    rows, tokens = mask_BT.shape
    at_BT = torch.arange(rows * tokens, dtype=torch.float64, device=mask_BT.device).reshape(rows, tokens)
    return (at_BT * 0.6180339887498949).frac().float()


@contextmanager
def _set(trainer: Any, values: Mapping[str, Any]) -> Iterator[None]:
    """A context in which the trainer and its settings have these values, where they have such attributes."""
    before = [
        (owner, name, getattr(owner, name))
        for owner in (trainer, trainer.args)
        for name in values
        if hasattr(owner, name)
    ]
    try:
        for owner, name, _ in before:
            setattr(owner, name, values[name])
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


@contextmanager
def _without_traces(trainer: Any) -> Iterator[None]:
    """A context of eval mode after which random numbers, the trainer's attributes and its metrics are as before.

    The model itself stays in training mode, which TRL reads as training, and not as an evaluation; the layers below, which
    drop out, do not. DeepSpeed's forward pass of training expects a backward pass, so there the loss is an evaluation's.
    """
    attributes, device = vars(trainer).copy(), trainer.accelerator.device
    devices: Sequence[torch.device] = [device] if device.type == "cuda" else []
    wrapped = trainer.model_wrapped if trainer.is_deepspeed_enabled else trainer.model
    with torch.random.fork_rng(devices), in_eval_mode(wrapped), _set(trainer, _OTHER_TERMS):
        try:
            trainer.model.training = not trainer.is_deepspeed_enabled
            trainer._metrics = {mode: defaultdict(list) for mode in trainer._metrics}
            yield
        finally:
            for name in vars(trainer).keys() - attributes.keys():
                delattr(trainer, name)
            vars(trainer).update(attributes)
