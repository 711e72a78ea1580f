"""A reward in verl's convention that a random model learns in a few steps: the share of digits in the answer."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):
    share = sum(character.isdigit() for character in solution_str) / max(1, len(solution_str))
    return {"score": share, "acc": float(solution_str[:1].isdigit())}
