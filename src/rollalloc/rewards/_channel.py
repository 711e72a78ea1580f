"""What a worker and its parent say to each other, and how it is checked.

Both directions are frames: a length, and that many bytes. The parent asks with an id drawn at random and a pickle. What
comes back is never unpickled: JSON of bounded length, which has to carry the id of the request at hand and, where the
kernel tells who wrote it (Linux), to come from the worker's own process. Anything else is `Polluted`.
"""

from __future__ import annotations

import fcntl
import math
import os
import resource
import secrets
import socket
import struct
from dataclasses import dataclass
from json import dumps, loads
from typing import Any

from rollalloc.rewards.function import Outcome, Scored, Unscored

LONGEST_REASON = 2000  # characters, of a sample's or of why the function could not be loaded
LOST_CHANNEL = 117  # exit code of a worker whose channel was closed or replaced under it
_LENGTH = struct.Struct("!I")
_ID_BYTES = 8
_LONGEST_ANSWER = 65_536  # bytes
_MOST_READ = 1 << 20  # bytes at a time
_CREDENTIALS = struct.Struct("3i")  # process, user, group; see unix(7)
_HIGHEST_DESCRIPTOR = 65_536  # that is used, whatever the limit


class Polluted(Exception):
    """Something came from a worker that is no answer of its own to the request at hand."""


@dataclass(frozen=True, slots=True)
class Started:
    """A worker's first word, before it runs any code of the user's: which process it is."""

    process_id: int


@dataclass(frozen=True, slots=True)
class Ready:
    """The function is loaded; or why it could not be."""

    error: str | None


@dataclass(frozen=True, slots=True)
class Answer:
    """One sample's outcome.

    Attributes:
        request: the request's id.
        outcome: it.
        fit: whether the process is as the import left it; where not, it takes no further sample.
    """

    request: str
    outcome: Outcome
    fit: bool


def new_request(message: bytes) -> tuple[str, bytes]:
    """An id that nobody guesses, and the frame to send."""
    request = secrets.token_bytes(_ID_BYTES)
    return request.hex(), _frame(request + message)


class ParentEnd:
    """The parent's end: waits for nothing, and predicts nothing that it cannot check."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._unsent = bytearray()
        self._received = bytearray()
        self._speaker: int | None = None
        self._knows_speakers = hasattr(socket, "SO_PASSCRED")
        if self._knows_speakers:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def fileno(self) -> int:
        return self._connection.fileno()

    def close(self) -> None:
        self._connection.close()

    def queue(self, frame: bytes) -> None:
        self._unsent += frame

    def flush(self) -> None:
        """Sends as much of the queue as the worker takes now."""
        try:
            del self._unsent[: self._connection.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:  # it died, which is heard of by the end of what it says
            self._unsent.clear()

    def receive(self) -> Started | Ready | Answer | None:
        """The next message; None where no whole one has come.

        Raises:
            EOFError: the worker's end is closed.
            Polluted: what came is none.
        """
        while True:
            if len(self._received) >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(self._received)
                if length > _LONGEST_ANSWER:
                    raise Polluted
                end = _LENGTH.size + length
                if len(self._received) >= end:
                    message = _decode(bytes(self._received[_LENGTH.size : end]))
                    del self._received[:end]
                    if isinstance(message, Started):  # no code of the user's has run: it tells the truth
                        self._knows_speakers &= message.process_id == self._speaker
                    return message
            if not self._read():
                return None

    def _read(self) -> bool:
        """Takes in what has come, from one process at a time, as the kernel hands it over; False where nothing has."""
        room = socket.CMSG_LEN(_CREDENTIALS.size) if self._knows_speakers else 0
        try:
            received, ancillary, _, _ = self._connection.recvmsg(_LONGEST_ANSWER, room)
        except BlockingIOError:
            return False
        except OSError:
            raise EOFError from None
        if not received:
            raise EOFError
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
                speaker = _CREDENTIALS.unpack(data)[0]
                if self._speaker is None:  # before the worker says that it has started, no other process exists
                    self._speaker = speaker
                if speaker != self._speaker:
                    raise Polluted
        self._received += received
        return True


def _decode(encoded: bytes) -> Started | Ready | Answer:
    """Reads a message; `Polluted` where it is not exactly what a worker sends."""
    try:
        message = loads(encoded)
    except (ValueError, RecursionError):
        raise Polluted from None
    match message:
        case ["started", int(process_id)] if process_id > 0:
            return Started(process_id)
        case ["ready"]:
            return Ready(None)
        case ["broken", str(error)]:
            return Ready(error)
        case [str(request), bool(fit), float(reward), float(metric)] if math.isfinite(reward) and math.isfinite(metric):
            return Answer(request, Scored(reward, metric), fit)
        case [str(request), bool(fit), str(reason), bool(raised)] if len(reason) <= LONGEST_REASON:
            return Answer(request, Unscored(reason, raised), fit)
        case _:
            raise Polluted


class WorkerEnd:
    """The worker's end, kept where the functions it runs do not stumble upon it, and closed in what they fork.

    It is no object that a collector of open sockets would find, and its descriptor is a high one, beyond what programs
    close or duplicate over by habit; executed programs do not inherit it. Where it was closed or replaced nevertheless,
    the process ends rather than write an answer into somebody's file.

    Args:
        descriptor: the socket as it was handed over; closed.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, most_descriptors() // 2)
        os.close(descriptor)
        self._received = bytearray()
        self._identity = self._identify()
        os.register_at_fork(after_in_child=self._close)

    def receive(self) -> tuple[str, bytes]:
        """The next request's id and message.

        Raises:
            EOFError: the parent has hung up.
        """
        (length,) = _LENGTH.unpack(self._take(_LENGTH.size))
        message = self._take(length)
        return message[:_ID_BYTES].hex(), message[_ID_BYTES:]

    def send(self, message: list[Any]) -> None:
        """Sends JSON."""
        frame = memoryview(_frame(dumps(message).encode()))
        while frame:
            self._check()
            frame = frame[os.write(self._descriptor, frame) :]

    def _take(self, size: int) -> bytes:
        while len(self._received) < size:
            self._check()
            part = os.read(self._descriptor, _MOST_READ)
            if not part:
                raise EOFError
            self._received += part
        taken = bytes(self._received[:size])
        del self._received[:size]
        return taken

    def _check(self) -> None:
        if self._identify() != self._identity:
            os._exit(LOST_CHANNEL)

    def _identify(self) -> tuple[int, int] | None:
        try:
            found = os.fstat(self._descriptor)
        except OSError:
            return None
        return found.st_dev, found.st_ino

    def _close(self) -> None:
        if self._identify() == self._identity:
            os.close(self._descriptor)


def most_descriptors() -> int:
    """How many files this process may open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _HIGHEST_DESCRIPTOR if soft == resource.RLIM_INFINITY else min(soft, _HIGHEST_DESCRIPTOR)


def answer_message(answer: Answer) -> list[Any]:
    """An answer as JSON data."""
    outcome = answer.outcome
    if isinstance(outcome, Scored):
        return [answer.request, answer.fit, outcome.reward, outcome.metric]
    return [answer.request, answer.fit, outcome.reason[:LONGEST_REASON], outcome.raised]


def _frame(message: bytes) -> bytes:
    return _LENGTH.pack(len(message)) + message
