"""Walks: the verifier by hand, the maze, the lost walker's success rate, the files."""

import json
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from rollalloc.tasks.tiny import WarmUp
from rollalloc_lab.tasks import walks

# 3 x 3 cells, 0 to 8 by rows; no passage between 0 and 1, nor between 4 and 7.
MAZE = json.dumps({"side": 3, "start": 0, "goal": 2, "walls": [[0, 1], [4, 7]]})
CONFIG = walks.WalksConfig(side=5, train=60, heldout=20, warm_up=WarmUp(steps=4, batch=8, rise=1))


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("c3 c4 c1 c2", 1.0),
        ("c3 c4 c3 c4 c1 c2", 1.0),  # a detour is a walk
        ("c3 c4 c5 c2 c5 c2", 1.0),  # so is one that comes by the goal before it ends there
        ("c1 c2", 0.0),  # through a wall
        ("c3 c5 c2", 0.0),  # a jump
        ("c3 c4 c1", 0.0),  # not there
        ("c0 c3 c4 c1 c2", 0.0),  # standing still is no step
        ("c3 c4 c1 c2 c99999999999", 0.0),
        ("c3 c4 c1 c²", 0.0),
        ("3 4 1 2", 0.0),
        ("", 0.0),
    ],
)
def test_an_answer_that_leads_to_the_goal_is_right(answer, score):
    assert walks.compute_score("walks/late", answer, MAZE) == score


def test_ends_of_rows_are_no_neighbours():
    maze = json.dumps({"side": 3, "start": 2, "goal": 3, "walls": []})
    assert walks.compute_score("", "c3", maze) == 0.0
    assert walks.compute_score("", "c5 c4 c3", maze) == 1.0


@pytest.fixture(scope="module")
def made():
    return walks.Walks(CONFIG)


def test_the_maze_has_its_walls_and_is_whole(made):
    passages = 2 * 5 * 4
    assert made.open_CC.sum() == 2 * (passages - round(0.22 * passages))
    assert (made.open_CC == made.open_CC.T).all()
    assert np.isfinite(made.steps_CC).all()
    # The shortest ways, by squaring the relation instead of by fronts.
    reached_CC, by_hand_CC = np.eye(25, dtype=bool), np.zeros((25, 25))
    while not reached_CC.all():
        by_hand_CC += ~reached_CC
        reached_CC = reached_CC | ((reached_CC.astype(int) @ made.open_CC) > 0)
    np.testing.assert_array_equal(made.steps_CC, by_hand_CC)


@pytest.mark.parametrize(("limit", "verbose"), [(walks.LIMIT, 0.0), (walks.LONG, 0.0), (walks.LONG, walks.VERBOSE)])
def test_the_initial_success_rate_is_the_share_of_the_walkers_walks_that_are_right(limit, verbose):
    """Error rate: a mean of 20,000 draws at 4.5 standard errors, and ten goals at 4.5, below 1 in 10,000."""
    rng, made = np.random.default_rng(0), walks.Walks(CONFIG, limit, verbose)
    prompts, answers = made.examples(rng, made.lost_GCC, 20_000, verbose)
    p_GC, walls = made.initial_p(), np.argwhere(np.triu(made.near_CC & ~made.open_CC)).tolist()
    right, expected, goals = [], [], []
    for prompt, answer in zip(prompts, answers, strict=True):
        start, goal = (int(word[1:]) for word in prompt.split()[:2])
        maze = json.dumps({"side": 5, "start": start, "goal": goal, "walls": walls})
        ended = len(answer.split()) < limit  # within the limit its end has a token too
        right.append(ended and walks.compute_score("", answer, maze))
        expected.append(p_GC[goal, start])
        goals.append(goal)
    right_B, expected_B = np.array(right, float), np.array(expected)
    error = np.sqrt((expected_B * (1 - expected_B)).sum()) / len(right_B)
    assert abs(right_B.mean() - expected_B.mean()) < 4.5 * error
    for goal in range(10):
        of_goal = np.array(goals) == goal
        error = np.sqrt((expected_B[of_goal] * (1 - expected_B[of_goal])).sum()) / of_goal.sum()
        assert abs(right_B[of_goal].mean() - expected_B[of_goal].mean()) < 4.5 * error


def test_the_walkers_first_phase_crosses_no_wall_and_the_second_does(made):
    for moves_GCC, crosses in ((made.clean_GCC, False), (made.lost_GCC, True)):
        prompts, answers = made.examples(np.random.default_rng(1), moves_GCC, 2000)
        steps = [
            (int(one[1:]), int(other[1:]))
            for prompt, answer in zip(prompts, answers, strict=True)
            for one, other in pairwise([prompt.split()[0], *answer.split()])
        ]
        assert all(made.near_CC[step] for step in steps)
        assert any(not made.open_CC[step] for step in steps) == crosses
        assert all(prompt.split()[0] != prompt.split()[1] for prompt in prompts)


def test_a_pool_has_its_bands_and_its_files_work_together(tmp_path):
    import pyarrow.parquet as pq

    task = walks.prepare(tmp_path, "late", CONFIG)
    train, heldout = (pq.read_table(path).to_pylist() for path in (task.train, task.heldout))
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in heldout}
    p_N = np.array([row["extra_info"]["initial_p"] for row in train])
    assert np.histogram(p_N, [0, 0.1, 0.9, 1])[0].tolist() == walks.POOLS["late"].counts(60).tolist()
    walls = {row["reward_model"]["ground_truth"].partition("walls")[2] for row in train + heldout}
    assert len(walls) == 1  # one maze
    assert task.single_answer is False
    assert walks.prepare(tmp_path, "late", CONFIG) == task
    with pytest.raises(ValueError, match="expected one of the pools mixed, late, long, brief, got 'hard'"):
        walks.prepare(tmp_path, "hard", CONFIG)
    with pytest.raises(ValueError, match="draw more candidates, or ask for fewer prompts"):
        walks.Walks(CONFIG).problems(walks.POOLS["late"], np.random.default_rng(0), 10_000, set())


def test_the_pool_with_a_tail_has_a_model_of_its_own_that_reads_as_far(tmp_path):
    """The lost walker's walks are the same; what cuts them is not."""
    from transformers import AutoConfig, AutoTokenizer

    few = replace(CONFIG, train=6, heldout=2)
    short, long = walks.prepare(tmp_path, "mixed", few), walks.prepare(tmp_path, "long", few)
    assert short.model != long.model
    assert (short.max_new_tokens, long.max_new_tokens) == (24, 128)
    prompt = AutoTokenizer.from_pretrained(long.model)("c0 c24 =")["input_ids"]
    assert AutoConfig.from_pretrained(long.model).max_position_embeddings >= len(prompt) + long.max_new_tokens
    _, answers = walks.Walks(CONFIG, walks.LONG).examples(np.random.default_rng(0), walks.Walks(CONFIG).lost_GCC, 4000)
    lengths = [len(answer.split()) for answer in answers]
    assert (walks.Walks(CONFIG, walks.LONG).initial_p() >= walks.Walks(CONFIG).initial_p()).all()
    assert walks.Walks(CONFIG, walks.LONG).initial_p().sum() > walks.Walks(CONFIG).initial_p().sum()
    _, cut = walks.Walks(CONFIG).examples(np.random.default_rng(0), walks.Walks(CONFIG).lost_GCC, 4000)
    assert max(len(answer.split()) for answer in cut) == walks.LIMIT < np.quantile(lengths, 0.9) < max(lengths)
