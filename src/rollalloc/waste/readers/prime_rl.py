"""Reader for the traces of prime-rl and of verifiers' `vf-eval`: each line is an episode, or one trace of an episode.

Both write episodes in the format of the Python package `verifiers`. prime-rl also writes the id of each episode's group.
Traces of evaluations have no such id: their groups are the rollouts of one task in one run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from rollalloc.waste.groups import Gathering, Log, key_of
from rollalloc.waste.readers.shared import (
    Fields,
    Files,
    Format,
    Options,
    by_suffix,
    count,
    inside,
    message_text,
    names,
    number,
    objects,
    said,
    text,
    whole,
)

_TOKENS = ("max_input_tokens", "max_output_tokens", "max_total_tokens", "context_length")
_LIMITS = (*_TOKENS, "max_turns", "compaction_failed")  # reasons for stopping a rollout that the model had not ended
_VERSION = 1  # version of verifiers' traces
_NO_TRACE: Fields = {"rewards": {}, "ok": False}  # stands for the trace of an episode that failed before it had one


_Group = tuple[str, ...]


class _Place(NamedTuple):
    """The group, prompt and step of an episode."""

    group: _Group
    prompt: str
    step: int | None


@dataclass(slots=True)
class _Traces:
    """The state while traces are read.

    Attributes:
        wanted: reward names that the user chose; empty: sum all rewards.
        all_rows: whether traces of evaluations are counted too.
        rewards: names of the rewards that were summed.
        seen: ids of the traces so far.
        repeated: number of traces with an id that was seen before.
        evaluations: number of evaluation traces that were left out.
        of_run: True: count the traces of a separate evaluation. False: count those of a training run.
        metrics: names of the metrics that were logged in addition to rewards.
        errors: number of failed traces, by the type of the error.
        turns: number of turns of each trace with a score.
        environment_of: the environment of each task, by the task's key, because tasks of two environments may have the
            same key.
        agents: the names of the agents whose traces each group has.
        traceless: the failed episodes without a trace, which belong to the agents of their group.
    """

    log: Log
    wanted: tuple[str, ...]
    all_rows: bool
    gathering: Gathering = field(default_factory=Gathering)
    rewards: dict[str, None] = field(default_factory=dict)
    seen: set[int] = field(default_factory=set)
    repeated: int = 0
    evaluations: int = 0
    of_run: bool = False
    metrics: dict[str, None] = field(default_factory=dict)
    errors: Counter[str] = field(default_factory=Counter)
    turns: list[int] = field(default_factory=list)
    environment_of: dict[str, str] = field(default_factory=dict)
    agents: dict[_Group, dict[str, None]] = field(default_factory=dict)
    traceless: list[_Place] = field(default_factory=list)


def _read(files: Files, log: Log, options: Options) -> None:
    _read_traces(files, log, _Traces(log, options.rewards, options.all_rows))


def _read_evaluation(files: Files, log: Log, options: Options) -> None:
    _read_traces(files, log, _Traces(log, options.rewards, all_rows=True, of_run=True))
    if log.groups is not None and len(log.groups) and log.groups.size_V.max() == 1:
        log.notes.append(
            "every task has a single rollout, so there are no groups; evaluate with, say, --num-rollouts 4"
        )


def _read_traces(files: Files, log: Log, traces: _Traces) -> None:
    """Read the traces of files into a log."""
    effective = False
    for file in files:
        effective |= file.parent.name == "effective"
        named = next((part[5:] for part in file.parts if part.startswith("step_")), "")
        step = int(named) if named.isdecimal() else None
        for where, record in objects(file, log):
            of_record = record["traces"] if isinstance(record.get("traces"), list) else [record]
            if not of_record and isinstance(record.get("task"), dict):  # the episode failed before it had a trace
                of_record = [_NO_TRACE]
            for trace in of_record:
                problem = _add(record, trace, file, where, step, traces)
                if problem is not None:
                    log.reject(where, problem)
    for place in traces.traceless:
        for agent in traces.agents.get(place.group, {"": None}):
            traces.gathering.add((*place.group, agent), place.prompt, place.step, None, truncated=False)
    log.groups = traces.gathering.groups()
    log.notes.append(f"reward: {names(traces.rewards, ' + ') or 'none'}, each times its weight")
    if unread := traces.metrics.keys() - traces.rewards.keys():
        log.notes.append(f"other metrics, to choose with --reward NAME: {names(sorted(unread))}")
    if traces.errors:
        some = names((f"{kind} ({number:,})" for kind, number in traces.errors.most_common()))
        log.notes.append(f"{traces.errors.total():,} traces failed and have no score: {some}")
    if traces.turns and max(traces.turns) > 1:
        log.notes.append(
            f"turns of a rollout: {fmean(traces.turns):.1f} on average, {max(traces.turns)} in the longest"
        )
    if traces.evaluations:
        log.notes.append(
            f"{traces.evaluations:,} traces are of evaluations and were left out; --rows all counts them as training"
        )
    if traces.repeated:
        log.notes.append(f"{traces.repeated:,} traces repeat the id of another and were left out")
    if effective:
        log.complete = False
        log.notes.append("these are prime-rl's effective traces, without the groups that were filtered out, so the true "
                         "waste may be higher; the folder `all` beside them has every group")  # fmt: skip


def _add(record: Fields, trace: Any, file: Path, where: str, step: int | None, traces: _Traces) -> str | None:
    """Add a trace's rollout. Return the problem with the trace, if there is one."""
    log = traces.log
    if not isinstance(trace, dict) or not isinstance(trace.get("rewards"), dict):
        return f"expected an episode of verifiers 0.4 with traces and rewards, found {names(record)}"
    if trace.get("version", _VERSION) != _VERSION:
        version = names([text(trace["version"])])
        return f"trace of version {version}, expected {_VERSION}, as verifiers 0.4 and prime-rl 0.7 to 0.9 write it"
    agent = inside(trace, "agent")
    if agent.get("trainable") is False:
        return None
    if _kind(record) == "eval" and not traces.all_rows:
        traces.evaluations += 1
        return None
    if isinstance(name := trace.get("id"), str):
        if (mark := hash(name)) in traces.seen:
            traces.repeated += 1
            return None
        traces.seen.add(mark)
    task = inside(record, "task") or inside(trace, "task")
    place = _place(record, trace, task, file, where, step, traces)
    if place is None:
        return f"expected a group's id and a task, found {names(record)}"
    failed = trace.get("ok") is False or ("ok" not in trace and bool(trace.get("errors")))
    if failed:
        traces.errors[_error(record, trace)] += 1
    if trace is _NO_TRACE:
        traces.traceless.append(place)
        return None
    metrics = inside(trace, "metrics")
    known = metrics | trace["rewards"] if traces.wanted else trace["rewards"]
    rewards = {name: held for name, held in known.items() if name in (traces.wanted or known)}
    traces.rewards |= dict.fromkeys(rewards)
    traces.metrics |= dict.fromkeys(metrics)
    reward = None if failed else _reward(rewards, log, where)
    sampled = [inside(node, "message") for node in _objects(trace, "nodes") if node.get("sampled") is True]
    if sampled and not failed:
        traces.turns.append(len(sampled))
    calls = [call for call in _objects(trace, "calls") if not call.get("error")]
    at_limit = trace.get("stop_condition") in _LIMITS or bool(calls and calls[-1].get("finish_reason") == "length")
    named = text(agent.get("name"))
    traces.agents.setdefault(place.group, {})[named] = None
    traces.gathering.add(
        (*place.group, named),
        place.prompt,
        place.step,
        reward,
        truncated=at_limit,
        tokens=_tokens(trace, log, where),
        asked=_asked(inside(task, "data")),
        answered=message_text([sampled[-1]]) if sampled else None,
    )
    return None


def _place(
    record: Fields, trace: Fields, task: Fields, file: Path, where: str, step: int | None, traces: _Traces
) -> _Place | None:
    """The group, prompt and step of an episode; None if it has no task, or no group's id although it needs one."""
    prompt = text(_first(task.get("key"), task.get("hash"), key_of(text(task.get("data")))))
    environment = text(inside(record, "env").get("id"))
    if traces.environment_of.setdefault(prompt, environment) != environment:
        prompt = f"{environment} {prompt}"
    named = _first(record.get("group_id"), inside(record, "info").get("group_id"), inside(record, "group").get("id"))
    run, ordered = inside(record, "run").get("id"), inside(record, "run", "work").get("step")
    if isinstance(named, (str, int)):
        # Another run may use the same id, and so may a later step. The step of the order is the same in the whole group.
        within = text(_first(run, str(file.parent)))
        group: _Group = (within, text(step if step is not None else ordered), str(named))
    elif traces.of_run and named is None:
        group = (text(_first(run, str(file))), prompt)  # without a run's id, each file is a run
    else:
        return None
    arrived = inside(trace, "info", "arrival").get("step", ordered)
    step = whole(arrived, traces.log, where, "step") if step is None else step
    return _Place(group, prompt, step) if task else None


def _first(*values: Any) -> Any:
    """The first value that is not None, or None. An id may be 0."""
    return next((value for value in values if value is not None), None)


def _objects(record: Fields, name: str) -> list[Fields]:
    """The objects of a list in a record; empty if there is no such list."""
    items = record.get(name)
    return [item for item in items if isinstance(item, dict)] if isinstance(items, list) else []


def _tokens(trace: Fields, log: Log, where: str) -> int | None:
    """Number of tokens that the model generated in all turns. prime-rl 0.8 writes these numbers only for each call."""
    if "num_output_tokens" in trace:
        return count(trace["num_output_tokens"], log, where, "num_output_tokens")
    usages = [usage for call in _objects(trace, "calls") if (usage := inside(call, "usage"))]
    counts = [count(usage.get("completion_tokens"), log, where, "completion_tokens") for usage in usages]
    known = [tokens for tokens in counts if tokens is not None]
    return sum(known) if known else None


def _asked(data: Fields) -> str | None:
    """The text of a task's prompt; None if it has none."""
    prompt = data.get("prompt")
    return None if prompt is None else "\n".join(filter(None, (said(data.get("system_prompt")), message_text(prompt))))


def _error(record: Fields, trace: Fields) -> str:
    """The type of the newest error of a trace, or of its episode."""
    errors = [*_objects(record, "errors"), *_objects(trace, "errors")]
    return text(errors[-1].get("type")) if errors else "no reason given"


def _kind(record: Fields) -> Any:
    run = inside(record, "run")
    return record.get("kind") or inside(run, "work").get("type") or run.get("type")


def _reward(rewards: Fields, log: Log, where: str) -> float | None:
    """The weighted sum of the rewards; None if none has a score. A reward is a number, or an object of score and weight."""
    known: list[float] = []
    for name, reward in rewards.items():
        label = f"reward {names([name])}"
        if isinstance(reward, dict):
            score = number(reward.get("score"), log, where, label)
            weight = number(reward.get("weight", 1.0), log, where, f"weight of {label}")
        else:
            score, weight = number(reward, log, where, label), 1.0
        if score is not None:
            known.append(score * (weight or 0.0))
    return number(sum(known), log, where, "sum of rewards") if known else None


def _choose(files: Sequence[Path]) -> list[Path]:
    """The files with all training traces, if there are any; otherwise those with the traces that were trained on."""
    training = [
        file for file in by_suffix(files, ".jsonl") if "eval" not in file.parts and not file.name.startswith("metrics.")
    ]
    everything = [file for file in training if file.parent.name in ("all", "stream")]
    return everything or training


def _is_evaluation(line: Fields) -> bool:
    """Whether a line is from an evaluation outside of training, or has the format of verifiers before 0.4."""
    run = inside(line, "run")
    own = "traces" in line and run.get("type") == "eval" and "work" not in run
    return own or {"example_id", "reward"} <= line.keys()


def _choose_evaluation(files: Sequence[Path]) -> list[Path]:
    lines = by_suffix(files, ".jsonl")
    return [file for file in lines if file.name.startswith(("traces.", "results.")) or file.parent.name == "stream"]


VERIFIERS = Format(
    "traces.jsonl of verifiers 0.4's `vf-eval`", _choose_evaluation, _read_evaluation, _is_evaluation, ("reward",)
)
FORMAT = Format(
    "rollouts/step_*/train/all/traces.jsonl or traces/stream/*.jsonl",
    _choose,
    _read,
    lambda line: "traces" in line or ("rewards" in line and "task" in line),
    ("reward", "rows"),
)
