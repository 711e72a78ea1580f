"""The formulas of lab/experiments/findings.py, worked out by hand and by drawing."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments"))
import findings_decay
import findings_map
import findings_runs
from findings_map import BINS, discarded, piloted, plain
from rollalloc.train.update import token_losses


def pool_of(rate_N):
    return np.bincount(np.digitize(rate_N, findings_map.EDGES), minlength=BINS) / len(rate_N)


# The map


def test_what_a_candidate_costs_and_adds_by_hand():
    [at] = np.flatnonzero(pool_of(np.array([0.5])))
    grpo = piloted(np.array([0.5]), 0, 2)  # mixed with chance 1/2, then A = ±1: one right row, one wrong
    assert [each[at] for each in (grpo.cost_B, grpo.signal_B, grpo.right_B, grpo.wrong_B)] == pytest.approx(
        [2, 0.5, 0.5, 0.5]
    )
    commits = piloted(np.array([0.5]), 2, 4)  # one of two pilots right with chance 1/2; then 0, 1 or 2 right commits
    deviation = 0.25 * 4 * np.sqrt(3) / 4 * 2 + 0.5 * 4 * 0.5
    assert commits.cost_B[at] == pytest.approx(2 + 0.5 * 2)
    assert commits.signal_B[at] == pytest.approx(0.5 * deviation)
    assert commits.right_B[at] + commits.wrong_B[at] == pytest.approx(0.5 * 4)  # Σ A² = n
    assert piloted(np.array([0.5]), 1, 4).signal_B[at] == 0  # one pilot is never inside the window
    alone = plain(np.array([0.5]), pool_of(np.array([0.5])), neg=0.1)
    assert [alone.signal_B[at], alone.right_B[at], alone.wrong_B[at]] == pytest.approx([0.1375, 0.125, 0.00125])


def test_the_share_that_dynamic_sampling_keeps_by_hand():
    assert discarded(1, 1, 0.3) == pytest.approx(1)
    assert discarded(1, 2, 0.5) == pytest.approx(0.75)  # 4/3 rounds of two, of which 4/3 prompts are mixed, one is kept
    assert discarded(4, 12, 1.0) == pytest.approx(1 / 3)


# How long pilots stay true


def test_the_figures_are_those_of_pilots_and_commits_that_are_drawn():
    """Drawn 400 times: the largest of these figures has a deviation below 0.004."""
    rng = np.random.default_rng(1)
    then_N = rng.beta(0.4, 0.4, 300)
    now_N = np.clip(then_N + rng.normal(0, 0.2, 300), 0, 1)
    found = findings_decay.decay(np.stack([then_N, *[now_N] * 4])[None], 4, 4, 6, (0.125, 0.75))
    pilots, commits = rng.binomial(4, then_N, (400, 300)) / 4, rng.binomial(6, now_N, (400, 300)) / 6
    passed = (pilots >= 0.125) & (pilots <= 0.75)
    mixed = ((commits > 0) & (commits < 1))[passed].mean()
    solved = np.broadcast_to(now_N, pilots.shape)[pilots == 1].mean()
    drawn = [
        np.corrcoef(pilots.ravel(), commits.ravel())[0, 1],
        np.corrcoef(pilots[passed], commits[passed])[0, 1],
        mixed,
        solved,
    ]
    assert [found.correlation[0], found.accepted[0], found.mixed[0], found.solved[0]] == pytest.approx(drawn, abs=0.02)
    assert found.correlation[1] < found.correlation[0] < found.correlation[2]


# Runs


def test_without_correction_stale_rows_count_as_if_they_were_fresh(monkeypatch):
    seen = []
    monkeypatch.setattr(findings_runs, "token_losses", lambda *given: seen.append(given))
    with findings_runs.as_if_on_policy(True):
        findings_runs.update.token_losses("new", "proximal", "behaviour", "rest")
    assert seen == [("new", "proximal", "proximal", "rest")]
    assert findings_runs.update.token_losses is token_losses
