"""Laws of the verdict, on evidence of a world that is known."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planted_evidence import planted, scaled, signals
from rollalloc.lab.advise.choices import CHOICES, Choice, mix_of
from rollalloc.lab.advise.ranking import fitted, rank
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
    assert "0.15 million" in notes
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
