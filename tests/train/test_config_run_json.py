"""Tests of whole runs and their `run.json`: what is written, what is read back, and what is refused before training."""

import json
import re
from dataclasses import replace

import pytest

import rollalloc
from rollalloc.compare.compare import is_finished
from rollalloc.data import prompts
from rollalloc.data.prompts import write_prompts
from rollalloc.files.names import ENCODED
from rollalloc.models.policy import Policy
from rollalloc.models.settings import Clip, Loss
from rollalloc.runs.reader import read_metrics
from rollalloc.train import store
from rollalloc.train.config import Schedule, read_config
from rollalloc.train.store import RunFolder
from rollalloc.train.train import train
from tiny_policy import killed_after

# A run


def test_a_run_writes_what_it_is_what_it_paid_and_its_model(run_of, tmp_path):
    run = run_of(seed=7)
    heard = []
    why = train(run, tmp_path / "run", heard.append)
    metrics = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert why.startswith("the budget of ")
    assert metrics[-1]["kind"] == heard[-1]["kind"] == "end"
    assert metrics[-1]["rollouts_paid"] == 96
    described = json.loads((tmp_path / "run" / "run.json").read_text())
    assert described.pop("digests").keys() > {run.prompts[0], run.heldout}
    assert len(described.pop("starts")) == 1
    assert described == run.description()
    assert Policy.load(tmp_path / "run" / "model", device="cpu").eos_ids == (1,)


def test_a_description_is_plain_and_tells_runs_apart(run_of):
    run = run_of()
    assert json.loads(json.dumps(run.description())) == run.description() == run_of().description()
    others = [
        run_of(seed=1),
        run_of(learning_rate=2e-4),
        run_of(parameters={"groups": 4, "n": 5}),
        run_of(max_rollouts=97),
        run_of(optimizer_steps_per_batch=2),
        run_of(reward="other:function"),
    ]
    assert all(other.description() != run.description() for other in others)
    assert run_of(track=("tensorboard",)).description() == run.description()


def test_a_run_with_every_setting_of_the_update_is_read_back(run_of, tmp_path):
    run = run_of()
    loss = Loss(clip=Clip(low=0.1, dual=10.0), aggregation="dr_grpo", kl=0.01)
    schedule = Schedule(warmup=2, shape="cosine", steps=9, floor=0.5)
    run = replace(run, loss=loss, schedule=schedule, precision="bf16", max_batches=2)
    train(run, tmp_path)
    assert read_config(tmp_path) == run


def test_a_run_is_tracked_where_that_is_wished(run_of, tmp_path):
    pytest.importorskip("tensorboard")
    train(run_of(track=("tensorboard",)), tmp_path)
    assert [path.name[:6] for path in (tmp_path / "tensorboard").iterdir()] == ["events"]


def test_a_tracker_that_is_not_there_is_said_before_anything_is_removed(run_of, tmp_path):
    run = run_of()
    train(run, tmp_path)
    with pytest.raises(ValueError, match="unknown tracker mlflow"):
        train(run_of(seed=1, track=("mlflow",)), tmp_path, overwrite=True)
    assert is_finished(run, tmp_path)


def test_another_runs_folder_is_refused_and_a_run_that_cannot_be_removes_nothing(run_of, tmp_path):
    first, second, third = run_of(), run_of(seed=1), run_of(reward="no_such_module:score")
    train(first, tmp_path)
    with pytest.raises(FileExistsError, match="holds a run that has ended"):
        train(second, tmp_path)
    with pytest.raises(ImportError, match="no_such_module"):
        train(third, tmp_path, overwrite=True)
    assert is_finished(first, tmp_path)
    train(second, tmp_path, overwrite=True)
    assert is_finished(second, tmp_path)
    assert not is_finished(first, tmp_path)


def test_a_run_that_came_to_no_checkpoint_begins_again_and_no_other_does(run_of, tmp_path):
    run = run_of()
    with pytest.raises(KeyboardInterrupt):
        train(run, tmp_path, killed_after(1))
    with pytest.raises(FileExistsError, match="a run that has not ended, without a checkpoint"):
        train(run_of(seed=1), tmp_path, resume=True)
    assert train(run, tmp_path, resume=True).startswith("the budget of ")


@pytest.mark.parametrize(("least", "encoded"), [(1, [0, 20]), (1000, [80, 20])])
def test_a_resumed_run_encodes_none_of_many_prompts_again(run_of, tmp_path, monkeypatch, least, encoded):
    """Of 80 prompts and 20 held-out ones. Ids are kept of at least `least` prompts, and go with the run's model."""
    monkeypatch.setattr(store, "LEAST_PROMPTS", least)
    run, counts, plain = run_of(checkpoint_every=1), [], prompts.encode_each
    with pytest.raises(KeyboardInterrupt):
        train(run, tmp_path, killed_after(2))
    assert (tmp_path / ENCODED).exists() == (least == 1)

    def counted(tokenizer, texts, *more, **named):
        counts.append(len(texts))
        return plain(tokenizer, texts, *more, **named)

    monkeypatch.setattr(prompts, "encode_each", counted)
    train(run, tmp_path, resume=True)
    assert counts == encoded
    RunFolder(tmp_path).slim()
    assert not (tmp_path / ENCODED).exists()


@pytest.mark.parametrize("text", ["", "[]", "{", "3", "[" * 100_000])
def test_a_description_that_is_damaged_is_said(run_of, tmp_path, text):
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(ValueError, match="does not describe a run"):
        read_config(tmp_path)


def test_a_description_that_lacks_a_field_is_refused_by_the_fields_name(run_of, tmp_path):
    """Defaults in place of missing fields would resume another run."""
    run = run_of()
    saved = run.description()
    for name in (name for name in saved if name != "schema"):
        rest = {other: value for other, value in saved.items() if other != name}
        (tmp_path / "run.json").write_text(json.dumps(rest))
        with pytest.raises(ValueError, match=name):
            read_config(tmp_path)

    inner = {name: value for name, value in saved["loss"].items() if name != "kl"}
    (tmp_path / "run.json").write_text(json.dumps(saved | {"loss": inner}))
    with pytest.raises(ValueError, match="Loss lacks kl"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("starts", "why"),
    [
        ([{"rollalloc": "0.1.9"}], r"rollalloc 0\.1\.9 wrote it, and this is .*, which records more: use the version"),
        ([{"rollalloc": "0.1.9"}, {"rollalloc": rollalloc.__version__}], "it is damaged: restore it"),
        ([{"rollalloc": 3}], "it is damaged, or an earlier version"),
        ([3], "it is damaged, or an earlier version"),
        (None, "it is damaged, or an earlier version"),
    ],
)
def test_a_description_without_a_field_names_the_version_that_wrote_it(run_of, tmp_path, starts, why):
    """A later version records a field that the one which wrote the folder did not know."""
    saved = run_of().description() | {"starts": starts}
    del saved["seed"]
    (tmp_path / "run.json").write_text(json.dumps(saved))
    with pytest.raises(ValueError, match=f"lacks seed; {why}"):
        read_config(tmp_path)


@pytest.mark.parametrize("body", ["def score(:", "raise KeyError(3)", "import sys; sys.exit(0)", "1 / 0"])
def test_a_reward_whose_module_raises_is_one_error(run_of, tmp_path, body):
    (tmp_path / "broken.py").write_text(body + "\n")
    with pytest.raises(ImportError, match=r"broken\.py:score cannot be loaded, since its module raises"):
        train(run_of(reward=f"{tmp_path / 'broken.py'}:score"), tmp_path / "run")


@pytest.mark.parametrize(
    "changes",
    [
        {"reward": "no_such_module:score"},
        {"prompts": ("none.parquet",)},
        {"heldout": "none.parquet"},
        {"device": "cuda:99"},
        {"device": "nonsense"},
        {"device": "meta"},
        {"parameters": {"groups": 2000, "n": 4}},
    ],
)
def test_what_can_be_known_is_said_before_the_model_is_loaded(run_of, tmp_path, monkeypatch, changes):
    def loaded(*_, **__):
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(Policy, "load", loaded)
    with pytest.raises((ValueError, OSError, ImportError)):
        train(run_of(**changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


# What a run refuses


def test_a_tokenizer_that_is_larger_than_its_model_is_refused(run_of, task, tmp_path):
    policy = Policy.load(task.model, device="cpu")
    policy.model.resize_token_embeddings(policy.vocabulary - 6)  # the last words, "s7" among them, have none
    policy.save(tmp_path / "model")
    rows = [
        {"data_source": "t", "prompt": f"s{number} s7 =", "reward_model": {"ground_truth": "s0"}} for number in range(8)
    ]
    write_prompts(tmp_path / "prompts.jsonl", rows)
    run = run_of(model=str(tmp_path / "model"), prompts=(str(tmp_path / "prompts.jsonl"),), heldout=None)
    with pytest.raises(ValueError, match=r"prompt '\S+' has token 10 .* embeddings for 5 tokens only"):
        train(run, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("part", "wrong", "said"),
    [
        ("", {"loss": 5}, "Config.loss: expected Loss, got 5"),
        ("", {"recipe": None}, "Config.recipe: expected str, got None"),
        ("", {"max_rollouts": "many"}, "Config.max_rollouts: expected int | None, got 'many'"),
        ("", {"prompts": "a.parquet"}, "Config.prompts: expected tuple[str, ...], got 'a.parquet'"),
        ("", {"prompts": [1]}, "Config.prompts"),
        ("", {"single_answer": "no"}, "Config.single_answer: expected bool, got 'no'"),
        ("", {"seed": True}, "Config.seed: expected int, got True"),
        ("", {"sampling": []}, "Config.sampling"),
        ("sampling", {"temperature": "hot"}, "Sampling.temperature: expected float, got 'hot'"),
    ],
)
def test_a_description_with_a_value_of_another_type_is_refused_by_field(run_of, tmp_path, part, wrong, said):
    described = run_of().description()
    (described[part] if part else described).update(wrong)
    (tmp_path / "run.json").write_text(json.dumps(described))
    with pytest.raises(ValueError, match=re.escape(said)):
        read_config(tmp_path)
