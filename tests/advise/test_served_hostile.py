"""Servers that do what no guide says, full disks, kills and keys: one sentence, and no answer is paid for twice."""

# pyright: reportIndexIssue=false

import gzip
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("openai", reason="needs pip install 'rollalloc[served]'")
from stand_in_server import MODEL, answered, completion, logged, serving


@pytest.fixture
def advise(advise):
    """The command on 6 prompts, 4 rollouts of each, so 24 requests."""
    return partial(advise, sample_prompts=6, sample_n=4)


EVERY = {"sample_prompts": None, "sample_n": None}  # 24 prompts, 96 requests, as `started` asks


def sends(body, status=200, **headers):
    """A reply of these bytes, with these headers."""

    def sent(handler):
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(body)

    return sent


def drip(handler):
    sends(b"", **JSON, Content_Length="100000")(handler)
    for _ in range(100):
        handler.wfile.write(b" ")
        time.sleep(0.1)


def plain(text):
    """An answer that is text."""
    return sends(text.encode(), Content_Type="text/plain", Content_Length=str(len(text)))


CHUNK = {"id": "x", "object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {"content": "yes"}}]}
STREAM = f"data: {json.dumps(CHUNK)}\n\ndata: [DONE]\n\n".encode()
JSON = {"Content_Type": "application/json"}
DEEP = b'{"choices": ' + b'[{"a": ' * 450 + b"1" + b"}]" * 450 + b"}"  # JSON can be read, but not its parts


def reply(**changes):
    """A whole answer with other parts."""
    return 200, completion("yes") | changes


def choice(finish="stop", **message):
    return reply(choices=[{"index": 0, "finish_reason": finish, "message": {"role": "assistant", **message}}])


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        (sends(STREAM, Content_Type="text/event-stream", Connection="close"), "does not speak the OpenAI protocol"),
        (
            sends(b'40\r\n{"choices": [', **JSON, Transfer_Encoding="chunked"),
            "sent an answer that is incomplete or cannot be decoded",
        ),
        (drip, "did not answer a request within 1 s, 2 times; give more time with --request-limit"),
        (reply(choices=None), "does not speak the OpenAI protocol"),
        (sends(b"", 204), "does not speak the OpenAI protocol"),
        (sends(b"oops", **JSON, Content_Encoding="gzip", Content_Length="4"), "incomplete or cannot be decoded"),
        (reply(choices=[]), "does not speak the OpenAI protocol"),
        (reply(choices={"0": {}}), "does not speak the OpenAI protocol"),
        (reply(choices=[None]), "does not speak the OpenAI protocol"),
        (choice(content=3), "expected text, got int"),
        (
            choice(content=[{"type": "image_url", "image_url": "x"}]),
            "expected parts of text, got a part of type 'image_url'",
        ),
        (choice(content=["yes"]), "does not speak the OpenAI protocol"),
        (sends(b"[" * 100_000, **JSON, Content_Length="100000"), "does not speak the OpenAI protocol"),
        (sends(DEEP, **JSON, Content_Length=str(len(DEEP))), "does not speak the OpenAI protocol"),
        (reply(error={"message": "out of memory"}), "does not answer (an error came in place of an answer"),
        (
            (200, {"error": {"message": "out of memory"}}),
            "does not answer (an error came in place of an answer: {'message': 'out of memory'}",
        ),
        ((200, []), "does not speak the OpenAI protocol"),
        ((200, "null"), "does not speak the OpenAI protocol"),
        ((402, {"error": "no credit"}), "refuses requests (402: no credit); see the server's log"),
        ((403, {"error": "not for you"}), "asks for a key: OPENAI_API_KEY is not set (403: not for you)"),
        ((413, {"error": "too large"}), "refuses a prompt: 413: too large"),
        ((422, {"error": "no system message"}), "refuses a prompt: 422: no system message"),
        ((400, "\x00\x1b[31m"), "refuses a prompt: 400"),
        ((400, {"error": "maximum context length is 4"}), "refuses a prompt: 400: maximum context length is 4"),
        (
            (429, {"error": "slow down"}),
            "refused a request 2 times: too many requests (429: slow down); lower --concurrency",
        ),
        ((503, {"error": "loading"}), "failed 2 times (503: loading); see the server's log"),
        ((404, {"error": "no such thing"}), "--endpoint usually ends in /v1"),
        (None, "no server answers at"),
        ((200, '{"cho'), "does not speak the OpenAI protocol"),
        ((200, completion("yes", model="another")), "answered with 'another'; give --served-model another"),
    ],
)
def test_a_server_that_does_what_it_should_not_ends_in_a_sentence(advise, server, failure, message):
    server.replies = lambda number, body: failure if number >= 8 else answered(number, body)
    server.models = None  # a name that is not listed must be that of the answers
    code, _, said = advise(concurrency=2, retries=1, request_limit=1 if failure is drip else 30)
    assert code == 2
    assert message in said
    assert "\x1b" not in said
    kept = re.search(r"(\d+) answers are kept in profile: the same command continues with them", said)
    assert kept
    if failure is not drip:  # on a busy machine a whole answer may take longer than its short limit
        assert kept[1] == "8"
    asked = len(server.requests)
    server.replies = answered
    assert advise(concurrency=2)[0] == 0
    assert len(server.requests) - asked == 24 - int(kept[1])
    assert len(logged()) == 24


def test_a_redirect_is_not_followed_and_the_key_goes_to_no_other_host(advise, server, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-very-secret")
    with serving() as elsewhere:
        there = elsewhere.url.replace("127.0.0.1", "localhost")
        server.replies = lambda number, body: sends(b"", 307, Location=f"{there}/chat/completions")
        code, _, said = advise(retries=0)
        assert code == 2
        assert f"redirects to {there}/chat/completions; if that is your server, give its address" in said
        assert not elsewhere.requests


@pytest.mark.parametrize("key", ["sk-secret\n", "sk secret", "sk-secret\u00e9", "sk-\x00secret"])
def test_a_key_that_cannot_be_sent_is_said_without_showing_it(advise, server, monkeypatch, key):
    if "\x00" in key:  # the environment cannot hold it, but a program can set it
        monkeypatch.setattr("rollalloc.generate.openai_server.os.environ", {**os.environ, "OPENAI_API_KEY": key})
    else:
        monkeypatch.setenv("OPENAI_API_KEY", key)
    code, shown, said = advise()
    assert code == 2
    assert "OPENAI_API_KEY contains a space, a line break or a letter outside ASCII" in said
    assert "secret" not in shown + said
    assert not server.requests


def test_a_key_that_a_server_repeats_anywhere_is_not_shown(advise, server, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-very-secret")
    server.models = ["sk-very-secret"]
    assert "serves [key], not" in advise()[2]
    server.models = None
    server.replies = lambda number, body: (200, completion("yes", model="sk-very-secret"))
    _, shown, said = advise()
    assert "answered with '[key]'" in said
    server.replies = lambda number, body: (200, completion("yes", finish="sk-very-secret"))
    said += advise()[2]
    assert "sk-very" not in shown + said
    for file in Path("profile").rglob("*.json*"):
        assert b"sk-very-secret" not in file.read_bytes()


@pytest.mark.parametrize("words", ["x" * 52, "x" * 230, "x" * 240], ids=len)
@pytest.mark.parametrize("form", [plain, lambda text: (200, {"error": {"message": text}})], ids=["text", "error"])
def test_a_message_is_not_cut_off_in_the_middle_of_the_key(advise, server, monkeypatch, form, words):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-very-secret")
    server.replies = lambda number, body: form(f"{words} sk-very-secret")
    code, shown, said = advise()
    assert code == 2
    assert words[:50] in said
    assert "sk-very" not in shown + said


@pytest.mark.parametrize("listing", [(405, {}), (501, {}), (200, {"object": "list", "data": []})])
def test_a_server_that_cannot_list_its_models_is_asked_all_the_same(advise, server, listing):
    server.listing = listing
    assert advise()[0] == 0


@pytest.mark.parametrize(
    "usage",
    [
        None,
        {},
        {"prompt_tokens": -1, "completion_tokens": "3"},
        {"completion_tokens": 10**40},
        {"completion_tokens": 0.5},
    ],
)
def test_counts_that_are_missing_or_impossible_are_no_counts(advise, server, usage):
    server.replies = lambda number, body: (200, answered(number, body)[1] | {"usage": usage})
    code, _, said = advise()
    assert code == 0
    assert "24 answers: the server reported no counts of tokens" in said
    assert {row["tokens"] for row in logged()} == {None}


def test_counts_of_some_answers_stand_for_all(advise, server):
    server.replies = lambda number, body: (200, answered(number, body)[1] | ({"usage": None} if number % 2 else {}))
    assert "24 answers: 168 tokens of prompts and 72 of answers" in advise()[2]


TEXTS = ["\x00", "\ud800 lone", "\u202ereversed", "a\u2028b\r\nc", "</script>\x1b[2J", "", "1" * 5000]


def test_texts_that_no_tokenizer_writes_are_kept_scored_and_not_shown(advise, server):
    server.replies = lambda number, body: (200, completion(TEXTS[number % len(TEXTS)], tokens=1))
    code, shown, said = advise()
    assert code == 0
    assert {row["text"] for row in logged()} == set(TEXTS)
    assert "\x1b" not in shown + said
    assert advise("--overwrite", reward="my_reward.py:yes")[0] == 0
    assert len(server.requests) == 24


@pytest.mark.parametrize("text", [None, "", "\n\n"])
def test_an_answer_whose_text_the_server_lost_has_no_score_and_is_counted(advise, server, text):
    """vllm 41902: the text and the reasoning are null, but 29 tokens were counted."""
    server.replies = lambda number, body: (200, completion("yes" if number % 2 else text, tokens=29))
    code, _, said = advise()
    assert code == 0
    assert (
        "12 of 24 answers have no score, mostly because: the server counted tokens of the answer, but sent no text"
        in said
    )
    assert [row["metric"] for row in logged() if not row["text"].strip()] == [None] * 12


def test_an_answer_that_ends_at_once_is_wrong(advise, server):
    server.replies = lambda number, body: (200, completion("", tokens=number % 2))
    assert advise()[0] == 0
    assert {row["metric"] for row in logged()} == {0.0}


def test_an_answer_in_parts_is_their_text(advise, server):
    parts = [{"type": "thinking", "thinking": "even?"}, {"type": "text", "text": "ye"}, {"type": "text", "text": "s"}]
    server.replies = lambda number, body: choice(content=parts[number % 2 :])
    code, _, said = advise()
    assert code == 0
    assert {(row["text"], row["metric"]) for row in logged()} == {("yes", 1.0)}
    assert said.count("takes the reasoning out of answers") == 1


def packed(encoding, text="yes", times=1):
    """An answer that is compressed this many times, although nobody asked for that."""
    body = json.dumps(completion(text)).encode()
    for _ in range(times):
        body = gzip.compress(body)
    return sends(body, **JSON, Content_Encoding=encoding, Content_Length=str(len(body)))


def test_a_compressed_answer_is_read(advise, server):
    server.replies = lambda number, body: packed("gzip")
    assert advise()[0] == 0
    assert {row["text"] for row in logged()} == {"yes"}
    assert server.headers["accept-encoding"] == "identity"


@pytest.mark.parametrize(("encoding", "times"), [("gzip, gzip", 2), ("br", 1), ("gzip", 0)])
def test_an_answer_in_another_encoding_is_refused(advise, server, encoding, times):
    server.replies = lambda number, body: packed(encoding, times=times)
    code, _, said = advise(retries=0)
    assert code == 2
    assert "sent an answer that is incomplete or cannot be decoded" in said


@pytest.mark.parametrize(
    "form", [lambda text: (200, completion(text)), lambda text: packed("gzip", text)], ids=["plain", "gzip"]
)
def test_an_answer_that_is_too_large_is_refused(advise, server, monkeypatch, form):
    monkeypatch.setattr("rollalloc.generate.whole_answers.MOST_BYTES", 2**20)
    server.replies = lambda number, body: form("1" * (2**20 + 1))
    code, _, said = advise(retries=0)
    assert code == 2
    assert "sent an answer of more than 1 MiB; lower --max-new-tokens" in said


def test_a_parameter_that_only_some_of_the_servers_behind_an_address_refuse_is_left_out(advise, server):
    def mixed(number, body):
        if number % 3 == 2 and "top_k" in body:
            time.sleep(0.02)
            return 400, {"error": "unknown parameter top_k"}
        return answered(number, body)

    server.replies = mixed
    code, _, said = advise()
    assert code == 0
    assert "does not take top_k and uses its own values" in said


def test_a_file_without_prompts_or_without_messages_is_refused_before_anything_is_asked(advise, server):
    Path("none.jsonl").write_text("")
    Path("empty.jsonl").write_text(
        json.dumps({"data_source": "mine", "prompt": [], "reward_model": {"ground_truth": ""}}) + "\n"
    )
    for path in ("none.jsonl", "empty.jsonl"):
        code, _, said = advise(prompts=path)
        assert code == 2
        assert path in said
    assert not server.requests


def test_a_full_disk_keeps_whole_answers_and_the_same_command_asks_for_the_rest(advise, server):
    kept = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, kept[1]))  # bytes of a file
    try:
        code, _, said = advise(concurrency=4, **EVERY)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, kept)
    assert code == 2
    assert "File too large" in said
    assert "answers are kept in profile: the same command continues with them" in said
    saved = [json.loads(line) for line in Path("profile/answers.jsonl").read_text().splitlines()]
    assert 0 < len(saved) < 96
    asked = len(server.requests)
    assert advise(**EVERY)[0] == 0
    assert len(server.requests) - asked == 96 - len(saved)


@pytest.mark.parametrize("kept", [1.0, 0.5], ids=["its line's end", "half a line"])
def test_what_a_crash_left_of_the_last_answer_is_asked_for_again_and_kept_whole(advise, server, kept):
    advise(sample_prompts=3, sample_n=2)
    path = Path("profile/answers.jsonl")
    *lines, last = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines) + last[: int(kept * (len(last) - 1))])
    assert advise("--overwrite", sample_prompts=3, sample_n=2)[0] == 0
    assert len(server.requests) == 7
    assert len([json.loads(line) for line in path.read_text().splitlines()]) == 6


def started(server, out="profile", **changes):
    """The command in a process of its own."""
    options = {"endpoint": server.url, "served-model": MODEL, "out": out, "max-new-tokens": "8", "concurrency": "2"}
    given = [part for name, value in options.items() for part in (f"--{name}", value)]
    command = [sys.executable, "-m", "rollalloc.cli.app", "advise", *given, "--prompts", "chat.jsonl"]
    command += ["--reward", "my_reward.py:yes", "--reward-workers", "0"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.e2e
def test_a_kill_loses_no_more_than_what_was_under_way(advise, server):
    def kills(number, body):
        if number == 30:
            os.kill(process.pid, signal.SIGKILL)
            time.sleep(0.2)
        return answered(number, body)

    server.replies = kills
    process = started(server)
    assert process.wait(120) == -signal.SIGKILL
    saved = len(Path("profile/answers.jsonl").read_text().splitlines())
    assert saved >= 29
    asked = len(server.requests)
    server.replies = answered
    assert advise(**EVERY)[0] == 0
    assert len(server.requests) - asked == 96 - saved


@pytest.mark.e2e
def test_of_two_processes_on_a_folder_one_is_refused(advise, server):
    code = []

    def second(number, body):
        if number == 5:
            other = started(server)
            code.append((other.communicate(timeout=120)[1], other.returncode))
        return answered(number, body)

    server.replies = second
    assert advise(concurrency=1, **EVERY)[0] == 0
    ((said, ended),) = code
    assert ended == 2
    assert "in use" in said or "another process" in said
    assert len(server.requests) == 96


# Reports of users of other clients, each reproduced: what they met should end in a profile, or say what to do.


def test_a_gateway_that_answers_with_the_name_behind_an_alias_is_used_and_said(advise, server):
    """LiteLLM 22709: an alias is listed, and the answers name what it stands for. That name may not be listed."""
    server.replies = lambda number, body: (200, completion("yes", model="gpt-4.1-2025-04-14"))
    code, _, said = advise()
    assert code == 0
    assert (
        said.count("was asked for 'org/tiny' and answered with 'gpt-4.1-2025-04-14', but it lists the requested") == 1
    )


@pytest.mark.parametrize(
    ("answers_with", "code"),
    [
        ("tiny", 0),
        ("org/tiny:latest", 0),
        ("org/tiny-2025-04-14", 0),
        ("org/tiny-instruct-v2", 2),
        ("ny", 2),
    ],
)
def test_a_server_that_lists_nothing_must_answer_with_the_model_that_was_asked_for(advise, server, answers_with, code):
    server.models = None
    server.replies = lambda number, body: (200, completion("yes", model=answers_with))
    ended, _, said = advise()
    assert ended == code
    assert (f"answered with '{answers_with}'" in said) == bool(code)


@pytest.mark.parametrize(
    ("finish", "truncated", "scored"),
    [("eos_token", False, True), ("STOP", False, True), ("end_turn", False, True), ("MAX_TOKENS", True, True)]
    + [(other, False, False) for other in ("tool_calls", "abort", "error", "")],
)
def test_the_reasons_of_other_servers_count_as_what_they_mean(advise, server, finish, truncated, scored):
    """text-generation-inference 2344, spring-ai 4900: a whole answer ends with "eos_token"."""
    server.replies = lambda number, body: (200, completion("yes", finish="stop" if number else finish))
    assert advise(sample_prompts=3, sample_n=2)[0] == 0
    row = next(row for row in logged() if row["rollout"] == 0)
    assert (row["truncated"], row["metric"] == 1.0) == (truncated, scored)


@pytest.mark.parametrize("content", [None, ""])
def test_reasoning_that_used_up_the_limit_is_a_wrong_answer_that_was_cut_off(advise, server, content):
    """lm-evaluation-harness 3244: the content is null, and all words are elsewhere."""
    server.replies = lambda number, body: (
        choice("length", content=content, reasoning_content="since") if number % 2 else answered(number, body)
    )
    code, _, said = advise()
    assert code == 0
    assert said.count("takes the reasoning out of answers") == 1
    assert {row["metric"] for row in logged() if row["truncated"]} == {0.0}


def test_a_proxy_that_a_local_address_goes_through_is_said(advise, server, monkeypatch):
    """gpustack 956."""
    monkeypatch.setenv("NO_PROXY", "")
    monkeypatch.setenv("HTTP_PROXY", "http://me:secret@127.0.0.1:1")
    code, shown, said = advise(retries=0)
    assert code == 2
    assert "went through the environment's proxy, export NO_PROXY=127.0.0.1 to avoid it" in said
    assert "secret" not in shown + said


@pytest.mark.parametrize(
    "proxy",
    [
        " http://me:hunter22@127.0.0.1:1",
        "http://me:hunter22@127.0.0.1:port",
        "me:hunter22@127.0.0.1:1",
        "ftp://me:hunter22@x",
    ],
)
def test_a_proxy_that_cannot_be_used_is_said_without_its_password(advise, server, monkeypatch, proxy):
    monkeypatch.setenv("NO_PROXY", "")
    monkeypatch.setenv("HTTP_PROXY", proxy)
    code, shown, said = advise(retries=0)
    assert code == 2
    assert "proxy" in said
    assert "hunter" not in shown + said


def test_a_password_that_a_server_or_proxy_repeats_is_not_shown(advise, server, monkeypatch):
    monkeypatch.setenv("HTTPS_PROXY", "http://me:hunter%2022@proxy:1")
    server.replies = lambda number, body: (
        400,
        {"error": "via http://me:hunter%2022@proxy, http://you:pass@x: hunter 22"},
    )
    _, shown, said = advise()
    assert "refuses a prompt: 400: via http://[hidden]@proxy, http://[hidden]@x: [hidden]" in said
    assert "hunter" not in shown + said


def test_a_certificate_that_is_not_trusted_is_said(advise, server, monkeypatch):
    """openai-python 73, TaskWeaver 52."""
    import httpx
    import openai

    error = "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: self-signed certificate (_ssl.c:1000)"

    async def refuse(*_, **__):
        raise httpx.ConnectError(error)

    monkeypatch.setattr(openai.DefaultAsyncHttpxClient, "send", refuse)
    code, _, said = advise(retries=0)
    assert code == 2
    assert "has a certificate that is not trusted" in said
    assert "export SSL_CERT_FILE=" in said


@pytest.mark.parametrize("ending", ["/", "/chat/completions", ""])
def test_an_address_with_too_much_or_too_little_says_how_it_should_end(advise, server, ending):
    """llama-cpp-python 1032, cline 240; a slash at its end changes nothing."""
    root = server.url.removesuffix("/v1")
    server.paths = ("/v1/models", "/v1/chat/completions")
    code, _, said = advise(endpoint=root + ("/v1" + ending if ending else ""))
    assert code == (0 if ending == "/" else 2)
    assert code == 0 or "--endpoint usually ends in /v1" in said


def test_a_name_with_a_colon_and_without_its_tag(advise, server):
    """As Ollama names models: with a tag, which may be left out in a request."""
    server.models = ["qwen3:0.6b", "llama3:latest"]
    server.replies = lambda number, body: (200, completion("yes", model=body["model"]))
    assert "give --served-model llama3:latest" in advise(served_model="llama3")[2]
    assert advise(served_model="qwen3:0.6b", out=None)[0] == 0
    assert Path("runs/profile-qwen3:0.6b-0/rollouts.jsonl").exists()
