"""vLLM as a back-end: it batches, caches and samples; here is what the interface asks beyond that.

vLLM's engine has processes of its own. What it streams arrives in an event loop, in a thread of this process. That loop
needs of vLLM no more than `Served`; what says it in vLLM's words is `rollalloc.generate.stream.vllm_engine`.
"""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import count
from math import isnan
from pathlib import Path
from queue import Empty, SimpleQueue
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
from safetensors.torch import save_file
from torch import Tensor

from rollalloc.generate.sampler import NOT_FINITE, draw_keys, uniforms
from rollalloc.generate.stream.backend import BackendDied, Decoding, End, Ended, Row, spans_of
from rollalloc.generate.stream.silence import LOOK_S, Silence

T = TypeVar("T")

_IN_MEMORY = Path("/dev/shm")  # where Linux has files that are on no disk
_ENDS: dict[str, End] = {"stop": "stop", "length": "length", "abort": "aborted"}  # by vLLM's words


class Chunk(NamedTuple):
    """What came of a rollout since the last one.

    Attributes:
        tokens: that were sampled.
        logprobs: of each, under the distribution that it was drawn from.
        finish: vLLM's word for how it ended; None while it goes on.
        at: the step of the newest token, in seconds by the clock of `Served.load`.
    """

    tokens: Sequence[int]
    logprobs: Sequence[float]
    finish: str | None
    at: float


class Served(Protocol):
    """A model that vLLM serves; all but `dead` is called in the event loop."""

    @property
    def dead(self) -> bool:
        """Whether its processes are gone."""
        ...

    def generate(self, name: str, tokens: Sequence[int], most: int, seed: int, salt: str) -> AsyncIterator[Chunk]:
        """Sample at most `most` tokens after these; cached keys and values are shared where the salt is the same.

        Raises:
            BackendDied: the processes are gone.
        """
        ...

    async def abort(self, names: Sequence[str]) -> None:
        """Let these end, soon."""

    async def load(self, file: Path) -> tuple[float, Mapping[str, int]]:
        """Take weights from a safetensors file, between two steps.

        Returns:
            When it was, and by name, of those that it has begun and not forgotten, how many tokens had been sampled.
        """
        ...

    def paces(self) -> list[tuple[int, float]]:
        """As `Backend.paces`."""
        ...

    def figures(self) -> dict[str, Any]:
        """As `Backend.figures`."""
        ...

    def pids(self) -> Sequence[int]:
        """Of its processes."""
        ...

    def close(self) -> None:
        """End the processes, whatever state they are in."""


@dataclass(slots=True)
class _Live:
    """A rollout that runs; only the event loop touches it.

    Attributes:
        name: vLLM's for it; a rollout that begins again has another one.
        version: of the weights when it was handed to vLLM.
        loads: for each load since: its tokens then, where vLLM knew it, when that was, and the version.
        at: the step of its newest token.
        aborted: whether it is to end.
    """

    name: str
    version: int
    loads: list[tuple[int | None, float, int]] = field(default_factory=list[tuple[int | None, float, int]])
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    at: float = 0.0
    aborted: bool = False

    def versions(self) -> list[int]:
        """Of each token. vLLM knows neither what it has not begun nor what ended: the clock tells which it is."""
        versions = [self.version] * len(self.tokens)
        for known, when, version in self.loads:
            before = known if known is not None else len(versions) if self.at < when else 0
            versions[before:] = [version] * (len(versions) - before)
        return versions

    def ended(self, rollout: int, end: End, reason: str) -> Ended:
        logprobs = np.array(self.logprobs, np.float32)
        return Ended(rollout, tuple(self.tokens), logprobs, spans_of(self.versions()), end, reason)


class VllmBackend:
    """Samples with a model that vLLM serves, in processes of its own.

    What a rollout draws is seeded by (seed, prompt, rollout, tokens that it begins with). The same seeds need not give the
    same tokens: logits differ in their last digits with who else is in the batch. New weights are taken between two steps.
    Prompts that are the same are read once under each version; what was started before keeps the keys and values that it
    has, or finds.

    Args:
        serve: begins it, with a folder for its files, in the event loop.
        decoding: how.
        version: of the weights that the model has.
        limit_s: seconds without a token of any rollout, or an answer, after which it is given up.

    Raises:
        ValueError, BackendDied: `serve` does.
    """

    def __init__(
        self,
        serve: Callable[[Path], Served],
        decoding: Decoding,
        *,
        version: int = 0,
        limit_s: float = 600.0,
    ) -> None:
        self._decoding, self.slots = decoding, decoding.slots
        self._rows: set[int] = set()  # started and not given back
        self._said: SimpleQueue[Ended | Exception] = SimpleQueue()
        self._over: Exception | None = None  # why nothing comes any more
        self._signs = 1  # of life: it is begun, then tokens, and weights that it took
        self._silence = Silence(self._who, limit_s)
        self._closed = False
        self._loaded = threading.Event()
        self._loaded.set()
        self._file: Path | None = None  # the newest weights
        self._names = count()
        self._version = version  # from here on only the event loop's
        self._live: dict[int, _Live] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._settled = asyncio.Event()  # no weights are under way
        self._settled.set()
        self._served: Served | None = None
        self._folder = TemporaryDirectory(prefix="rollalloc-vllm-")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollalloc vLLM", daemon=True)
        self._thread.start()
        try:
            self._in_loop(self._begin(serve)).result()
        except BaseException:
            self.close()
            raise

    # ------------------------------------------------------------------------------------------------- the interface

    def capacity(self) -> int:
        return max(0, self.slots - len(self._rows))

    def start(self, rows: Sequence[Row]) -> None:
        self._decoding.refuse_unfit(rows, self._rows)
        self._rows.update(row.rollout for row in rows)
        self._in_loop(self._start(rows))

    def abort(self, rollouts: Sequence[int]) -> None:
        self._in_loop(self._abort(rollouts))

    def step(self, wait_s: float) -> list[Ended]:
        ended: list[Ended] = []
        try:
            said = self._said.get(timeout=wait_s if self._rows and self._over is None else 0)
            while True:
                if isinstance(said, Exception):
                    self._over = self._over or said
                else:
                    self._rows.discard(said.rollout)
                    ended.append(said)
                said = self._said.get_nowait()
        except Empty:
            pass
        if self._over is None and not ended and self._served is not None and self._served.dead:
            self._over = BackendDied("vLLM's engine ended; what it said about it is above, on standard error")
        if self._over is None and self._rows:
            try:
                self._silence.look(self._signs, f"{len(self._rows)} rollouts")
            except BackendDied as died:
                self._over = died
        if self._over is not None:
            raise self._over
        return ended

    def load(self, weights: Mapping[str, Tensor], version: int) -> None:
        while not self._loaded.wait(LOOK_S):  # what it was given last
            self._silence.look(self._signs, f"the weights of version {version}")
        bytes_ = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
        own = Path(self._folder.name)
        self._file = _place(own, bytes_) / f"{own.name}-{version}.safetensors"
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}, self._file)
        self._loaded.clear()
        self._in_loop(self._load(self._file, version))

    def paces(self) -> Sequence[tuple[int, float]]:
        return [] if self._served is None else self._served.paces()

    def figures(self) -> dict[str, Any]:
        return {} if self._served is None else self._served.figures()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._in_loop(self._end()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._folder.cleanup()
        if self._file is not None:
            self._file.unlink(missing_ok=True)  # nobody may have taken it
        self._rows.clear()

    def _who(self) -> str:
        pids = () if self._served is None else self._served.pids()
        return f"vLLM's engine ({', '.join(map(str, pids))})"

    # -------------------------------------------------------------------------------------------------- the event loop

    def _in_loop(self, doing: Coroutine[Any, Any, T]) -> Future[T]:
        """In the order in which they are asked for."""
        return asyncio.run_coroutine_threadsafe(doing, self._loop)

    async def _begin(self, serve: Callable[[Path], Served]) -> None:
        self._served = serve(Path(self._folder.name))

    def _beside(self, doing: Coroutine[Any, Any, None]) -> None:
        """What may take long, and is ended by `close`."""
        task = asyncio.create_task(doing)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _start(self, rows: Sequence[Row]) -> None:
        assert self._served is not None
        for row in rows:
            live = self._live[row.rollout] = _Live(f"{row.rollout}.{next(self._names)}", self._version)
            self._beside(self._sample(self._served, row, live))

    async def _abort(self, rollouts: Sequence[int]) -> None:
        live = [self._live[rollout] for rollout in rollouts if rollout in self._live]
        for each in live:
            each.aborted = True
        if live and self._served is not None:
            await self._served.abort([each.name for each in live])

    async def _load(self, file: Path, version: int) -> None:
        self._settled.clear()
        self._beside(self._take(file, version))

    async def _take(self, file: Path, version: int) -> None:
        assert self._served is not None
        try:
            when, begun = await self._served.load(file)
            for each in self._live.values():
                each.loads.append((begun.get(each.name), when, version))
            self._version = version
            self._signs += 1
        except Exception as error:  # whatever it is, nobody knows which weights it has
            died = BackendDied(f"vLLM did not take the weights of version {version}: {error or type(error).__name__}")
            self._said.put(error if isinstance(error, BackendDied) else died)
        finally:
            file.unlink(missing_ok=True)
            self._settled.set()
            self._loaded.set()

    async def _end(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._served is not None:
            self._served.close()
        self._loaded.set()

    async def _sample(self, served: Served, row: Row, live: _Live) -> None:
        """One rollout, from its start to its end, which is not told while nobody knows under which weights it came."""
        end, reason = "failed", ""
        try:
            end, reason = await self._stream(served, row, live)
        except (BackendDied, FloatingPointError) as error:
            self._said.put(error)
            return
        except Exception as error:
            reason = f"vLLM: {type(error).__name__}: {error}"
        await self._settled.wait()
        del self._live[row.rollout]
        self._said.put(live.ended(row.rollout, end, reason))

    async def _stream(self, served: Served, row: Row, live: _Live) -> tuple[End, str]:
        """Take in what is sampled; how it ended."""
        while not self._settled.is_set():  # which weights it begins under is then known
            await self._settled.wait()
        if live.aborted:
            return "aborted", ""
        live.version, live.loads = self._version, []
        [draw] = uniforms(draw_keys(self._decoding.seed, [row.prompt], [row.rollout]), len(row.begun))
        most = self._decoding.sampling.max_new_tokens - len(row.begun)
        # What is cached of other weights is not for those that begin under these.
        asked = (live.name, (*row.tokens, *row.begun), most, int(draw * 2**53), str(live.version))
        async for chunk in served.generate(*asked):
            live.tokens += chunk.tokens
            live.logprobs += chunk.logprobs
            live.at = chunk.at
            self._signs += 1
            if any(map(isnan, chunk.logprobs)):
                raise FloatingPointError(NOT_FINITE)
            if chunk.finish is not None:
                end = _ENDS.get(chunk.finish, "failed")
                if end == "failed" or (end == "aborted" and not live.aborted):
                    return "failed", f"vLLM ended it by itself: {chunk.finish}"
                return end, ""
            if live.aborted:  # it was not there yet when vLLM was told
                await served.abort([live.name])
        return "failed", "vLLM's stream ended without a word"


def _place(other: Path, bytes_: int) -> Path:
    """A folder for a file of that size, in memory where there is plenty of room."""
    return _IN_MEMORY if _IN_MEMORY.is_dir() and shutil.disk_usage(_IN_MEMORY).free > 3 * bytes_ else other
