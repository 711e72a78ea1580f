"""Files that are no files, links that lead elsewhere, and what a report may overwrite."""

from __future__ import annotations

import os
import socket

import pytest

from rollalloc.files.regular import open_regular
from rollalloc.report.page import write_page
from rollalloc.runs.discovery import comparisons, run_folders
from rollalloc.runs.reader import read_run

pytestmark = [pytest.mark.usefixtures("undrawn"), pytest.mark.timeout(300)]  # a FIFO that is opened waits for ever


def a_socket(path):
    with socket.socket(socket.AF_UNIX) as opened:
        here = os.getcwd()
        os.chdir(path.parent)  # its name must be short
        opened.bind(path.name)
        os.chdir(here)


def a_link_out(path):
    secret = path.parent.parent.parent / "secret"
    secret.write_text('{"label": "secret"}')
    path.symlink_to(secret)


KINDS = {
    "FIFO": os.mkfifo,
    "socket": a_socket,
    "folder": os.mkdir,
    "device": lambda path: os.mknod(path, 0o600 | 0o020000, os.makedev(1, 5)),  # /dev/zero
    "symbolic links": lambda path: path.symlink_to(path.name),
    "leads out of its folder": a_link_out,
    "not there": lambda path: path.symlink_to("nowhere"),
}


@pytest.mark.parametrize("name", ["run.json", "metrics.jsonl"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_file_of_the_run_is_named_and_the_other_runs_are_shown(write_run, tmp_path, kind, name):
    write_run("good")
    place = write_run("bad") / name
    place.unlink(missing_ok=True)
    try:
        KINDS[kind](place)
    except PermissionError:
        pytest.skip("making a device needs root")
    page = write_page(tmp_path).read_text(encoding="utf-8")
    assert "good" in page
    assert "6,000" in page
    assert f"{name}: " in page
    assert "secret" not in page
    problem = read_run(place.parent).problem
    assert problem is not None
    assert problem.startswith(f"{name}: ")
    assert kind in problem


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_what_may_not_be_read_is_named(write_run):
    folder = write_run()
    (folder / "run.json").chmod(0)
    assert read_run(folder).problem == "run.json: Permission denied"


def test_a_link_within_the_folder_is_followed(tmp_path):
    (tmp_path / "real").write_text("x")
    (tmp_path / "link").symlink_to("real")
    with open_regular(tmp_path / "link") as file:
        assert file.read() == b"x"


def test_links_to_runs_are_followed_and_a_run_is_found_once_by_its_own_name(write_run, tmp_path, tmp_path_factory):
    folder = write_run("z")
    elsewhere = write_run("y").rename(tmp_path_factory.mktemp("elsewhere") / "run")
    (tmp_path / "best").symlink_to(folder)
    (tmp_path / "compare" / "circle").symlink_to(tmp_path)
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "linked").symlink_to(elsewhere)
    assert run_folders(tmp_path) == [folder, tmp_path / "linked"]
    assert list(comparisons(tmp_path)) == [tmp_path / "compare", tmp_path]


def test_a_file_is_no_folder_of_runs(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError):
        comparisons(tmp_path / "file")
    assert run_folders(tmp_path / "nowhere") == []


# what a report may overwrite


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_a_report_overwrites_the_one_before(write_run):
    folder = write_run()
    page = write_page(folder)
    before = contents(folder)
    page.write_text(page.read_text() + "<!-- old -->")
    write_page(folder)
    assert "<!-- old -->" not in page.read_text()
    assert contents(folder).keys() == before.keys()


@pytest.mark.parametrize("name", ["report.html", "where.png"])
@pytest.mark.parametrize("content", [b"mine", b"<!doctype html>\n<p>mine", b"\x89PNG\r\n\x1a\nmine"])
def test_what_no_report_wrote_stays_and_is_named(write_run, name, content):
    folder = write_run()
    (folder / name).write_bytes(content)
    before = contents(folder)
    with pytest.raises(FileExistsError, match=rf"{name}, which was not written by rollalloc.* move it away.*--out"):
        write_page(folder)
    assert contents(folder) == before
    write_page(folder, out=folder / "other" / "page.html")


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("run.json")])
def test_nothing_else_is_replaced_by_a_page(write_run, make):
    folder = write_run()
    make(folder / "report.html")
    before = contents(folder)
    with pytest.raises(FileExistsError):
        write_page(folder)
    assert contents(folder) == before
