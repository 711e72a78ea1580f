"""The rewards of PODS's runs."""

from pathlib import Path

import pytest
import yaml

pytest.importorskip("math_verify")

from rollalloc.rewards import pods
from rollalloc.rewards.frameworks import Reward
from rollalloc.rewards.function import load_reward

LINES = "<think>\n3 × 24\n</think>\n<answer>\n{}\n</answer>"


def scored(function, text, truth="72"):
    return function(data_source="gsm8k", solution_str=text, ground_truth=truth, extra_info={})


@pytest.mark.parametrize(
    ("text", "share"),
    [
        ("<think>a</think><answer>b</answer>", 1),
        ("<think>a</think>\n<answer>b</answer>", 1),
        ("<think>a</think>\n\n<answer>b</answer>", 0),
        ("1234567890<think>a</think> <answer>b</answer>", 0.9),
        ("<think>a</think><answer>b</answer>" + "." * 25, 0.75),
        ("<think>a</think><answer>b</answer>" + "." * 101, 0),
        ("</think><answer>b</answer>", 0),
        ("<think>a</think><answer>b", 0),
        ("<answer>b</answer><think>a</think>", 0),
        ("<think></think></answer><answer>", 0),
        ("<think>", 0),
        ("", 0),
    ],
)
def test_on_one_gpu_each_character_around_the_format_costs_a_hundredth(text, share):
    assert pods.one_gpu_format(text) == pytest.approx(share)


@pytest.mark.parametrize(
    ("text", "right"),
    [
        (LINES, 1),
        (LINES + "\nThat is all.", 1),  # as released: the end of a line is enough
        (LINES + " That is all.", 0),
        (" " + LINES, 0),
        (LINES.replace("\n", ""), 0),
        (LINES.replace("</think>\n<", "</think>\n\n<"), 0),
        ("<think>\n</think>\n<answer>\n72\n</answer>", 0),
        ("<think>\n\n</think>\n<answer>\n\n</answer>", 1),
        ("<think>\na\n</think>\n<answer>\n</answer>", 0),
    ],
)
def test_on_eight_gpus_the_format_is_all_or_nothing(text, right):
    assert pods.eight_gpus_format(text) == right


def test_a_tag_counts_if_it_is_there_once():
    assert pods.share_of_tags("<think>a</think><answer>b</answer>") == 1
    assert pods.share_of_tags("<think><think>a</think><answer>b") == 0.5


@pytest.mark.parametrize(
    ("text", "truth", "right"),
    [
        ("<answer>72</answer> or 5", "72", 1),
        ("<answer>5</answer> or 72", "72", 1),
        ("<answer>5</answer> or 6", "72", 0),
        ("<answer>\\boxed{72}</answer>.", "72", 1),
        ("so 24 + 48 = 72.", "72", 1),
        ("it costs $1,234.50 in all", "1234.5", 1),
        ("5-3", "3", 1),
        ("it is -3", "3", 0),
        ("it is -3", "-3", 1),
        ("<think>a</think><answer>\\frac{1}{2}</answer>", "0.5", 1),
        ("x+1", "1+x", 1),
        ("<answer></answer>", "72", 0),
        ("", "72", 0),
        ("<answer>" + "72 " * 100 + "</answer> no", "72", 1),  # the last number; the text is too long for an answer
    ],
)
def test_on_one_gpu_an_answer_is_in_the_tags_or_the_last_number(text, truth, right):
    assert scored(pods.is_right, text, truth) == right


@pytest.mark.parametrize(
    ("text", "right"),
    [
        (LINES.format(72), 0),  # as released: no formula
        (LINES.format("$72$"), 1),
        (LINES.format("\\boxed{72}"), 1),
        ("$72$, so \\boxed{71}", 0),
        ("\\(5\\) and then \\[72\\]", 1),
        ("$72$ or $5$", 0),
        ("", 0),
    ],
)
def test_on_eight_gpus_an_answer_is_a_formula(text, right):
    assert scored(pods.is_right_in_latex, text) == right


@pytest.mark.parametrize(
    ("function", "text", "score", "acc"),
    [
        (pods.score_eight_gpus, LINES.format("$72$"), 3, 1),
        (pods.score_eight_gpus, LINES.format("$71$"), 2, 0),
        (pods.score_eight_gpus, "$72$", 1, 1),
        (pods.score_one_gpu, LINES.format(72), 1.2, 1),
        (pods.score_one_gpu, LINES.format(71), 0.2, 0),
        (pods.score_one_gpu_if_wrong, LINES.format(72), 1, 1),
        (pods.score_one_gpu_if_wrong, LINES.format(71), 0.2, 0),
        (pods.score_one_gpu_in_format, LINES.format(72), 1.2, 1),
        (pods.score_one_gpu_in_format, f"\n{LINES.format(72)} ", 1.198, 1),
        (pods.score_one_gpu_in_format, f"\n\n{LINES.format(72)}", 1.198, 0),
        (pods.score_one_gpu_in_format, f"So: {LINES.format(72)}", 1.196, 0),
        (pods.score_one_gpu_in_format, f"{LINES.format(72)}.", 1.199, 0),
    ],
)
def test_the_parts_add_up_and_selection_sees_whether_the_answer_is_right(function, text, score, acc):
    assert scored(function, text) == pytest.approx({"score": score, "acc": acc})


def test_all_right_or_all_wrong_rollouts_differ_by_their_format():
    """With a reward of ±1, a step of such a prompt would be empty."""
    texts = [LINES.format(72), "<answer>72</answer>", "72"]
    assert len({scored(pods.score_one_gpu, text)["score"] for text in texts}) == 3


@pytest.mark.parametrize("name", ["eight_gpus", "one_gpu", "one_gpu_in_format", "one_gpu_if_wrong", "accuracy"])
def test_every_reward_of_pods_loads_in_our_commands_and_can_be_called_by_others(name):
    reward = getattr(pods, name)
    assert isinstance(reward, Reward)
    assert reward.__name__ == name
    result = scored(load_reward(f"rollalloc.rewards.pods:{name}"), LINES.format("$72$"))
    assert (result if isinstance(result, float) else result["acc"]) == 1


def test_every_run_of_pods_names_a_graded_reward_except_for_math():
    """MATH's published results count the answer alone."""
    folder = Path(__file__).parents[2] / "recipes" / "verl"
    base = yaml.safe_load((folder / "pods_base.yaml").read_text("utf-8"))
    path = base["reward"]["custom_reward_function"]["path"].removeprefix("pkg://")
    rows = {file.stem: yaml.safe_load(file.read_text("utf-8")) for file in folder.glob("pods_*.yaml")}
    names = {row: read["reward"]["custom_reward_function"]["name"] for row, read in rows.items() if "defaults" in read}
    assert len(names) == 4
    for row, name in names.items():
        results = [scored(load_reward(f"{path}:{name}"), text) for text in (LINES.format("$71$"), "71")]
        assert (results[0] == results[1]) == (row == "pods_math")


@pytest.mark.e2e
def test_verl_and_trl_call_a_reward_of_pods(request):
    request.addfinalizer(pods.one_gpu.scorer.close)
    given = pods.one_gpu(data_source="gsm8k", solution_str=LINES.format(72), ground_truth="72", extra_info={})
    assert (given["score"], given["acc"], given["unscored"]) == (pytest.approx(1.2), 1, 0)
    completions = [[{"role": "assistant", "content": LINES.format(answer)}] for answer in (72, 71)]
    assert pods.one_gpu(completions=completions, ground_truth=["72", "72"]) == pytest.approx([1.2, 0.2])
