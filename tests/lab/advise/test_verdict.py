"""Laws of the verdict, on evidence of a world that is known."""

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planted_evidence import planted, scaled, signals
from rollalloc.lab.advise.choices import CHOICES, Choice, mix_of
from rollalloc.lab.advise.outcomes import Outcomes
from rollalloc.lab.advise.ranking import Ranked, fitted, rank
from rollalloc.lab.advise.verdict import judged

KNOWN = planted()
GRPO = Choice("grpo", 16, 4)
rates = st.floats(0, 1)


def test_one_rollout_per_prompt_where_answers_are_single():
    verdict = judged(signals(0.0), GRPO, KNOWN)
    assert verdict.kind == "switch"
    assert verdict.choice is not None
    assert verdict.choice.n == 1
    assert verdict.sentence.startswith("One rollout per prompt, 64 prompts a batch")
    assert "fewer rollouts than GRPO n = 4" in verdict.sentence


def test_groups_are_kept_where_answers_are_many():
    verdict = judged(signals(1.0), GRPO, KNOWN)
    assert verdict.kind == "keep"
    assert verdict.choice == GRPO
    assert verdict.sentence.startswith("Keep GRPO n = 4")
    assert any("two right answers" in sentence for sentence in verdict.otherwise)


def test_batches_are_as_large_as_the_present_ones():
    verdict = judged(signals(0.0), Choice("grpo", 128, 8), KNOWN)
    assert {row.choice.groups * row.choice.n for row in verdict.ranked} == {1024}
    assert "1024 prompts a batch" in verdict.sentence


@settings(max_examples=30, deadline=None)
@given(rates, rates, st.sampled_from(["raft", "reinforce", "foresight", "grpo"]), st.sampled_from(list(CHOICES)))
def test_what_is_ruled_out_is_never_recommended(many, zero_variance, recipe, present):
    ruled_out = {recipe: "because"}
    verdict = judged(signals(many, zero_variance_4=zero_variance), CHOICES[present], KNOWN, ruled_out=ruled_out)
    assert verdict.choice is not None
    assert verdict.choice.recipe != recipe
    assert [row.ruled_out != "" for row in verdict.ranked] == sorted(row.ruled_out != "" for row in verdict.ranked)


@settings(max_examples=30, deadline=None)
@given(rates, rates, st.sampled_from(list(CHOICES)))
def test_intervals_are_ordered_and_savings_are_over_the_present(many, zero_variance, present):
    for row in rank(fitted(KNOWN), signals(many, zero_variance_4=zero_variance), CHOICES[present]):
        low, high = row.interval
        assert 0 < low <= row.saving <= high
        if row.choice.name == present:
            assert (low, row.saving, high) == (1, 1, 1)


def test_what_is_first_does_not_depend_on_the_present_setting():
    firsts = {rank(fitted(KNOWN), signals(0.2), choice)[0].choice.name for choice in CHOICES.values()}
    assert len(firsts) == 1


def test_all_costs_times_a_factor_change_nothing():
    one, other = (judged(signals(0.3), GRPO, known) for known in (KNOWN, scaled(KNOWN, 7.0)))
    assert [row.choice for row in one.ranked] == [row.choice for row in other.ranked]
    for row, same in zip(one.ranked, other.ranked, strict=True):
        assert row.saving == pytest.approx(same.saving, rel=0.02)


def test_what_is_outside_of_the_evidence_is_said():
    notes = " ".join(judged(signals(0.2, zero_variance_4=0.99), GRPO, KNOWN).notes)
    assert "0.99" in notes
    assert "wider" in notes
    assert "0.15 to 135 million" in notes
    within = " ".join(judged(signals(0.2), GRPO, KNOWN).notes)
    assert "wider" not in within


def test_what_is_not_known_is_said():
    assert any("not known" in note for note in judged(signals(0.0), GRPO, KNOWN, unknown=("many_answers",)).notes)


@pytest.mark.parametrize(
    ("n", "mix"),
    [
        (2, {"grpo_n2": 1.0}),
        (4, {"grpo_n4": 1.0}),
        (8, {"grpo_n4": 0.5, "grpo_n16": 0.5}),
        (16, {"grpo_n16": 1.0}),
        (64, {"grpo_n16": 1.0}),
    ],
)
def test_sizes_of_groups_lie_between_those_that_were_run(n, mix):
    assert mix_of(Choice("grpo", 1, n)) == pytest.approx(mix)


@pytest.mark.parametrize("choice", [Choice("dapo", 16, 4), Choice("reinforce", 16, 4), Choice("grpo", 64, 1)])
def test_a_present_setting_without_evidence_is_refused(choice):
    with pytest.raises(ValueError, match=r"no evidence|needs groups"):
        judged(signals(), choice, KNOWN)


def test_a_size_that_was_not_run_is_said():
    assert any("Groups of 32 were not run" in note for note in judged(signals(), replace(GRPO, n=32), KNOWN).notes)


def table(monkeypatch, saving, interval, over_plain=(1.2, 0.6, 2.0)):
    """Savings as they are given: of foresight over the present GRPO n = 4, and over REINFORCE."""
    even = (1.0, 1.0, 1.0)
    rows = (
        Ranked(CHOICES["foresight"], saving, interval, over_plain),
        Ranked(GRPO, 1.0, (1.0, 1.0), even),
    )
    monkeypatch.setattr("rollalloc.lab.advise.verdict.rank", lambda *given: rows)
    return judged(signals(), GRPO, KNOWN)


@pytest.mark.parametrize(
    ("saving", "interval", "kind", "words"),
    [
        (
            1.09,
            (1.05, 1.2),
            "keep",
            "Keep GRPO n = 4: no saving is shown. The likeliest is foresight, 1.1 × (1.1–1.2).",
        ),
        (1.5, (0.9, 2.0), "keep", "Keep GRPO n = 4: no saving is shown. The likeliest is foresight, 1.5 × (0.9–2.0)."),
        (1.1, (1.01, 1.3), "switch", "One rollout per prompt, 64 prompts a batch, foresight; expect 1.0–1.3 × fewer"),
    ],
)
def test_nothing_is_changed_for_a_small_saving_or_one_that_may_be_none(monkeypatch, saving, interval, kind, words):
    verdict = table(monkeypatch, saving, interval)
    assert (verdict.kind, verdict.choice) == (kind, GRPO if kind == "keep" else CHOICES["foresight"])
    assert verdict.sentence.startswith(words)


@pytest.mark.parametrize(
    ("over_plain", "words"),
    [
        ((2.0, 1.5, 3.0), "Drawing by prediction: 1.5–3.0 × fewer than REINFORCE."),
        ((0.5, 0.4, 0.8), "Drawing by prediction: 1.2–2.5 × more than REINFORCE."),
        ((1.2, 0.6, 2.0), "Drawing by prediction: likelier to help than not, which is not shown (1.2 ×, 0.6–2.0, of"),
    ],
)
def test_what_drawing_by_prediction_adds_is_fewer_above_1_and_more_below_it(monkeypatch, over_plain, words):
    assert words in table(monkeypatch, 3.0, (2.0, 4.0), over_plain).sentence


@pytest.mark.parametrize("many", [0.0, 0.3, 1.0])
def test_it_is_otherwise_from_the_nearest_value_on_that_changes_what_is_first(many):
    """Of 21 values that tasks had; between it and what is here, the same is first."""
    known = fitted(KNOWN)
    first = rank(known, signals(many), GRPO)[0].choice
    [sentence] = [said for said in judged(signals(many), GRPO, KNOWN).otherwise if "two right answers" in said]
    found = re.fullmatch(r"If .* were (at most|at least) (\S+) \(here (\S+)\): (.*)\.", sentence)
    assert found
    how, value, here, words = found.groups()
    assert here == f"{many:.2f}"
    assert how == ("at most" if float(value) < many else "at least")
    for between in np.linspace(0, 1, 21):
        now = rank(known, signals(float(between)), GRPO)[0].choice
        if abs(between - float(value)) < 1e-9:
            assert now.words == words != first.words
        elif abs(between - many) < abs(float(value) - many) - 1e-9:
            assert now == first


def test_savings_add_up_and_are_over_what_they_say():
    """Logs of what each pays are planted: REINFORCE e^1 below GRPO n = 4, which is level with n = 2's + 0.1."""
    rows = {row.choice.name: row for row in rank(fitted(KNOWN), signals(0.0), GRPO)}
    assert rows["reinforce"].saving == pytest.approx(np.exp(1.0), rel=0.25)
    assert rows["grpo_n16"].saving == pytest.approx(np.exp(-0.3), rel=0.25)
    assert rows["grpo_n4"].over_plain[0] == pytest.approx(np.exp(-1.0), rel=0.25)
    assert rows["reinforce"].over_plain == (1, 1, 1)
    for row in rows.values():  # logs of expected costs, so that they are differences of one column
        assert row.saving == pytest.approx(rows["reinforce"].saving * row.over_plain[0])


@pytest.mark.parametrize(("logs", "first"), [(0.05, "reinforce"), (0.25, "foresight")])
def test_foresight_comes_first_where_it_saves_a_tenth_over_what_is_plainer(monkeypatch, logs, first):
    """Its figures in the table stay what is expected."""

    def drawn(self, signals, mixes):
        return {name: np.full(4, {"foresight": 7 - logs, "reinforce": 7.0}.get(name, 8.0)) for name in mixes}

    monkeypatch.setattr(Outcomes, "drawn", drawn)
    rows = rank(fitted(KNOWN), signals(0.0), GRPO)
    assert rows[0].choice.name == first
    [row] = [row for row in rows if row.choice.name == "foresight"]
    assert row.over_plain[0] == pytest.approx(np.exp(logs))


def test_who_draws_by_prediction_already_is_not_told_to_save_by_what_costs_more(monkeypatch):
    def drawn(self, signals, mixes):
        return {name: np.full(4, {"foresight": 6.95, "reinforce": 7.0}.get(name, 8.0)) for name in mixes}

    monkeypatch.setattr(Outcomes, "drawn", drawn)
    verdict = judged(signals(0.0), CHOICES["foresight"], KNOWN)
    assert verdict.kind == "keep"
    assert verdict.sentence.startswith("Keep foresight: nothing is expected to need fewer rollouts here")
