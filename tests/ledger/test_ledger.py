"""The ledger: what is added counts once, whatever happens meanwhile, and nothing that is not a ledger is touched."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rollalloc.core.table import Priors, PromptTable
from rollalloc.data.prior_file import read_priors, write_priors
from rollalloc.ledger.adding import add
from rollalloc.ledger.contents import contents_of, prompt_in
from rollalloc.ledger.priors import Trust, priors_of
from rollalloc.ledger.sources import Source, sources_of
from rollalloc.ledger.store import NotALedger, write
from rollalloc.rules.beliefs import Foresight
from rollalloc.rules.prompts import Posterior
from rollalloc.waste.readers import FORMATS, read_log

SAMPLES = Path(__file__).parents[1] / "waste" / "samples"


def rollouts(folder, rows, *, model="m", seed=0):
    """A run of ours: rows of (group, version, key, metric, tokens)."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [
        {"rollout": at, "group": group, "stage": 0, "version": version, "key": key, "reward": metric, "metric": metric,
         "tokens": tokens, "truncated": False, "text": f"{seed}/{at}"}
        for at, (group, version, key, metric, tokens) in enumerate(rows)
    ]  # fmt: skip
    (folder / "rollouts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    described = {"source": {"model": model}, "recipe": "grpo", "settings": {"seed": seed}, "digests": {}}
    (folder / "run.json").write_text(json.dumps(described))
    return folder


def added(ledger, folder, **options):
    (source,) = sources_of(str(folder), **options)
    return add(ledger, source, read_log(source.log, source.format), "the metric")


ROWS = [
    (0, 0, "a", 1, 3),
    (0, 0, "a", 0, 4),
    (1, 0, "b", 1, 5),
    (2, 1, "a", 1, 6),
    (2, 1, "a", 1, 7),
    (3, 2, "c", None, 8),
]


@pytest.fixture
def ledger(tmp_path):
    return tmp_path / "l.db"


def sums(ledger, key):
    (one,) = prompt_in(ledger, key)
    return tuple(
        one[name] for name in ("attempts", "scored", "successes", "reward_sum", "tokens", "first_step", "last_step")
    )


def test_a_run_is_kept_by_prompt(tmp_path, ledger):
    found = added(ledger, rollouts(tmp_path / "r", ROWS, seed=4))
    assert (found.rollouts, found.known, found.prompts, found.rates) == (6, 0, 3, True)
    assert sums(ledger, "a") == (4, 4, 3, 3, 20, 0, 1)
    assert sums(ledger, "c") == (1, 0, 0, 0, 8, 2, 2)
    (run,) = contents_of(ledger).runs
    assert (run["model"], run["recipe"], run["seed"], run["prompts"]) == ("m", "grpo", 4, 3)


def test_a_run_counts_once_however_often_and_in_whatever_parts_it_comes(tmp_path, ledger):
    whole = rollouts(tmp_path / "r", ROWS)
    text = (whole / "rollouts.jsonl").read_bytes()
    copy = Path(shutil.copytree(whole, tmp_path / "copy"))
    for part in (text[: len(text) // 2], text, text[: len(text) // 3], text, text[len(text) // 2 :]):
        (copy / "rollouts.jsonl").write_bytes(part)
        added(ledger, copy)
    assert added(ledger, whole).rollouts == 0
    assert sums(ledger, "a") == (4, 4, 3, 3, 20, 0, 1)
    assert len(contents_of(ledger).runs) == 1


def test_runs_that_only_begin_alike_are_two(tmp_path, ledger):
    added(ledger, rollouts(tmp_path / "r", ROWS))
    other = [*ROWS[:3], (2, 1, "d", 0, 1), (3, 2, "e", 1, 1)]
    found = added(ledger, rollouts(tmp_path / "o", other))
    assert (found.run, found.rollouts, found.known) == (2, 2, 3)  # what they share was drawn once
    assert added(ledger, tmp_path / "r").rollouts == added(ledger, tmp_path / "o").rollouts == 0
    assert contents_of(ledger).rollouts == 8


def test_another_seed_of_the_same_answers_is_another_run(tmp_path, ledger):
    added(ledger, rollouts(tmp_path / "r", ROWS))
    assert added(ledger, rollouts(tmp_path / "o", ROWS, seed=1)).rollouts == 6


@pytest.mark.parametrize("format", FORMATS)
def test_every_format_is_taken_in_and_known_again(tmp_path, ledger, format):
    first, again = (added(ledger, SAMPLES / format) for _ in range(2))
    assert first.rollouts == {"prime-rl": 24}.get(format, 96)
    assert (again.rollouts, again.known) == (0, first.rollouts)
    assert contents_of(ledger).rollouts == first.rollouts
    has_tokens = contents_of(ledger).runs[0]["tokens"] is not None
    assert has_tokens == (format in ("rollalloc", "prime-rl"))


def test_a_run_judged_otherwise_is_refused(tmp_path, ledger):
    added(ledger, rollouts(tmp_path / "r", ROWS))
    (source,) = sources_of(str(tmp_path / "r"))
    with pytest.raises(ValueError, match=r"whose successes are the metric; got reward of at least 0"):
        add(ledger, source, read_log(source.log), "reward of at least 0.5", 0.5)


@pytest.mark.parametrize("content", [b"", b"mine", b"SQLite format 3\0" + bytes(200)])
def test_what_is_no_ledger_is_refused_and_left_alone(tmp_path, ledger, content):
    ledger.write_bytes(content)
    with pytest.raises(NotALedger, match="is not a ledger"):
        added(ledger, rollouts(tmp_path / "r", ROWS))
    assert ledger.read_bytes() == content


def test_another_programs_database_and_a_fifo_are_refused(tmp_path, ledger):
    sqlite3.connect(ledger).execute("CREATE TABLE mine (x)").connection.close()
    before = ledger.read_bytes()
    with pytest.raises(NotALedger):
        contents_of(ledger)
    assert ledger.read_bytes() == before
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(OSError, match="a FIFO"):
        contents_of(tmp_path / "fifo")


def test_a_torn_ledger_is_refused_at_every_length(tmp_path, ledger):
    added(ledger, rollouts(tmp_path / "r", [(at, at, f"prompt {at}", 1, 1) for at in range(300)]))
    whole = ledger.read_bytes()
    for length in range(100, len(whole), 4096):
        ledger.write_bytes(whole[:length])
        with pytest.raises(NotALedger):
            contents_of(ledger)
        with pytest.raises(NotALedger):
            added(ledger, tmp_path / "r")
        assert ledger.read_bytes() == whole[:length]


def test_a_kill_during_an_addition_leaves_the_ledger_as_it_was(tmp_path, ledger):
    added(ledger, rollouts(tmp_path / "r", ROWS))
    code = f"""
import os, signal
from pathlib import Path
from rollalloc.ledger.store import write
def work(connection):
    connection.execute("PRAGMA cache_size = 1")  # pages reach the file before the end
    connection.executemany("INSERT INTO prompts (key) VALUES (?)", ((f"{{at}}" * 50,) for at in range(5000)))
    connection.execute("DELETE FROM records")
    os.kill(os.getpid(), signal.SIGKILL)
write(Path({str(ledger)!r}), work)
"""
    before = ledger.stat().st_size
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL
    assert ledger.stat().st_size > before  # it was in the middle
    assert (contents_of(ledger).prompts, contents_of(ledger).rollouts) == (3, 6)
    new = tmp_path / "new.db"
    assert subprocess.run([sys.executable, "-c", code.replace(str(ledger), str(new))], check=False).returncode < 0
    assert not new.exists()


def test_two_who_add_at_once_lose_nothing(tmp_path, ledger):
    folders = [rollouts(tmp_path / f"r{seed}", ROWS, seed=seed) for seed in range(4)]
    failed: list[BaseException] = []

    def run(folder):
        try:
            added(ledger, folder)
        except BaseException as error:  # told below: a thread's error is lost otherwise
            failed.append(error)

    threads = [threading.Thread(target=run, args=(folder,)) for folder in [*folders, *folders]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert contents_of(ledger).rollouts == 24
    assert not list(tmp_path.glob(".partial-*"))


def test_what_work_raises_undoes_it(tmp_path, ledger):
    added(ledger, rollouts(tmp_path / "r", ROWS))

    def broken(connection):
        connection.execute("DELETE FROM records")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(ledger, broken)
    assert contents_of(ledger).rollouts == 6


def test_odd_keys_and_rewards_are_kept_or_counted(tmp_path, ledger):
    keys = ["", "\ud800", "a\0b", "x" * 100_000, "'; DROP TABLE records; --", "\x1b[2J"]
    rows = [(at, 0, key, [1, float("nan"), float("inf"), 10**400, True, 0.5][at], 1) for at, key in enumerate(keys)]
    found = added(ledger, rollouts(tmp_path / "r", rows))
    assert (found.rollouts, found.prompts, found.rates) == (6, 6, True)
    assert sums(ledger, "'; DROP TABLE records; --")[:3] == (1, 1, 1)
    assert sums(ledger, "\\ud800")[:4] == (1, 0, 0, 0)


def test_rewards_beyond_rates_make_no_priors(tmp_path, ledger):
    assert not added(ledger, rollouts(tmp_path / "r", [(0, 0, "a", -1, 1), (0, 0, "a", 2, 1)])).rates
    assert sums(ledger, "a")[2:4] == (None, 1)
    found = priors_of(ledger, [["a"]], "m", None)
    assert (found.prompts, found.without) == (0, 1)


# ------------------------------------------------------------------------------------------------------------- priors


def test_priors_fade_with_distance_and_are_capped(tmp_path, ledger):
    rows = [(0, 0, "a", 1, 1), (1, 32, "a", 0, 1), *((2, 0, "b", 1, 1) for _ in range(20))]
    added(ledger, rollouts(tmp_path / "r", rows))
    found = priors_of(ledger, [["b"], ["new"], ["a"]], "m", None)
    np.testing.assert_allclose(found.priors.rate_N, [1, np.nan, 2 / 3])
    np.testing.assert_allclose(found.priors.rollouts_N, [8, 0, 1.5])
    assert (found.prompts, found.same, found.other) == (2, 22, 0)


def test_another_model_counts_little_and_weights_say_more_than_names(tmp_path, ledger):
    folder = rollouts(tmp_path / "r", [(0, 0, "a", 1, 1), (1, 32, "b", 1, 1)])
    (source,) = sources_of(str(folder))
    add(ledger, replace(source, weights="begin", weights_after="end"), read_log(source.log), "the metric")
    of = [["a"], ["b"]]

    def rollouts_of(*model):
        return priors_of(ledger, of, *model).priors.rollouts_N.tolist()

    assert rollouts_of("m", "other") == pytest.approx([0.1, 0.1])
    assert rollouts_of("elsewhere", "begin") == pytest.approx([1, 0.5])
    assert rollouts_of("elsewhere", "end") == pytest.approx([0.5, 1])
    assert priors_of(ledger, of, "m", "other", Trust(other=0)).prompts == 0


def test_a_name_that_two_prompts_have_names_neither(tmp_path, ledger):
    added(ledger, rollouts(tmp_path / "r", [(0, 0, "a", 1, 1), (1, 0, "b", 1, 1)]))
    found = priors_of(ledger, [["x", "a"], ["y", "a"], ["z", "b"]], "m", None)
    assert np.isnan(found.priors.rate_N).tolist() == [True, True, False]


def test_firm_priors_are_counts_beside_what_a_rule_believes():
    table = PromptTable(3, prior_N=[1.0, 0.5, np.nan], prior_rollouts_N=[8, 2, 5])
    memory = Posterior(prior_weight=2.0).init(table)
    np.testing.assert_allclose(memory["hits_N"] + memory["misses_N"], [10, 4, 2], rtol=1e-6)
    np.testing.assert_allclose(memory["hits_N"], [0.02 * 10 + 0.96 * 9, 2, 1], rtol=1e-6)


def test_foresight_is_fitted_to_firm_priors_before_its_first_rollout():
    at_N = np.linspace(-1, 1, 200)
    features = {"x": at_N[:, None].astype(np.float32)}
    rule = Foresight()
    table = PromptTable(
        200, prior_N=(at_N > 0).astype(float), prior_rollouts_N=np.arange(200) % 2 * 2.5, features=features
    )
    memory = rule.init(table)
    assert memory["before"] == 250
    assert rule.predictor.due(memory)
    rule.predictor.refit(memory, features)
    unseen = np.arange(0, 200, 2)  # no prior of their own
    said = rule.predictor(memory, features, unseen)
    assert said[:40].mean() < 0.3 < 0.7 < said[-40:].mean()
    assert not rule.predictor.due(memory)
    with pytest.raises(ValueError, match="finite numbers"):
        rule.predictor.init(2, {}, [0.5, 0.5], [-1, 1])


def test_priors_are_kept_with_a_run_to_the_bit(tmp_path):
    given = Priors(np.array([0.1, np.nan, 1.0], np.float32), np.array([1 / 3, 0, 8], np.float32))
    write_priors(tmp_path / "p.safetensors", ["a", "b", "c"], given)
    back = read_priors(tmp_path / "p.safetensors", ["c", "b", "a"])
    np.testing.assert_array_equal(back.rate_N, np.asarray(given.rate_N)[::-1])
    np.testing.assert_array_equal(back.rollouts_N, np.asarray(given.rollouts_N)[::-1])


def test_sources_say_which_runs_have_no_rollouts(tmp_path):
    rollouts(tmp_path / "one", ROWS)
    (rollouts(tmp_path / "two", ROWS) / "rollouts.jsonl").unlink()
    (rollouts(tmp_path / "three", ROWS) / "run.json").write_text("{torn")
    one, three, two = sources_of(str(tmp_path))
    assert [bool(each.missing) for each in (one, two, three)] == [False, True, False]
    assert (one.model, three.model) == ("m", None)
    assert isinstance(one, Source)
