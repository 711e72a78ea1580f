"""The channel between a worker and its parent, and the checks of a worker's messages.

The length of a message, in bytes, is sent before the message. A request contains a random id and a pickle. An answer is JSON
of limited length, so that the parent never unpickles anything from a worker. An answer must have the id of the current
request. On Linux, where the kernel reports the sender, an answer must also come from the worker's own process. Any other
message raises `InvalidMessage`.
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

LONGEST_REASON = 2000  # maximum number of characters of a reason for a missing score, or of a loading error
LOST_CHANNEL = 117  # exit code of a worker whose reward function closed or replaced its channel
_LENGTH = struct.Struct("!I")
_ID_BYTES = 8
_LONGEST_ANSWER = 65_536  # bytes
_MOST_READ = 1 << 20  # maximum number of bytes in one read
_CREDENTIALS = struct.Struct("3i")  # process, user, group; see unix(7)
_HIGHEST_DESCRIPTOR = 65_536  # highest file descriptor that is used, even if the process may open more files


class InvalidMessage(Exception):
    """A message is not the worker's own answer to the current request."""


@dataclass(frozen=True, slots=True)
class Started:
    """A worker's first message, with its process id. It is sent before any user code runs."""

    process_id: int


@dataclass(frozen=True, slots=True)
class Ready:
    """The function is loaded, or could not be loaded because of `error`."""

    error: str | None


@dataclass(frozen=True, slots=True)
class Answer:
    """The outcome of a sample.

    Attributes:
        request: the request's id.
        outcome: the outcome.
        fit: whether the sample's changes to the process were undone. If not, the worker gets no further sample.
    """

    request: str
    outcome: Outcome
    fit: bool


def new_request(message: bytes) -> tuple[str, bytes]:
    """A random id that no other process can guess, and the frame to send."""
    request = secrets.token_bytes(_ID_BYTES)
    return request.hex(), _frame(request + message)


class ParentEnd:
    """The parent's end of the channel. It never blocks, and checks each message."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._unsent = bytearray()
        self._received = bytearray()
        self._sender: int | None = None
        self._knows_senders = hasattr(socket, "SO_PASSCRED")
        if self._knows_senders:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def fileno(self) -> int:
        return self._connection.fileno()

    def close(self) -> None:
        self._connection.close()

    def send(self, frames: bytes = b"") -> None:
        """Send as much of these and of the unsent frames as the socket accepts now."""
        self._unsent += frames
        try:
            del self._unsent[: self._connection.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:  # the worker died; `receive` will raise EOFError
            self._unsent.clear()

    def receive(self) -> Started | Ready | Answer | None:
        """The next message; None if no complete message has arrived.

        Raises:
            EOFError: the worker's end is closed.
            InvalidMessage: the data is not a valid message from the worker.
        """
        while True:
            if len(self._received) >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(self._received)
                if length > _LONGEST_ANSWER:
                    raise InvalidMessage
                end = _LENGTH.size + length
                if len(self._received) >= end:
                    message = _decode(bytes(self._received[_LENGTH.size : end]))
                    del self._received[:end]
                    if isinstance(message, Started):  # no user code has run yet, so this process id can be trusted
                        self._knows_senders &= message.process_id == self._sender
                    return message
            if not self._read():
                return None

    def _read(self) -> bool:
        """Read data that has arrived, and check its sender. Return False if there is no data.

        All data of one read is from the same sender.
        """
        room = socket.CMSG_LEN(_CREDENTIALS.size) if self._knows_senders else 0
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
                sender = _CREDENTIALS.unpack(data)[0]
                if self._sender is None:  # the worker sent the first data, before it could start child processes
                    self._sender = sender
                if sender != self._sender:
                    raise InvalidMessage
        self._received += received
        return True


def _decode(encoded: bytes) -> Started | Ready | Answer:
    """Decode a message. Raise InvalidMessage if it differs in any way from what a worker sends."""
    try:
        message = loads(encoded)
    except (ValueError, RecursionError):
        raise InvalidMessage from None
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
            raise InvalidMessage


class WorkerEnd:
    """The worker's end of the channel, protected against accidental damage by the reward function.

    The end is a bare file descriptor, which is not closed by code that closes all open socket objects. The descriptor has a
    high number, because programs often close or overwrite low descriptors. Forked processes close the descriptor, and
    programs that the function executes do not inherit it. If the function closes or replaces the descriptor nevertheless,
    the process exits. Otherwise an answer could be written into a file of the user.

    Args:
        descriptor: the socket; it is duplicated and then closed.
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
            EOFError: the parent closed the channel.
        """
        (length,) = _LENGTH.unpack(self._take(_LENGTH.size))
        message = self._take(length)
        return message[:_ID_BYTES].hex(), message[_ID_BYTES:]

    def send(self, message: list[Any]) -> None:
        """Send a message as JSON."""
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
        data = bytes(self._received[:size])
        del self._received[:size]
        return data

    def _check(self) -> None:
        if self._identify() != self._identity:
            os._exit(LOST_CHANNEL)

    def _identify(self) -> tuple[int, int] | None:
        try:
            status = os.fstat(self._descriptor)
        except OSError:
            return None
        return status.st_dev, status.st_ino

    def _close(self) -> None:
        if self._identify() == self._identity:
            os.close(self._descriptor)


def most_descriptors() -> int:
    """The maximum number of files that this process may open."""
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
