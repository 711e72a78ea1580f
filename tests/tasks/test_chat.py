"""Tasks in chat form: messages in verl's schema, and answers that their reward accepts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from rollalloc.data.prompts import load_prompts
from rollalloc.rewards.function import load_reward
from rollalloc.tasks import chat, stories
from rollalloc.tasks.chat import CHAT_TASKS, REWARD, ChatTask, prepare

pytest.importorskip("reasoning_gym")


def small(task: ChatTask) -> ChatTask:
    return replace(task, train=12, heldout=5)


@pytest.mark.parametrize("name", CHAT_TASKS)
def test_prompts_are_messages_and_the_reward_accepts_their_answers_only(name: str, tmp_path: Path) -> None:
    files = prepare(tmp_path / name, small(CHAT_TASKS[name]))
    train, heldout = load_prompts(files.train), load_prompts(files.heldout)
    assert (len(train), len(heldout)) == (12, 5)
    assert not {str(prompt) for prompt in train.prompts} & {str(prompt) for prompt in heldout.prompts}
    assert len(set(train.keys)) == 12
    score = load_reward(REWARD)
    for prompts in (train, heldout):
        for row, prompt in enumerate(prompts.prompts):
            system, asked, answered, question = prompt
            assert [message["role"] for message in prompt] == ["system", "user", "assistant", "user"]
            assert (system["content"], asked, answered) == (CHAT_TASKS[name].system, *train.prompts[0][1:3])
            assert question["content"] != asked["content"]
            about = {"data_source": prompts.sources[row], "ground_truth": prompts.ground_truths[row]}
            about["extra_info"] = prompts.extra_infos[row]
            assert score(solution_str=prompts.ground_truths[row], **about) == 1
            for text in ("", "I do not know.", f"{prompts.ground_truths[row]} or 4711"):
                assert score(solution_str=text, **about) == 0


def test_scoring_needs_no_reasoning_gym(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that trains may lack it; the package's own verifier gives the same marks."""
    made = load_prompts(prepare(tmp_path / "filter", small(CHAT_TASKS["filter"])).train)
    verifier = chat.gym.installed().create_dataset("number_filtering", size=1, seed=0)
    answers = [str(truth) for truth in made.ground_truths]
    said = [f"{before}{text}{after}" for text in answers for before, after in ((" ", " "), ("", "."), ("It is ", ""))]
    marks = {
        (row, text): float(verifier.score_answer(text.strip(), {"answer": answers[row]}) >= 1)
        for row in range(len(answers))
        for text in (*said, *answers, "[]", "")
    }
    assert {0.0, 1.0} == set(marks.values())
    monkeypatch.setattr(chat.gym, "installed", None)
    for (row, text), expected in marks.items():
        assert chat.compute_score(made.sources[row], text, answers[row], made.extra_infos[row]) == expected


@pytest.mark.parametrize("name", ["letters", "gcd"])
def test_no_answer_is_right_too_often(name: str, tmp_path: Path) -> None:
    files = prepare(tmp_path / name, replace(CHAT_TASKS[name], train=60, heldout=21))
    for file, most in ((files.train, 15), (files.heldout, 6)):
        assert max(Counter(load_prompts(file).ground_truths).values()) == most


DRAWN = {
    "gets": ([3, 4], "Ida has 3 eggs and gets 4 more. How many eggs does Ida have now?", 7),
    "gives": ([9, 5], "Ida has 9 eggs and gives 5 of them to Tom. How many eggs does Ida have left?", 4),
    "packs": ([3, 4], "Ida has 3 jars with 4 eggs in each. How many eggs does Ida have?", 12),
    "shares": ([3, 4], "Ida puts 12 eggs into 3 jars, the same number in each. How many eggs are in one?", 4),
    "pays": (
        [2, 5, 6],
        "Ida buys 2 eggs for 5 dollars each and pays with 16 dollars. How many dollars does Ida get back?",
        6,
    ),
    "loses": (
        [8, 4, 5],
        "Ida has 8 eggs. Tom gives Ida 4 more, and then Ida loses 5. How many eggs does Ida have now?",
        7,
    ),
}


@pytest.mark.parametrize(("story", "row"), list(zip(stories.STORIES, DRAWN.values(), strict=True)), ids=DRAWN)
def test_a_story_says_what_its_answer_is_made_of(story: stories.Story, row: tuple[list[int], str, int]) -> None:
    numbers, text, answer = row
    left = iter(numbers)

    def draw(low: int, high: int) -> int:
        value = next(left)
        assert low <= value <= high
        return value

    assert story(draw, "Ida", "Tom", "eggs", "jars") == (text, answer)
    assert next(left, None) is None


def test_the_command_writes_a_folder_a_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rollalloc: Callable[..., tuple[int, str, str]]
) -> None:
    monkeypatch.setitem(CHAT_TASKS, "stories", small(CHAT_TASKS["stories"]))
    code, _, said = rollalloc("data", "chat", "stories", "--out", tmp_path / "chat")
    assert code == 0
    assert str(tmp_path / "chat" / "stories") in said
    assert f"--reward {REWARD}" in said
    assert len(load_prompts(tmp_path / "chat" / "stories" / "train.parquet")) == 12
    code, _, said = rollalloc("data", "chat", "poems", "--out", tmp_path / "chat")
    assert code == 2
    assert "choose from sums, products" in said
    (tmp_path / "mine" / "stories").mkdir(parents=True)
    code, _, said = rollalloc("data", "chat", "stories", "--out", tmp_path / "mine")
    assert code == 2
    assert "is no task of rollalloc" in said
