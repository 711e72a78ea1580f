"""`rollalloc report`."""

import json
import os
import subprocess
import sys
import time
from types import SimpleNamespace

from typer.testing import CliRunner

from rollalloc.cli.app import app


def test_report_of_a_damaged_run_says_so_and_fails_although_it_wrote_the_page(rollalloc, undrawn, write_run):
    run = write_run(batches=1, evaluated=False)
    with (run / "metrics.jsonl").open("a") as file:
        file.write("\x1b]0;owned\n")
    code, *said = rollalloc("report", run)
    said = "".join(said)
    assert code == 1
    assert "metrics.jsonl:3 is not a line of JSON" in said
    assert "\x1b]0" not in said
    assert "cannot be read in full" in (run / "report.html").read_text()


def test_follow_writes_the_page_again_until_the_run_ends(rollalloc, undrawn, write_run, monkeypatch):
    run = write_run(why=None, batches=3, evaluated=False)
    page, seen = run / "report.html", []
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    end = {key: value for key, value in last.items() if key != "batch"} | {"kind": "end", "why": "budget: spent"}

    def ends_meanwhile(seconds):
        assert not seen, "the end of the run was not seen"
        seen.append((seconds >= 5, "data-seconds=" in page.read_text(), (run / "training.png").exists()))
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(end) + "\n")

    monkeypatch.setattr("rollalloc.cli.report.time", SimpleNamespace(sleep=ends_meanwhile, monotonic=time.monotonic))
    code, *_ = rollalloc("report", run, "--follow")
    assert (code, seen) == (0, [(True, True, False)])
    assert "data-seconds=" not in page.read_text()
    assert (run / "training.png").exists()


def test_several_folders_are_one_page_in_the_first_and_verl_takes_one(rollalloc, undrawn, run_into, tmp_path):
    one, two = run_into(tmp_path / "one", "one", 0, batches=5), run_into(tmp_path / "two", "two", 0, batches=5)
    assert rollalloc("report", one, two)[0] == 0
    assert str(two) in (one / "report.html").read_text()
    code, *said = rollalloc("report", one, two, "--verl", "acc")
    assert (code, "give one folder" in " ".join("".join(said).split())) == (2, True)


def test_what_is_no_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("nowhere")
    for name, why in (
        ("file", "is a file"),
        ("fifo", "is a file"),
        ("link", "is a link to something that does not exist"),
    ):
        given = CliRunner().invoke(app, ["report", str(tmp_path / name)], env={"COLUMNS": "300"})
        assert given.exit_code == 2
        assert f"{why}; give a folder" in given.output


def test_a_page_is_written_over_nothing_of_the_users(rollalloc, undrawn, write_run, tmp_path):
    run, page = write_run(), tmp_path / "page.html"
    page.write_text("mine")
    for out, why in ((page, "holds page.html, which was not written by rollalloc"), ("", "--out"), (tmp_path, "--out")):
        code, _, said = rollalloc("report", run, "--out", out)
        assert (code, why in " ".join(said.split())) == (2, True), said
    assert page.read_text() == "mine"


def test_a_report_needs_no_pytorch(write_run, tmp_path):
    """PyTorch takes seconds to import."""
    for seed in (0, 1):
        write_run(seed=seed)
    script = (
        "import sys; from pathlib import Path; from rollalloc.report.page import write_page;"
        "write_page(Path(sys.argv[1]));"
        "print(*{'torch', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script, tmp_path], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.split()) == (0, []), done.stderr
