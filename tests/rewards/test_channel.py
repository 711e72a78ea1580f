"""What the parent takes of what a worker sends: its own answers, whole, and nothing else."""

import json
import os
import socket
import struct
from pathlib import Path

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
from rollalloc.rewards.function import Sample, Scored, Unscored
from rollalloc.rewards.scorers import WorkerScorer

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


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="the function finds its channel in /proc")
@pytest.mark.parametrize("message", ['["00", true, 1.0, 1.0]', '["started", 2]', '["ready"]'])
def test_a_worker_that_sends_more_than_its_answer_is_lost(message):
    with WorkerScorer(f"{Path(__file__).with_name('reward_samples.py')}:write_to_channel") as scorer:
        outcomes = scorer.score([Sample("s", message, "", {})])
        assert outcomes == [Unscored("worker sent an invalid answer, or another process answered for it")]
        assert scorer.report()["discarded"] == 1


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
