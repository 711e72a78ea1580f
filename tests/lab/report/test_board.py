"""The board's server: who may ask, for what, and that it follows the files."""

from __future__ import annotations

import http.client
import json
import re
import threading
import time

import pytest

from rollalloc.lab.report.board import BoardPages, serve
from rollalloc.runs.reader import read_metrics


@pytest.fixture
def ask(tmp_path):
    """(method, address, headers) → (status, headers, body) of a board of `tmp_path`."""
    with serve(tmp_path) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()

        def asked(method="GET", address="/", **headers):
            connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
            connection.request(method, address, headers=headers)
            answer = connection.getresponse()
            body = answer.read().decode()
            connection.close()
            return answer.status, answer.headers, body

        asked.address = server.server_address
        yield asked
        server.shutdown()
        thread.join()


def test_it_listens_on_this_machine_only(ask):
    assert ask.address[0] == "127.0.0.1"


def test_it_follows_a_folder_that_fills(ask, write_run):
    assert "No run has begun yet" in ask()[2]
    folder = write_run("<b>grpo</b>", why=None, batches=10)
    status, _, body = ask()
    assert status == 200
    assert "&lt;b&gt;grpo&lt;/b&gt;" in body
    assert "1,000" in body
    assert 'http-equiv="refresh"' in body
    assert folder == write_run("<b>grpo</b>", batches=20)
    body = ask()[2]
    assert "2,000" in body
    assert "target reached" in body
    assert 'http-equiv="refresh"' not in body


def test_a_report_is_drawn_beside_the_request(ask, write_run):
    write_run("grpo")
    address = ask()[2].partition('<a href="')[2].partition('"')[0]
    status, _, body = ask("GET", address)
    assert status == 200
    assert "drawing the report" in body
    deadline = time.monotonic() + 60
    while "drawing the report" in body and time.monotonic() < deadline:
        time.sleep(0.2)
        body = ask("GET", address)[2]
    assert "Where every rollout went" in body


def test_a_damaged_run_does_not_end_the_board(ask, write_run):
    (write_run("grpo") / "metrics.jsonl").write_text('{"kind"\n{"kind": "end"}\n')
    (write_run("other") / "run.json").write_text("[]")
    (write_run("third") / "run.json").write_text('{"seed": [1]}')
    with (write_run("fourth") / "metrics.jsonl").open("a") as file:
        line = {"kind": "batch", "rollouts_paid": "many", "tokens_paid": 0, "seconds": 0, "accounts": None}
        file.write(json.dumps(line) + "\n")
    status, _, body = ask()
    assert status == 200
    assert "is not a line of JSON" in body
    assert "expected an object with its seed" in body
    assert "expected an object with its kind, rollouts_paid" in body


@pytest.mark.parametrize(
    "address", ["/1", "/compare/grpo-0/run.json", "/%2e%2e/%2e%2e/etc/passwd", "//etc/passwd", "/?/run"]
)
def test_no_address_reaches_the_file_system(ask, write_run, address):
    write_run("grpo")
    status, _, body = ask("GET", address)
    assert status == (200 if address.startswith("/?") else 404)
    assert "root:" not in body
    assert '"recipe"' not in body


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS"])
def test_it_can_only_be_read(ask, method):
    status, headers, _ = ask(method)
    assert status == 405
    assert headers["Allow"] == "GET, HEAD"


@pytest.mark.parametrize(
    ("host", "status"), [("127.0.0.1", 200), ("localhost:8000", 200), ("evil.example:80", 421), ("", 421)]
)
def test_another_name_of_this_machine_is_refused(ask, host, status):
    assert ask(Host=host)[0] == status


def test_nothing_is_kept_and_nothing_else_may_be_loaded(ask):
    headers = ask()[1]
    assert headers["Cache-Control"] == "no-store"
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]


def test_runs_that_go_on_stand_first_and_a_failure_takes_one_line(write_run, tmp_path):
    write_run("done", 0)
    write_run("at-work", 0, why=None)
    folder = write_run("broken", 0, why=None)
    last = read_metrics(folder / "metrics.jsonl")[-1]
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(last | {"kind": "failed", "why": "ImportError: no module\nnamed " + "x" * 500}) + "\n")
    page = BoardPages(tmp_path).page("/")
    places = [page.index(f"<bdi>{name}</bdi>") for name in ("at-work", "broken", "done")]
    assert places == sorted(places)
    [shown] = re.findall(r'<small class="cut"[^>]*>([^<]*)</small>', page)
    assert len(shown) <= 120
    assert shown.startswith("ImportError: no module named x")
