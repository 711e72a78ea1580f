"""Latency curves from files, and costs."""

import json
import os
from dataclasses import replace

import pytest
from simulated import FREE

from rollalloc_lab.simulate.cluster import Cluster, Scenario
from rollalloc_lab.simulate.cost import Latency, read_latency


def test_a_curve_is_linear_between_its_points_and_flat_before_the_first():
    assert Latency((2, 4), (1.0, 3.0)).table(4) == [1.0, 1.0, 1.0, 2.0, 3.0]


def test_a_curve_is_read_from_csv(tmp_path):
    (tmp_path / "a.csv").write_text("seconds_per_token, concurrency\n0.5,1\n\n0.75,8\n")
    read = read_latency(tmp_path / "a.csv")
    assert (read.concurrency, read.seconds_per_token) == ((1, 8), (0.5, 0.75))
    assert read.source == str(tmp_path / "a.csv")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("rows,ms\n1,2\n", "line 1: expected CSV with the header .*, got 'rows,ms'"),
        ("concurrency,seconds_per_token\n1,0.1\n2\n", "line 3: expected a whole number .*, got '2'"),
        ("concurrency,seconds_per_token\n1,0.1\n2.5,0.1\n", "line 3: expected a whole number .*, got '2.5,0.1'"),
        ("concurrency,seconds_per_token\n1,fast\n", "line 2: expected .* a number of seconds, got '1,fast'"),
        ("concurrency,seconds_per_token\n1,nan\n", "point 1: seconds_per_token must be a finite number above 0"),
        ("concurrency,seconds_per_token\n4,1\n4,1\n", "point 2: concurrency must grow, got 4 after 4"),
    ],
)
def test_what_is_no_curve_is_refused_by_line(tmp_path, content, says):
    (tmp_path / "a.csv").write_text(content)
    with pytest.raises(ValueError, match=says):
        read_latency(tmp_path / "a.csv")


def test_bytes_and_pipes_are_refused(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="not UTF-8"):
        read_latency(tmp_path / "a.csv")
    os.mkfifo(tmp_path / "pipe.csv")
    with pytest.raises(OSError, match="a FIFO"):
        read_latency(tmp_path / "pipe.csv")
    with pytest.raises(FileNotFoundError):
        read_latency(tmp_path / "none.csv")


@pytest.mark.parametrize("name", ["prefill", "abort", "weight_sync", "logprob", "train", "train_row", "update"])
@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf"), "1", True])
def test_costs_are_finite_and_not_negative(name, value):
    with pytest.raises(ValueError, match=f"{name} must be a finite number of at least 0"):
        replace(FREE, **{name: value})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"gpus": 0}, "gpus must be a whole number of at least 1"),
        (
            {"gpus": 1, "schedule": "async"},
            r"gpus must be a whole number of at least 2 \(a replica of 1 and a trainer\)",
        ),
        ({"gpus": 1, "slots": 0}, "slots"),
        ({"gpus": 10**9}, "gpus must be at most 1,000,000, got 1,000,000,000"),
        ({"gpus": 1, "schedule": "later"}, "schedule must be one of sync, async, got 'later'"),
        ({"gpus": 2, "trainer_share": 1.0}, "trainer_share must lie in"),
    ],
)
def test_clusters_that_there_are_not(changes, says):
    with pytest.raises(ValueError, match=says):
        Cluster(**changes)


@pytest.mark.parametrize(
    ("gpus", "share", "schedule", "expected"),
    [(9, 2, "sync", (9, 4, 1)), (8, 1, "async", (4, 4, 0)), (9, 4, "async", (4, 1, 1)), (2, 1, "async", (1, 1, 0))],
)
def test_how_gpus_are_shared_out(gpus, share, schedule, expected):
    cluster = Cluster(gpus=gpus, gpus_per_replica=share, schedule=schedule)
    assert (cluster.trainers, cluster.replicas, cluster.unused) == expected


def test_a_scenario_needs_a_curve_as_long_as_its_slots():
    with pytest.raises(ValueError, match="--slots is 256"):
        Scenario(cluster=Cluster(gpus=1), latency=Latency((1,), (1.0,)))
    assert json.dumps(Scenario(cluster=Cluster(gpus=1)).workload.describe())
