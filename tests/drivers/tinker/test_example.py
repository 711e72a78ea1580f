"""The example runs, with the service by hand in place of the one that it would pay."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from fake_tinker import Client, Cloud

from rollalloc import Budget
from rollalloc.drivers.tinker import Service
from rollalloc.rewards.scorers import InlineScorer
from rollalloc.tasks.tiny import word_tokenizer

pytestmark = pytest.mark.e2e

EXAMPLE = Path(__file__).parents[3] / "examples" / "tinker_pilot_commit.py"


@pytest.fixture
def example(by_hand, monkeypatch):
    spec = importlib.util.spec_from_file_location("tinker_pilot_commit", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    cloud = Cloud()

    class ByHand(Service):
        def __init__(self, model, remote, seed):
            super().__init__(model, remote, seed, client=Client(cloud))

        def tokenizer(self):
            return word_tokenizer("abcdefgh")

    monkeypatch.setattr(module, "Service", ByHand)
    monkeypatch.setattr(
        module, "WorkerScorer", lambda _: InlineScorer(lambda **sample: float("a" in sample["solution_str"]))
    )
    monkeypatch.setattr(module, "Budget", lambda run_rollouts: Budget(run_rollouts=min(run_rollouts, 600)))
    return module


def test_the_example_trains_says_what_it_cost_and_goes_on(example, tmp_path, capsys):
    prompts = tmp_path / "prompts.jsonl"
    letters = "abcdefgh"
    prompts.write_text(
        "".join(
            json.dumps({"data_source": "toy", "prompt": f"{one} {other}", "reward_model": {"ground_truth": one}}) + "\n"
            for one in letters
            for other in letters
        )
    )
    example.main(str(prompts), str(tmp_path / "run"))
    first = capsys.readouterr().out.splitlines()
    # Rollouts finish in an order that the clock decides, so a few may be left that are too few for another group.
    assert first[-1].startswith("the budget of 600 rollouts ")
    assert {line.split()[-1] for line in first if line.startswith("batch")} == {"USD"}
    example.main(str(prompts), str(tmp_path / "run"))  # a run that is over is resumed, and is over
    assert capsys.readouterr().out.splitlines()[-1] == first[-1]
