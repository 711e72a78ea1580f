"""One reward, called as verl and as TRL call theirs, and loaded as rollalloc's own."""

# pyright: reportArgumentType=false

import pickle
import runpy
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from rollalloc.rewards.frameworks import Reward
from rollalloc.rewards.function import Sample, Scored, load_reward
from rollalloc.rewards.scorers import InlineScorer, WorkerScorer

WRAPPED = Path(__file__).with_name("reward_wrapped.py")
RIGHT = {"score": 1.0, "acc": 1.0, "unscored": 0.0, "reason": ""}


@pytest.fixture
def module():
    """The module of the wrapped rewards, as verl loads it: from a file."""
    module = SimpleNamespace(**runpy.run_path(str(WRAPPED)))
    yield module
    module.workers.close()


def ask_as_verl(reward, solution_str, extra_info=None):
    return reward(data_source="test", solution_str=solution_str, ground_truth="", extra_info=extra_info)


def test_verl_gets_a_dict_with_the_same_keys_whatever_happens(module):
    assert ask_as_verl(module.reward, "fine") == RIGHT
    hung = ask_as_verl(module.reward, "hang", {"index": 17, "num_turns": None})
    assert hung == {"score": 0.0, "acc": 0.0, "unscored": 1.0, "reason": "timed out after 1 s"}
    assert module.workers.report()["lost"][0]["name"] == "test/17"


def test_verl_calls_from_many_threads(module):
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda text: ask_as_verl(module.reward, text), ["fine"] * 20 + ["exit"]))
    assert answers[:20] == [RIGHT] * 20
    assert answers[20]["reason"] == "worker died (exit code 7)"


def test_trl_gets_a_list_with_none_where_unscored(module):
    columns = {"answer": ["", "", ""], "trainer_state": SimpleNamespace(global_step=12), "log_extra": print}
    messages = [{"role": "assistant", "content": "fine"}]
    parts = [{"role": "assistant", "content": [{"type": "text", "text": "fi"}, {"type": "text", "text": "ne"}]}]
    for completions in (["fine", "hang", "fine"], [messages, [{"content": "exit"}], parts]):
        assert module.reward(prompts=[""] * 3, completions=completions, **columns) == [1.0, None, 1.0]
    names = [entry["name"] for entry in module.workers.report()["lost"]]
    assert names == ["sample 1 of step 12"] * 2
    assert module.reward.__name__ == "obedience"


def test_trl_s_missing_column_is_named(module):
    with pytest.raises(ValueError, match=r"no column 'answer'; its columns are \['solution'\]"):
        module.reward(completions=["fine"], solution=[""])


def test_rollalloc_unwraps_the_function():
    with WorkerScorer(f"{WRAPPED}:reward") as scorer:
        assert scorer.score([Sample("", "fine", "", {})]) == [Scored(1.0, 1.0)]
    assert Reward(InlineScorer(len)).bare_function is len


def test_rollalloc_refuses_to_lose_the_shaping():
    with pytest.raises(TypeError, match="a Reward with the scorer OverlongScorer does more than call a function"):
        load_reward(f"{WRAPPED}:shaped")


def test_a_copy_has_processes_of_its_own(module):
    copy = pickle.loads(pickle.dumps(module.reward))
    try:
        assert ask_as_verl(copy, "hang")["reason"] == "timed out after 1 s"  # the same limit
        assert module.workers.report()["lost"] == []
    finally:
        copy.scorer.close()


@pytest.mark.e2e
def test_trl_s_trainer_trains_with_it(module, tmp_path):
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    from tiny_policy import WORDS, tiny_model, word_tokenizer

    trainer = trl.GRPOTrainer(
        model=tiny_model(),
        processing_class=word_tokenizer(WORDS),
        reward_funcs=module.reward,
        train_dataset=datasets.Dataset.from_dict({"prompt": ["k0 ="] * 4, "answer": ["4"] * 4}),
        args=trl.GRPOConfig(
            output_dir=str(tmp_path),
            per_device_train_batch_size=4,
            num_generations=4,
            max_completion_length=2,
            max_steps=2,
            use_cpu=True,
            report_to=[],
            logging_steps=1,
        ),
    )
    trainer.train()
    assert trainer.state.global_step == 2
    assert any("rewards/obedience/mean" in entry for entry in trainer.state.log_history)
    report = module.workers.report()
    assert report["scored"] + sum(report["unscored"].values()) == 8
