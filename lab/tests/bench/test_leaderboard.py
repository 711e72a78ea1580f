"""A leaderboard: carried out, killed and gone on with, and what its page and table say."""

# pyright: reportOptionalMemberAccess=false

from __future__ import annotations

import json
import multiprocessing
import time
from dataclasses import replace

import pytest
from by_hand import write_run

from rollalloc.compare.pool import Failure, Job, RunsFailed
from rollalloc.named import sizes_of
from rollalloc.runs.reader import read_metrics
from rollalloc.tasks import presets
from rollalloc.train.config import Config, read_config
from rollalloc_lab.bench import leaderboard
from rollalloc_lab.bench.cells import board_of
from rollalloc_lab.bench.leaderboard import Progress, run_leaderboard
from rollalloc_lab.bench.plan import DIVERGED, PLAN, TABLE, freeze, make_plan
from rollalloc_lab.bench.tables import markdown
from rollalloc_lab.cli.bench import bench


@pytest.fixture
def tiny(task, monkeypatch):
    """The tasks of a tier are all this one, which is made."""
    monkeypatch.setattr(presets, "task_files", lambda name, folder, shown: task)


def ended(folder):
    return {
        path: path.stat().st_mtime_ns for path in folder.rglob("metrics.jsonl") if '"kind": "end"' in path.read_text()
    }


def test_a_leaderboard_that_is_killed_goes_on_and_is_whole(tiny, tmp_path):
    """With what was finished left as it is; then the page and the table stand, and nothing is run again."""
    out, plan = tmp_path / "out", make_plan("smoke")
    child = multiprocessing.get_context("fork").Process(
        target=run_leaderboard, args=(plan, out, tmp_path), kwargs={"processes": 1}
    )
    child.start()
    while not ended(out):
        assert child.is_alive()
        time.sleep(0.05)
    child.kill()
    child.join()
    before, frozen = ended(out), (out / PLAN).read_bytes()
    assert board_of(out).missing == 3
    assert "Not finished: 3 runs are missing" in markdown(board_of(out))

    seen: list[Progress] = []
    run_leaderboard(plan, out, tmp_path, watcher=seen.append)
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert (out / PLAN).read_bytes() == frozen
    assert seen[-1].over == plan.runs == len(ended(out)) == 4
    assert seen[-1].share == pytest.approx(1)
    assert seen[-1].rollouts == sum(read_metrics(path)[-1]["rollouts_paid"] for path in ended(out)) <= plan.rollouts
    assert not list(out.rglob("model.safetensors"))  # only the figures of a run stay
    for recipe in ("grpo", "reinforce"):
        run = read_config(out / "sort" / f"{recipe}-9900")
        assert run.parameters == sizes_of(recipe, {})
        assert run.learning_rate == presets.DEFAULT_RATE
        assert {name: getattr(run, name) for name in presets.DEFAULT_OPTIMIZER} == presets.DEFAULT_OPTIMIZER

    again = ended(out)
    bench(tier="smoke", out=out, task_folder=tmp_path)
    assert ended(out) == again
    board = board_of(out)
    assert board.missing == 0
    for part in board.parts:
        assert {cell.label: cell.runs for cell in part.cells} == {"grpo": 2, "reinforce": 2}
        for cell in part.cells:
            assert cell.paid is not None
            assert cell.budget["accuracy"] is not None
    assert (out / TABLE).read_text() == markdown(board)


# ------------------------------------------------------------------------------------------------------------ by hand


SMOKE = make_plan("smoke")


def write_final(folder, label, seed, reaches, *, ends=True, budget=128):
    """A final run of `SMOKE`, which is evaluated every 32 rollouts."""
    run = Config(
        model="m", prompts=("p",), reward="a:b", recipe=label, parameters={"groups": 4, "n": 4}, seed=seed,
        eval_every=32, max_rollouts=budget, label=label, task="sort",
    )  # fmt: skip

    def breadth(at):
        return {"k": 8, "pass_at_k": at / 128, "entropy": 1 - at / 128}

    return write_run(folder / "sort" / f"{label}-{seed}", run, reaches, every=32, ends=ends, breadth=breadth)


def known(interval):
    assert interval is not None
    return interval


def freeze_smoke(folder):
    freeze(SMOKE, folder)
    return folder


def test_cells_by_hand(tmp_path):
    """Targets are held against runs that went on; a ratio is paired by seed; a censored run is counted as a bound."""
    freeze_smoke(tmp_path)
    for seed, (grpo, reinforce) in zip(SMOKE.seeds, [(96, 64), (64, 32)], strict=True):
        write_final(tmp_path, "grpo", seed, grpo)
        write_final(tmp_path, "reinforce", seed, reinforce)
    [part] = board_of(tmp_path).parts
    first, second = part.cells
    assert first.paid is not None
    assert second.paid is not None
    # The target is 0.6 of the way between two points of the grid.
    assert known(first.paid.costs["rollouts"]).values == pytest.approx((64 + 0.6 * 32, 32 + 0.6 * 32))
    assert known(second.paid.ratios["rollouts"]).values == pytest.approx((83.2 / 51.2, 51.2 / 19.2))
    assert known(first.budget["pass_at_k"]).values == (1, 1)
    assert known(first.budget["entropy"]).values == (0, 0)
    text = markdown(board_of(tmp_path))
    assert "| grpo | 2 of 2 | 67 (83, 51) |" in text
    assert "| reinforce | 2.15 (1.6" in text


def test_a_censored_run_and_one_that_diverged_are_counted(tmp_path):
    freeze_smoke(tmp_path)
    for seed in SMOKE.seeds:
        write_final(tmp_path, "grpo", seed, 64)
    write_final(tmp_path, "reinforce", SMOKE.seeds[0], None)
    lost = write_final(tmp_path, "reinforce", SMOKE.seeds[1], None, ends=False)
    assert board_of(tmp_path).missing == 1
    (tmp_path / DIVERGED).write_text(json.dumps({lost.relative_to(tmp_path).as_posix(): "it did"}))
    board = board_of(tmp_path)
    [part] = board.parts
    cell = part.cells[1]
    assert (board.missing, cell.runs, cell.diverged) == (0, 2, 1)
    assert cell.paid is not None
    cost, ratio = known(cell.paid.costs["rollouts"]), known(cell.paid.ratios["rollouts"])
    assert (cell.paid.reached, cost.bound, ratio.bound) == (0, ">", "<")
    assert cell.budget == {}
    text = markdown(board)
    assert "| reinforce | 0 of 2 [1 diverged] | >128 |" in text
    assert "reached by 0 of 2" in text
    (tmp_path / DIVERGED).write_text('["torn')
    with pytest.raises(ValueError, match=f"{DIVERGED} does not say which runs diverged"):
        board_of(tmp_path)


def test_another_run_in_the_place_of_a_cells_is_refused(tmp_path):
    freeze_smoke(tmp_path)
    write_final(tmp_path, "grpo", SMOKE.seeds[0], 64, budget=512)
    with pytest.raises(ValueError, match=r"grpo-9900 has another run than the plan"):
        board_of(tmp_path)


def test_texts_of_a_plan_are_shown_and_act_on_nothing(tmp_path):
    hostile = "<img src=x onerror=alert(1)>|`x`\u202e"
    plan = replace(SMOKE, contestants=(SMOKE.contestants[0], replace(SMOKE.contestants[1], label=hostile)))
    plan = replace(plan, made_with={"processor": hostile, "torch": "2"})
    freeze(plan, tmp_path)
    write_final(tmp_path, "grpo", SMOKE.seeds[0], 64)
    text = markdown(board_of(tmp_path))
    assert "<img" not in text
    assert "\u202e" not in text
    assert "&lt;img src=x onerror=alert(1)>\\|\\`x\\`⟨U+202E⟩" in text


# -------------------------------------------------------------------------------------------------------- what goes wrong


@pytest.fixture
def carried_out(tiny, tmp_path, monkeypatch):
    """(how each job ends) → the leaderboard is carried out with nothing trained; returns its folder."""

    def made(end):
        def carry_out(jobs, processes, stop, ended, watch, **_):
            for job in jobs:
                ended(job, end(job))
                watch([])

        monkeypatch.setattr(leaderboard, "carry_out", carry_out)
        run_leaderboard(make_plan("smoke"), tmp_path / "out", tmp_path)
        return tmp_path / "out"

    return made


def test_a_method_whose_every_run_diverges_ends_as_a_result(carried_out):
    def diverges(job: Job):
        job.place.mkdir(parents=True)
        return Failure(job, "FloatingPointError", "FloatingPointError: the weights diverged")

    out = carried_out(diverges)
    assert len(json.loads((out / DIVERGED).read_text())) == 2 * 2


def test_another_failure_is_named_after_the_other_runs(carried_out):
    done = []

    def fails(job: Job):
        done.append(job.place.name)
        job.place.mkdir(parents=True)
        kind = "OSError" if job.run.recipe == "grpo" else "FloatingPointError"
        return Failure(job, kind, f"{kind}: no space")

    with pytest.raises(
        RunsFailed, match=r"grpo with seed 9900 failed: OSError: no space; grpo with seed 9901"
    ) as caught:
        carried_out(fails)
    assert len(caught.value.failures) == 2
    assert sum(name.startswith("reinforce") for name in done) == 2


def test_a_plan_is_shown_and_nothing_is_written(tmp_path, capsys):
    bench(tier="smoke", out=tmp_path / "out", plan=True)
    said = " ".join(capsys.readouterr().err.split())
    assert "2 methods × 1 tasks, 4 runs, at most 512 rollouts" in said
    assert "sort: to 0.6, 128 rollouts per run (speed not measured)" in said
    assert not list(tmp_path.iterdir())


def test_ctrl_c_while_tasks_are_made_leaves_at_once_and_says_so(rollalloc_lab, interrupted_tasks, tmp_path):
    out = ("--out", tmp_path / "out", "--task-folder", tmp_path / "tasks")
    code, _, error = rollalloc_lab("bench", "--tier", "smoke", *out, "--processes", 1)
    assert code == 130, error
    assert "stopped; run the same command again to continue" in " ".join(error.split())
