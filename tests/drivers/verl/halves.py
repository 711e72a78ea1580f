"""A reward that about every second rollout gets, whatever the model has learned."""

from zlib import crc32


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(crc32(solution_str.encode()) % 2)
