"""What the parent predicts of what a worker sends: its own answers, whole, and nothing else."""

import json
import os
import socket
import struct
from collections import deque

import pytest

from rollalloc.rewards._channel import (
    LOST_CHANNEL,
    Answer,
    InvalidMessage,
    ParentEnd,
    Ready,
    Started,
    WorkerEnd,
    answer_message,
)
from rollalloc.rewards._handle import Limits, Lost, WorkerHandle
from rollalloc.rewards.function import Scored, Unscored

GOOD = ["ab", True, 1.0, 0.5]


@pytest.fixture
def ends():
    """The parent's end, and the bare socket of a worker that may say what it likes."""
    ours, theirs = socket.socketpair()
    parent = ParentEnd(ours)
    with theirs:
        yield parent, theirs
    parent.close()


def frame(message):
    encoded = message if isinstance(message, bytes) else json.dumps(message).encode()
    return struct.pack("!I", len(encoded)) + encoded


def exhaust(receive):
    while receive() is not None:
        pass


@pytest.mark.parametrize(
    ("sent", "read"),
    [
        (["started", 7], Started(7)),
        (["ready"], Ready(None)),
        (["broken", "why"], Ready("why")),
        (GOOD, Answer("ab", Scored(1.0, 0.5), fit=True)),
        (["ab", False, "why", True], Answer("ab", Unscored("why", raised=True), fit=False)),
        (answer_message(Answer("ab", Unscored("x" * 5000), True)), Answer("ab", Unscored("x" * 2000), fit=True)),
    ],
)
def test_a_message_is_read_whole_however_it_comes(ends, sent, read):
    parent, worker = ends
    for byte in frame(sent):
        assert parent.receive() is None
        worker.send(bytes([byte]))
    assert parent.receive() == read
    assert parent.receive() is None


@pytest.mark.parametrize(
    "sent",
    [
        b"\x80\x04}.",
        b"{",
        b'["ab", true, NaN, 1.0]',
        b'["ab", true, 1e999, 1.0]',
        {},
        ["ready", 1],
        ["started", -1],
        ["broken"],
        ["ab", True, 1.0],
        ["ab", True, 1.0, "0.5"],
        ["ab", True, 1, 1],
        ["ab", 1, 1.0, 1.0],
        ["ab", True, "x" * 2001],
    ],
)
def test_what_no_worker_sends_is_refused(ends, sent):
    parent, worker = ends
    worker.send(frame(sent))
    with pytest.raises(InvalidMessage):
        parent.receive()


def test_a_torn_message_is_never_read(ends):
    parent, worker = ends
    worker.send(frame(GOOD)[:-1])
    assert parent.receive() is None
    worker.shutdown(socket.SHUT_WR)
    with pytest.raises(EOFError):
        parent.receive()


@pytest.mark.skipif(not hasattr(socket, "SO_PASSCRED"), reason="the kernel does not tell who writes")
@pytest.mark.parametrize("split", [0, 3, len(frame(GOOD))])
def test_another_process_is_not_believed(ends, split, forked):
    parent, worker = ends
    worker.send(frame(["started", os.getpid()]))
    assert parent.receive() == Started(os.getpid())
    sent = frame(GOOD)
    worker.send(sent[:split])
    forked(lambda: worker.send(sent[split:] or b"x"))
    with pytest.raises(InvalidMessage):
        exhaust(parent.receive)


# A worker's handle: which answer it takes


class Said:
    """A channel on which a worker has said this."""

    has_unsent = False

    def __init__(self, *messages):
        self.messages = deque(messages)

    def receive(self):
        return self.messages.popleft() if self.messages else None


def handle(*messages, ready=True):
    """At the first of two tasks, whose requests are aa and bb."""
    worker = object.__new__(WorkerHandle)
    worker.__dict__.update(
        pending=deque([("aa", "first"), ("bb", "second")]),
        fresh=True,
        since=0.0,
        deadline=1e18,
        channel=Said(*messages),
        _limits=Limits("module:function", 1, 1e9, 1.0, 1),
        _process_id=1,
        _ready=ready,
    )
    return worker


def answer(name):
    return Answer(name, Scored(1.0, 1.0), fit=True)


@pytest.mark.parametrize("messages", [[answer("bb")], [answer("aa"), answer("aa")], [Started(2)], [Ready(None)]])
def test_an_answer_to_another_request_or_a_second_one_loses_the_worker(messages):
    worker = handle(*messages)
    with pytest.raises(Lost, match="sent an invalid answer") as lost:
        exhaust(worker.next_answer)
    assert lost.value.discarded == 1


# The worker's end


@pytest.mark.parametrize("accident", [os.close, lambda descriptor: os.dup2(os.open(os.devnull, os.O_RDWR), descriptor)])
def test_a_worker_whose_channel_was_closed_or_replaced_ends(accident, forked):
    ours, theirs = socket.socketpair()

    def act():
        end = WorkerEnd(theirs.detach())
        accident(end._descriptor)
        end.send(["ready"])

    assert forked(act) == LOST_CHANNEL
    theirs.close()
    assert ours.recv(1) == b""
    ours.close()


def is_open(descriptor):
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def test_the_channel_is_out_of_the_way_and_not_inherited(forked):
    ours, theirs = socket.socketpair()

    def act():
        end = WorkerEnd(theirs.detach())
        assert end._descriptor >= 256
        assert not os.get_inheritable(end._descriptor)
        assert forked(lambda: is_open(end._descriptor)) == 0

    assert forked(act) == 0
    theirs.close()
    ours.close()
