"""A back-end in its own process, so that generation and training do not wait for each other.

A thread would not do: a tiny model spends most of its time in Python code, and only one thread at a time can run Python
code. The process has its own model. It gets weights through shared memory, and everything else through a pipe. It ends
when the pipe is closed.
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rollalloc.files.text import error_text
from rollalloc.generate.sampler import Generation
from rollalloc.generate.stream.backend import NOTHING_YET, BackendDied, Decoding, RunningRow
from rollalloc.generate.stream.blueprint import Blueprint, SharedWeights
from rollalloc.generate.stream.local import LocalBackend
from rollalloc.generate.stream.watchdog import LOOK_S, Silence
from rollalloc.models.weights import weights_of
from rollalloc.processes.spawned import Spawned

log = logging.getLogger(__name__)

_GRACE_S = 5.0  # seconds between a process's last message and its exit code
SPEAKS_S = 0.5  # seconds between signs of life of a busy process
_GONE = None  # marks the end of the pipe


class ProcessBackend:
    """`LocalBackend` in another process.

    If the process dies, a new process starts its rollouts again, with the newest weights and the same random draws. If the
    new process dies before any rollout has ended, it is not replaced. A process without signs of life is killed.

    Args:
        model: the model that the process builds again, with the same weights and on the same device.
        decoding: settings of decoding.
        version: version of the model's weights.
        limit_s: number of seconds without a sign of life after which the process is killed. While the process starts,
            the limit is at least two minutes.

    Raises:
        ValueError: another process cannot build the model (`Blueprint.of`), or `LocalBackend` refuses it. Some errors are
            found only in the process; the first `poll` raises them.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        decoding: Decoding,
        *,
        version: int = 0,
        limit_s: float = 600.0,
    ) -> None:
        self._decoding, self.slots = decoding, decoding.slots
        weights = weights_of(model)
        self._blueprint, self._device = Blueprint.of(model), model.device
        self._weights = SharedWeights(weights)
        self._fixed = SharedWeights(
            {name: each for name, each in self._blueprint.first(model).items() if name not in weights}
        )
        self._threads = max(1, torch.get_num_threads() // 2)
        self._version = version
        self._rows: dict[int, RunningRow] = {}  # submitted and not returned by `poll` yet
        self._cancelled: set[int] = set()  # rollouts in `_rows` that were cancelled
        self._paces: list[tuple[int, float]] = []
        self._restarts = 0
        self._ended_since = True  # whether a rollout has ended since the process was last replaced
        self._silence = Silence(lambda: f"the process that generates ({self._spawned.process.pid})", limit_s)
        self._start_process()

    # ------------------------------------------------------------------------------------------------- the interface

    def capacity(self) -> int:
        return max(0, self.slots - len(self._rows))

    def submit(self, rows: Sequence[RunningRow]) -> None:
        self._decoding.refuse_unfit(rows, self._rows)
        self._rows |= {row.rollout: row for row in rows}
        self._told.say(("submit", list(rows)))

    def cancel(self, rollouts: Sequence[int]) -> None:
        running = [rollout for rollout in rollouts if rollout in self._rows]
        self._cancelled.update(running)
        self._told.say(("cancel", running))

    def poll(self, wait_s: float) -> list[Generation]:
        ended: list[Generation] = []
        until = monotonic() + wait_s
        while self._rows and not ended:
            try:
                said = self._heard.inbox.get(timeout=min(LOOK_S, max(0.0, until - monotonic())))
                while True:  # handle all messages in the queue
                    ended += self._take(said)
                    said = self._heard.inbox.get_nowait()
            except Empty:
                self._check_silence(f"{len(self._rows)} rollouts")
                if monotonic() >= until:
                    break
        return ended

    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        while not self._heard.wait_until_copied(LOOK_S):  # wait until the process has copied the last weights
            self._check_silence(f"the weights of version {version}")
        self._weights.put(weights)
        self._version = version
        self._heard.copied = False
        self._told.say(("load_weights", version))

    def paces(self) -> Sequence[tuple[int, float]]:
        paces, self._paces = self._paces, []
        return paces

    def figures(self) -> dict[str, Any]:
        return {"restarts": self._restarts}

    def close(self) -> None:
        self._spawned.end()  # the process has nothing to save
        self._told.end()
        self._heard.end(self._spawned.connection)
        self._rows.clear()

    def _check_silence(self, what: str) -> None:
        """Check that the process has not been silent for too long. `what` is the subject of "... wait for it"."""
        try:
            self._silence.check(self._heard.signs, what)
        except BackendDied:
            self._spawned.end()
            raise

    # ----------------------------------------------------------------------------------------------------- the process

    def _start_process(self) -> None:
        shared = (self._weights, self._fixed)
        self._spawned = Spawned(
            _serve, *shared, self._version, self._decoding, self._threads, name="rollalloc generator"
        )
        self._heard = _Heard(self._spawned.connection)
        self._told = _Told(self._spawned.connection)
        self._silence.begin()
        self._told.say((self._blueprint, self._device))

    def _take(self, said: Any) -> list[Generation]:
        if said is _GONE:
            return self._replace()
        what, with_it = said
        if what == "at work":
            return []
        if what == "failed":
            raise with_it
        ended, paces = with_it
        self._paces += paces
        for each in ended:
            del self._rows[each.rollout]
            self._cancelled.discard(each.rollout)
        self._ended_since = self._ended_since or bool(ended)
        return ended

    def _replace(self) -> list[Generation]:
        """Start another process with the rollouts of the process that died."""
        code = self._spawned.end(_GRACE_S)
        self._told.end()
        self._heard.end(self._spawned.connection)
        how = f"by {signal.Signals(-code).name}" if code and code < 0 else f"with exit code {code}"
        if not self._ended_since:
            why = 'it may lack memory (lower --max-rows or --kv-tokens), or your program lacks `if __name__ == "__main__":`'
            what = (
                f"the process that generates ended {how}, as the process before it did, and no rollout ended in between"
            )
            raise BackendDied(f"{what}; {why}")
        log.warning("the process that generates ended %s; a new process starts %d rollouts again", how, len(self._rows))
        self._restarts += 1
        self._ended_since = False
        self._start_process()
        lost = [replace(NOTHING_YET, rollout=rollout, cancelled=True) for rollout in sorted(self._cancelled)]
        for rollout in self._cancelled:
            del self._rows[rollout]
        self._cancelled.clear()
        self._told.say(("submit", list(self._rows.values())))
        return lost


class _Told:
    """Writes to a pipe in a thread, so that the caller does not wait for a reader that has stopped."""

    def __init__(self, pipe: Connection) -> None:
        self._outbox: SimpleQueue[Any] = SimpleQueue()
        self._thread = threading.Thread(target=self._write, args=(pipe,), name="rollalloc generator's ear", daemon=True)
        self._thread.start()

    def say(self, what: Any) -> None:
        """Queue a message. If the reader is gone, nothing is raised here."""
        self._outbox.put(ForkingPickler.dumps(what))  # pickle here, so that the caller gets the error

    def end(self) -> None:
        """Stop writing. Call this when the process is gone, before its pipe is closed."""
        self._outbox.put(None)
        self._thread.join(_GRACE_S)

    def _write(self, pipe: Connection) -> None:
        with suppress(OSError):
            while (what := self._outbox.get()) is not None:
                pipe.send_bytes(what)


class _Heard:
    """Reads from a pipe in a thread, so that the writer never waits. The last message is always `_GONE`.

    `signs` counts the messages. `copied` says whether the process has copied the last weights.
    """

    def __init__(self, pipe: Connection) -> None:
        self.inbox: SimpleQueue[Any] = SimpleQueue()
        self.signs = 0
        self.copied = False
        self._gone = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._read, args=(pipe,), name="rollalloc generator's pipe", daemon=True)
        self._thread.start()

    def wait_until_copied(self, wait_s: float) -> bool:
        """Wait up to this many seconds. Return whether waiting is over: the weights are copied, or the process is gone."""
        with self._changed:
            return self._changed.wait_for(lambda: self.copied or self._gone, wait_s)

    def end(self, pipe: Connection) -> None:
        """Close the pipe of a process that has ended."""
        # Wait before closing. Otherwise the thread might read from a new file that gets the same descriptor.
        self._thread.join(_GRACE_S)
        pipe.close()

    def _read(self, pipe: Connection) -> None:
        try:
            while True:
                said = pipe.recv()
                self.signs += 1
                if said[0] == "copied":
                    with self._changed:
                        self.copied = True
                        self._changed.notify_all()
                else:
                    self.inbox.put(said)
        except (EOFError, OSError):
            pass
        except Exception:  # stop reading after a message that cannot be read
            log.exception("the process that generates sent a message that cannot be read")
        finally:
            with self._changed:
                self._gone = True
                self._changed.notify_all()
            self.inbox.put(_GONE)


def _serve(
    pipe: Connection,
    weights: SharedWeights,
    fixed: SharedWeights,
    version: int,
    decoding: Decoding,
    threads: int,
) -> None:
    """The code of the process: follow messages, decode while a rollout is running, and report rollouts that ended.

    If no rollout ends for some time, send a sign of life.
    """
    torch.set_num_threads(threads)
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the process ends only when the parent closes the pipe
        signal.signal(each, signal.SIG_IGN)
    try:
        blueprint, device = pipe.recv()
        model = blueprint.built(fixed.views() | weights.views(), device)
        backend = LocalBackend(model, decoding, version=version)

        def load(version: int) -> None:
            backend.load_weights(weights.views(), version)
            pipe.send(("copied", version))

        do = {"submit": backend.submit, "cancel": backend.cancel, "load_weights": load}
        load(version)
        busy, spoke = False, monotonic()
        while True:
            while pipe.poll(0 if busy else None):
                busy = True
                what, with_it = pipe.recv()
                do[what](with_it)
            ended = backend.poll(0)
            busy = backend.busy
            if ended:
                pipe.send(("ended", (ended, backend.paces())))
            elif busy and monotonic() - spoke >= SPEAKS_S:
                pipe.send(("at work", None))
            else:
                continue
            spoke = monotonic()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        os._exit(0)  # the parent is gone
    except Exception as error:
        pipe.send(("failed", _as_it_travels(error)))


def _as_it_travels(error: Exception) -> Exception:
    """An error that can be sent through a pipe. If the error cannot be pickled, a RuntimeError with its text."""
    try:
        return pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"the process that generates failed: {error_text(error)}")
