"""verl's own loop of turns and tools under our worker and client; the server, its engine and the reward are made up."""

import asyncio
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("verl", reason="verl's environment: make verl-test")

from omegaconf import OmegaConf
from transformers import AutoTokenizer
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput, register
from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.trainer.ppo.v1 import agent_loop_tq
from verl.workers.rollout import llm_server
from verl.workers.rollout.replica import TokenOutput

from rollalloc.drivers.verl import workers
from rollalloc.drivers.verl.client import Client, ResumingClient, requests_left

pytestmark = pytest.mark.verl
EXAMPLE = Path(__file__).parents[3] / "examples" / "verl"
CALL, WORD = 7, 8  # tokens: whatever has the first in it calls the tool
ROOM = 60  # tokens of a response


@ToolParser.register("sevens")
class Sevens(ToolParser):
    async def extract_tool_calls(self, responses_ids, tools=None):
        calls = [FunctionCall(name="tool", arguments="{}")] if CALL in responses_ids else []
        return "text", calls


class Tool(BaseTool):
    """Does what a test says, and remembers who was released."""

    def __init__(self, does):
        schema = {"name": "tool", "description": "a tool", "parameters": {"type": "object", "properties": {}}}
        super().__init__({}, OpenAIFunctionToolSchema(type="function", function=schema))
        self.does, self.released, self.running = does, 0, asyncio.Event()

    async def execute(self, instance_id, parameters, **kwargs):
        self.running.set()
        return ToolResponse(text=await self.does()), 0.25, {}

    async def release(self, instance_id, **kwargs):
        self.released += 1


async def answers():
    return "42"


async def hangs():
    await asyncio.sleep(3600)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    sys.path.insert(0, str(EXAMPLE))
    try:
        from make_tiny import make_model
    finally:
        sys.path.remove(str(EXAMPLE))
    make_model(folder)
    return AutoTokenizer.from_pretrained(folder)


class Server:
    """An engine that answers with the next of `turns`: tokens, the version of the weights and why it ended; None: it runs
    until it is aborted."""

    def __init__(self, *turns, engine="vllm", aborts_with=()):
        self.turns, self.sent, self.running, self.aborts_with = list(turns), [], {}, aborts_with
        self.generate = SimpleNamespace(remote=self._generate)
        self.__ray_call__ = SimpleNamespace(remote=self._call)
        self.why = "completed"
        if engine == "sglang":
            states = SimpleNamespace(rid_to_state=self.running, abort_request=self._stop)
            self.inner = SimpleNamespace(tokenizer_manager=states)
        else:
            known = SimpleNamespace(external_req_ids=self.running, request_states=self.running)
            self.inner = SimpleNamespace(engine=SimpleNamespace(output_processor=known, abort=self._abort))
        self.busy = asyncio.Event()

    def _stop(self, request):
        self.why = "aborted"
        self.running[request].set()

    async def _abort(self, request):
        self._stop(request)

    async def _call(self, function, *arguments):
        return function(self.inner, *arguments)

    async def _generate(self, request_id, prompt_ids, sampling_params, **_):
        self.sent.append((list(prompt_ids), dict(sampling_params)))
        turn = self.turns.pop(0) if self.turns else None
        if turn is None:
            aborted = self.running[request_id] = asyncio.Event()
            self.busy.set()
            await aborted.wait()
            del self.running[request_id]
            if isinstance(self.aborts_with, Exception):
                raise self.aborts_with
            turn = self.aborts_with, 9, self.why
        tokens, version = list(turn[0]), turn[1]
        tokens = tokens[: sampling_params.get("max_tokens", ROOM)]
        return TokenOutput(
            token_ids=tokens,
            log_probs=[-0.5] * len(tokens),
            stop_reason=turn[2] if turn[2:] else "completed",
            extra_fields={"global_steps": version},
        )


class Case:
    """A worker with one session of `tool_agent`, or of another loop."""

    def __init__(self, monkeypatch, tokenizer, server, tool=None, loop="tool_agent", client=Client, **settings):
        self.server, self.tool, self.loop, self.rows, self.released = server, tool, loop, {}, []
        rollout = {"name": "vllm", "prompt_length": 200, "response_length": ROOM, "max_model_len": 400}
        rollout |= {"full_determinism": False, "calculate_log_probs": True}
        turns = {"format": "sevens", "max_parallel_calls": 1, "max_tool_response_length": 256}
        rollout["multi_turn"] = turns | {"tool_response_truncate_side": "left"}
        rollout["multi_turn"] |= {"max_user_turns": None, "max_assistant_turns": settings.get("most_turns")}
        config = OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}, "data": {}})
        worker = self.worker = workers.Worker.__new__(workers.Worker)
        worker.config, worker.llm_client = config, client(config)
        worker.rollout_config = config.actor_rollout_ref.rollout
        worker.model_config = SimpleNamespace(hf_config=SimpleNamespace(max_position_embeddings=400))
        worker.tokenizer, worker.processor, worker.hf_model_type = tokenizer, None, "qwen2"
        worker.dataset_cls, worker.distillation_enabled = None, False
        worker.tools = [tool] if tool else []
        worker._reward_timeout, worker._tool_timeout = 10**6, settings.get("tool_timeout")
        worker._poll_interval, worker._max_tokens = 0, 400
        worker._live, worker._scored, worker._ended = {}, {}, []
        worker._any_ended = asyncio.Event()
        self.scoring, self.score = asyncio.Event(), asyncio.Event()
        self.score.set()

        async def scores(_, outputs, kwargs):
            self.scoring.set()
            await self.score.wait()
            outputs[-1].reward_score, outputs[-1].extra_fields["reward_extra_info"] = 1.0, {"acc": 1.0}

        async def acquire(_, request_id, **extra):
            return "server", server

        async def put(keys, fields, tags, partition_id):
            self.rows |= {key: fields[at] for at, key in enumerate(keys)}

        monkeypatch.setattr(workers.AgentLoopWorker, "_compute_score", scores)
        monkeypatch.setattr(llm_server.LLMServerClient, "_acquire_server", acquire)
        monkeypatch.setattr(llm_server.LLMServerClient, "_release_server", lambda *_, **__: self.released.append(1))
        monkeypatch.setattr(agent_loop_tq.tq, "async_kv_batch_put", put)

    async def run(self, *meanwhile):
        """The session's outcome, while a test does something."""
        prompt = {"uid": "g0s0r0", "raw_prompt": [{"role": "user", "content": "6*7="}], "global_steps": 3}
        prompt |= {"agent_name": self.loop, "index": 0}
        trajectory = {"step": 3, "sample_index": 0, "rollout_n": 0, "validate": False}
        sampling = {"temperature": 1.0, "logprobs": True}
        how = {"trajectory": trajectory, "trace": False}
        session = asyncio.create_task(self.worker._run_session(0, prompt, sampling, how))
        for do in meanwhile:
            await do()
        await session
        [outcome] = self.worker._ended
        assert not self.worker._live
        return outcome

    async def stop(self):
        await self.worker.cancel([("g0s0r0", 0)])

    def passes(self, seconds):
        """Lets so much time pass at once, by the event loop's clock."""

        async def do():
            loop, before = asyncio.get_running_loop(), asyncio.get_running_loop().time
            loop.time = lambda: before() + seconds
            for _ in range(5):
                await asyncio.sleep(0)

        return do

    def row(self):
        [(key, row)] = self.rows.items()
        assert key == "g0s0r0_0_0"
        return {name: row[name].tolist() for name in ("responses", "response_mask", "rollout_log_probs")}


@pytest.fixture
def case(monkeypatch, tokenizer):
    """Runs `test(case)` in an event loop of its own, where the server and the tool are made."""

    def run(test, turns=(), does=answers, engine="vllm", aborts_with=(), **how):
        async def inside():
            made = Tool(does) if does else None
            server = Server(*turns, engine=engine, aborts_with=aborts_with)
            return await test(Case(monkeypatch, tokenizer, server, made, **how))

        return asyncio.run(inside())

    return run


# -------------------------------------------------------------------------------------------------------- a trajectory


@pytest.mark.parametrize("client", [Client, ResumingClient])
def test_a_trajectory_is_one_rollout_whose_length_is_what_the_model_generated_in_all_turns(case, client):
    async def test(case):
        return case, await case.run()

    case, outcome = case(test, [([WORD, CALL, WORD], 2), ([WORD, WORD], 4)], client=client)
    assert (outcome.tokens, outcome.rows, outcome.reward, outcome.cancelled) == (5, 1, 1.0, False)
    assert (outcome.version, outcome.last_version, outcome.truncated) == (2, 4, False)
    row = case.row()
    answer = len(row["responses"]) - 5
    assert row["response_mask"] == [1] * 3 + [0] * answer + [1] * 2
    assert row["rollout_log_probs"] == [-0.5] * 3 + [0.0] * answer + [-0.5] * 2
    assert "42" in case.worker.tokenizer.decode(row["responses"][3:-2])
    (first, _), (second, limited) = case.server.sent
    assert second == first + row["responses"][:-2]
    assert limited["max_tokens"] == ROOM - len(row["responses"][:-2]), "no more than there is room for"
    assert case.tool.released == 1


def test_a_request_that_was_broken_off_goes_on_from_its_tokens_with_the_version_of_the_first(case, monkeypatch):
    async def at_once(_):
        pass

    async def test(case):
        monkeypatch.setattr(llm_server.asyncio, "sleep", at_once)
        return case, await case.run()

    turns = [([], 1, "aborted"), ([WORD, WORD], 3, "aborted"), ([WORD], 4)]
    case, outcome = case(test, turns, client=ResumingClient)
    assert (outcome.tokens, outcome.version, outcome.last_version, outcome.truncated) == (3, 3, 4, False)
    assert (case.row()["responses"], case.row()["rollout_log_probs"]) == ([WORD] * 3, [-0.5] * 3)
    (prompt, _), *_ = case.server.sent
    assert [sent for sent, _ in case.server.sent] == [prompt, prompt, [*prompt, WORD, WORD]]
    assert [limits["max_tokens"] for _, limits in case.server.sent] == [ROOM, ROOM, ROOM - 2]


def test_a_trajectory_whose_answer_finds_no_room_is_truncated(case):
    async def test(case):
        return case, await case.run()

    turn = [CALL] + [WORD] * (ROOM - 10)
    case, outcome = case(test, [(turn, 2)])
    assert outcome.truncated
    assert (outcome.tokens, case.row()["responses"]) == (len(turn), turn)
    _, outcome = _again(case, test, [([WORD] * (ROOM - 9), 2)])
    assert not outcome.truncated


def _again(case, test, turns):
    async def inside():
        case.server.turns, case.rows, case.worker._ended = list(turns), {}, []
        case.score, case.scoring = asyncio.Event(), asyncio.Event()
        case.score.set()
        return await test(case)

    return asyncio.run(inside())


# ------------------------------------------------------------------------------------------------------------- stopping


def test_a_rollout_that_waits_for_a_tool_is_stopped_at_once(case):
    async def test(case):
        return case, await case.run(case.tool.running.wait, case.stop)

    case, outcome = case(test, [([CALL, WORD], 2)], does=hangs)
    assert (outcome.cancelled, outcome.tokens, outcome.reward) == (True, 2, None)
    assert len(case.server.sent) == case.tool.released == 1
    assert not case.rows


def test_a_session_stopped_while_it_waits_for_a_server_sends_nothing(case, monkeypatch):
    async def test(case):
        async def acquired_late(_, request_id, **extra):
            await case.stop()
            return "server", case.server

        monkeypatch.setattr(llm_server.LLMServerClient, "_acquire_server", acquired_late)
        return case, await case.run()

    case, outcome = case(test, [([WORD], 2)])
    assert (outcome.cancelled, case.server.sent, len(case.released)) == (True, [], 1)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("client", [Client, ResumingClient])
@pytest.mark.parametrize("aborts_with", [(), (WORD, WORD, WORD), ValueError("aborted by the user")])
def test_a_turn_is_stopped_and_what_it_generated_was_paid(case, engine, client, aborts_with):
    async def test(case):
        outcome = await case.run(case.server.busy.wait, case.stop)
        return case, outcome, requests_left(case.server.inner)

    turns = [([CALL, WORD], 2), None]
    case, outcome, left = case(test, turns, engine=engine, client=client, aborts_with=aborts_with)
    generated = 0 if isinstance(aborts_with, Exception) else len(aborts_with)
    assert (outcome.cancelled, outcome.tokens) == (True, 2 + generated)
    assert (len(case.server.sent), left, case.rows) == (2, 0, {})


def test_a_trajectory_that_is_being_scored_is_not_stopped(case):
    async def test(case):
        case.score.clear()
        return case, await case.run(case.scoring.wait, case.stop, lambda: asyncio.sleep(0.05), _set(case.score))

    case, outcome = case(test, [([WORD], 2)])
    assert (outcome.cancelled, outcome.reward, len(case.rows)) == (False, 1.0, 1)


def _set(event):
    async def do():
        event.set()

    return do


@register("keeps_trying")
class KeepsTrying(AgentLoopBase):
    """Takes any Exception of the server for a bad day."""

    async def run(self, sampling_params, **kwargs):
        while True:
            try:
                await self.server_manager.generate("id", prompt_ids=[1], sampling_params=sampling_params)
            except Exception:
                await asyncio.sleep(0)


@register("branches")
class Branches(AgentLoopBase):
    """Two generations at once."""

    async def run(self, sampling_params, **kwargs):
        both = [self.server_manager.generate("id", prompt_ids=[1], sampling_params=dict(sampling_params)) for _ in "ab"]
        await asyncio.gather(*both)


@pytest.mark.parametrize(("loop", "requests"), [("keeps_trying", 1), ("branches", 2)])
def test_an_agent_loop_of_ones_own_is_stopped_too(case, loop, requests):
    async def test(case):
        async def all_run():
            while len(case.server.running) < requests:
                await asyncio.sleep(0)

        outcome = await case.run(all_run, case.stop)
        return outcome, len(case.server.sent), requests_left(case.server.inner)

    outcome, sent, left = case(test, loop=loop)
    assert (outcome.cancelled, sent, left) == (True, requests, 0)


# ------------------------------------------------------------------------------------------------- tools that misbehave


PATIENCE = 1000  # seconds, of which none really pass


def test_a_tool_that_hangs_costs_its_rollout(case):
    async def test(case):
        async def still_runs():
            assert case.worker._live

        waits = [case.passes(PATIENCE - 100), still_runs, case.passes(200)]
        return case, await case.run(case.tool.running.wait, *waits)

    case, outcome = case(test, [([CALL, WORD], 2)], does=hangs, tool_timeout=PATIENCE)
    assert (outcome.reward, outcome.cancelled, outcome.tokens) == (None, False, 2)
    assert outcome.reason == f"a tool took more than {PATIENCE} s"
    assert case.tool.released == 1
    assert not case.rows


async def leaves():
    sys.exit(3)


def test_a_tool_that_leaves_python_is_an_error_for_the_model_to_read(case):
    async def test(case):
        return case, await case.run()

    case, outcome = case(test, [([CALL], 2), ([WORD], 2)], does=leaves)
    assert outcome.reward == 1.0
    assert "SystemExit" in case.worker.tokenizer.decode(case.row()["responses"])


# -------------------------------------------------------------------------------------------------- rows that do not fit


WHOLE = {"prompt_ids": [1], "response_ids": [2, 3], "response_mask": [1, 1], "response_logprobs": [-0.5, -0.5]}


@register("as_told")
class AsTold(AgentLoopBase):
    async def run(self, sampling_params, **kwargs):
        return AgentLoopOutput(**TOLD, metrics={})


TOLD = {}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, None),
        ({"response_mask": [1]}, "response_mask with 1 .* got 2 response_ids and a mask of length 1"),
        ({"response_mask": [1, 2]}, "response_mask with 1"),
        (
            {"response_ids": [], "response_mask": [], "response_logprobs": []},
            "got 0 response_ids and a mask of length 0",
        ),
        ({"response_logprobs": [-0.5]}, "response_logprobs for each of its 2 response_ids, got 1"),
        ({"response_logprobs": None}, "got None: actor_rollout_ref.rollout.calculate_log_probs is true"),
    ],
)
def test_a_row_that_would_end_the_run_at_its_update_costs_its_rollout(case, changes, says, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "TOLD", WHOLE | changes)

    async def test(case):
        return case, await case.run()

    case, outcome = case(test, loop="as_told")
    assert (outcome.reward is None) == (says is not None)
    assert len(case.rows) == outcome.rows == (says is None)
    if says:
        with pytest.raises(ValueError, match=says):
            raise ValueError(outcome.reason)


@pytest.mark.parametrize("client", [Client, ResumingClient])
def test_a_tools_time_limit_leaves_out_turns_and_rewards(case, client):
    async def test(case):
        case.score.clear()

        async def answer():
            for event in case.server.running.values():
                event.set()

        passes = case.passes(2 * PATIENCE)
        return await case.run(case.server.busy.wait, passes, answer, case.scoring.wait, passes, _set(case.score))

    assert case(test, [None], aborts_with=(WORD,), tool_timeout=PATIENCE, client=client).reward == 1.0
