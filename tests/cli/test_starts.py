"""Every method starts under every engine: a batch or two of the smallest model, from the command line.

Recipe × engine × staleness × where features come from, sampled: each recipe meets each engine, with a staleness that changes
from one pair to the next, so that each engine meets each staleness many times; what a recipe decides knows nothing of the
engine. The one that predicts, whose way into a run is another, meets them all.
Processes are forked here, which is quick; what they are sent is pickled all the same. One is spawned, as for a user.
"""

import json
from itertools import product

import pytest
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from rollalloc.named import RECIPES, sizes_of

REWARD = """
def even(data_source, solution_str, ground_truth, extra_info):
    return float(sum(map(ord, solution_str)) % 2 == 0)
"""
JOINED = {"mopps+pods": {"groups": 2, "n": 4, "m": 2}}
PARAMETERS = {**{recipe: sizes_of(recipe, {}, rows=8, group_rows=4) for recipe in RECIPES}, **JOINED}
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
def test_adapters_kl_and_checkpointing_start_under_every_engine(started, forked_generators, engine, also):
    assert started("foresight", *ENGINES[engine], "--staleness", 1, *also)


def test_a_run_two_batches_ahead_starts(started):
    """Under a model that is not trained some rollouts are long: none is older than twice as many updates."""
    batches = started("grpo", "--engine", "async", "--no-overlap", "--ahead", 2)
    assert_none_too_old(batches, 4)


def test_the_command_of_a_user_starts(started):
    """In a process that is spawned; transformers leaves hooks on the model where it made features."""
    assert started("foresight", "--engine", "async", "--staleness", 1, "--lora", 2)


def test_a_model_that_attends_to_the_last_tokens_only_is_refused_and_nothing_is_left(call, own, tmp_path):
    config = Qwen2Config(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        use_sliding_window=True,
        sliding_window=4,
        max_window_layers=0,
        max_position_embeddings=32,
        eos_token_id=1,
    )
    Qwen2ForCausalLM(config).save_pretrained(own / "sliding")
    AutoTokenizer.from_pretrained(own / "model").save_pretrained(own / "sliding")
    (own / "starts.py").write_text(REWARD)
    options = ("--recipe", "foresight", "--engine", "async", "--model", "sliding", "--set", "groups=4")
    code, output = call(*TRAIN, *options, "--out", tmp_path / "run")
    assert code == 2
    assert "has sliding windows" in output
    assert not (tmp_path / "run").exists()
