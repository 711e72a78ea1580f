"""`rollalloc board`: follow all runs of a folder on a local web page while they train."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from rollalloc.cli.options import folder_of_runs
from rollalloc.cli.progress import say


def board(
    folder: Annotated[Path, typer.Argument(help="Folder with runs or comparisons.", parser=folder_of_runs)] = Path(
        "runs"
    ),
    port: Annotated[int, typer.Option(help="Port to listen on (0: any free port).", min=0, max=65535)] = 0,
) -> None:
    """Serve a local, read-only web page that shows all runs of a folder while they train; stop it with Ctrl-C."""
    from rollalloc.lab.report.board import HOST, serve  # matplotlib takes a second to import, `--help` should not

    console = Console(stderr=True)
    with serve(folder, port) as server:
        say(console, f"http://{HOST}:{server.server_port}/ follows {folder}; stop with Ctrl-C")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return
