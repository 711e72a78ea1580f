"""Programs in several processes under gloo, as torchrun starts them, but `forks.FORKS`."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from forks import FORKS

_LIMIT_S = 300


def exit_codes(out: Path, given: dict[str, Any], program: str = "tiny_trl", processes: int = 2) -> list[int | None]:
    """Call `main` of a module beside this one in each process; what process N says on standard error is in `N.stderr`.

    One that hangs is killed, and its code is then the negative number of the signal.
    """
    out.mkdir(exist_ok=True)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port, "TORCHELASTIC_USE_AGENT_STORE": True}
    sizes = {"WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
    started = [
        FORKS.Process(
            target=_run,
            args=(program, {"out": str(out)} | given, where | sizes | {"RANK": rank, "LOCAL_RANK": rank}),
        )
        for rank in range(processes)
    ]
    for process in started:
        process.start()
    for process in started:
        process.join(_LIMIT_S)
        process.kill()
        process.join()
    return [process.exitcode for process in started]


def said(out: Path, process: int) -> str:
    """What a process wrote to standard error."""
    return (out / f"{process}.stderr").read_text("utf-8")


def _run(program: str, given: dict[str, Any], environment: dict[str, object]) -> None:
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    os.environ |= {name: str(value) for name, value in environment.items()}
    with open(Path(given["out"]) / f"{environment['RANK']}.stderr", "w") as file:
        os.dup2(file.fileno(), sys.stderr.fileno())
    importlib.import_module(program).main(given)
