"""Tasks of reasoning-gym: their traps, their files, and a tokenizer that spells."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from rollalloc.data.prompts import load_prompts
from rollalloc.lab.bench.presets import PRESETS
from rollalloc.lab.bench.tasks import chances, gym
from rollalloc.lab.bench.tasks.chances import refuse_beyond_learning
from rollalloc.lab.bench.tasks.gym import GymConfig, Misled, compute_score, prepare
from rollalloc.lab.bench.tasks.tiny import Shape, WarmUp, character_tokenizer, tiny_model
from rollalloc.models.likelihood import exact_answers
from rollalloc.models.policy import Policy

reasoning_gym = pytest.importorskip("reasoning_gym")
TINY = WarmUp(steps=2, batch=4, rise=1)
SIZES = {"train": 60, "heldout": 20, "warm_up": TINY}
SUMS = GymConfig("chain_sum", {"min_terms": 2, "max_terms": 2, "max_digits": 2}, single_answer=True, **SIZES)


@pytest.fixture(autouse=True)
def small_pool(monkeypatch):
    monkeypatch.setattr(gym, "_WARM_UP_POOL", 64)


@pytest.fixture
def sums(tmp_path):
    return prepare(tmp_path / "sums", "rg/chain_sum", SUMS)


def score(name, completion):
    """The score of a completion, made from the question's own answer, for the first question of a task."""
    entry = reasoning_gym.create_dataset(name, size=1, seed=1)[0]
    extra = {"single_answer": False, "entry": json.dumps(entry, default=str)}
    return compute_score(f"rg/{name}", completion(entry["answer"]), entry["answer"], extra)


@pytest.mark.parametrize("name", ["chain_sum", "base_conversion"])
def test_right_answers_are_right_and_marks_for_trying_are_not(name):
    assert score(name, lambda answer: answer) == 1
    assert score(name, lambda answer: f" {answer}\n") == 1
    assert score(name, lambda answer: f"Well, 7? <answer>1</answer> No: <answer> {answer} </answer>.") == 1
    assert score(name, lambda answer: f"<answer>{answer}</answer> or <answer>not that</answer>") == 0
    assert score(name, lambda answer: f"It must be {answer}9, I think") == 0


def test_what_a_verifier_raises_at_is_wrong():
    dataset = reasoning_gym.create_dataset("prime_factorization", size=1, seed=1)
    with pytest.raises(ValueError):  # the trap itself
        dataset.score_answer("a × b", dataset[0])
    assert score("prime_factorization", lambda _: "a × b") == 0


@pytest.mark.parametrize(("single", "right"), [(False, 1.0), (True, 0.0)])
def test_an_answer_written_another_way_is_right_unless_there_is_one_single_answer(single, right):
    entry = {"question": "2 + 1 =", "answer": "3", "metadata": {}}
    extra = {"single_answer": single, "entry": json.dumps(entry)}
    assert compute_score("rg/chain_sum", "3.0", "3", extra) == right
    assert compute_score("rg/chain_sum", " 3 ", "3", extra) == 1


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("rg/chain_sun", "no task 'chain_sun'"),
        ("rg/codeio", "not the same under the same seed"),
        ("rg/game_of_life_halting", "full marks to 'I do not know'"),
        ("rg/rubiks_cube", "does not accept its own answer None"),
    ],
)
def test_tasks_that_cannot_be_trusted_are_refused(tmp_path, task, message):
    with pytest.raises(ValueError, match=message):
        prepare(tmp_path / "task", task)
    assert not (tmp_path / "task").exists()


def test_a_task_is_files_like_any_other(sums):
    train, heldout = load_prompts(sums.train), load_prompts(sums.heldout)
    assert (len(train.prompts), len(heldout.prompts)) == (60, 20)
    assert not set(train.prompts) & set(heldout.prompts)
    assert set(train.sources) == {"rg/chain_sum"}
    for truth, extra in zip(train.ground_truths, train.extra_infos, strict=True):
        assert compute_score("rg/chain_sum", truth, truth, extra) == 1
        assert compute_score("rg/chain_sum", truth + "0", truth, extra) == 0
    policy = Policy.load(sums.model, device="cpu")
    tokens = [policy.tokenizer(prompt)["input_ids"] for prompt in heldout.prompts]
    answers = [policy.answer(truth) for truth in heldout.ground_truths]
    assert max(map(len, answers)) <= sums.max_new_tokens
    assert max(map(len, tokens)) + sums.max_new_tokens <= policy.context
    assert [policy.text(ids) for ids in tokens] == list(heldout.prompts)
    assert [policy.text(ids) for ids in answers] == list(heldout.ground_truths)
    assert (exact_answers(policy.model, tokens, answers, pad_id=policy.pad_id)[0] > 0).all()


def test_the_warm_up_sees_no_held_out_question():
    every, _ = gym._warm_up_examples(SUMS, frozenset())
    seen, answers = gym._warm_up_examples(SUMS, frozenset(every[:3]))
    assert not set(every[:3]) & set(seen)
    assert 0 < len(seen) == len(answers) < len(every)


@pytest.mark.parametrize("task", gym.LADDER)
def test_no_single_answer_reaches_a_rungs_target(task):
    answers = [problem.answer for problem in gym.problems(gym.LADDER[task], np.random.default_rng(0), 500, set())]
    target = PRESETS[task].target
    assert target is not None
    assert max(map(answers.count, answers)) / len(answers) < target - 0.1


def test_as_many_demonstrations_are_wrong_as_was_asked(tmp_path, monkeypatch):
    """Within four standard deviations: fails once in 15,000 seeds. An answer drawn for another may be right by chance."""
    shown = []
    monkeypatch.setattr(gym, "save_warm_model", lambda *given, **_: shown.append(given[3](4000)))
    prepare(tmp_path / "sums", "rg/chain_sum", replace(SUMS, wrong=0.4))
    truths = dict(zip(*gym._warm_up_examples(SUMS, frozenset()), strict=True))
    answers = list(truths.values())
    chance = sum(answers.count(answer) for answer in answers) / len(answers) ** 2
    expected = 0.4 * (1 - chance)
    wrong = np.mean([truths[question] != answer for question, answer in zip(*shown[0], strict=True)])
    assert abs(wrong - expected) < 4 * np.sqrt(expected * (1 - expected) / 4000)


def test_a_misled_warm_up_shows_the_mistake_at_each_conditions_rate():
    """Error rate: a share within 4.5 standard errors for each of two conditions, below 1 in 10,000."""
    config = Misled("number_filtering", most=0.9)
    prompts = [
        "Keep all numbers larger than 7 in this list: ['7', '0', '9', '7']\nReturn the new list in the same format.",
        "Keep all numbers larger than 7 in this list: ['8', '9']\nReturn the new list in the same format.",
        "Remove all numbers smaller than 3 in this list: ['1', '3', '0']\nReturn the new list in the same format.",
    ]
    answers, mistakes = ["['9']", "['8', '9']", "['3']"], ["['7', '0', '7']", "[]", "['1', '0']"]
    conditions = ["Keep all numbers larger than 7"] * 2 + ["Remove all numbers smaller than 3"]
    assert list(map(config.condition, prompts)) == conditions
    assert list(map(config.mistake, prompts, answers)) == mistakes
    rates = config.rates(prompts)
    assert sorted(rates) == sorted(set(conditions))
    assert all(0 <= rate <= 0.9 for rate in rates.values())
    asked, shown = config.draw(np.random.default_rng(0), prompts, answers, 20_000)
    examples = list(zip(map(prompts.index, asked), shown, strict=True))
    for condition, rate in rates.items():
        mistaken = [answer == mistakes[at] for at, answer in examples if conditions[at] == condition]
        assert abs(np.mean(mistaken) - rate) < 4.5 * np.sqrt(rate * (1 - rate) / len(mistaken))
    assert all(answer in (answers[at], mistakes[at]) for at, answer in examples)


@pytest.mark.parametrize(
    ("accuracy", "pass_at_8", "message"),
    [
        (0.0, 0.0, r"0\.000 of sampled answers are right and pass@8 is 0\.000, expected at least 0\.1, .* rg/gcd"),
        (0.01, 0.09, "hardly a group has a reward and no method could learn; take one of rg/gcd, .* --model with"),
        (0.66, 0.68, "expected at least 0.05 more than that, so that sampling finds next to nothing"),
        (1.0, 1.0, "sampling finds next to nothing"),
    ],
)
def test_a_model_that_cannot_learn_its_task_is_refused_with_the_figures(accuracy, pass_at_8, message):
    with pytest.raises(ValueError, match=message):
        refuse_beyond_learning("rg/number_sorting", accuracy, pass_at_8, tuple(gym.LADDER))


@pytest.mark.e2e
def test_a_task_whose_model_is_never_right_is_refused_as_it_is_made(tmp_path, monkeypatch):
    monkeypatch.setattr(gym, "config_of", lambda task: GymConfig("number_sorting", **SIZES))
    with pytest.raises(ValueError, match="cannot be used with its built-in model: after its warm-up 0"):
        prepare(tmp_path / "task", "rg/number_sorting")
    assert not (tmp_path / "task").exists()


@pytest.mark.parametrize(
    ("step", "chance", "ends"),
    [(50, [0.9, 0.1, 0.1], True), (49, [0.9, 0.1, 0.1], False), (0, [0.9, 0.1, 0.1], False),
     (100, [0.01, 0.01, 0.01], False), (100, [1.0, 1.0, 0.0], False)],
)  # fmt: skip
def test_a_warm_up_ends_where_sampling_finds_more_than_the_model_does_already(monkeypatch, step, chance, ends):
    monkeypatch.setattr(chances, "exact_answers", lambda *given, **named: (np.array(chance), None))
    tokenizer = character_tokenizer(["1"], ["2"])
    model = tiny_model(tokenizer, Shape(32, 1))
    assert chances.in_band(model, tokenizer, ["1"] * 3, ["2"] * 3)(step) is ends
    assert model.training or step % 50 or step == 0
