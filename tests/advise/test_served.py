"""Profiles of a served model: what is asked of the server, what is kept, and what every kind of failure says.

`advise()` is the command on 24 prompts, 4 rollouts of each, so 96 requests to `server`, a stand-in that answers as
`server.replies` says; it returns the exit code, what was shown on standard output and what was said beside it.
"""

import os
import re
import signal
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("openai", reason="needs pip install 'rollalloc[served]'")
from stand_in_server import MODEL, answered, completion, logged, serving

from rollalloc.advise.served import amount


def test_a_served_model_gets_a_verdict_and_every_answer_is_scored_and_kept(advise, server):
    server.replies = lambda number, body: time.sleep(0.01) or answered(number, body)
    code, shown, said = advise()
    assert code == 0
    assert "mean success rate" in shown
    assert "96 rollouts: 96 requests, 16 at once, at most 768 tokens of answers; temperature 1, top_p 1" in said
    assert "96 answers: 672 tokens of prompts and 288 of answers" in said
    rows = logged()
    assert [row["rollout"] for row in rows] == list(range(96))
    assert {(row["text"], row["metric"]) for row in rows} == {("yes", 1.0), ("no", 0.0)}
    assert {(row["tokens"], row["truncated"]) for row in rows} == {(3, False)}
    assert 1 < server.most <= 16


def test_messages_are_sent_as_messages_and_sampling_is_said_in_full(advise, server):
    advise("--chat-template-args", '{"enable_thinking": false}')
    request = server.requests[0]
    assert request["messages"][0]["role"] == "user"
    assert request | {"messages": None} == {
        "messages": None,
        "model": MODEL,
        "max_tokens": 8,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "stream": False,
        "chat_template_kwargs": {"enable_thinking": False},
    }


def test_prompts_that_are_text_are_completed(advise, server):
    assert advise(prompts="text.jsonl")[0] == 0
    assert server.requests[0]["prompt"].startswith("Is ")
    assert "messages" not in server.requests[0]


@pytest.mark.parametrize(
    ("names", "refusal", "says", "sent"),
    [
        (
            ("top_k", "min_p"),
            "Unrecognized request argument supplied: {}",
            "does not take top_k, min_p and uses its own",
            {},
        ),
        (
            ("top_p",),
            "`temperature` and `{}` cannot both be specified.",
            "does not take top_p and uses",
            {"temperature": 1},
        ),
        (("max_tokens",), "Unsupported: use 'max_completion_tokens' instead.", "", {"max_completion_tokens": 8}),
    ],
)
def test_a_parameter_that_the_server_refuses_is_left_out_and_said(advise, server, names, refusal, says, sent):
    """The second is opencode 28930 and oai-compatible-copilot 81; the third has a newer name, which is sent instead."""

    def picky(number, body):
        for name in names:
            if name in body:
                return 400, {"error": {"message": refusal.format(name)}}
        return answered(number, body)

    server.replies = picky
    code, _, said = advise(sample_prompts=6, sample_n=4)
    assert code == 0
    assert says in said
    assert ("uses its own values" in said) == bool(says)
    assert [len({*names} & body.keys()) for body in server.requests[: len(names) + 1]] == [*range(len(names), -1, -1)]
    assert server.requests[-1].items() >= sent.items()


@pytest.mark.parametrize("failure", [(429, {"error": "slow down"}), (500, {"error": "oops"}), None, (200, '{"cho')])
def test_a_request_that_fails_now_and_then_is_sent_again(advise, server, failure):
    server.replies = lambda number, body: failure if number % 3 == 1 else answered(number, body)
    assert advise(concurrency=1, sample_prompts=6, sample_n=4)[0] == 0  # with more at once, all tries of one could fail
    assert len(logged()) == 24
    assert len(server.requests) > 24


def test_requests_under_way_when_another_fails_are_waited_for_and_kept(advise, server):
    begun = threading.Event()

    def fails(number, body):
        if number == 20:
            begun.wait(60)
            return 403, {"error": "not for you"}
        if number > 20:
            begun.set()
            time.sleep(0.3)  # so that the other one fails first
        return answered(number, body)

    server.replies = fails
    assert advise(concurrency=2)[0] == 2
    assert len(Path("profile/answers.jsonl").read_text().splitlines()) == len(server.requests) - 1 == 21


def test_a_hang_ends(advise, server):
    ended = threading.Event()
    server.replies = lambda number, body: ended.wait(60) and None
    code, _, said = advise(request_limit=0.2, retries=0)
    ended.set()
    assert code == 2
    assert "did not answer a request within 0.2 s, 1 times; give more time with --request-limit" in said


def test_ctrl_c_leaves_at_once_and_keeps_the_answers(advise, server):
    ended = threading.Event()

    def interrupted(number, body):
        if number < 20:
            return answered(number, body)
        if number == 20:
            os.kill(os.getpid(), signal.SIGINT)
        ended.wait(60)
        return None

    server.replies = interrupted
    code, _, said = advise(concurrency=2)
    ended.set()
    assert code == 128 + signal.SIGINT
    assert "stopped; run the same command again to continue from the answers in profile" in said
    server.replies = answered
    code, _, said = advise(concurrency=2)
    assert code == 0
    assert re.search(r"96 rollouts, (19|20) of them kept from before", said)


def test_ctrl_c_after_the_last_answer_leaves_as_well(advise, monkeypatch):
    def interrupted(*_):
        time.sleep(0.5)  # the answers are there by then
        raise KeyboardInterrupt

    monkeypatch.setattr("rollalloc.advise.sampled_profile.write_text", interrupted)
    code, _, said = advise(sample_prompts=2, sample_n=1)
    assert code == 128 + signal.SIGINT
    assert "continue from the answers in profile" in said


@pytest.mark.parametrize(
    ("listing", "message"),
    [
        ((200, "<html>welcome</html>"), "does not speak the OpenAI protocol"),
        ((200, {"hello": 1}), "does not speak the OpenAI protocol"),
        ((401, {"error": "key"}), "OPENAI_API_KEY is not set"),
        ((500, {"error": "oops"}), "failed 1 times (500: oops)"),
        *(((200, {"data": data}), "does not speak") for data in ([None], "models", 3)),
        *(((200, {"data": data}), "not 'org/tiny'") for data in ([{"id": None}], [{"name": "x"}])),
    ],
)
def test_a_server_of_another_kind_is_refused_before_anything_is_asked(advise, server, listing, message):
    server.listing = listing
    code, _, said = advise(retries=0)
    assert code == 2
    assert message in said
    assert not server.requests
    assert not Path("profile/rollouts.jsonl").exists()


def test_another_model_is_refused_by_name(advise, server):
    code, _, said = advise(served_model="org/tinny")
    assert code == 2
    assert "serves org/tiny, not 'org/tinny'; give --served-model org/tiny" in said
    assert not server.requests


def test_the_key_is_sent_and_stands_in_no_file_and_no_message(advise, server, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-very-secret")
    server.replies = lambda number, body: (
        (401, {"error": {"message": "Incorrect API key: sk-very-secret"}}) if number == 30 else answered(number, body)
    )
    code, shown, said = advise()
    assert code == 2
    assert server.headers["authorization"] == "Bearer sk-very-secret"
    assert "is set but not accepted" in said
    assert "sk-very-secret" not in shown + said
    for file in Path.cwd().rglob("*"):
        assert not file.is_file() or b"sk-very-secret" not in file.read_bytes()


@pytest.mark.parametrize(
    "url",
    [
        "http://me:secret@127.0.0.1:1/v1",
        "http://127.0.0.1:1/v1?key=secret",
        "me:secret@127.0.0.1:1",
        " http://[::1?k=secret",
    ],
)
def test_a_key_within_the_address_is_refused_and_not_repeated(advise, url):
    code, shown, said = advise(endpoint=url)
    assert code == 2
    assert "put it into OPENAI_API_KEY" in said
    assert "secret" not in shown + said


def test_answers_that_are_cut_off_are_truncated_or_without_a_score(advise, server):
    endings = ["length", "stop", "content_filter", None]
    server.replies = lambda number, body: (200, completion("yes", finish=endings[number % 4], tokens=3))
    code, _, said = advise()
    assert code == 0
    rows = logged()
    assert {(row["truncated"], row["metric"], row["unscored"]) for row in rows} == {
        (True, 1.0, None),
        (False, 1.0, None),
        (False, None, "the server cut the answer off: content_filter"),
        (False, None, "the server does not say why the answer ended (finish_reason is null)"),
    }
    assert "cut 24 answers off before 8 tokens (the shortest at 3)" in said


def test_a_server_that_does_not_sample_is_said(advise, server):
    server.replies = lambda number, body: (200, completion(body["messages"][0]["content"]))
    assert "all answers to a prompt are equal, for each of 24 prompts" in advise()[2]


def test_a_prompt_that_the_server_refuses_may_be_left_out(advise, server):
    def short(number, body):
        if "Is 3 even" in body["messages"][0]["content"]:
            return 400, {"error": {"message": "maximum context length is 4 tokens"}}
        return answered(number, body)

    server.replies = short
    assert advise("--drop-overlong")[0] == 0
    rows = logged()
    assert [row["key"] for row in rows if row["unscored"]] == ["mine/3"] * 4
    assert "maximum context length" in next(row["unscored"] for row in rows if row["unscored"])


def test_a_reward_that_fails_stops_early_and_its_repair_asks_for_nothing_again(advise, server):
    code, _, said = advise(reward="my_reward.py:never", concurrency=1)
    assert code == 2
    assert "none of 64 rollouts has a score" in said
    asked = len(server.requests)
    assert 64 <= asked < 96
    code, _, said = advise("--overwrite", concurrency=1)
    assert code == 0
    assert f"{asked} of them kept from before: {96 - asked} requests" in said
    assert len(server.requests) == 96
    assert {row["metric"] for row in logged()} == {0.0, 1.0}


def test_more_prompts_and_more_rollouts_ask_only_for_what_is_missing(advise, server):
    advise(sample_prompts=10, sample_n=2)
    assert len(server.requests) == 20
    advise(sample_prompts=12, sample_n=2)
    assert len(server.requests) == 24
    advise("--overwrite", sample_prompts=12, sample_n=3)
    assert len(server.requests) == 36
    before = len(server.requests)
    server.listing = (500, {})  # a whole profile needs no server
    assert advise(sample_prompts=12, sample_n=3)[0] == 0
    assert len(server.requests) == before


def test_answers_to_other_questions_are_not_taken(advise, server):
    said = advise(temperature=0.5)[2]
    assert "temperature 0.5, top_p 1 (training must use this temperature too; its default is 1)" in said
    assert server.requests[0]["temperature"] == 0.5
    assert "temperature" in advise()[2]  # other settings are refused
    advise("--overwrite")
    assert len(server.requests) == 192


@pytest.mark.parametrize("ending", ["abort", "content_filter", "tool_calls"])
def test_an_answer_without_a_score_is_asked_for_again(advise, server, ending):
    few = {"sample_prompts": 3, "sample_n": 2}
    server.replies = lambda number, body: (200, completion("yes", finish=ending if number % 2 else "stop"))
    said = advise(**few)[2]
    assert (
        f"3 of 6 answers have no score, mostly because: the server cut the answer off: {ending}. The same command"
        in said
    )
    server.replies = answered
    assert advise(**few | {"sample_prompts": 4})[0] == 0
    assert len(server.requests) == 8  # those in the log stay as they are
    assert advise("--overwrite", **few)[0] == 0
    assert len(server.requests) == 11
    assert None not in {row["metric"] for row in logged()}


def test_an_unfinished_waves_answers_without_a_score_are_asked_for_again(advise, server):
    server.replies = lambda number, body: (
        (200, completion("yes", finish="abort" if number in (0, 20) else "stop")) if number < 21 else (500, {})
    )
    assert advise(concurrency=1, retries=0)[0] == 2
    server.replies = answered
    assert advise(concurrency=1)[0] == 0
    assert len(server.requests) == 96 + 1 + 1  # the one that failed, and the one that was aborted in the last wave
    assert [row["rollout"] for row in logged() if row["metric"] is None] == [0]


def test_an_answer_belongs_to_its_server_and_its_template(advise, server):
    few = {"sample_prompts": 3, "sample_n": 2}
    advise(**few)
    assert advise(endpoint=server.url + "/", **few)[0] == 0  # another spelling of its address
    with serving() as other:
        assert f"profile.served: saved '{server.url}', given '{other.url}'" in advise(endpoint=other.url, **few)[2]
        assert advise("--overwrite", endpoint=other.url, **few)[0] == 0
        advise("--overwrite", "--chat-template-args", '{"enable_thinking": false}', endpoint=other.url, **few)
        assert len(other.requests) == 12
    assert advise("--overwrite", **few)[0] == 0
    assert len(server.requests) == 6  # its answers were kept


def test_the_cost_comes_first_and_is_estimated_from_the_first_answers(advise, server):
    _, _, said = advise(price="1000,5000", concurrency=1)
    first = said.index("96 requests, 1 at once, at most 768 tokens of answers, 3.84 in your currency and their prompts")
    estimate = re.search(
        r"after the first (\d+) answers: 7 tokens per prompt and 3 per answer; the other (\d+) will take about (\d+) tokens",
        said,
    )
    assert estimate is not None
    assert first < estimate.start()
    arrived, left, tokens = map(int, estimate.groups())
    assert (arrived >= 16, arrived + left, tokens) == (True, 96, 10 * left)
    assert "96 answers: 672 tokens of prompts and 288 of answers, 2.11 in your currency" in said


@pytest.mark.parametrize(
    ("price", "said"),
    [(1234.5, "1,234.50"), (0.114, "0.11"), (1.824e-4, "0.00018"), (3.12e-7, "0.00000031"), (0.0, "0")],
)
def test_a_price_is_not_rounded_to_nothing(price, said):
    assert amount(price) == said


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"served_model": None}, "--endpoint also needs --served-model"),
        ({"endpoint": "localhost:8000"}, "expected an address such as http://localhost:8000/v1"),
        ({"endpoint": "http://"}, "expected an address such as"),
        ({"endpoint": "http://[::1"}, "expected an address such as"),
        ({"endpoint": None, "model": "mine"}, "--served-model: applies only with --endpoint"),
        ({"model": "mine"}, "--model: cannot be used with --endpoint"),
        ({"device": "cpu"}, "--device: cannot be used with --endpoint"),
        ({"concurrency": 0}, "concurrency must be a whole number of at least 1"),
        ({"concurrency": 100_000}, "at most 1000 requests"),
        ({"retries": -1}, "retries must be a whole number of at least 0"),
        ({"request_limit": 0}, "positive number of seconds"),
        ({"price": "3"}, "expected two prices"),
        ({"price": "a,b"}, "expected numbers separated by commas"),
    ],
)
def test_options_that_cannot_be(advise, changes, message):
    more = ["--model", "mine"] if "model" in changes else []
    code, _, said = advise(*more, **{name: value for name, value in changes.items() if name != "model"})
    assert code == 2
    assert message in said


def test_what_is_pasted_names_the_users_files_and_no_more_prompts_than_there_are(advise, server, rollalloc):
    expected = (
        "rollalloc train --model org/tiny --prompts chat.jsonl --reward my_reward.py:yes \\\n"
        "    --max-new-tokens 8 \\\n"
        "    --recipe reinforce --set groups=24 --set n=1\n"
    )
    _, shown, _ = advise()
    assert "Begin with REINFORCE: one rollout per prompt, 24 prompts per batch." in shown
    assert expected in shown
    assert "24 rows instead of 64" in shown
    assert expected in rollalloc("advise", "profile")[1]  # from the folder alone, too
    assert "gradient_accumulation_steps=3,  # on one process: 24 rows, of 24 prompts" in advise("--framework", "trl")[1]
