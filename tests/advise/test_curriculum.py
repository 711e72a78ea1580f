"""Curricula: rates with their intervals, weights for a mix of rates, and a file that is whole, or not there."""

from __future__ import annotations

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from curriculum_file import logged
from rollalloc.advise.curriculum import check_export, curriculum_of, weights_of, write_curriculum
from rollalloc.advise.rates import fit_rates
from rollalloc.core.seeds import rng
from rollalloc.data.prompts import load_prompts
from rollalloc.recipes.foresight import Foresight

MIXES = ("variance", "uniform", "gaussian:0.5,0.15", "foresight")
ROW = {"key": "mine/1", "rate": 0.5, "weight": 1.0}


def fitted(hits, n=8):
    hits_P = np.array(hits)
    return fit_rates(hits_P, np.full(len(hits), n), resamples=0), hits_P, np.full(len(hits), n)


def test_each_prompt_has_its_counts_rate_interval_tokens_and_pool(tmp_path):
    hits = [0] * 10 + [4] * 10 + [8] * 10
    groups = logged(tmp_path / "rollouts.jsonl", hits)
    rows = curriculum_of(groups, fitted(hits)[0], "variance")
    assert [row["key"] for row in rows] == sorted(row["key"] for row in rows)
    assert [row["right"] for row in rows] == hits
    assert {row["rollouts"] for row in rows} == {8}
    assert [rows[at]["tokens"] for at in (0, 29)] == [10, 39]
    assert all(row["rate_low"] <= row["rate"] <= row["rate_high"] for row in rows)
    assert [rows[at]["pool"] for at in (0, 15, 29)] == ["hard", "normal", "easy"]
    assert sum(row["weight"] for row in rows) == pytest.approx(1)
    assert {row["predicted"] for row in rows} == {None}  # the log has no texts


def test_95_percent_intervals_contain_the_true_rates_of_prompts():
    """The true rates of 200 prompts are drawn from Beta(2, 2), and each prompt has 8 rollouts.

    On average 190 of 200 intervals contain the true rate, with a standard deviation of 3. Right intervals reach 181 in all
    but .2% of draws.
    """
    random = rng(0, "test")
    rate_P = random.beta(2, 2, 200)
    hits_P, count_P = random.binomial(8, rate_P), np.full(200, 8)
    rates = fit_rates(hits_P, count_P, resamples=0)
    low_P, high_P = (rates.quantile(level, hits_P, count_P) for level in (0.025, 0.975))
    assert ((low_P <= rate_P) & (rate_P <= high_P)).sum() >= 181


@pytest.mark.parametrize("mix", MIXES)
@given(hits=st.lists(st.integers(0, 8), min_size=1, max_size=30))
def test_weights_are_chances_and_equal_counts_have_equal_ones(mix, hits):
    rates, hits_P, count_P = fitted(hits)
    weight_P = weights_of(mix, rates, hits_P, count_P)
    assert weight_P.sum() == pytest.approx(1)
    assert (weight_P >= 0).all()
    assert all(np.ptp(weight_P[hits_P == each]) < 1e-12 for each in hits)


def test_each_mix_favours_what_it_says():
    hits = [0] * 40 + [8] * 20 + [16] * 10 + [24] * 5 + [32] * 5
    rates, hits_P, count_P = fitted(hits, 32)
    of = {mix: weights_of(mix, rates, hits_P, count_P) for mix in (*MIXES, "gaussian:1,0.1")}
    assert hits[of["variance"].argmax()] == hits[of["gaussian:0.5,0.15"].argmax()] == 16
    assert hits[of["gaussian:1,0.1"].argmax()] == 32
    assert hits[of["foresight"].argmax()] == 8  # p(1 - p)³ is largest at 1/4
    assert of["foresight"] == pytest.approx(Foresight().chances(rates.posterior_mean(hits_P, count_P)))
    shares = [of["uniform"][hits_P == each].sum() for each in (0, 8, 16, 24, 32)]
    assert shares == pytest.approx([0.2] * 5)  # flat over rates, however many prompts have one


def test_a_file_is_written_whole_again_and_never_over_another(tmp_path):
    file = tmp_path / "c.parquet"
    for weight in (1.0, 0.5):
        check_export(file, "variance", None)
        write_curriculum(file, [ROW | {"weight": weight}])
        assert pyarrow.parquet.read_table(file).to_pylist() == [ROW | {"weight": weight}]
    (tmp_path / "mine").mkdir()
    file = tmp_path / "mine/c.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"mine": [1]}), file)
    before = file.read_bytes()
    for refused in (lambda: check_export(file, "variance", None), lambda: write_curriculum(file, [ROW])):
        with pytest.raises(FileExistsError, match=r"holds c\.parquet, which was not written by rollalloc"):
            refused()
    assert file.read_bytes() == before
    with pytest.raises(ValueError, match="parquet cannot hold these rows"):
        write_curriculum(tmp_path / "new.parquet", [ROW | {"truth": 1}, ROW | {"truth": "one"}])
    assert {path.name for path in tmp_path.iterdir()} == {"c.parquet", "mine", ".rollalloc"}


def test_a_place_among_the_logs_and_another_ending_are_refused(tmp_path):
    with pytest.raises(ValueError, match="in the folder of the log, and would be read as a log of TRL"):
        check_export(tmp_path / "deep" / "c.parquet", "variance", tmp_path)
    with pytest.raises(ValueError, match=r"ends in \.parquet, got .*c\.csv"):
        check_export(tmp_path / "c.csv", "variance", None)


def test_the_rows_of_the_prompts_make_it_a_file_of_prompts(tmp_path):
    hits = [0, 4, 8] * 4
    groups = logged(tmp_path / "rollouts.jsonl", hits, tokens=None)
    prompts = {
        key: {
            "key": key, "data_source": "mine", "prompt": [{"role": "user", "content": key}],
            "reward_model": {"ground_truth": "1"}, "extra_info": {"index": int(key.rpartition("/")[2])},
        }
        for key in groups.keys
    }  # fmt: skip
    rows = curriculum_of(groups, fitted(hits)[0], "uniform", prompts=prompts)
    write_curriculum(tmp_path / "c.parquet", rows)
    assert load_prompts(tmp_path / "c.parquet").ground_truths == ("1",) * 12
    assert {row["tokens"] for row in pyarrow.parquet.read_table(tmp_path / "c.parquet").to_pylist()} == {None}


def test_rates_are_predicted_from_the_features_of_other_prompts(tmp_path):
    hits = [0, 8] * 20
    groups = logged(tmp_path / "rollouts.jsonl", hits)
    features_PD = np.array([[right, 1.0] for right in hits], np.float32)
    rows = curriculum_of(groups, fitted(hits)[0], "variance", features_PD=features_PD)
    assert all((row["predicted"] > 0.5) == (row["right"] == 8) for row in rows)


def test_a_link_is_not_written_through_though_it_leads_to_a_curriculum(tmp_path):
    for name in ("c.parquet", "link.parquet"):  # so that both names are claimed
        write_curriculum(tmp_path / name, [ROW])
    (tmp_path / "link.parquet").unlink()
    (tmp_path / "link.parquet").symlink_to(tmp_path / "c.parquet")
    for refused in (
        lambda: check_export(tmp_path / "link.parquet", "variance", None),
        lambda: write_curriculum(tmp_path / "link.parquet", [ROW]),
    ):
        with pytest.raises(FileExistsError, match=r"holds link\.parquet, which"):
            refused()
