"""A reward with an answer to vote on: the first digit, which is right where it is even."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    digits = [character for character in solution_str if character.isdigit()]
    right = float(bool(digits) and int(digits[0]) % 2 == 0)
    return {"score": 2 * right - 1, "acc": right, "pred": digits[0] if digits else ""}
