"""Trackers get what the metrics hold: read back from TensorBoard's files, and from a stand-in for wandb."""

import builtins
import sys
from types import SimpleNamespace

import pytest

from rollalloc import recipes
from rollalloc.train.evaluation import HeldOut
from rollalloc.train.trackers import EXAMPLES, scalars, tracked
from tiny_policy import lines_of

BATCH = {
    "kind": "batch",
    "rollouts_paid": 32,
    "reward_mean": 0.25,
    "metric_mean": None,
    "short_because": None,
    "accounts": {"trained": 20, "open": 2},
    "prompts": {"out_of_band/solved": 3},
    "unscored": {"KeyError('<b>')": 2, "timed out": 1},
    "ages": {"0": 30, "1": 2},
    "lengths": {"count": 32, "truncated": 1, "quantiles": [1, 2, 3, 4, 5, 6, 7]},
    "learning_rate": 1e-3,
}


def test_trackers_get_the_numbers_of_a_batch_by_name():
    assert scalars(BATCH) == {
        "reward": 0.25,
        "rollalloc/reward_mean": 0.25,
        "rollalloc/rollouts_paid": 32,
        "rollalloc/accounts/trained": 20,
        "rollalloc/accounts/open": 2,
        "rollalloc/prompts/out_of_band/solved": 3,
        "rollalloc/unscored": 3,
        "rollalloc/ages/0": 30,
        "rollalloc/ages/1": 2,
        "rollalloc/lengths/count": 32,
        "rollalloc/lengths/truncated": 1,
        "rollalloc/lengths/min": 1,
        "rollalloc/lengths/p10": 2,
        "rollalloc/lengths/p25": 3,
        "rollalloc/lengths/p50": 4,
        "rollalloc/lengths/p75": 5,
        "rollalloc/lengths/p90": 6,
        "rollalloc/lengths/max": 7,
        "rollalloc/learning_rate": 1e-3,
    }


def read_back(folder):
    """tag → [(step, value)], as TensorBoard shows them."""
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    shown = accumulators.EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    shown.Reload()
    return {tag: [(event.step, event.value) for event in shown.Scalars(tag)] for tag in shown.Tags()["scalars"]}


def test_tensorboard_shows_a_runs_metrics(trainer_of, prompts_of, tmp_path):
    pytest.importorskip("tensorboard")
    with tracked(["tensorboard"], tmp_path, {}) as listener:
        trainer_of(recipes.grpo(4, 4), 96, folder=tmp_path, heldout=HeldOut(prompts_of(4)), listener=listener).run()
    lines = lines_of(tmp_path)
    shown = read_back(tmp_path)
    for tag, name, kind in (
        ("reward", "reward_mean", "batch"),
        ("rollalloc/loss", "loss", "batch"),
        ("rollalloc/accuracy", "accuracy", "eval"),
    ):
        expected = [(line["rollouts_paid"], line[name]) for line in lines if line["kind"] == kind]
        assert len(expected) >= 2
        assert [step for step, _ in shown[tag]] == [step for step, _ in expected]
        assert [value for _, value in shown[tag]] == pytest.approx([value for _, value in expected])
    assert shown["rollalloc/accounts/trained"][-1] == (96, lines[-1]["accounts"]["trained"])


def test_tensorboard_hides_what_a_resumed_run_writes_again(tmp_path):
    pytest.importorskip("tensorboard")
    with tracked(["tensorboard"], tmp_path, {}) as listener:
        for paid in (10, 20, 30):
            listener(BATCH | {"rollouts_paid": paid, "reward_mean": 0.1})
    with tracked(["tensorboard"], tmp_path, {}) as listener:  # goes on from a checkpoint after 10
        for paid in (20, 30):
            listener(BATCH | {"rollouts_paid": paid, "reward_mean": 0.2})
    assert read_back(tmp_path)["reward"] == [
        (10, pytest.approx(0.1)),
        (20, pytest.approx(0.2)),
        (30, pytest.approx(0.2)),
    ]


@pytest.fixture
def wandb(monkeypatch):
    """A stand-in that writes down what it is asked."""
    calls = []

    def noted(name):
        return lambda *given, **named: calls.append((name, given, named))

    run = SimpleNamespace(define_metric=noted("define_metric"), log=noted("log"), finish=noted("finish"))
    module = SimpleNamespace(init=lambda **named: (calls.append(("init", (), named)), run)[1], Table=noted("Table"))
    monkeypatch.setitem(sys.modules, "wandb", module)
    return calls


def test_wandb_gets_the_run_and_its_lines_against_rollouts_paid(wandb, tmp_path):
    folder = tmp_path / "grpo-3"
    with tracked(["wandb"], folder, {"recipe": "grpo"}) as listener:
        listener(BATCH)
    assert folder.is_dir()
    [init, define, log, finish] = wandb
    named = {"project": "rollalloc", "name": "grpo-3", "group": "grpo-3", "config": {"recipe": "grpo"}}
    assert init == ("init", (), {**named, "dir": str(folder)})
    assert define == ("define_metric", ("*",), {"step_metric": "rollalloc/rollouts_paid"})
    assert log == ("log", (scalars(BATCH),), {})
    assert log[1][0]["rollalloc/rollouts_paid"] == 32
    assert finish == ("finish", (), {"exit_code": 0})


def test_wandb_hears_that_a_run_broke_off(wandb, tmp_path):
    with pytest.raises(KeyboardInterrupt), tracked(["wandb"], tmp_path, {}):
        raise KeyboardInterrupt
    assert wandb[-1] == ("finish", (), {"exit_code": 1})


def test_every_tracker_and_the_callers_own_listener_hear_each_line_once(wandb, tmp_path):
    pytest.importorskip("tensorboard")
    lines = []
    with tracked(["tensorboard", "wandb", "wandb"], tmp_path, {}, lines.append) as listener:
        listener(BATCH)
    assert lines == [BATCH]
    assert [name for name, *_ in wandb].count("log") == 1
    assert read_back(tmp_path)["reward"] == [(32, 0.25)]


EXAMPLE = {
    "prompt_text": "2 + 2?",
    "text": "<b>4|",
    "reward": 1.0,
    "metric": 1.0,
    "tokens": 2,
    "version": 0,
    "key": "k/1",
}


def test_tensorboard_gets_a_table_of_rollouts_with_each_evaluation(trainer_of, prompts_of, tmp_path):
    pytest.importorskip("tensorboard")
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with tracked(["tensorboard"], tmp_path, {}) as listener:
        held_out = HeldOut(prompts_of(4))
        trainer_of(
            recipes.grpo(4, 4), 32, folder=tmp_path, heldout=held_out, listener=listener, track=("tensorboard",)
        ).run()
        listener(BATCH | {"examples": [EXAMPLE]})
    assert not any("examples" in line for line in lines_of(tmp_path))
    shown = accumulators.EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"tensors": 0})
    shown.Reload()
    tables = [event.tensor_proto.string_val[0].decode() for event in shown.Tensors("rollalloc/rollouts/text_summary")]
    assert len(tables) >= 2
    assert tables[0].count("\n") == 1 + EXAMPLES
    assert tables[-1].splitlines()[-1] == "| 2 + 2? | &lt;b>4\\| | 1.0 | 1.0 |  | 2 | 0 | k/1 |"


def test_wandb_gets_a_table_of_rollouts_as_they_are(wandb, tmp_path):
    with tracked(["wandb"], tmp_path, {}) as listener:
        listener(BATCH | {"examples": [EXAMPLE]})
    [table] = [given for name, _, given in wandb if name == "Table"]
    assert table["data"] == [["2 + 2?", "<b>4|", 1.0, 1.0, None, 2, 0, "k/1"]]
    assert table["columns"][:3] == ["prompt", "completion", "reward"]


def test_trackio_gets_lines_and_a_table_whose_markdown_is_text(monkeypatch, tmp_path):
    heard = []
    run = SimpleNamespace(
        log=lambda *given, **named: heard.append((given, named)), finish=lambda: heard.append("finish")
    )
    library = SimpleNamespace(init=lambda **named: heard.append(named) or run, Table=lambda columns, data: data)
    monkeypatch.setitem(sys.modules, "trackio", library)
    with tracked(["trackio"], tmp_path / "grpo-3", {"recipe": "grpo"}) as listener:
        listener(BATCH | {"examples": [EXAMPLE]})
    init, ((logged,), named), finish = heard
    assert (init["project"], init["name"], init["config"]) == ("rollalloc", "grpo-3", {"recipe": "grpo"})
    assert (logged["reward"], named) == (0.25, {"step": 32})
    assert logged["rollalloc/rollouts"] == [["2 + 2?", "&lt;b>4\\|", 1.0, 1.0, None, 2, 0, "k/1"]]
    assert finish == "finish"


@pytest.mark.parametrize(
    ("name", "library"), [("tensorboard", "torch.utils.tensorboard"), ("wandb", "wandb"), ("trackio", "trackio")]
)
def test_a_missing_library_is_named_with_its_remedy(monkeypatch, tmp_path, name, library):
    load = builtins.__import__

    def without(module, *given):
        if module == library:
            raise ModuleNotFoundError(f"No module named {library!r}")
        return load(module, *given)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=f"pip install {name}"), tracked([name], tmp_path, {}):
        pass
