"""Few-shot questions: who is right, what is shown, and where an answer ends; the model is made here."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rollalloc.data.prompts import load_prompts
from rollalloc.models.policy import Policy
from rollalloc.tasks.tiny import Shape, character_tokenizer, tiny_model
from rollalloc_lab.tasks.shots import FAMILIES, Shots, prepare

SHOTS = Shots(train=40, heldout=12)


def solved(line: str) -> bool:
    """Whether a line is right."""
    asked, answer = line.split("=")
    if asked.startswith("reverse"):
        return asked.removeprefix("reverse(").removesuffix(")").split(",") == answer.split(",")[::-1]
    return sum(map(int, asked.split("+"))) == int(answer)


def test_what_is_shown_and_asked_is_right_and_asked_once() -> None:
    taken: set[str] = set()
    train, heldout = (SHOTS.problems(np.random.default_rng(seed), 40, taken) for seed in (1, 2))
    assert len({each.prompt for each in (*train, *heldout)}) == 80 == len(taken)
    assert {each.extra["family"] for each in train} == {*FAMILIES}
    for each in train:
        *shown, asked = f"{each.prompt}{each.answer}".split("\n")
        assert len(shown) == SHOTS.shown
        assert all(map(solved, [*shown, asked]))
        assert asked not in shown


def test_more_questions_than_there_are_are_refused() -> None:
    with pytest.raises(ValueError, match="more different questions, found"):
        SHOTS.problems(np.random.default_rng(0), 4000, set())


def test_the_model_ends_its_answers_with_a_line(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="rollalloc model gemma3 "):
        prepare(tmp_path, SHOTS)
    tokenizer = character_tokenizer(["0123456789+=,()abcdefghijrevs\n"], [])
    for each in (tokenizer, tiny_model(tokenizer, Shape(hidden=32, layers=1))):
        each.save_pretrained(tmp_path / "gemma3")
    files = prepare(tmp_path, SHOTS)
    policy = Policy.load(files.model, device="cpu")
    assert policy.tokenizer.decode(policy.eos_ids) == "\n"
    assert len(load_prompts(str(files.heldout)).prompts) == 12
