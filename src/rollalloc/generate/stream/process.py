"""A back-end in a process of its own, so that what is generated and what is trained do not wait for each other.

A tiny model's time is Python's, which threads would share; so it is a process, with a model of its own. Weights reach it
through shared memory, everything else through a pipe, and it ends when the pipe does.
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rollalloc.generate.stream.backend import NO_LOGPROBS, BackendDied, Decoding, Ended, RunningRow
from rollalloc.generate.stream.blueprint import Blueprint, SharedWeights
from rollalloc.generate.stream.local import LocalBackend
from rollalloc.generate.stream.silence import LOOK_S, Silence
from rollalloc.models.weights import weights_of
from rollalloc.processes.spawned import Spawned

log = logging.getLogger(__name__)

_GRACE_S = 5.0  # between a process's last word and its exit code
_SPEAKS_S = 0.5  # how often a process at work says so
_GONE = None  # what is heard when the pipe ends


class ProcessBackend:
    """`LocalBackend` in a process of its own.

    A process that dies is replaced, and what ran there begins again under the newest weights, to the same tokens where these
    are the same; one that dies again before any rollout has ended is not. One that gives no sign of life is killed.

    Args:
        model: is built there once more, with the same weights, on the same device.
        decoding: how.
        version: of the weights that the model has.
        limit_s: seconds without a sign of life after which it is given up; longer at the beginning.

    Raises:
        ValueError: as `Blueprint.of`; as `LocalBackend`, but when the first rollouts are asked for where only the model
            says it.
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
        self._rows: dict[int, RunningRow] = {}  # started and not given back
        self._cancelled: set[int] = set()  # of these
        self._paces: list[tuple[int, float]] = []
        self._restarts = 0
        self._ended_since = True  # whether a rollout ended since the process was last replaced
        self._silence = Silence(lambda: f"the process that generates ({self._spawned.process.pid})", limit_s)
        self._begin()

    # ------------------------------------------------------------------------------------------------- the interface

    def capacity(self) -> int:
        return max(0, self.slots - len(self._rows))

    def submit(self, rows: Sequence[RunningRow]) -> None:
        self._decoding.refuse_unfit(rows, self._rows)
        self._rows |= {row.rollout: row for row in rows}
        self._send("submit", list(rows))

    def cancel(self, rollouts: Sequence[int]) -> None:
        running = [rollout for rollout in rollouts if rollout in self._rows]
        self._cancelled.update(running)
        self._send("cancel", running)

    def poll(self, wait_s: float) -> list[Ended]:
        ended: list[Ended] = []
        until = monotonic() + wait_s
        while self._rows and not ended:
            try:
                said = self._heard.inbox.get(timeout=min(LOOK_S, max(0.0, until - monotonic())))
                while True:  # and what else is there
                    ended += self._take(said)
                    said = self._heard.inbox.get_nowait()
            except Empty:
                self._look(f"{len(self._rows)} rollouts")
                if monotonic() >= until:
                    break
        return ended

    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        while not self._heard.wait_until_copied(LOOK_S):  # what it was given last
            self._look(f"the weights of version {version}")
        self._weights.put(weights)
        self._version = version
        self._heard.copied = False
        self._send("load_weights", version)

    def paces(self) -> Sequence[tuple[int, float]]:
        paces, self._paces = self._paces, []
        return paces

    def figures(self) -> dict[str, Any]:
        return {"restarts": self._restarts}

    def close(self) -> None:
        self._spawned.end()  # it has nothing to save
        self._told.end()
        self._heard.end(self._spawned.connection)
        self._rows.clear()

    def _look(self, what: str) -> None:
        """It says nothing: for how long?"""
        try:
            self._silence.look(self._heard.signs, what)
        except BackendDied:
            self._spawned.end()
            raise

    # ----------------------------------------------------------------------------------------------------- the process

    def _begin(self) -> None:
        shared = (self._weights, self._fixed)
        self._spawned = Spawned(
            _serve, *shared, self._version, self._decoding, self._threads, name="rollalloc generator"
        )
        self._heard = _Heard(self._spawned.connection)
        self._told = _Told(self._spawned.connection)
        self._silence.begin()
        self._told.say((self._blueprint, self._device))

    def _send(self, what: str, with_it: Any) -> None:
        self._told.say((what, with_it))

    def _take(self, said: Any) -> list[Ended]:
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

    def _replace(self) -> list[Ended]:
        """The process is gone: begin with another one, and with what ran in it."""
        code = self._spawned.end(_GRACE_S)
        self._told.end()
        self._heard.end(self._spawned.connection)
        how = f"by {signal.Signals(-code).name}" if code and code < 0 else f"with exit code {code}"
        if not self._ended_since:
            why = 'it may lack memory (--max-rows, --kv-tokens), or your program `if __name__ == "__main__":`'
            what = f"the process that generates ended {how}, and so did the one before it, without a rollout between"
            raise BackendDied(f"{what}; {why}")
        log.warning("the process that generates ended %s; %d rollouts begin again in another", how, len(self._rows))
        self._restarts += 1
        self._ended_since = False
        self._begin()
        lost = [Ended(rollout, (), NO_LOGPROBS, (), "cancelled") for rollout in sorted(self._cancelled)]
        for rollout in self._cancelled:
            del self._rows[rollout]
        self._cancelled.clear()
        self._send("submit", list(self._rows.values()))
        return lost


class _Told:
    """What goes into a pipe, so that its reader is not waited for: one that has stopped takes in what the pipe holds."""

    def __init__(self, pipe: Connection) -> None:
        self._outbox: SimpleQueue[Any] = SimpleQueue()
        self._thread = threading.Thread(target=self._write, args=(pipe,), name="rollalloc generator's ear", daemon=True)
        self._thread.start()

    def say(self, what: Any) -> None:
        """Say it after what was said before; where nobody hears it any more, `poll` will hear that."""
        self._outbox.put(ForkingPickler.dumps(what))  # here, where an error belongs

    def end(self) -> None:
        """Of a process that is gone; before its pipe is closed."""
        self._outbox.put(None)
        self._thread.join(_GRACE_S)

    def _write(self, pipe: Connection) -> None:
        with suppress(OSError):
            while (what := self._outbox.get()) is not None:
                pipe.send_bytes(what)


class _Heard:
    """What comes out of a pipe, taken in at once, so that its writer never waits; at last, whatever happens, `_GONE`.

    `signs` counts what came; `copied`: whether the weights given last are, which only the one who gives them denies.
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
        """Whether they are, or never will be; so many seconds are waited for it."""
        with self._changed:
            return self._changed.wait_for(lambda: self.copied or self._gone, wait_s)

    def end(self, pipe: Connection) -> None:
        """Close the pipe of a process that is gone."""
        self._thread.join(_GRACE_S)  # before that: it might read from whoever has the pipe's number next
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
        except Exception:  # what cannot be read is as good as nothing
            log.exception("the process that generates said what cannot be read")
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
    """The process: do what is said, decode while anything runs, and say what ended, or now and then that it is at work."""
    torch.set_num_threads(threads)
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the parent decides; a pipe that ends says so
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
            elif busy and monotonic() - spoke >= _SPEAKS_S:
                pipe.send(("at work", None))
            else:
                continue
            spoke = monotonic()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        os._exit(0)  # nobody is there any more
    except Exception as error:
        pipe.send(("failed", _as_it_travels(error)))


def _as_it_travels(error: Exception) -> Exception:
    """An error that can be sent; one that is not the same elsewhere is said in words."""
    try:
        return pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"the process that generates failed: {type(error).__name__}: {error}")
