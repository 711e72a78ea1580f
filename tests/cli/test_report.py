"""`rollalloc report`, `watch` and `board`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rollalloc.cli.app import app
from rollalloc.cli.watch import watch


def write_run(folder: Path, *, ended: bool) -> Path:
    """A run that paid 10 rollouts."""
    folder.mkdir(parents=True)
    spent = {
        "rollouts_paid": 10,
        "tokens_paid": 50,
        "seconds": 1.0,
        "accounts": {"trained": 4, "open": 6},
        "unscored": {},
    }
    lines = [{"kind": "batch", **spent}] + ([{"kind": "end", "why": "budget: spent", **spent}] if ended else [])
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "run.json").write_text(json.dumps({"recipe": "grpo", "seed": 3, "max_rollouts": 100}))
    return folder


def test_report_of_a_damaged_run_says_so_and_fails_although_it_wrote_the_page(rollalloc, undrawn, tmp_path):
    run = write_run(tmp_path / "run", ended=True)
    with (run / "metrics.jsonl").open("a") as file:
        file.write("\x1b]0;owned\n")
    code, *said = rollalloc("report", run)
    said = "".join(said)
    assert code == 1
    assert "metrics.jsonl:3 is not a line of JSON" in said
    assert "\x1b]0" not in said
    assert "cannot be read in full" in (run / "report.html").read_text()


def test_watch_over_runs_trained_one_by_one_leaves_when_all_have_ended(rollalloc, tmp_path):
    for name in ("one", "other"):
        write_run(tmp_path / name, ended=True)
    assert rollalloc("watch", tmp_path)[0] == 0


@pytest.mark.parametrize("command", ["watch", "report", "board"])
def test_what_is_no_folder_is_refused(command, tmp_path):
    (tmp_path / "file").write_text("")
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("nowhere")
    for name, why in (
        ("file", "is a file"),
        ("fifo", "is a pipe or a device"),
        ("link", "is a link that leads nowhere"),
    ):
        given = CliRunner().invoke(app, [command, str(tmp_path / name)], env={"COLUMNS": "300"})
        assert given.exit_code == 2
        assert f"{why}; give a folder" in given.output


@pytest.mark.parametrize("kind", ["fifo", "link"])
def test_watch_in_a_pipe_says_that_the_metrics_cannot_be_read(kind, tmp_path, monkeypatch, capsys):
    run, elsewhere = write_run(tmp_path / "run", ended=False), tmp_path / "elsewhere.jsonl"
    (run / "metrics.jsonl").rename(elsewhere)
    if kind == "fifo":
        os.mkfifo(run / "metrics.jsonl")
    else:
        (run / "metrics.jsonl").symlink_to(elsewhere)
    monkeypatch.setattr("rollalloc.cli.watch.time.sleep", lambda _: signal.raise_signal(signal.SIGINT))
    watch(run)
    why = {"fifo": "it is a FIFO", "link": "it is a link that leads out of its folder"}[kind]
    assert "0 of 1 runs ended · 0 rollouts · run, seed 3 cannot be read in full: metrics.jsonl: " in (
        first := capsys.readouterr().out.splitlines()[0]
    )
    assert why in first


@pytest.mark.parametrize(
    "command", [["report"], ["watch"], ["board"], ["verify-resume"], ["data", "prepare", "gsm8k", "--from-local"]]
)
def test_an_empty_name_is_not_the_current_folder(tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    given = CliRunner().invoke(app, [*command, ""], env={"COLUMNS": "200"})
    assert given.exit_code == 2
    assert "expected the name of a folder, got an empty one" in given.output
    assert not list(tmp_path.iterdir())


def test_what_follows_runs_needs_no_pytorch(tmp_path):
    """It takes seconds to import; `report` and `board` draw a comparison without."""
    for seed in (0, 1):
        write_run(tmp_path / f"grpo-{seed}", ended=True)
    script = (
        "import sys; from pathlib import Path; import rollalloc.lab.report.board, rollalloc.lab.report.terminal;"
        "from rollalloc.lab.report.page import write_page; write_page(Path(sys.argv[1]));"
        "print(*{'torch', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script, tmp_path], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.split()) == (0, []), done.stderr


def test_watch_leaves_when_the_run_has_ended(rollalloc, tmp_path):
    code, said, _ = rollalloc("watch", write_run(tmp_path / "run", ended=True))
    assert code == 0
    assert "grpo · seed 3 · finished" in said
    assert "10% of 100" in said


def test_watch_waits_for_a_run_and_ctrl_c_leaves(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "later"
    looks = iter([lambda: write_run(folder, ended=False), lambda: None, lambda: signal.raise_signal(signal.SIGINT)])
    monkeypatch.setattr("rollalloc.cli.watch.time.sleep", lambda _: next(looks)())
    watch(folder, wait=True)
    written = capsys.readouterr().out
    assert written.startswith(f"waiting for a run in {folder}; stop with Ctrl-C\n")  # at once, although it is piped
    assert "grpo · seed 3 · not ended" in written
    assert next(looks, None) is None


def test_board_says_its_address_serves_and_ctrl_c_leaves(tmp_path):
    write_run(tmp_path / "run", ended=False)
    command = [sys.executable, "-m", "rollalloc.cli.app", "board", tmp_path]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        address = process.stdout.readline().split()[0]
        with urllib.request.urlopen(address, timeout=60) as answer:
            assert b"grpo" in answer.read()
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=60)[0]
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0
    assert "Traceback" not in said
