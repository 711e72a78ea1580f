"""Every method starts under every engine: a batch or two of the smallest model, from the command line.

Recipe × engine × staleness × where features come from, sampled: each recipe meets each engine, with a staleness that changes
from one pair to the next, so that each engine meets each staleness many times; what a recipe decides knows nothing of the
engine. The one that predicts, whose way into a run is another, meets them all. Of both all but a third are `slow`.
Processes are forked here, which is quick; what they are sent is pickled all the same. Few are spawned, as for a user.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from itertools import product
from math import log
from time import monotonic
from types import ModuleType

import pytest

from rollalloc.generate.stream import settings
from rollalloc.generate.stream.vllm_backend import Chunk
from rollalloc.lab.bench.methods import matched
from rollalloc.named import RECIPES, make_recipe

REWARD = """
def even(data_source, solution_str, ground_truth, extra_info):
    return float(sum(map(ord, solution_str)) % 2 == 0)
"""
JOINED = {"mopps+pods": {"groups": 2, "n": 4, "m": 2}}
PARAMETERS = {**{recipe: matched(recipe, groups=2, n=4) for recipe in RECIPES}, **JOINED}
READERS = [name for name, said in PARAMETERS.items() if make_recipe(name, said).reads_features]
ENGINES = {
    "sync": ("--engine", "sync"),
    "in_process": ("--engine", "async", "--no-overlap"),
    "own_process": ("--engine", "async"),
}
STALENESS = (0, 1, 3)
AT = {name: at for names in (PARAMETERS, ENGINES) for at, name in enumerate(names)}


PAIRS = [*product(PARAMETERS, ENGINES)]
FEATURES = {"made": (), "none": ("--features", "none")}
PREDICTING = [*product(ENGINES, STALENESS, FEATURES)]
TRAIN = ("train", "--model", "model", "--prompts", "prompts.parquet", "--reward", "starts.py:even", "--device", "cpu")
TRAIN = (*TRAIN, "--reward-workers", 0, "--max-new-tokens", 4, "--max-rows", 8, "--max-rollouts", 64)


@pytest.fixture
def started(call, own, tmp_path):
    """Train with a recipe and options; the batches' lines of the metrics."""
    (own / "starts.py").write_text(REWARD)

    def run(recipe, *options):
        said = [word for name, value in PARAMETERS[recipe].items() for word in ("--set", f"{name}={json.dumps(value)}")]
        code, output = call(*TRAIN, "--recipe", recipe, *said, *options, "--out", tmp_path)
        assert code == 0, output
        lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
        assert lines[-1]["kind"] == "end"
        return [line for line in lines if line["kind"] == "batch"]

    return run


def assert_none_too_old(batches, staleness):
    """A row that is replayed, as REINFORCE's and foresight's are by default, may be twelve versions old."""
    for line in batches:
        assert line["staleness_max"] <= (12 if line.get("replayed") else staleness)


@pytest.mark.parametrize(("recipe", "engine"), PAIRS)
def test_every_recipe_starts_under_every_engine(started, forked_generators, recipe, engine):
    staleness = STALENESS[(AT[recipe] // 3 + AT[engine]) % 3]
    batches = started(recipe, *ENGINES[engine], "--staleness", staleness)
    assert batches
    assert_none_too_old(batches, staleness)


@pytest.mark.parametrize(("engine", "staleness", "features"), PREDICTING)
def test_what_reads_features_starts_with_and_without(started, forked_generators, engine, staleness, features):
    assert started("foresight", *ENGINES[engine], "--staleness", staleness, *FEATURES[features])


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("also", [("--lora", 2), ("--kl", 0.1, "--gradient-checkpointing")])
def test_so_does_what_is_trained_in_another_way(started, forked_generators, engine, also):
    assert started("foresight", *ENGINES[engine], "--staleness", 1, *also)


def test_the_command_of_a_user_starts(started):
    """In a process that is spawned; transformers leaves hooks on the model where it made features."""
    assert started("foresight", "--engine", "async", "--staleness", 1)


class Served:
    """In vLLM's place: draws tokens of equal probability."""

    dead = False

    def __init__(self, model, folder, *, sampling, ends, longest_prompt, slots):
        model.save_pretrained(folder)
        self.tokens, self.ends, self.made, self.aborted = model.config.vocab_size, ends, {}, set()

    async def generate(self, name, tokens, most, seed, salt):
        draw = random.Random(seed)
        for at in range(most):
            self.made[name] = at
            await asyncio.sleep(0)
            token = draw.randrange(self.tokens)
            end = (
                "abort"
                if name in self.aborted
                else "stop"
                if token in self.ends
                else "length"
                if at == most - 1
                else None
            )
            yield Chunk([token], [-log(self.tokens)], end, monotonic())
            if end:
                break
        del self.made[name]

    async def abort(self, names):
        self.aborted.update(names)

    async def load(self, file):
        return monotonic(), dict(self.made)

    def paces(self):
        return []

    def figures(self):
        return {}

    def pids(self):
        return []

    def close(self):
        pass


@pytest.mark.parametrize(("recipe", "staleness"), [("foresight", 1), ("darts", 3)])
def test_vllm_s_back_end_starts(started, monkeypatch, recipe, staleness):
    engine = ModuleType("vllm_engine")
    engine.Engine, engine.refuse_unservable = Served, lambda model: None
    monkeypatch.setitem(sys.modules, "rollalloc.generate.stream.vllm_engine", engine)
    monkeypatch.setattr(settings, "find_spec", lambda name: True)
    batches = started(recipe, "--engine", "async", "--backend", "vllm", "--staleness", staleness)
    assert_none_too_old(batches, staleness)
