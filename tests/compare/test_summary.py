"""Summaries by hand, and how often the bootstrap's intervals hold the truth."""

from __future__ import annotations

import json

import by_hand
import numpy as np
import pytest

from rollalloc.compare import summary
from rollalloc.compare.compare import compare
from rollalloc.compare.summary import Interval, Summary, interquartile_mean, interval, summaries
from rollalloc.train.config import Config


def write_run(folder, recipe="grpo", seed=0, *, reaches=200, task="", target=0.5, **how):
    """A run of 500 rollouts, which is evaluated every 100."""
    run = Config(
        model="m", prompts=("p",), reward="a:b", recipe=recipe, seed=seed, target=target, max_rollouts=500, task=task
    )
    return by_hand.write_run(folder / task / f"{recipe}-{seed}", run, reaches, every=100, **how)


def summarise(folder):
    [found] = summaries(folder)
    return found


def test_costs_ratios_and_accounts_by_hand(tmp_path):
    for seed, (baseline, ours) in enumerate([(200, 100), (300, 200), (400, 400)]):
        write_run(tmp_path, "grpo", seed, reaches=baseline, zero_variance=100)
        write_run(tmp_path, "pods", seed, reaches=ours)
    found = summarise(tmp_path)
    assert (found.task, found.target, found.baseline, found.unfinished) == ("", 0.5, "grpo", ())
    grpo, pods = found.recipes
    assert (grpo.label, pods.label) == ("grpo", "pods")
    assert (grpo.reached, grpo.seeds, grpo.standard_error) == (3, (0, 1, 2), 0.0)
    assert grpo.rollouts_paid == 1500
    assert grpo.accounts == {"trained": 1200, "zero_variance": 300}
    # Half-way between the grid point before, at accuracy 0, and the one that reaches it, at 1.
    assert grpo.costs["rollouts"] == Interval(250.0, None, None, (150.0, 250.0, 350.0))
    assert grpo.costs["tokens"] == Interval(750.0, None, None, (450.0, 750.0, 1050.0))
    assert grpo.costs["seconds"] == Interval(25.0, None, None, (15.0, 25.0, 35.0))
    assert grpo.costs["steps"] == Interval(5.0, None, None, (3.0, 5.0, 7.0))
    assert grpo.ratios["rollouts"] == Interval(1.0, None, None, (1.0, 1.0, 1.0))
    ratios = (150 / 50, 250 / 150, 350 / 350)
    assert pods.ratios["rollouts"] == Interval(pytest.approx(np.mean(ratios)), None, None, pytest.approx(ratios))


def test_the_last_evaluation_of_each_run_is_told_where_all_know_it(tmp_path):
    known = {"k": 8, "pass_at_k": 0.0, "distinct_right": None, "entropy": 0.25}
    for seed, k in enumerate((4, None, 8)):
        write_run(tmp_path, "grpo", seed, breadth=lambda at, seed=seed: known | {"pass_at_k": (at / 100 + seed) / 10})
        write_run(tmp_path, "dapo", seed, breadth=lambda at, k=k: k and known | {"k": k})
        write_run(tmp_path, "pods", seed)
    found = summarise(tmp_path)
    grpo, dapo, pods = found.recipes
    assert grpo.last["pass_at_k"] == Interval(pytest.approx(0.6), None, None, (0.5, 0.6, 0.7))  # of six, from 0 to 500
    assert grpo.last["accuracy"] == Interval(1.0, None, None, (1.0, 1.0, 1.0))
    assert (grpo.last["distinct_right"], grpo.k, dapo.k, pods.k) == (None, 8, None, None)
    assert (
        {name for name in dapo.last if dapo.last[name]}
        == {name for name in pods.last if pods.last[name]}
        == {"accuracy"}
    )
    assert found.last == {"accuracy": "accuracy", "pass_at_k": "pass@k", "entropy": "entropy"}
    assert Summary("", None, "grpo", (grpo,), ()).last["pass_at_k"] == "pass@8"


def test_a_censored_run_is_counted_and_makes_the_point_a_bound(tmp_path):
    for seed in range(5):
        write_run(tmp_path, "grpo", seed, reaches=300)
        write_run(tmp_path, "dapo", seed, reaches=None if seed == 2 else 200)
    grpo, dapo = summarise(tmp_path).recipes
    assert (grpo.reached, dapo.reached, len(dapo.seeds)) == (5, 4, 5)
    assert grpo.costs["rollouts"] == Interval(250.0, 250.0, 250.0, (250.0,) * 5)
    assert dapo.costs["rollouts"] == Interval(150.0, None, None, (150.0, 150.0, 500.0, 150.0, 150.0), ">")
    ratio = dapo.ratios["rollouts"]
    assert ratio is not None
    assert (ratio.bound, ratio.low, ratio.high) == ("<", None, None)  # it paid more than 500, so at most 250 / 500
    assert ratio.values[2] == 0.5


def test_a_ratio_to_a_censored_baseline_is_a_lower_bound_and_to_both_is_none(tmp_path):
    for seed in range(2):
        write_run(tmp_path, "grpo", seed, reaches=None)
    write_run(tmp_path, "dapo", 0, reaches=200)
    write_run(tmp_path, "dapo", 1, reaches=300)
    write_run(tmp_path, "pods", 0, reaches=None)
    _, dapo, pods = summarise(tmp_path).recipes
    assert dapo.ratios["rollouts"] == Interval(
        pytest.approx((500 / 150 + 2) / 2), None, None, pytest.approx((500 / 150, 2)), ">"
    )
    assert pods.ratios["rollouts"] is None


def test_ratios_are_paired_by_seed(tmp_path):
    write_run(tmp_path, "grpo", 0, reaches=200)
    write_run(tmp_path, "grpo", 1, reaches=400)
    write_run(tmp_path, "pods", 1, reaches=400)
    write_run(tmp_path, "pods", 7, reaches=100)
    pods = summarise(tmp_path).recipes[1]
    assert pods.ratios["rollouts"] == Interval(1.0, None, None, (1.0,))
    assert pods.costs["rollouts"] == Interval(200.0, None, None, (350.0, 50.0))


def test_runs_that_have_not_ended_and_runs_without_a_target(tmp_path):
    write_run(tmp_path, "grpo", 0, target=None)
    begun = write_run(tmp_path, "grpo", 1, target=None, ends=False)
    found = summarise(tmp_path)
    assert found.unfinished == (begun,)
    [grpo] = found.recipes
    assert (grpo.seeds, grpo.reached) == ((0,), 0)
    assert set(grpo.costs.values()) == set(grpo.ratios.values()) == {None}


def test_runs_under_other_settings_do_not_pass_for_further_seeds(tmp_path):
    first, second = write_run(tmp_path, "pods", 0), write_run(tmp_path, "pods", 1)
    described = json.loads((second / "run.json").read_text())
    described["parameters"] = {"groups": 9}
    (second / "run.json").write_text(json.dumps(described))
    with pytest.raises(ValueError, match=f"{first} and {second} have the same label.* their seed: pods.parameters"):
        summaries(tmp_path)


def test_tasks_are_told_apart(tmp_path):
    write_run(tmp_path, task="one")
    write_run(tmp_path, task="two", reaches=300)
    assert [one.task for one in summaries(tmp_path)] == ["one", "two"]
    assert summarise(tmp_path / "two").recipes[0].costs["rollouts"] == Interval(250.0, None, None, (250.0,))
    write_run(tmp_path, "pods", task="one", target=0.7)
    with pytest.raises(ValueError, match=r"runs of one have different targets, \['0.5', '0.7'\]"):
        summaries(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"no run\.json below"):
        summaries(tmp_path / "none")


@pytest.mark.e2e
@pytest.mark.usefixtures("forked_runs")
def test_a_summary_needs_nothing_but_descriptions_and_metrics(run_of, tmp_path):
    runs = [run_of(seed=seed, target=1e-9) for seed in (0, 1)] + [
        run_of("pods", {"groups": 4, "n": 4, "m": 2}, target=1e-9)
    ]
    compare(runs, tmp_path)
    before = summarise(tmp_path)
    assert before.recipes[0].reached == 2
    for path in list(tmp_path.rglob("*")):
        if path.is_file() and path.name not in ("run.json", "metrics.jsonl"):
            path.unlink()
    assert not (tmp_path / "results.json").exists()
    assert summarise(tmp_path) == before


# Statistics


@pytest.mark.parametrize(
    ("values", "mean"),
    [
        ([5.0], 5.0),
        ([1.0, 2.0, 6.0], 3.0),
        ([0.0, 1.0, 3.0, 100.0], 2.0),
        ([100.0, 1.0, 2.0, 3.0, -7.0], 2.0),
        ([*range(8)], 3.5),
        ([0, 0, 1, 2, 3, 4, 90, 99], 2.5),
    ],
)
def test_a_quarter_rounded_down_is_cut_off_at_each_end(values, mean):
    assert interquartile_mean(values) == pytest.approx(mean)


def test_intervals_need_five_values_and_are_repeatable():
    assert (interval([1.0, 2.0, 3.0, 4.0]).low, interval([1.0] * 5, ">").high) == (None, None)
    values = [3.0, 1.0, 4.0, 1.5, 5.0]
    once = interval(values)
    assert once == interval(values)
    assert 1.0 <= once.low < once.point < once.high <= 5.0


@pytest.mark.parametrize(("seeds", "distribution"), [(5, "normal"), (5, "lognormal"), (10, "uniform")])
def test_intervals_hold_the_true_value_about_as_often_as_they_say(monkeypatch, seeds, distribution):
    """Of 1,000 intervals at least 91% and at most 98.5% hold it.

    Error rate: with a true coverage of 93.5% fewer than 91% do with a probability of 0.1%, with one of 97.2% more than 98.5%
    with 0.2%; the seed is fixed. The plain percentile interval holds 90% at five seeds from a normal distribution.
    """
    monkeypatch.setattr(summary, "RESAMPLES", 1000)
    rng = np.random.default_rng(5)
    draw = {
        "normal": lambda *shape: rng.normal(size=shape),
        "uniform": lambda *shape: rng.random(shape),
        "lognormal": lambda *shape: np.exp(0.3 * rng.normal(size=shape)),
    }[distribution]
    truth = interquartile_mean(draw(4_000_000))
    found = [interval(values) for values in draw(1000, seeds).tolist()]
    held = np.mean([one.low <= truth <= one.high for one in found])
    assert 0.91 <= held <= 0.985
