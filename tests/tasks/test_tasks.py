"""The tasks' files: their schema, their shares, and that making them is repeatable and can be interrupted."""

from __future__ import annotations

import dataclasses
from importlib import import_module
from importlib.util import find_spec

import numpy as np
import pyarrow.parquet as pq
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from rollalloc.generate.sampler import Request, generate
from rollalloc.models.likelihood import exact_answers
from rollalloc.models.settings import Sampling
from rollalloc.tasks import chat, skills, sort
from rollalloc.tasks.files import compute_score, graded_score, make_once
from rollalloc.tasks.tiny import EOS, EOS_ID, PAD_ID, WarmUp

TINY = WarmUp(steps=3, batch=8, rise=1)
SKILLS = skills.SkillsConfig(train=300, heldout=70, warm_up=TINY)
SORT = sort.SortConfig(train=200, heldout=120, warm_up=TINY)
CHAT = dataclasses.replace(chat.CHAT_TASKS["sums"], train=12, heldout=5)
needs_gym = pytest.mark.skipif(find_spec("reasoning_gym") is None, reason="pip install reasoning-gym")


def rows_of(path):
    return pq.read_table(path).to_pylist()


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    return {
        "skills": skills.prepare(folder / "skills", "late", SKILLS),
        "skills/graded": skills.prepare(folder / "skills", "graded", SKILLS),
        "sort": sort.prepare(folder / "sort", SORT),
    }


# Every task


@pytest.mark.parametrize("name", ["skills", "skills/graded", "sort"])
def test_prompts_are_unique_and_in_verls_schema(tasks, name):
    task = tasks[name]
    prompts = []
    for split, path in {"train": task.train, "heldout": task.heldout}.items():
        rows = rows_of(path)
        assert [row["extra_info"]["index"] for row in rows] == list(range(len(rows)))
        for row in rows:
            assert set(row) == {"data_source", "prompt", "ability", "reward_model", "extra_info"}
            assert row["data_source"] == {"skills": "skills/late"}.get(name, name)
            assert row["ability"] == name.partition("/")[0]
            assert row["reward_model"]["style"] == "rule"
            assert row["extra_info"]["split"] == split
        prompts += [row["prompt"] for row in rows]
    assert len(set(prompts)) == len(prompts) == {"skills": 370, "skills/graded": 318, "sort": 320}[name]


@pytest.mark.parametrize("name", ["skills", "skills/graded", "sort"])
def test_files_load_and_work_together(tasks, name):
    task = tasks[name]
    tokenizer = AutoTokenizer.from_pretrained(task.model)
    model = AutoModelForCausalLM.from_pretrained(task.model)
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (PAD_ID, EOS_ID)
    assert model.generation_config.eos_token_id == EOS_ID
    assert 100_000 < model.num_parameters() < 200_000
    module, function = task.reward.split(":")
    reward = getattr(import_module(module), function)

    rows = rows_of(task.heldout)
    prompts = [tokenizer(row["prompt"])["input_ids"] for row in rows]
    answers = [tokenizer(f"{row['reward_model']['ground_truth']} {EOS}")["input_ids"] for row in rows]
    for row, prompt, answer in zip(rows, prompts, answers, strict=True):
        assert len(prompt) == len(row["prompt"].split())
        assert tokenizer.decode(prompt) == row["prompt"]
        assert len(answer) <= task.max_new_tokens
        text = tokenizer.decode(answer, skip_special_tokens=True)
        assert text == row["reward_model"]["ground_truth"]
        assert reward(row["data_source"], text, row["reward_model"]["ground_truth"]) == 1.0
    assert max(map(len, answers)) == task.max_new_tokens

    p_N, _ = exact_answers(model, prompts, answers, pad_id=PAD_ID)
    assert ((p_N >= 0) & (p_N <= 1)).all()
    [generation] = generate(
        model,
        [Request(0, tuple(prompts[0]), (0,))],
        Sampling(task.max_new_tokens),
        eos_ids=[EOS_ID],
        pad_id=PAD_ID,
        seed=0,
    )
    assert set(tokenizer.decode(generation.tokens).split()) <= set(tokenizer.get_vocab())


@pytest.mark.parametrize(
    ("prepare", "config"),
    [
        pytest.param(lambda folder, config: skills.prepare(folder, "late", config), SKILLS, id="skills"),
        pytest.param(sort.prepare, SORT, id="sort"),
        pytest.param(chat.prepare, CHAT, id="chat", marks=needs_gym),
    ],
)
def test_files_are_a_function_of_the_configuration_and_made_once(prepare, config, tmp_path):
    prepare(tmp_path / "one", config)
    prepare(tmp_path / "two", config)
    made = contents(tmp_path / "one")
    assert made == contents(tmp_path / "two")
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "one").rglob("*")}
    prepare(tmp_path / "one", config)
    assert times == {path: path.stat().st_mtime_ns for path in (tmp_path / "one").rglob("*")}
    with pytest.raises(ValueError, match="another folder"):
        prepare(tmp_path / "one", dataclasses.replace(config, seed=99))


def test_the_reward_is_an_exact_match_up_to_white_space():
    assert compute_score("skills/late", " a5  a17\n", "a5 a17") == 1.0
    for wrong in ["a5", "a17 a5", "a5 a17 a17", "a5a17", ""]:
        assert compute_score("skills/late", wrong, "a5 a17", extra_info={"index": 0}) == 0.0


# Skills


@pytest.mark.parametrize("pool", skills.POOLS)
def test_pools_have_their_shares(pool):
    table = skills.Skills(SKILLS)
    problems = table.problems(skills.POOLS[pool], np.random.default_rng(0), 400, taken=set())
    p_N = np.array([problem.extra["initial_p"] for problem in problems])
    easy, hard = (p_N > 0.93).mean(), (p_N < 0.01).mean()
    if pool == "balanced":
        assert np.histogram(p_N, bins=10, range=(0, 1))[0].tolist() == [40] * 10
    else:
        assert (easy, hard) == {"late": (0.50, 0.30)}.get(pool, (0.35, 0.40))


def test_answers_are_the_right_images_and_initial_p_the_product_of_rates(tasks):
    table = skills.Skills(SKILLS)
    for row in rows_of(tasks["skills"].train):
        *names, separator = row["prompt"].split()
        numbers = [int(name.removeprefix("k")) for name in names]
        assert separator == "="
        assert row["reward_model"]["ground_truth"].split() == [f"a{table.right_K[number]}" for number in numbers]
        assert row["extra_info"]["initial_p"] == pytest.approx(np.prod(table.rate_K[numbers]))


def test_the_warm_up_data_are_wrong_at_each_skills_rate():
    """Error rate: eight skills at 4.5 standard errors of a binomial share, below 1 in 10,000."""
    table = skills.Skills(SKILLS)
    prompts, answers = table.noisy_examples(np.random.default_rng(0), 20_000)
    images = [[] for _ in table.rate_K]
    for prompt, answer in zip(prompts, answers, strict=True):
        for skill, image in zip(prompt.split()[:-1], answer.split(), strict=True):
            images[int(skill[1:])].append(int(image[1:]))
    for skill in range(8):
        seen = np.array(images[skill])
        assert set(seen) <= {table.right_K[skill], table.wrong_K[skill]}
        rate = table.rate_K[skill]
        assert abs((seen == table.right_K[skill]).mean() - rate) < 4.5 * np.sqrt(rate * (1 - rate) / len(seen))


def test_pools_share_one_model(tmp_path):
    late, mixed = (skills.prepare(tmp_path, pool, SKILLS) for pool in ("late", "mixed"))
    assert late.model == mixed.model
    assert late.train != mixed.train
    with pytest.raises(ValueError, match="balanced, mixed, late"):
        skills.prepare(tmp_path, "hard", SKILLS)


def test_a_warm_up_teaches_the_rates(tmp_path):
    """Four skills are learnt in seconds; the exact success rate then follows the product of the rates.

    No draw of the test is random beyond the seed, so its error rate is 0 on one machine; the bounds are loose for others.
    """
    config = skills.SkillsConfig(skills=4, images=4, train=60, heldout=20, warm_up=WarmUp(steps=120, batch=64))
    table = skills.Skills(config)
    task = skills.prepare(tmp_path, "balanced", config)
    tokenizer, model = AutoTokenizer.from_pretrained(task.model), AutoModelForCausalLM.from_pretrained(task.model)
    prompts = tokenizer([f"k{skill} =" for skill in range(4)])["input_ids"]
    answers = tokenizer([f"a{image} {EOS}" for image in table.right_K])["input_ids"]
    p_K, _ = exact_answers(model, prompts, answers, pad_id=PAD_ID)
    np.testing.assert_allclose(p_K, table.rate_K, atol=0.15)


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("s1 s2 s2 s5", 1.0),
        ("  s1 s2\ns2 s5 ", 1.0),
        ("s1 s2 s3 s5", 3 / 4),
        ("s1 s2 s2 s5 s5", 4 / 5),
        ("s2 s2 s5", 1 / 4),  # a place that is left out shifts the others
        ("s1 " * 100, 1 / 100),
        ("", 0.0),
    ],
)
def test_a_graded_score_is_the_share_of_right_places(answer, score):
    assert graded_score("skills/graded", answer, "s1 s2 s2 s5", {"index": 0}) == pytest.approx(score)


# Sort


def test_sorted_answers(tasks):
    repeated = 0
    for row in rows_of(tasks["sort"].train):
        *symbols, separator = row["prompt"].split()
        assert separator == "="
        assert sort.SHORTEST <= len(symbols) <= sort.LONGEST
        assert row["reward_model"]["ground_truth"].split() == sorted(symbols, key=lambda symbol: int(symbol[1:]))
        repeated += len(set(symbols)) < len(symbols)
    assert repeated > 0


# Making a folder


@dataclasses.dataclass(frozen=True)
class Settings:
    size: int = 1


def test_a_half_made_folder_is_made_anew(tmp_path):
    def killed(folder):
        (folder / "half").write_text("")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_once(tmp_path / "it", Settings(), killed)
    assert not (tmp_path / "it").exists()
    made = make_once(tmp_path / "it", Settings(), lambda folder: (folder / "whole").write_text("yes"))
    assert {path.name for path in made.iterdir()} == {"whole", "settings.json"}


@pytest.mark.parametrize("theirs", ["it/thesis.txt", ".it.partial/thesis.txt"])
def test_a_folder_of_somebody_else_is_neither_taken_nor_removed(tmp_path, theirs):
    (tmp_path / theirs).parent.mkdir()
    (tmp_path / theirs).write_text("mine")
    with pytest.raises((ValueError, FileExistsError), match="choose another folder"):
        make_once(tmp_path / "it", Settings(), lambda folder: (folder / "whole").write_text("yes"))
    assert (tmp_path / theirs).read_text() == "mine"
