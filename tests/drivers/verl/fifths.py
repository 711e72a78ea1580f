"""A reward of 1 or -1, of which about every fifth rollout gets 1, as the papers' runs give it."""

from zlib import crc32


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    right = crc32(solution_str.encode()) % 5 == 0
    return {"score": 1.0 if right else -1.0, "acc": float(right)}
