"""Finished runs that were made elsewhere: put beside our own as what they are, refused by name where they do not match."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollalloc.cli.bench import bench
from rollalloc.files.claims import HIDDEN, Lock
from rollalloc.generate.sampling import Sampling
from rollalloc.lab.bench import added as adding
from rollalloc.lab.bench.added import add, added_in
from rollalloc.lab.bench.cells import board_of
from rollalloc.lab.bench.leaderboard import settings_in
from rollalloc.lab.bench.plan import DIVERGED, KIND, PAGE, PLAN, TABLE, Plan, freeze, make_plan, place_of
from rollalloc.lab.report.leaderboard import write_leaderboard
from rollalloc.runs.files import digest_of
from rollalloc.runs.whole import refuse_unfinished
from rollalloc.train.description import Run, Source
from rollalloc.train.settings import Settings

OURS = make_plan("smoke", tracks=["defaults"])
[TASK] = OURS.tasks
ELSEWHERE = {"rollalloc": "9.8.7", "torch": "6.5.4", "processor": "a made-up processor", "device": "a made-up GPU"}
THEIRS = replace(OURS, tasks=(replace(TASK, name="ladder/theirs"),), default_seeds=(1, 2, 3), made_with=ELSEWHERE)
FIRST = "defaults/ladder-theirs/grpo-1"


def seal(place: Path) -> None:
    """Let the last line of a run's metrics have the digest of what stands there now."""
    path = place / "metrics.jsonl"
    *before, last = path.read_text().splitlines(keepends=True)
    path.write_text("".join(before))
    path.write_text("".join([*before, json.dumps(json.loads(last) | {"digest": digest_of(place)}) + "\n"]))


def metrics_of(seed: int, kind: str = "end") -> list[dict[str, Any]]:
    """Of a run that pays 128 rollouts in two batches, on a grid of 32."""

    def spent(paid: int) -> dict[str, Any]:
        said = {"rollouts_paid": paid, "tokens_paid": 3 * paid + seed, "seconds": paid / 10 + seed / 7}
        return {**said, "accounts": {"trained": paid}, "optimizer_steps": paid // 64, "version": paid // 64}

    def evaluation(at: int | None, made: int) -> dict[str, Any]:
        return {"kind": "eval", **spent(made), "at": at, "accuracy": made / 128, "standard_error": 0.0}

    lines = [evaluation(0, 0), evaluation(32, 0), {"kind": "batch", "batch": 1, **spent(64)}]
    lines += [evaluation(64, 64), evaluation(96, 64), {"kind": "batch", "batch": 2, **spent(128)}]
    why = "the budget of 128 rollouts is spent" if kind == "end" else "FloatingPointError: the weights diverged"
    return [*lines, evaluation(128, 128), evaluation(None, 128), {"kind": kind, "why": why, **spent(128)}]


def write_runs(folder: Path, plan: Plan) -> Path:
    """A leaderboard of one track that was carried out."""
    freeze(plan, folder)
    [task], [track] = plan.tasks, plan.tracks
    for each in plan.contestants:
        for at, seed in enumerate(plan.seeds_of(track, task)):
            tuned, *_ = settings_in(plan, track, task, each)
            run = Run(
                source=Source(model="m", prompts=("p",), heldout="h", reward="a:b"),
                recipe=each.recipe,
                parameters=tuned.parameters,
                settings=Settings(
                    sampling=Sampling(3),
                    seed=seed,
                    eval_every=32,
                    eval_samples=task.eval_samples,
                    learning_rate=tuned.learning_rate,
                    **tuned.optimizer,
                ),
                max_rollouts=task.budget,
                label=each.label,
                task=task.name,
            )
            place = folder / place_of(track, task, each.label, seed)
            place.mkdir(parents=True)
            described = run.description() | {"digests": {"p": "0" * 64, "h": "1" * 64, "a.py": "2" * 64}}
            (place / "run.json").write_text(json.dumps(described))
            lines = metrics_of(100 * plan.contestants.index(each) + at + len(task.name))
            (place / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
            seal(place)
    return folder


@pytest.fixture
def out(tmp_path):
    return write_runs(tmp_path / "ours", OURS)


@pytest.fixture
def theirs(tmp_path):
    return write_runs(tmp_path / "theirs", THEIRS)


def contents(folder: Path) -> dict[str, bytes]:
    return {
        file.relative_to(folder).as_posix(): file.read_bytes()
        for file in sorted(folder.rglob("*"))
        if file.is_file() and file.suffix != ".lock"
    }


def edited(path: Path, change: Callable[[Any], Any]) -> None:
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


def changed(name: str, value: Any, at: int = -1, *, sealed: bool = True, run: str = FIRST) -> Callable[[Path], None]:
    """A value in a line of a run's metrics."""

    def tamper(folder: Path) -> None:
        path = folder / run / "metrics.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        lines[at][name] = value
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        if sealed:
            seal(folder / run)

    return tamper


def rearranged(change: Callable[[list[str]], list[str]]) -> Callable[[Path], None]:
    """The lines of a run's metrics, which say again that they are whole."""

    def tamper(folder: Path) -> None:
        path = folder / FIRST / "metrics.jsonl"
        path.write_text("".join(change(path.read_text().splitlines(keepends=True))))
        seal(folder / FIRST)

    return tamper


def described(change: Callable[[dict[str, Any]], Any], run: str = FIRST) -> Callable[[Path], None]:
    """What a run was told to do; its metrics say that this is whole."""

    def tamper(folder: Path) -> None:
        def made(found: dict[str, Any]) -> dict[str, Any]:
            change(found)
            return found

        edited(folder / run / "run.json", made)
        seal(folder / run)

    return tamper


def planned(plan: Plan) -> Callable[[Path], None]:
    """Another plan in the place of theirs, frozen as it should be."""

    def tamper(folder: Path) -> None:
        saved = json.loads((folder / PLAN).read_text())
        (folder / PLAN).write_text(json.dumps(saved | {"plan": plan.described(), "digest": plan.digest}))

    return tamper


def written(name: str, text: str) -> Callable[[Path], None]:
    def tamper(folder: Path) -> None:
        (folder / name).write_text(text)

    return tamper


def relinked(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.with_name("nowhere"))


def another_in_the_plan(**changes: Any) -> Callable[[Path], None]:
    [task] = THEIRS.tasks
    return planned(replace(THEIRS, tasks=(replace(task, **changes),)))


def copied(folder: Path) -> None:
    """One run under two seeds."""
    other = folder / "defaults/ladder-theirs/grpo-2"
    shutil.rmtree(other)
    shutil.copytree(folder / FIRST, other)
    described(lambda run: run["settings"].update(seed=2), "defaults/ladder-theirs/grpo-2")(folder)


def test_what_matches_stands_beside_our_own_as_what_it_is(out, theirs):
    before = contents(out)
    (theirs / "notes.txt").write_text("not ours to take")
    name = add(theirs, out)
    assert [each.name for each in added_in(out)] == [name] == [f"added-{THEIRS.digest[:12]}"]
    assert before.items() - contents(out).items() == {
        (f"{HIDDEN}/{KIND}-manifest.json", before[f"{HIDDEN}/{KIND}-manifest.json"])
    }
    kept = contents(out / name)
    assert "notes.txt" not in kept
    assert {file: kept[file] for file in kept if file.startswith("defaults")} == {
        file: content for file, content in contents(theirs).items() if file.startswith("defaults")
    }
    board = write_leaderboard(out)
    assert board.missing == board.added[name].missing == 0
    text = (out / TABLE).read_text()
    assert f"| method | sort | ladder/theirs, {name} |" in text
    assert f"{name}: made elsewhere on a made-up GPU by rollalloc 9.8.7 and torch 6.5.4, by a plan frozen" in text
    assert "| grpo | 0 of 2 |" in text
    assert "| grpo | 0 of 3 |" in text
    assert f"- {name}, device: a made-up GPU" in text
    assert f"ladder/theirs, {name}" in (out / PAGE).read_text()
    with pytest.raises(ValueError, match="was added before, as"):
        add(theirs, out)


def test_runs_of_the_tuned_track_are_added_too(tmp_path):
    """Their optimizer has no clipping by a running mean, which a description leaves out."""
    ours = make_plan("smoke", tracks=["tuned"])
    out = write_runs(tmp_path / "ours", ours)
    theirs = replace(ours, tasks=(replace(TASK, name="ladder/theirs"),), made_with=ELSEWHERE)
    name = add(write_runs(tmp_path / "theirs", theirs), out)
    assert write_leaderboard(out).added[name].missing == 0


def test_the_command_adds_and_takes_nothing_else(out, theirs, capsys):
    bench(what=["add", str(theirs)], out=out)
    assert "is whole and matches its plan: it is now" in " ".join(capsys.readouterr().err.split())
    assert "ladder/theirs" in (out / TABLE).read_text()
    with pytest.raises(ValueError, match="expected options, or add FOLDER, got 'ad x'"):
        bench(what=["ad", "x"], out=out)
    for other in ({"plan": True}, {"tier": "full"}, {"task_folder": out}):
        with pytest.raises(ValueError, match="add takes --out and no other option"):
            bench(what=["add", "x"], out=out, **other)


PLANS = {
    "changed after it was frozen": (
        lambda folder: edited(folder / PLAN, lambda saved: saved | {"plan": saved["plan"] | {"tier": "full"}}),
        "was changed since it was frozen",
    ),
    "ours": (planned(OURS), "is this leaderboard's own: go on in its folder"),
    "another method under a label": (
        planned(
            replace(THEIRS, contestants=(replace(OURS.contestants[0], defaults={"groups": 1}), OURS.contestants[1]))
        ),
        "has another method under the label grpo: grpo.defaults",
    ),
    "another file of a method": (
        planned(replace(THEIRS, contestants=(replace(OURS.contestants[0], contents="ab"), OURS.contestants[1]))),
        "has another method under the label grpo: grpo.contents",
    ),
    "a method that is not compared": (
        planned(replace(THEIRS, contestants=(*OURS.contestants, replace(OURS.contestants[1], label="mine")))),
        "has the method mine, which is none of grpo, reinforce",
    ),
    "no baseline": (planned(replace(THEIRS, contestants=OURS.contestants[1:])), "has no grpo"),
    "no track": (planned(replace(THEIRS, tracks=([],))), r"has the tracks \[\[\]\]"),  # pyright: ignore
    "another track": (planned(replace(THEIRS, tracks=("tuned",))), r"has the tracks \['tuned'\]"),
    "a task of ours with another budget": (
        another_in_the_plan(name="sort", budget=64),
        "another for a task of this lead",
    ),
    "a rung of ours that is another": (another_in_the_plan(name="ladder/1m", rung="ab"), "another rung under the name"),
    "other seeds for a task of ours": (
        another_in_the_plan(name="sort"),
        r"has the seeds \[1, 2, 3\] for sort, expected",
    ),
    "a seed twice": (planned(replace(THEIRS, default_seeds=(1, 2, 2))), r"has the seeds \[1, 2, 2\].*each once"),
    "more than anybody runs": (
        planned(replace(THEIRS, default_seeds=tuple(range(2000, 10**4)))),
        "has [0-9,]+ final runs a track",
    ),
    "a way out": (another_in_the_plan(name="../../x"), "which no folder may have"),
    "escapes": (another_in_the_plan(name="x\x1b[2J"), "has the name 'x.x1b.2J'"),
    "a budget that is none": (another_in_the_plan(budget=0), "that is no number above 0"),
    "a target that is none": (another_in_the_plan(target=float("nan")), "that is no number above 0"),
    "a budget of text": (another_in_the_plan(budget="128"), "that is no number above 0"),
    "no machine": (
        planned(replace(THEIRS, made_with={"rollalloc": "1", "torch": "1"})),
        "does not say on what machine",
    ),
    "a list for a version": (planned(replace(THEIRS, made_with=ELSEWHERE | {"torch": []})), "does not say what it was"),  # pyright: ignore
    "more than is shown": (
        planned(replace(THEIRS, made_with=ELSEWHERE | {"notes": "x" * 10_000})),
        "does not say what it was made with",
    ),
    "escapes in a digest": (
        lambda folder: edited(folder / PLAN, lambda saved: saved | {"digest": "\x1b[2J\u202e"}),
        "was changed since it was frozen",
    ),
    "escapes in a field": (
        lambda folder: edited(
            folder / PLAN, lambda saved: saved | {"plan": saved["plan"] | {"tasks": [{"\x1b[2J": 1}]}}
        ),
        "is no plan of this version",
    ),
    "a link to nowhere": (lambda folder: relinked(folder / PLAN), "it is a link to a file that is not there"),
    "a list": (written(PLAN, "[]"), "is no plan of this version"),
    "cut": (written(PLAN, '{"schema": 2, "plan"'), "is no plan of this version"),
    "deep": (written(PLAN, "[" * 100_000), "is no plan of this version of rollalloc .RecursionError"),
}
RUNS = {
    "a seed that is not the plan's": (
        lambda folder: (folder / FIRST).rename(folder / "defaults/ladder-theirs/grpo-4"),
        "grpo-4 is none of its plan, by its seed or its name",
    ),
    "a seed left out": (lambda folder: shutil.rmtree(folder / FIRST), "1 of its 6 final runs are missing, as .*grpo-1"),
    "another seed in its place": (described(lambda run: run["settings"].update(seed=7)), "its seed is 7, and the plan"),
    "a run twice": (copied, "its curve is that of defaults/ladder-theirs/grpo-1, to the second"),
    "true for a seed": (described(lambda run: run["settings"].update(seed=True)), r"Settings.seed: expected int, got True"),
    "other samples of its evaluations": (
        described(lambda run: run["settings"].update(eval_samples=7)),
        "its target or the samples",
    ),
    "no end of its last line": (
        lambda folder: os.truncate(path := folder / FIRST / "metrics.jsonl", path.stat().st_size - 1),
        "its last line is not 'end'",
    ),
    "an evaluation after the last": (rearranged(lambda all: [*all[:-1], *all[-2:]]), "and the final weights last"),
    "fewer tokens at its end": (changed("tokens_paid", 0), "tokens_paid falls from"),
    "fewer seconds at an evaluation": (changed("seconds", 0.0, 3), "seconds falls|the batch before"),
    "another recipe": (described(lambda run: run.update(recipe="raft")), "its recipe is 'raft'"),
    "no clipping": (described(lambda run: run["settings"].update(adaptive_clip=None)), "none that the plan allows"),
    "a shortened budget": (described(lambda run: run.update(max_rollouts=64)), "its budget is 64, and the plan has 128"),
    "another rate": (described(lambda run: run["settings"].update(learning_rate=1.0)), "none that the plan allows"),
    "other parameters": (described(lambda run: run["parameters"].update(n=8)), "none that the plan allows"),
    "a target": (described(lambda run: run["settings"].update(target=0.5)), "its target or the samples"),
    "another sampling": (
        described(lambda run: run["settings"]["sampling"].update(temperature=0.5), "defaults/ladder-theirs/grpo-2"),
        "of another model, data or settings than defaults/ladder-theirs/grpo-1: run.json.settings.sampling",
    ),
    "a changed digest": (
        described(lambda run: run["digests"].update(p="3" * 64), "defaults/ladder-theirs/reinforce-3"),
        "reinforce-3: it is of another model, data or settings than .*run.json.digests.p",
    ),
    "no digest": (described(lambda run: run["digests"].pop("h")), "has no digest of 'h'"),
    "no SHA-256": (described(lambda run: run["digests"].update(h="x")), "no SHA-256 of each of its files"),
    "a changed digest, not sealed": (
        lambda folder: edited(folder / FIRST / "run.json", lambda run: run | {"digests": run["digests"] | {"x": "4" * 64}}),
        "was changed since it ended",
    ),
    "an edited accuracy": (changed("accuracy", 0.9, 3, sealed=False), "was changed since it ended: the digest is"),
    "no digest at its end": (changed("digest", None, sealed=False), "its last line has no digest"),
    "NaN": (changed("accuracy", float("nan"), 3), "metrics.jsonl:4 .*accuracy"),
    "no accuracy": (changed("accuracy", None, 3), "the accuracy at 64 is None"),
    "an accuracy beyond 1": (changed("accuracy", 1.5, 3), "the accuracy at 64 is 1.5"),
    "a point of the grid left out": (rearranged(lambda all: all[:4] + all[5:]), "an evaluation at 128, expected one at 96"),
    "a batch left out": (rearranged(lambda all: all[:2] + all[3:]), "after batch 0 comes 2, expected 1"),
    "a batch twice": (rearranged(lambda all: all[:3] + all[2:]), "comes again or too late, batch 1 after 1"),
    "a curve that was cut": (rearranged(lambda all: all[:4] + all[-1:]), "points of the grid up to 128"),
    "no end": (lambda folder: rearranged(lambda all: all[:-1])(folder), "its last line is not 'end'"),
    "more after the end": (rearranged(lambda all: [*all, all[-1]]), "line 9 is its end, and more follows"),
    "a line that was cut": (written(f"{FIRST}/metrics.jsonl", '{"kind": "ev'), "its last line is not 'end'"),
    "seconds that fall": (changed("seconds", 0.1, 5), "seconds falls from"),
    "an evaluation of other weights": (changed("optimizer_steps", 7, 4), "does not say what the batch before it had paid"),
    "weights from the future": (changed("rollouts_paid", 64, 1), "the accounts|are of 64 rollouts"),
    "accounts that do not sum": (changed("accounts", {"trained": 1}, 8), "line 9: the accounts do not sum to the 128"),
    "a cut description": (written(f"{FIRST}/run.json", "{"), "does not describe a run"),
    "a description that is deep": (written(f"{FIRST}/run.json", "[" * 100_000), "does not describe a run"),
    "a list for a description": (written(f"{FIRST}/run.json", "[]"), "does not describe a run"),
    "escapes in a label": (described(lambda run: run.update(label="\x1b[2J\u202e")), "its label is '.x1b.2J"),
    "one that diverged, they say": (
        written(DIVERGED, json.dumps({FIRST: "it did"})),
        "its last line is not 'failed'",
    ),
    "a list of those that diverged": (written(DIVERGED, "[]"), "does not say which runs diverged"),
    "a cut list of those that diverged": (written(DIVERGED, '{"a'), "does not say which runs diverged"),
    "a deep list of those that diverged": (written(DIVERGED, "[" * 100_000), "does not say which runs diverged"),
    "other bytes for those that diverged": (
        lambda folder: (folder / DIVERGED).write_bytes(b"\xff"),
        "does not say which runs diverged",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", [*PLANS, *RUNS])
def test_what_was_tampered_with_is_refused_and_nothing_is_changed(out, theirs, kind):
    tamper, said = (PLANS | RUNS)[kind]
    tamper(theirs)
    before, mine = contents(out), contents(theirs)
    with pytest.raises((ValueError, OSError), match=said) as caught:
        add(theirs, out)
    assert str(theirs) in str(caught.value)
    assert not {"\x1b", "\u202e"} & set(str(caught.value))
    assert contents(out) == before
    assert contents(theirs) == mine


def test_links_fifos_and_huge_files_are_not_read(out, theirs, tmp_path):
    before = contents(out)
    place, aside = theirs / FIRST, tmp_path / "aside"
    place.rename(aside)
    place.symlink_to(aside)
    with pytest.raises(ValueError, match="grpo-1: it is a link; put the folder itself there"):
        add(theirs, out)
    place.unlink()
    aside.rename(place)
    for name in ("run.json", "metrics.jsonl"):
        content = (place / name).read_bytes()
        (place / name).unlink()
        os.mkfifo(place / name)
        with pytest.raises(ValueError, match="expected a regular file, it is a FIFO"):
            add(theirs, out)
        (place / name).unlink()
        (tmp_path / name).write_bytes(content)
        (place / name).symlink_to(tmp_path / name)
        with pytest.raises(ValueError, match="a link that leads out of its folder"):
            add(theirs, out)
        (place / name).unlink()
        (place / name).write_bytes(content)
    os.truncate(place / "metrics.jsonl", 1 << 40)  # a hole, which takes no place
    with pytest.raises(ValueError, match=r"metrics\.jsonl has 1,099,511,627,776 bytes, expected at most"):
        add(theirs, out)
    os.truncate(theirs / PLAN, 1 << 40)
    with pytest.raises(ValueError, match=r"plan\.json has 1,099"):
        add(theirs, out)
    assert contents(out) == before


def test_a_run_that_diverged_is_a_result(out, theirs):
    text = "".join(json.dumps(line) + "\n" for line in metrics_of(3, "failed"))
    (theirs / FIRST / "metrics.jsonl").write_text(text)
    seal(theirs / FIRST)
    (theirs / DIVERGED).write_text(json.dumps({FIRST: "it did", "tuning/x": "so did this"}))
    shutil.rmtree(theirs / HIDDEN)  # as an archive may leave it out
    name = add(theirs, out)
    assert json.loads((out / name / DIVERGED).read_text()) == {FIRST: "it did"}
    cells = {cell.label: cell for part in board_of(out).added[name].parts for cell in part.cells}
    assert (cells["grpo"].runs, cells["grpo"].diverged) == (3, 1)


def test_a_run_that_failed_for_another_reason_did_not_diverge(out, theirs):
    lines = metrics_of(3, "failed")
    lines[-1]["why"] = "OSError: the disk is full"
    (theirs / FIRST / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    seal(theirs / FIRST)
    (theirs / DIVERGED).write_text(json.dumps({FIRST: "it did"}))
    with pytest.raises(ValueError, match=r"grpo-1: diverged\.json says that it diverged, and it does not"):
        add(theirs, out)


@pytest.mark.parametrize(
    ("budget", "said"), [(127, "paid 128 rollouts of a budget of 127"), (193, "ended after 128 rollouts of 193, and")]
)
def test_a_run_pays_its_budget_and_no_more(theirs, budget, said):
    with pytest.raises(ValueError, match=said):
        refuse_unfinished(theirs / FIRST, budget=budget, every=32)


def test_what_changes_while_it_is_copied_is_refused(out, theirs, monkeypatch):
    before, copy = contents(out), adding._copy_file

    def other(path: Path, to: Path) -> None:
        copy(path, to)
        if to.name == "metrics.jsonl":
            to.write_text(to.read_text().replace('"seconds": 6.4', '"seconds": 6.3', 1) + "\n")

    monkeypatch.setattr(adding, "_copy_file", other)
    with pytest.raises(ValueError, match="adding cannot be added"):
        add(theirs, out)
    assert contents(out) == before
    assert not (out / HIDDEN / "adding").exists()


def test_another_search_or_a_setting_a_seed_is_another_method(tmp_path):
    ours = make_plan("smoke", tracks=["tuned"])
    out = write_runs(tmp_path / "ours", ours)
    plan = replace(ours, tasks=(replace(TASK, name="ladder/theirs"),), made_with=ELSEWHERE)
    first, *others = plan.search
    searched = write_runs(tmp_path / "searched", replace(plan, search=(replace(first, settings=99), *others)))
    with pytest.raises(ValueError, match="has another search, so that its settings had another chance"):
        add(searched, out)
    theirs = write_runs(tmp_path / "theirs", plan)
    [task], (each, *_) = plan.tasks, plan.contestants
    other = settings_in(plan, "tuned", task, each)[-1]
    change = {"parameters": dict(other.parameters)}, {"learning_rate": other.learning_rate}
    place = place_of("tuned", task, each.label, plan.seeds_of("tuned", task)[-1])
    described(lambda run: [run.update(change[0]), run["settings"].update(change[1])], place)(theirs)
    with pytest.raises(ValueError, match="its setting is another than that of its method's other seeds"):
        add(theirs, out)


def test_a_run_that_was_added_is_not_added_again_under_another_plan(out, theirs, tmp_path):
    add(theirs, out)
    again = write_runs(tmp_path / "again", replace(THEIRS, made_with=ELSEWHERE | {"notes": "again"}))
    with pytest.raises(ValueError, match=r"its curve is that of .*added-.*grpo-1, to the second"):
        add(again, out)


def test_a_run_of_ours_under_another_name_is_not_added(out, tmp_path):
    """The same curves in a folder of another plan."""
    other = write_runs(tmp_path / "other", replace(OURS, tier="ci", made_with=ELSEWHERE))
    with pytest.raises(ValueError, match=r"its curve is that of .*ours/defaults/sort/grpo-9900, to the second"):
        add(other, out)


def test_files_of_others_stay(out, theirs):
    (out / f"added-{THEIRS.digest[:12]}").mkdir()
    before = contents(out)
    with pytest.raises(FileExistsError, match="holds added-"):
        add(theirs, out)
    assert contents(out) == before


def test_folders_that_are_no_leaderboards_and_one_in_use_are_refused(out, theirs, tmp_path):
    for one, other in ((tmp_path, out), (theirs, tmp_path)):
        with pytest.raises(FileNotFoundError, match="expected the folder of a leaderboard"):
            add(one, other)
    lock = Lock(out, KIND)
    with lock, pytest.raises(RuntimeError, match="is in use by"):
        add(theirs, out)


def test_one_that_is_killed_leaves_the_folder_as_it_was(out, theirs, monkeypatch):
    """Whenever that is; the next one goes through."""
    before = contents(out)
    copy = adding._copy_file

    def killed(path: Path, to: Path) -> None:
        copy(path, to)
        if to.name == "metrics.jsonl":
            os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(adding, "_copy_file", killed)
    child = multiprocessing.get_context("fork").Process(target=add, args=(theirs, out))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    assert {name: text for name, text in contents(out).items() if "/adding/" not in name} == before
    assert added_in(out) == []
    monkeypatch.undo()
    assert (out / add(theirs, out)).is_dir()
    assert not (out / HIDDEN / "adding").exists()


def test_a_full_disk_leaves_the_folder_as_it_was(out, theirs, monkeypatch):
    before = contents(out)

    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(adding, "sync", full)
    with pytest.raises(OSError, match="No space left"):
        add(theirs, out)
    assert contents(out) == before
    assert not (out / HIDDEN / "adding").exists()


def test_what_others_wrote_is_shown_and_acts_on_nothing(out, tmp_path):
    hostile = "<script>alert(1)</script>|`x`\x1b[2J\u202e"
    plan = replace(THEIRS, made_with=dict.fromkeys([*ELSEWHERE, hostile], hostile))
    theirs = write_runs(tmp_path / "theirs", plan)
    edited(theirs / PLAN, lambda saved: saved | {"date": 100 * hostile})
    add(theirs, out)
    write_leaderboard(out)
    for name in (PAGE, TABLE):
        text = (out / name).read_text()
        assert "<script" not in text
        assert not {"\x1b", "\u202e"} & set(text)
        assert "alert(1)" in text


@pytest.mark.e2e
def test_a_folder_that_another_process_made(tmp_path):
    """A whole leaderboard of tier smoke, by the command; ours is of other seeds, on what passes for another machine."""
    made = "from rollalloc.cli.app import main; main()"
    command = [sys.executable, "-c", made, "bench", "--tier", "smoke", "--track", "defaults"]
    there = tmp_path / "there"
    subprocess.run([*command, "--out", there, "--task-folder", tmp_path / "tasks"], check=True)
    frozen = {**OURS.made_with, "processor": "another"}
    out = tmp_path / "ours"
    freeze(replace(OURS, made_with=frozen), out)
    name = add(there, out)
    assert {cell.runs for part in board_of(out).added[name].parts for cell in part.cells} == {2}
    text = (there / "defaults/sort/grpo-9901/metrics.jsonl").read_text()
    (there / "defaults/sort/grpo-9901/metrics.jsonl").write_text(text.replace('"accuracy": 0.', '"accuracy": 0.9', 1))
    other = tmp_path / "another"
    freeze(replace(OURS, made_with=frozen), other)
    with pytest.raises(ValueError, match=r"grpo-9901: run\.json or metrics\.jsonl was changed since it ended"):
        add(there, other)
