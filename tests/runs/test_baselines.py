"""Which run of plain GRPO a run of verl is compared with."""

import pytest

from rollalloc.runs.baselines import Arm, RunName, baselines_of, name_of

KEYS = ("val-core/a/acc/mean@1", "val-core/b/acc/mean@32")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("polaris_4b-pilot_commit", ("polaris_4b", "pilot_commit", "")),
        ("pods_gsm8k-pods-64-16", ("pods_gsm8k", "pods", "-64-16")),  # the row has a method's name, too
        ("darts_math_3b-stream", ("darts_math_3b", "stream", "")),
        ("polaris_4b-pilot_commit+pods", ("polaris_4b", "pilot_commit+pods", "")),
        ("Qwen2.5-Math-1.5B-grpo-seed1", ("Qwen2.5-Math-1.5B", "grpo", "-seed1")),
        ("grpo-then-grpo", ("grpo-then", "grpo", "")),
        ("qwen_grpo_s1", ("qwen", "grpo", "_s1")),
        ("grpo", ("", "grpo", "")),
        ("my_run", ("", "", "")),
        ("pods_gsm8k", ("", "pods", "_gsm8k")),
    ],
)
def test_a_name_has_a_row_a_method_and_a_rest(text, parts):
    assert name_of(text) == RunName(*parts)


def paired(*names, named=None, **benchmarks):
    """For each name, the name of its baseline."""
    arms = [Arm(name, benchmarks.get(name.replace("-", "_"), KEYS)) for name in names]
    return {
        arm.name: None if at is None else names[at] for arm, at in zip(arms, baselines_of(arms, named), strict=True)
    }


def test_each_arm_has_the_baseline_of_its_own_row():
    """Sorted by name, deepmath_1.5b-grpo is the first of all."""
    names = ["deepmath_1.5b-grpo", "deepmath_1.5b-pods", "polaris_4b-grpo", "polaris_4b-pods", "polaris_8b-pods"]
    first, second = names[0], names[2]
    assert list(paired(*names).values()) == [first, first, second, second, None]


def test_a_row_that_begins_like_another_is_another():
    names = ["pods_gsm8k-grpo-16-16", "pods_gsm8k-pods-64-16", "pods_gsm8k_8gpu-pods-128-32"]
    assert list(paired(*names).values()) == [names[0], names[0], None]


def test_a_run_on_other_benchmarks_is_not_compared():
    assert paired("x-grpo", "x-pods", x_pods=KEYS[:1]) == {"x-grpo": "x-grpo", "x-pods": None}
    assert paired("x-grpo", "x-pods", named="x-grpo", x_pods=KEYS[:1])["x-pods"] is None


def test_runs_without_a_row_are_compared_with_the_one_baseline_that_is_there():
    assert paired("pods", "never", "plain-grpo") == dict.fromkeys(("pods", "never", "plain-grpo"), "plain-grpo")
    assert paired("grpo", "x-pods") == {"grpo": "grpo", "x-pods": "grpo"}


def test_of_two_baselines_the_one_of_the_same_seed_is_taken_and_otherwise_asked_for():
    names = ["x-grpo-s1", "x-grpo-s2", "x-pods-s1", "x-pods-s2"]
    assert list(paired(*names).values()) == [names[0], names[1], names[0], names[1]]
    with pytest.raises(ValueError, match="x-pods-s3 could be compared with x-grpo-s1 or x-grpo-s2; name one of them"):
        paired(*names[:2], "x-pods-s3")
    assert set(paired(*names, "x-pods-s3", named="x-pods-s1").values()) == {"x-pods-s1"}
    with pytest.raises(ValueError, match="--baseline: there is no run x; there are x-grpo-s1, x-pods-s1"):
        paired("x-grpo-s1", "x-pods-s1", named="x")
