"""A process of ours at the other end of a pipe, which ends when nobody holds it, and at the latest with this one."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize

from rollalloc.processes.stopping import unheard


class Spawned:
    """A process that is spawned, since a fork would have the threads' locks, but not the threads.

    Let what goes to it at the start be small, and send the rest: multiprocessing writes that into a pipe of which it
    holds the other end as well, so that a process which dies before it has read it is written to for ever.

    Args:
        serve: what runs there; called with its end of the pipe, then `arguments`.
        arguments: some kilobytes, pickled.
        name: for whoever looks at the processes of a machine.

    Attributes:
        connection: our end of the pipe.
        process: it.
    """

    def __init__(self, serve: Callable[..., None], *arguments: object, name: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection: Connection
        self.connection, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(target=serve, args=(theirs, *arguments), name=name)
        # Else the interpreter waits for it at its own end, and it for us.
        self._kill = Finalize(self, _kill, (self.process,), exitpriority=1)
        try:
            with unheard():
                self.process.start()
        except BaseException:
            self.connection.close()
            raise
        finally:
            theirs.close()

    def end(self, grace_s: float = 0.0) -> int | None:
        """Its exit code; it is killed where it has not ended within so many seconds. The pipe stays open."""
        self.process.join(grace_s)
        self._kill()
        return self.process.exitcode


def _kill(process: BaseProcess) -> None:
    if process.pid is not None:
        process.kill()
        process.join()
