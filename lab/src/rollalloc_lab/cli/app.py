"""`rollalloc-lab`: the leaderboard, the simulator and the ladder's prompts.

`rollalloc train` and `rollalloc compare` take the laboratory's tasks by name wherever it is installed.
"""

from __future__ import annotations

from rollalloc.cli.app import command_line, run
from rollalloc.cli.options import Command
from rollalloc_lab.cli.bench import bench
from rollalloc_lab.cli.ladder import ladder
from rollalloc_lab.cli.simulate import simulate

app = command_line("The laboratory of rollalloc: leaderboard, simulator, and prompts of the ladder.", bench, ladder)
app.command(cls=Command)(simulate)  # the classes of its options check their numbers


def main() -> None:
    """Entry point of `rollalloc-lab`."""
    run(app)
