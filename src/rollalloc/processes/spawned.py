"""A child process with a pipe. It is killed when its handle is garbage-collected, or when this process ends."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize

from rollalloc.processes.stopping import unheard


class Spawned:
    """A spawned child process. A forked child would have copies of locks that threads hold, but not the threads.

    Keep the arguments small and send everything else through the pipe. If the child dies before it reads its arguments,
    large arguments block this process forever, because this process also holds the reading end of the arguments' pipe.

    Args:
        serve: the function that runs in the child. It is called with the child's end of the pipe and with `arguments`.
        arguments: at most some kilobytes when pickled.
        name: name of the process.

    Attributes:
        connection: this process's end of the pipe.
        process: the child process.
    """

    def __init__(self, serve: Callable[..., None], *arguments: object, name: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection: Connection
        self.connection, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(target=serve, args=(theirs, *arguments), name=name)
        # At exit, kill the child first. Otherwise the interpreter waits for the child, and the child waits for a message.
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
        """Wait `grace_s` seconds for the process to end, kill it if it has not, and return its exit code.

        The pipe stays open.
        """
        self.process.join(grace_s)
        self._kill()
        return self.process.exitcode


def _kill(process: BaseProcess) -> None:
    if process.pid is not None:
        process.kill()
        process.join()
