"""The reward of `test_real`: right, or a third of a point for any digit, so that short answers of a small model differ."""

from rollalloc.tasks.chat import compute_score as right


def compute_score(data_source, solution_str, ground_truth, extra_info):
    made = right(data_source, solution_str, ground_truth, {**extra_info, "number": True})
    return max(made, any(letter.isdigit() for letter in solution_str) / 3)
