"""A rung of the ladder on a GPU: what a language model of its size pays for the same accuracy under each method.

**The rungs have not been run on a GPU yet.** The speed was measured on an H100 (docs/models.md).
The tests run a tiny rung on a CPU.

    rollalloc data prepare gsm8k --out runs/tasks/ladder/data
    python benchmarks/gpu.py OUT --rung qwen2.5-0.5b-gsm8k --minutes 24

A rung is a file: those beside this one, in rungs/, those of `rollalloc bench --tier ladder`, or one of your own. It names
its model, on the hub or here, its questions, its budget and its target. Every method of the ladder is run by its defaults,
under a frozen plan. Before that it measures tokens per second, against `model.generate`, and the share of what the memory's
bandwidth allows. OUT gets `speed.json`, `plan.json`, `leaderboard.md` and `.html`, and the metrics of each run. If it is
killed or its time is up, the same command goes on. Exit code 0 means that all of it is done, 3 that it is not.

Without a network, smollm2-filter and smollm2-stories need two folders that are made where there is one, and brought:

    rollalloc data chat filter stories --out runs/tasks/ladder/data/chat    # needs reasoning-gym, which scoring does not
    rollalloc model smollm2 runs/tasks/ladder/smollm2
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from transformers import GenerationConfig

from rollalloc.cli.bench import BenchProgress
from rollalloc.data.prompts import EncodedPrompts, encode_prompts, load_prompts
from rollalloc.files.atomic import write_text
from rollalloc.generate.sampler import Request, generate
from rollalloc.generate.sampling import Sampling
from rollalloc.lab.bench.contestants import BASELINE
from rollalloc.lab.bench.leaderboard import run_leaderboard
from rollalloc.lab.bench.plan import TABLE, Plan, TaskPlan, freeze, plan_of_rung
from rollalloc.lab.bench.pool import RunsFailed
from rollalloc.lab.bench.presets import fields_of
from rollalloc.lab.bench.rungs import RUNGS, LadderRung, read_rung
from rollalloc.lab.bench.tasks import ladder
from rollalloc.lab.bench.tasks.files import TaskFiles
from rollalloc.lab.report.leaderboard import write_leaderboard
from rollalloc.models.behaviour import Behaviour
from rollalloc.models.dtypes import Precision, SamplingDtype
from rollalloc.models.features import weights_digest
from rollalloc.models.likelihood import padded
from rollalloc.models.policy import Policy, usable_device
from rollalloc.processes.stopping import Stopped, StopRequest
from rollalloc.train.config import Config

BESIDE = Path(__file__).parent / "rungs"
SPEED = "speed.json"
_UNFINISHED = 3  # exit code


@dataclass(frozen=True, slots=True)
class Asked:
    """What is timed: prompts × rollouts × tokens that are sampled, and bytes that are copied."""

    prompts: int
    rollouts: int
    tokens: int
    copied: int


ON_GPU, ON_CPU = Asked(64, 8, 32, 1 << 30), Asked(4, 2, 8, 1 << 24)


# ------------------------------------------------------------------------------------------------------------ its speed


def measured(policy: Policy, prompts: EncodedPrompts, asked: Asked) -> dict[str, Any]:
    """Tokens a second while sampling, no rollout ending before its last token, and what bounds them.

    A decoding step reads every weight and every row's keys and values once: rows · bandwidth / bytes is the most tokens a
    second that the memory allows. The bandwidth is that of a copy, bytes read and written. Decoding is the difference
    between long and short rollouts, which have the same prefill.
    """
    device, count, each, length = policy.model.device, asked.prompts, asked.rollouts, asked.tokens
    tokens = [prompts.tokens[at % len(prompts.tokens)] for at in range(count)]
    requests = [Request(at, few, tuple(range(at * each, (at + 1) * each))) for at, few in enumerate(tokens)]
    bandwidth = _bandwidth(device, asked.copied)
    found: dict[str, Any] = {"prompts": count, "rollouts": each, "tokens": length, "bandwidth_gb_s": bandwidth / 1e9}
    for dtype in ("float32", "bfloat16") if device.type == "cuda" else ("float32",):
        model = Behaviour(policy, dtype).policy().model

        def ours(length: int, model: Any = model) -> object:
            return generate(model, requests, Sampling(length), eos_ids=(), pad_id=policy.pad_id, seed=0)

        def theirs(model: Any = model) -> object:
            rows = [few for few in tokens for _ in range(each)]
            ids_BP, mask_BP = padded(rows, policy.pad_id, side="left", device=device)
            config = GenerationConfig(
                max_new_tokens=length, min_new_tokens=length, do_sample=True, top_k=0, pad_token_id=policy.pad_id
            )
            with torch.inference_mode():
                return model.generate(ids_BP, attention_mask=mask_BP.long(), generation_config=config)

        ways: dict[str, Callable[[], object]] = {
            "ours": partial(ours, length),
            "one_token": partial(ours, 1),
            "generate": theirs,
        }
        seconds = _best(ways, device)
        rows, context = count * each, float(np.mean([len(few) for few in tokens])) + length / 2
        decoding = rows * (length - 1) / max(1e-9, seconds["ours"] - seconds["one_token"])
        most = rows * bandwidth / (_weight_bytes(model) + rows * context * _cache_bytes(model))
        found[dtype] = {
            "tokens_per_s": rows * length / seconds["ours"],
            "against_generate": seconds["generate"] / seconds["ours"],
            "decoding_tokens_per_s": decoding,
            "bandwidth_share": decoding / most,
        }
    return found


def _best(ways: Mapping[str, Callable[[], object]], device: torch.device, repeats: int = 3) -> dict[str, float]:
    """The shortest of the times of each, taken in turn; what is done once warms up."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats + 1):
        for name, way in ways.items():
            started = time.perf_counter()
            way()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            taken[name].append(time.perf_counter() - started)
    return {name: min(seconds[1:]) for name, seconds in taken.items()}


def _bandwidth(device: torch.device, size: int) -> float:
    """Bytes a second that a copy reads and writes."""
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    to = torch.empty_like(source)
    return 2 * size / _best({"copy": lambda: to.copy_(source)}, device, repeats=10)["copy"]


def _weight_bytes(model: Any) -> int:
    """Of the matrices that a decoding step reads: of embeddings that are not the head's it reads a few rows."""
    unread = model.get_input_embeddings().weight
    head = model.get_output_embeddings().weight
    return sum(p.numel() * p.element_size() for p in model.parameters() if p is not unread or p is head)


def _cache_bytes(model: Any) -> int:
    """Of the keys and values of a token."""
    config = model.config.get_text_config()
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * config.num_key_value_heads * width * model.dtype.itemsize


def said(speed: Mapping[str, Any]) -> str:
    """The speed as Markdown."""
    what = f"{speed['prompts']} × {speed['rollouts']} rollouts of {speed['tokens']} tokens"
    lines = [
        f"{what} on {speed['device']}; a copy moves {speed['bandwidth_gb_s']:,.0f} GB/s",
        "",
        "| weights | tokens/s, prefill included | `generate`'s time over ours | decoding | of the bandwidth's limit |",
        "|---|---|---|---|---|",
    ]
    for dtype in ("float32", "bfloat16"):
        if dtype in speed:
            one = speed[dtype]
            figures = (
                f"{one['tokens_per_s']:,.0f} | {one['against_generate']:.2f} | {one['decoding_tokens_per_s']:,.0f}"
            )
            lines.append(f"| {dtype} | {figures} | {one['bandwidth_share']:.1%} |")
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------------------------- the runs


def rung_of(name: str) -> LadderRung:
    """A rung by the name of its file beside this one, by its name in the package, or by a path.

    Raises:
        ValueError: there is none.
    """
    beside = {file.stem: file for file in sorted(BESIDE.glob("*.toml"))}
    if name in RUNGS:
        return RUNGS[name]
    if name not in beside and not name.endswith(".toml"):
        raise ValueError(f"unknown rung {name!r}; there are {', '.join((*beside, *RUNGS))}, or give a file, *.toml")
    return read_rung(beside.get(name, Path(name)))


def base_run(
    task: TaskPlan, _: Path, *, files: TaskFiles, device: str, dtype: SamplingDtype, precision: Precision
) -> Config:
    """A run on the rung; recipe, seed and setting are replaced."""
    return Config(
        **fields_of(files) | {"device": device},
        recipe=BASELINE,
        max_rollouts=task.budget,
        task=task.name,
        sampling=Sampling(files.max_new_tokens),
        sampling_dtype=dtype,
        precision=precision,
        eval_every=task.eval_every,
        eval_samples=task.eval_samples,
        checkpoint_minutes=3.0,
        keep_checkpoints=1,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rung", required=True, help="of rungs/, of the package, or a file")
    parser.add_argument("--tasks", type=Path, default=Path("runs/tasks"), help="where questions and models are kept")
    parser.add_argument("--minutes", type=float, help="after which it stops, to go on when it is called again")
    parser.add_argument("--processes", type=int, help="runs at a time; default: 1 on a GPU, else one a core")
    parser.add_argument("--methods", default="", help="comma-separated, grpo among them; default: the ladder's")
    parser.add_argument("--device", help="default: the rung's, or a GPU where there is one")
    given = parser.parse_args()
    try:
        sys.exit(carried_out(given))
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        sys.exit(f"{type(error).__name__}: {error}")


def carried_out(given: argparse.Namespace) -> int:
    started, rung = time.monotonic(), rung_of(given.rung)
    if given.minutes is not None and not given.minutes > 0:
        raise ValueError(f"--minutes must be above 0, got {given.minutes}")
    if given.processes is not None and given.processes < 1:
        raise ValueError(f"--processes must be at least 1, got {given.processes}")
    device = usable_device(given.device or rung.run.device)
    on_gpu = device.startswith("cuda")
    plan = plan_of_rung(rung, recipes=[name for name in given.methods.split(",") if name])
    files = ladder.prepare(given.tasks / "ladder", rung)
    policy = Policy.load(str(files.model), device=device)
    called = torch.cuda.get_device_name(device) if on_gpu else f"{device}, {torch.get_num_threads()} threads"
    # Sampling in half precision pays on a GPU; few CPUs compute in it.
    dtype: SamplingDtype = "bfloat16" if on_gpu else "float32"
    made = {
        "model": f"{Path(str(files.model)).name}, {policy.model.num_parameters():,} parameters",
        "weights": weights_digest(policy.model),
        "device": called,
        "sampled in": dtype,
    }
    plan = replace(plan, made_with={**plan.made_with, **made})
    freeze(plan, given.out)
    if not (given.out / SPEED).exists():
        prompts = encode_prompts(load_prompts(files.train), policy.tokenizer, context=policy.context)
        speed = measured(policy, prompts, ON_GPU if on_gpu else ON_CPU)
        write_text(given.out / SPEED, json.dumps({"device": called, **speed}, indent=1))
    print(f"model: {made['model']}\n{said(json.loads((given.out / SPEED).read_text()))}", flush=True)
    del policy  # the runs load it themselves
    base = partial(base_run, files=files, device=device, dtype=dtype, precision=rung.run.precision)
    processes = given.processes or (1 if on_gpu else os.cpu_count() or 1)
    left = None if given.minutes is None else 60 * given.minutes - (time.monotonic() - started)
    why = _run(plan, given.out, base, processes, left)
    board = write_leaderboard(given.out)
    print((given.out / TABLE).read_text(), flush=True)
    if why is not None or board.missing:
        print(f"{why or 'not finished'}; {board.missing} runs are missing", file=sys.stderr)
        return _UNFINISHED
    return 0


def _run(plan: Plan, out: Path, base: Any, processes: int, left_s: float | None) -> str | None:
    """Carry out the plan, or what is left of it; says why it did not come to its end."""
    stop = StopRequest()
    clock = threading.Timer(min(threading.TIMEOUT_MAX, max(0.0, inf if left_s is None else left_s)), _ask, (stop,))
    clock.daemon = True
    clock.start()
    try:
        with BenchProgress(Console(stderr=True)) as shown:
            run_leaderboard(plan, out, out, processes=processes, watcher=shown.show, base_of=base, stop=stop)
    except Stopped as stopped:
        return str(stopped)
    except RunsFailed as failed:
        return f"some runs failed: {failed}"
    finally:
        clock.cancel()
    return None


def _ask(stop: StopRequest) -> None:
    """Time is up: ask as a person would, by a signal."""
    stop.by = stop.by or signal.SIGTERM


if __name__ == "__main__":
    main()
