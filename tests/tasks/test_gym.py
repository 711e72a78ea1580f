"""Tasks of reasoning-gym: their answers, their files, and a tokenizer that spells."""

# pyright: reportOperatorIssue=false

from dataclasses import replace

import numpy as np
import pytest

from rollalloc.data.prompts import load_prompts
from rollalloc.models.likelihood import exact_answers
from rollalloc.models.policy import Policy
from rollalloc.tasks import gym
from rollalloc.tasks.gym import GymConfig, Misled, compute_score, prepare
from rollalloc.tasks.presets import preset_of
from rollalloc.tasks.tiny import WarmUp

reasoning_gym = pytest.importorskip("reasoning_gym")
TINY = WarmUp(steps=2, batch=4, rise=1)
SIZES = {"train": 60, "heldout": 20, "warm_up": TINY}
SUMS = GymConfig("chain_sum", {"min_terms": 2, "max_terms": 2, "max_digits": 2}, **SIZES)


@pytest.fixture(autouse=True)
def small_pool(monkeypatch):
    monkeypatch.setattr(gym, "WARM_UP_POOL", 64)


@pytest.fixture
def sums(tmp_path):
    return prepare(tmp_path / "sums", "rg/chain_sum", SUMS)


@pytest.mark.parametrize(
    ("completion", "right"),
    [
        ("3", 1),
        (" 3\n", 1),
        ("Well, 7? <answer>1</answer> No: <answer> 3 </answer>.", 1),
        ("<answer>3</answer> or <answer>not that</answer>", 0),
        ("It must be 3, I think", 0),
        ("3.0", 0),
        ("", 0),
    ],
)
def test_the_answer_is_the_completion_or_what_stands_in_its_last_tags(completion, right):
    assert compute_score("rg/chain_sum", completion, "3", {}) == right


@pytest.mark.parametrize("task", gym.LADDER)
def test_reasoning_gyms_own_verifier_accepts_each_answer(task):
    config = gym.LADDER[task]
    dataset = reasoning_gym.create_dataset(config.name, size=16, seed=1, **config.settings)
    assert all(dataset.score_answer(entry["answer"], entry) == 1 for entry in dataset)


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


@pytest.fixture
def shown(tmp_path, monkeypatch):
    """(configuration) → the task's files, and the questions with answers that its warm-up shows; no model is made."""

    def of(config):
        drawn = []
        monkeypatch.setattr(gym, "save_warm_model", lambda *given, **_: drawn.append(given[3](4000)))
        files = prepare(tmp_path / f"wrong {config.wrong}", "rg/chain_sum", config)
        return files, list(zip(*drawn[0], strict=True))

    return of


def test_the_warm_up_sees_no_held_out_question(shown):
    """There are so few sums of two digits that many of its questions would be among those held out."""
    files, examples = shown(replace(SUMS, settings=SUMS.settings | {"max_digits": 1}))
    assert not set(load_prompts(files.heldout).prompts) & {question for question, _ in examples}


@pytest.mark.parametrize("task", gym.LADDER)
def test_no_single_answer_reaches_a_rungs_target(task):
    answers = [problem.answer for problem in gym.problems(gym.LADDER[task], np.random.default_rng(0), 500, set())]
    assert max(map(answers.count, answers)) / len(answers) < preset_of(task)[1].target - 0.1


def test_as_many_demonstrations_are_wrong_as_was_asked(shown):
    """Within four standard deviations: fails once in 15,000 seeds. An answer drawn for another may be right by chance."""
    truths = dict(shown(SUMS)[1])
    answers = list(truths.values())
    chance = sum(answers.count(answer) for answer in answers) / len(answers) ** 2
    expected = 0.4 * (1 - chance)
    wrong = np.mean([truths[question] != answer for question, answer in shown(replace(SUMS, wrong=0.4))[1]])
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
