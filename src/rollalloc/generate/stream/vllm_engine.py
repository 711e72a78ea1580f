# pyright: reportMissingImports=false
# (vLLM lives in an environment of its own: constraints/verl-cpu.txt)
"""vLLM's asynchronous engine, in its own words. The only module that imports vLLM, and imported only to serve by it."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Before vLLM is imported, which reads them then; what the user has set stays.
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")  # nothing is reported to anybody
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")  # `WorkerExtension` looks into the first one's requests

import psutil
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import PreTrainedModel
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.inputs.engine import tokens_input
from vllm.model_executor.models import ModelRegistry
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.loggers import StatLoggerBase

from rollalloc.generate.sampling import Sampling
from rollalloc.generate.stream.backend import BackendDied, Decoding
from rollalloc.generate.stream.vllm_backend import Chunk
from rollalloc.models.weights import weights_of
from rollalloc.processes.stopping import unheard

_BLOCK = 128  # tokens of a block of keys and values on a CPU
_GRACE_S = 5.0  # to end in peace
_WATCH_S = 1.0  # how often it is looked whether the engine is there, while it takes weights
_OWN = "use our own back-end (--backend own)"
_DIED = "vLLM's engine ended; what it said about it is above, on standard error"


def refuse_unservable(model: PreTrainedModel) -> None:
    """Refuse, by a `ValueError`, a model that vLLM cannot serve here, or to which it cannot give new weights."""
    config, names = model.config.get_text_config(), model.config.architectures or [type(model).__name__]
    if not set(names) & set(ModelRegistry.get_supported_archs()):
        raise ValueError(f"vLLM does not know {' or '.join(names)}: {_OWN}")
    if not current_platform.is_cpu():
        return
    if config.tie_word_embeddings:
        what = f"the head of this {type(model).__name__} is tied to its embeddings, which vLLM on a CPU cannot update"
        raise ValueError(f"{what}: untie it (`rollalloc model --untie`), or {_OWN}")
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    if _head_dim(config) not in (sizes := CPUAttentionBackend.get_supported_head_sizes()):
        known = ", ".join(map(str, sizes))
        raise ValueError(f"on a CPU vLLM serves heads of {known}, and this model's are of {_head_dim(config)}: {_OWN}")


class Engine:
    """A model that vLLM serves; see `vllm_backend.Served`. Made in the event loop, which it holds up for so long.

    Log-probabilities are "processed_logprobs": after the temperature, that is of the distribution that is drawn from.

    Args:
        model: is copied.
        folder: for its files.
        decoding: how.

    Raises:
        ValueError: vLLM refuses the model.
        BackendDied: it did not begin; why is on standard error.
    """

    def __init__(self, model: PreTrainedModel, folder: Path, decoding: Decoding) -> None:
        sampling, slots = decoding.sampling, decoding.slots
        self._sampling, self._ends = sampling, [*decoding.eos_ids, *sampling.stop_ids]
        width = decoding.longest_prompt + sampling.max_new_tokens
        model.save_pretrained(folder)
        _refuse_renamed(model, folder)
        arguments: dict[str, Any] = {
            "model": str(folder),
            "skip_tokenizer_init": True,
            "use_tqdm_on_load": False,
            "dtype": "float32",
            "max_model_len": width,
            "max_num_seqs": slots,
            "logprobs_mode": "processed_logprobs",
            "generation_config": "vllm",  # the model's own would bring other ends and other sampling
            "async_scheduling": False,  # else the tokens that were sampled are not known when weights come
            "worker_extension_cls": f"{__name__}.{WorkerExtension.__name__}",
        }
        if current_platform.is_cpu():
            arguments |= {"enforce_eager": True, "kv_cache_memory_bytes": _cache_bytes(model, sampling, width, slots)}
        self._paces = _Paces()
        with (
            unheard(),
            _for_children(TORCHDYNAMO_DISABLE="1", VLLM_CPU_OMP_THREADS_BIND="nobind", OMP_NUM_THREADS=_threads()),
        ):
            try:
                made = AsyncEngineArgs(**arguments).create_engine_config()
            except ValueError as error:
                raise ValueError(f"vLLM does not serve this model: {error}") from error
            try:
                self._engine = AsyncLLM.from_vllm_config(
                    made, stat_loggers=[lambda *_: self._paces], disable_log_stats=True
                )
            except Exception as error:
                raise BackendDied(f"vLLM's engine did not begin ({error}); why is above, on standard error") from error
        manager: Any = self._engine.engine_core.resources.engine_manager
        self._processes = [psutil.Process(process.pid) for process in manager.processes]

    @property
    def dead(self) -> bool:
        return self._engine.errored

    async def generate(self, name: str, tokens: Sequence[int], most: int, seed: int, salt: str) -> AsyncIterator[Chunk]:
        params = SamplingParams(
            temperature=self._sampling.temperature,
            top_p=self._sampling.top_p,
            top_k=self._sampling.top_k,
            seed=seed,
            max_tokens=most,
            stop_token_ids=self._ends,
            ignore_eos=True,  # what ends a rollout is said above
            logprobs=0,  # of the sampled token alone
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        try:
            async for output in self._engine.generate(tokens_input(list(tokens), cache_salt=salt), params, name):
                [made] = output.outputs
                logprobs = [] if made.logprobs is None else list(made.logprobs.logprobs)
                at = 0.0 if output.metrics is None else output.metrics.last_token_ts
                yield Chunk(list(made.token_ids), logprobs, made.finish_reason, at)
        except EngineDeadError as error:
            raise BackendDied(_DIED) from error

    async def abort(self, names: Sequence[str]) -> None:
        await self._engine.abort(list(names))

    async def load(self, file: Path) -> tuple[float, Mapping[str, int]]:
        self._paces.interrupt()
        asked = asyncio.ensure_future(self._engine.collective_rpc("take_weights", args=(str(file),)))
        try:
            while not asked.done():  # an engine that dies answers nothing
                await asyncio.wait({asked}, timeout=_WATCH_S)
                if self._engine.errored:
                    raise BackendDied(_DIED)
        finally:
            asked.cancel()  # does nothing to one that is done
            await asyncio.gather(asked, return_exceptions=True)
        when, begun = asked.result()[0]
        return when, {name.rpartition("-")[0]: tokens for name, tokens in begun.items()}  # vLLM adds -random

    def paces(self) -> list[tuple[int, float]]:
        return self._paces.taken()

    def figures(self) -> dict[str, Any]:
        return {"preempted": self._paces.preempted}

    def pids(self) -> Sequence[int]:
        return [process.pid for process in self._processes]

    def close(self) -> None:
        family = [each for process in self._processes for each in _family(process)]
        try:
            self._engine.shutdown(timeout=_GRACE_S)
        finally:
            _, alive = psutil.wait_procs(family, timeout=_GRACE_S)
            for each in alive:
                each.kill()
            psutil.wait_procs(alive, timeout=_GRACE_S)


class WorkerExtension:
    """What vLLM's workers do beyond their own; vLLM makes it a base of theirs."""

    model_runner: Any

    def take_weights(self, file: str) -> tuple[float, dict[str, int]]:
        """Take weights, between two steps; when that was, and how many tokens each request has that was begun."""
        self.model_runner.reload_weights(weights_iterator=iter(load_file(file).items()))
        begun = {name: len(request.output_token_ids) for name, request in self.model_runner.requests.items()}
        return time.monotonic(), begun


class _Paces(StatLoggerBase):
    """How long steps took that came one right after the other, by how many rows they were of."""

    def __init__(self) -> None:  # the base's is abstract
        self.preempted = 0
        self._found: list[tuple[int, float]] = []
        self._last: float | None = None

    def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
        now, last = time.perf_counter(), self._last
        if iteration_stats is not None and iteration_stats.num_generation_tokens:
            self.preempted += iteration_stats.num_preempted_reqs
            if last is not None:
                self._found.append((iteration_stats.num_generation_tokens, now - last))
        if scheduler_stats is not None:  # nothing runs after it: what comes next waited for something else
            self._last = now if scheduler_stats.num_running_reqs else None

    def log_engine_initialized(self) -> None: ...

    def interrupt(self) -> None:
        """The next step takes longer than it does."""
        self._last = None

    def taken(self) -> list[tuple[int, float]]:
        found, self._found = self._found, []
        return found


def _refuse_renamed(model: PreTrainedModel, folder: Path) -> None:
    """Refuse a model whose files have other names than it has: new weights would come by names that vLLM does not know."""
    saved: set[str] = set()
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            saved.update(opened.keys())
    if others := saved ^ weights_of(model).keys():
        what = f"{type(model).__name__} saves weights under other names than it has them ({min(others)}, ...)"
        raise ValueError(f"{what}, which vLLM cannot take: {_OWN}")


def _cache_bytes(model: PreTrainedModel, sampling: Sampling, width: int, slots: int) -> int:
    """Of keys and values: for every slot, where `kv_tokens` says so; else as much of it as half of the free memory."""
    config: Any = model.config.get_text_config()
    a_token = 2 * 4 * config.num_hidden_layers * config.num_key_value_heads * _head_dim(config)
    a_row = -(-width // _BLOCK) * _BLOCK * a_token
    needed = slots * a_row + _BLOCK * a_token  # vLLM keeps a block for itself
    if sampling.kv_tokens is not None:
        return needed
    return min(needed, max(2 * a_row, psutil.virtual_memory().available // 2))


def _head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _threads() -> str:
    return str(max(1, torch.get_num_threads() // 2))


@contextmanager
def _for_children(**variables: str) -> Iterator[None]:
    """Let processes that are started here have these variables, where nobody has set them."""
    added = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def _family(process: psutil.Process) -> list[psutil.Process]:
    try:
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []
