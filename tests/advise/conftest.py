"""A small `sort` task and runs on it; a stand-in for a served model."""

from pathlib import Path

import pytest
from stand_in_server import MODEL, serving

from rollalloc.advise.profile import profile_of
from rollalloc.data.prompts import write_prompts
from small_run import run_of, task
from tiny_policy import one_thread

__all__ = ["one_thread", "run_of", "task"]

REWARD = """
def yes(data_source, solution_str, ground_truth, extra_info):
    return float(solution_str == ground_truth)

def never(data_source, solution_str, ground_truth, extra_info):
    raise KeyError("no such column")
"""


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    # Pauses between two tries are the client's; they need not be waited for.
    monkeypatch.setattr("openai._base_client.AsyncAPIClient._calculate_retry_timeout", lambda *_, **__: 0.0)
    with serving() as server:
        yield server


@pytest.fixture
def files(tmp_path, monkeypatch):
    """The working directory, with prompts as messages and as text, and a reward."""
    monkeypatch.chdir(tmp_path)
    Path("my_reward.py").write_text(REWARD)
    rows = [
        {
            "data_source": "mine",
            "prompt": [{"role": "user", "content": f"Is {number} even?"}],
            "reward_model": {"style": "rule", "ground_truth": "yes"},
            "extra_info": {"index": number},
        }
        for number in range(24)
    ]
    write_prompts("chat.jsonl", rows)
    write_prompts("text.jsonl", [row | {"prompt": row["prompt"][0]["content"]} for row in rows])
    return tmp_path


@pytest.fixture
def advise(rollalloc, server, files, monkeypatch, caplog):
    """Call `rollalloc advise --endpoint` on the prompts; options with None are left out.

    The profile has few resamples: these tests are about the server.
    """
    quick = {"resamples": 2}
    monkeypatch.setattr("rollalloc.advise.profile.profile_of", lambda log, **how: profile_of(log, **how | quick))

    def called(*more, prompts="chat.jsonl", reward="my_reward.py:yes", **changes):
        options = {"endpoint": server.url, "served_model": MODEL, "out": "profile", "max_new_tokens": 8} | changes
        given = [
            part
            for name, value in options.items()
            if value is not None
            for part in (f"--{name.replace('_', '-')}", value)
        ]
        code, shown, said = rollalloc(
            "advise", *given, "--prompts", prompts, "--reward", reward, "--reward-workers", 0, *more
        )
        warned = " ".join(record.getMessage() for record in caplog.records)
        return code, shown, " ".join(f"{said} {warned}".split())

    return called
