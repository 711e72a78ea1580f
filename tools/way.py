"""The way through a run, by a trace: which files and functions of ours a batch really goes through.

    python tools/way.py            # the table, and an error where a bound is passed
    python tools/way.py --files    # and the files, in the order in which a reader meets them

Each program runs in a process of its own, under a tracer that notes every first call of a function of ours. A page of the
design says what the way should be; this measures what it is. Counted are files and functions until the first batch is asked
for, during one batch in the middle of the run, and in all. Of the walk from first call to first call, a *climb* is a step to
a floor above (a caller is called back), and a *return* is a step to a file that was left before.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import CO_OPTIMIZED
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "rollalloc"
FLOORS = (
    *(
        "core",
        "predict",
        "rules",
        "recipes",
        "named",
        "files",
        "processes",
        "rewards",
        "data",
        "runs",
        "models",
        "generate",
    ),
    *("train", "testing", "drivers", "tasks", "compare", "waste", "report", "advise", "cli"),
)
# By program: most files before the loop, during one batch, and in all.
BOUNDS: Mapping[str, Mapping[str, int]] = {
    "train": {"before": 51, "batch": 37, "all": 64},
    "compare": {"all": 68},  # what trains is in processes of its own
    "trl": {"before": 30, "batch": 37, "all": 43},
}
BATCH = 3  # the batch that is counted


@dataclass
class Trace:
    """The first calls of functions of ours, in order, split where a batch begins."""

    begins: tuple[str, ...]  # functions whose call is the beginning of the loop, or of a batch
    parts: list[list[tuple[str, str]]] = field(default_factory=lambda: [[]])

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call":
            return
        code = frame.f_code
        # Bodies of modules and classes, comprehensions and lambdas are not functions that a reader looks up.
        if not code.co_filename.startswith(str(PACKAGE)) or "<" in code.co_name or not code.co_flags & CO_OPTIMIZED:
            return
        here = (code.co_filename[len(str(PACKAGE)) + 1 :], code.co_qualname)
        if code.co_qualname in self.begins:
            self.parts.append([])
        if here not in (part := self.parts[-1]) and not imports(frame):
            part.append(here)


def imports(frame: FrameType) -> bool:
    """Whether a call is made while a module of ours is imported, by a decorator for example."""
    above = frame.f_back
    while above is not None:
        if above.f_code.co_name == "<module>" and above.f_code.co_filename.startswith(str(PACKAGE)):
            return True
        above = above.f_back
    return False


def counted(trace: Trace) -> dict[str, Any]:
    """Files and functions of the parts of a trace, and the walk's climbs and returns."""
    before, batch = trace.parts[0], trace.parts[min(BATCH, len(trace.parts) - 2)]
    whole = list(dict.fromkeys(call for part in trace.parts for call in part))
    walk = [file for at, (file, _) in enumerate(whole) if not at or file != whole[at - 1][0]]
    floors = [FLOORS.index(file.split("/")[0].removesuffix(".py")) for file in walk]
    return {
        "before": [len({file for file, _ in before}), len(before)],
        "batch": [len({file for file, _ in batch}), len(batch)],
        "all": [len(set(walk)), len(whole)],
        "climbs": sum(after > here for here, after in pairwise(floors)),
        "returns": len(walk) - len(set(walk)),
        "files": list(dict.fromkeys(file for file, _ in before)),
        "batch_files": list(dict.fromkeys(file for file, _ in batch)),
    }


def of_command(folder: Path, *words: str) -> None:
    """Carry out `rollalloc` with these words."""
    from rollalloc.cli import main

    sys.argv = ["rollalloc", *words, "--out", str(folder / "run")]
    try:
        main()
    except SystemExit as ended:
        if ended.code:
            raise


def own_model(folder: Path) -> tuple[str, ...]:
    """Words that name a tiny model, prompts and a reward, made in the folder."""
    from rollalloc.tasks import sort
    from rollalloc.tasks.tiny import WarmUp

    made = sort.prepare(
        folder, sort.SortConfig(symbols=6, train=24, heldout=12, warm_up=WarmUp(steps=2, batch=4, rise=1))
    )
    given = {"model": made.model, "prompts": made.train, "heldout": made.heldout, "reward": made.reward}
    words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    return (*words, "--max-new-tokens", "4", "--max-rollouts", "320", "--device", "cpu", "--eval-every", "160")


def trl(folder: Path, _: Sequence[str]) -> None:
    """Train with TRL's trainer under GRPO for some steps."""
    from datasets import Dataset
    from trl import GRPOConfig

    from rollalloc.drivers.trl.trainer import AllocatedGRPOTrainer
    from rollalloc.recipes.grpo import grpo

    settings = GRPOConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=16,
        num_generations=4,
        max_completion_length=4,
        max_steps=6,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        bf16=False,
        disable_tqdm=True,
    )
    data = Dataset.from_list([{"prompt": f"s{at % 6} s{at // 6} ="} for at in range(24)])
    AllocatedGRPOTrainer(
        model=str(folder / "model"),
        reward_funcs=lambda completions, **_: [float(len(text) % 2) for text in completions],
        args=settings,
        train_dataset=data,
        recipe=grpo(groups=4, n=4),
    ).train()


LOOP = ("Loop._train", "Loop._train_on")
PROGRAMS: Mapping[str, tuple[tuple[str, ...], Callable[[Path, Sequence[str]], None]]] = {
    "train": (LOOP, lambda folder, own: of_command(folder, "train", *own)),
    "compare": (
        LOOP,
        lambda folder, own: of_command(
            folder, "compare", *own, "--recipes", "grpo", "--seeds", "0", "--processes", "1"
        ),
    ),
    "trl": (("AllocatedGRPOTrainer._generate_and_score_completions",), trl),
}


def traced(name: str) -> dict[str, Any]:
    """Carry out a program in this process under the tracer."""
    begins, program = PROGRAMS[name]
    trace = Trace(begins)
    with tempfile.TemporaryDirectory() as folder:
        own = own_model(Path(folder))
        threading.setprofile(trace)
        sys.setprofile(trace)
        try:
            program(Path(folder), own)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
    return counted(trace)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", action="store_true", help="the files that a reader meets, too")
    parser.add_argument("--one", choices=PROGRAMS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        found = traced(given.one)
        print(json.dumps(found), file=sys.stderr)
        return 0
    wrong = 0
    for name, bounds in BOUNDS.items():
        command = [sys.executable, __file__, "--one", name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"{name} failed:\n{done.stderr[-3000:]}")
            return 1
        found = json.loads(done.stderr.splitlines()[-1])
        said = [f"{part} {found[part][0]} files, {found[part][1]} functions" for part in bounds]
        print(f"{name}: {'; '.join(said)}; {found['climbs']} climbs, {found['returns']} returns")
        for part in ("files", "batch_files") if given.files else ():
            print(f"  {part}: {' '.join(found[part])}")
        for part, most in bounds.items():
            if found[part][0] > most:
                wrong += 1
                print(f"  {part}: expected at most {most} files, got {found[part][0]}; join what is only read together")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
