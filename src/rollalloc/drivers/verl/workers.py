# pyright: reportMissingImports=false
# (verl and its dependencies are installed in a separate environment: constraints/verl-cpu.txt)
"""verl's agent loop workers, changed so that every session reports how it ended, even if its worker dies."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import ray
import transfer_queue as tq
from ray.exceptions import ActorDiedError, RayActorError
from tensordict import TensorDict
from verl.experimental.agent_loop import AgentLoopWorker
from verl.experimental.agent_loop.agent_loop import register
from verl.experimental.agent_loop.tool_agent_loop import AgentState, ToolAgentLoop
from verl.tools.schemas import ToolResponse
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ, apply_greedy_sampling_params
from verl.workers.rollout.utils import get_max_position_embeddings

from rollalloc.drivers.verl.client import LIVE, Live, SessionStopped
from rollalloc.drivers.verl.reserved import LIMIT
from rollalloc.drivers.verl.rounds import Session, SessionOutcome
from rollalloc.drivers.verl.scores import ACC, read_score
from rollalloc.files.text import error_text
from rollalloc.generate.outcomes import uncertainty_of
from rollalloc.rewards.function import Scored

log = logging.getLogger(__name__)

_RESTARTS = 3  # number of times that Ray restarts a worker that died
_PATIENCE = 60.0  # after this many seconds without an outcome, the number of running sessions is logged
_REASON = 200  # maximum number of characters of an exception in the log


@register("tool_agent")
class ToolLoop(ToolAgentLoop):
    """verl's agent loop with tools. It limits lengths exactly, and tools cannot end the worker.

    The class is registered under the name of verl's loop, and so replaces verl's loop.
    """

    async def _handle_generating_state(
        self, agent_data: Any, sampling_params: dict[str, Any], ignore_termination: bool = False
    ) -> AgentState:
        """Generate at most as many tokens as fit into the response. (verl would generate more and cut them off.)"""
        room = self.response_length - len(agent_data.response_mask)
        limited = sampling_params | {"max_tokens": min(room, sampling_params.get("max_tokens", room))}
        return await super()._handle_generating_state(agent_data, limited, ignore_termination)

    async def _handle_processing_tools_state(self, agent_data: Any) -> AgentState:
        state = await super()._handle_processing_tools_state(agent_data)
        if state is AgentState.TERMINATED and (live := LIVE.get()) is not None:
            live.truncated = True  # the tool's answer did not fit, which verl's row does not say
        return state

    async def _call_tool(self, tool_call: Any, *args: Any) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Call a tool as verl does, but continue if the tool calls `exit`, which would end the worker."""
        try:
            return await super()._call_tool(tool_call, *args)
        except (SystemExit, KeyboardInterrupt) as error:
            return ToolResponse(text=f"Error executing tool '{tool_call.name}': {type(error).__name__}"), 0.0, {}


class NoReward(Exception):
    """The reward function gave no score. The rollout has failed; this is not a wrong answer."""


class Worker(AgentLoopWorkerTQ.__ray_actor_class__):  # pyright: ignore
    """verl's worker. It tracks each session of a training prompt. Validation runs as in verl."""

    _metric = ACC

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        AgentLoopWorker.__init__(
            self, *args, **kwargs
        )  # not `super()`, which would fail: the base class is a Ray actor
        tq.init()
        self.background_tasks: set[asyncio.Task[None]] = set()
        section = self.config.trainer.v1.rollalloc
        self._reward_timeout = section.get("reward_timeout", 300.0)
        self._tool_timeout = section.get("tool_timeout", 300.0)
        self._poll_interval = section.get("poll_interval", 0.02)
        self._metric = section.get("metric", self._metric)
        self._max_tokens = self._context_length()
        self._live: dict[Session, Live] = {}
        self._scored: dict[Session, SessionOutcome] = {}
        self._ended: list[SessionOutcome] = []
        self._any_ended = asyncio.Event()

    def _context_length(self) -> int:
        """The total number of prompt and response tokens at which verl's servers end a rollout."""
        rollout = self.rollout_config
        limit = rollout.max_model_len or get_max_position_embeddings(self.model_config.hf_config)
        if limit < rollout.prompt_length + rollout.response_length:
            log.warning(
                "rollouts end at %d tokens of prompt and response, before data.max_prompt_length + data.max_response_length "
                "= %d: use a model with more positions, or a larger actor_rollout_ref.rollout.max_model_len",
                limit,
                rollout.prompt_length + rollout.response_length,
            )
        return limit

    async def outcomes(self) -> list[SessionOutcome]:
        """The sessions that ended since the last call. Waits until at least one session has ended."""
        await self._any_ended.wait()
        await asyncio.sleep(self._poll_interval)  # to collect sessions that end at about the same time
        self._any_ended.clear()
        ended, self._ended = self._ended, []
        return ended

    async def ping(self) -> bool:
        """Return True. The manager calls this to see whether the worker is alive."""
        return True

    async def cancel(self, sessions: Sequence[Session]) -> None:
        """Stop these sessions, except sessions that are being scored."""
        stops = [self._live[session].stop() for session in sessions if session in self._live]
        for error in await asyncio.gather(*stops, return_exceptions=True):
            if error is not None:
                log.warning("a session could not be stopped and continues: %s: %s", type(error).__name__, error)

    async def _run_prompt(
        self, prompt: dict[str, Any], sampling_params: dict[str, Any], trajectory: dict[str, Any], trace: bool = False
    ) -> None:
        if trajectory["validate"]:
            await super()._run_prompt(prompt, sampling_params, trajectory, trace)
            return
        if not prompt.pop("__do_sample__", True):
            apply_greedy_sampling_params(sampling_params := dict(sampling_params))
        options = {"trajectory": trajectory, "trace": trace}
        sessions, limit = range(prompt.pop("__rollout_n__")), prompt.pop(LIMIT, 0) or None
        if limit is not None:
            # An engine takes `max_tokens` in place of verl's own maximum, which may have been lowered since a resume.
            limit = min(limit, self.rollout_config.response_length)
            sampling_params = sampling_params | {"max_tokens": limit}
        await asyncio.gather(*(self._run_session(session, prompt, sampling_params, options) for session in sessions))

    async def _run_session(
        self, index: int, prompt: dict[str, Any], sampling_params: dict[str, Any], options: dict[str, Any]
    ) -> None:
        """Run one session and record its outcome."""
        session = (prompt["uid"], index)
        live = self._live[session] = Live(self._tool_timeout, sampling_params.get("max_tokens"))
        LIVE.set(live)  # only for this session, because each session is a task with its own context
        reason, cancelled = "the agent loop returned nothing", False
        try:
            async with asyncio.timeout(None) as live.clock:
                live.between_turns()
                await self._run_agent_loop(sampling_params, session_id=index, **options, **prompt)
        except SessionStopped:
            cancelled = True
        except BaseException as error:
            # Every error, even SystemExit, needs an outcome. Otherwise the trainer would wait forever.
            late = live.clock is not None and live.clock.expired()
            cancelled = late and live.stopped
            reason = f"a tool took more than {live.patience} s" if late else error_text(error, _REASON)
            if not cancelled:
                log.warning("session %s_%d: %s", *session, reason)
        del self._live[session]
        failed = SessionOutcome(*session, tokens=live.tokens, reason=reason, cancelled=cancelled)
        self._ended.append(self._scored.pop(session, failed))
        self._any_ended.set()

    async def _agent_loop_postprocess(self, output: Any, validate: bool, **kwargs: Any) -> None:
        outputs = output if isinstance(output, list) else [output]
        if not validate:
            if (live := LIVE.get()) is not None:
                live.over()
            for row in outputs:
                self._check(row)
        await super()._agent_loop_postprocess(output, validate, **kwargs)
        if not validate and outputs:
            session = (kwargs["uid"], kwargs["session_id"])
            self._scored[session] = self._outcome(session, outputs)

    def _check(self, output: Any) -> None:
        """Check an agent loop's row before it is stored, because a malformed row would make the update fail."""
        tokens, mask, logprobs = output.response_ids, output.response_mask, output.response_logprobs
        if not tokens or len(mask) != len(tokens) or not {0, 1}.issuperset(mask):
            raise ValueError(
                "an agent loop must return response_ids and a response_mask with 1 (generated) or 0 (not) for each of them, "
                f"got {len(tokens)} response_ids and a mask of length {len(mask)}"
            )
        if logprobs is None and not self.rollout_config.calculate_log_probs:
            return
        if logprobs is None or len(logprobs) != len(tokens):
            raise ValueError(
                f"an agent loop must return response_logprobs for each of its {len(tokens)} response_ids, got "
                f"{logprobs if logprobs is None else len(logprobs)}: actor_rollout_ref.rollout.calculate_log_probs is true; "
                "return 0 for tokens that were not generated"
            )

    def _outcome(self, session: Session, outputs: Sequence[Any]) -> SessionOutcome:
        first, last, live = outputs[0], outputs[-1], LIVE.get() or Live()
        scored = self._score_of(last)
        length = len(last.response_ids)
        full = (
            length >= (live.limit or self.rollout_config.response_length)
            or len(last.prompt_ids) + length >= self._max_tokens
        )
        return SessionOutcome(
            *session,
            # The number of generated tokens in all turns, including turns that the agent loop dropped.
            tokens=max(live.tokens, sum(sum(output.response_mask) for output in outputs)),
            reward=scored.reward,
            metric=scored.metric,
            # verl's own record is only the second choice, because it includes requests that generated nothing.
            version=_first_known(live.first_version, first.extra_fields.get("min_global_steps")),
            last_version=_first_known(live.last_version, last.extra_fields.get("max_global_steps")),
            truncated=live.truncated or (full and last.response_ids[-1] != self.tokenizer.eos_token_id),
            rows=len(outputs),
            uncertainty=_uncertainty(outputs),
        )

    async def _compute_score(self, outputs: Sequence[Any], kwargs: dict[str, Any]) -> None:
        try:
            await asyncio.wait_for(super()._compute_score(outputs, kwargs), self._reward_timeout)
        except TimeoutError:
            raise NoReward(f"the reward took more than {self._reward_timeout} s") from None
        self._score_of(outputs[-1])

    def _score_of(self, output: Any) -> Scored:
        read = read_score(output.reward_score, output.extra_fields.get("reward_extra_info", {}), self._metric)
        if not isinstance(read, Scored):
            raise NoReward(read.reason)
        return read


def _uncertainty(outputs: Sequence[Any]) -> float | None:
    """Uncertainty of the generated tokens of all turns; None if verl does not compute log-probabilities."""
    if any(output.response_logprobs is None for output in outputs):
        return None
    logprobs = [np.asarray(output.response_logprobs)[np.asarray(output.response_mask, bool)] for output in outputs]
    return uncertainty_of(np.concatenate(logprobs))


def _first_known(ours: int | None, verls: int | None) -> int | None:
    return verls if ours is None else ours


class Manager(AgentLoopManagerTQ):
    """verl's manager of workers. It tracks each worker's running sessions, so that no session is lost if a worker dies."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = ray.remote(max_restarts=_RESTARTS)(Worker)
        self._open: dict[Session, Any] = {}  # the worker of each running session
        self._lost: list[SessionOutcome] = []
        self._starting: dict[Any, Any] = {}  # the worker of each call that starts prompts
        self._listening: dict[Any, Any] = {}  # the worker of each call that waits for outcomes

    def generate_sequences(self, prompts: TensorDict) -> None:
        """Start prompts on the workers. The prompts are divided among the workers as in verl."""
        if "validate" in prompts:
            super().generate_sequences(prompts)
            return
        chunks = prompts.chunk(len(self.agent_loop_workers))
        for worker, chunk in zip(self.agent_loop_workers, chunks, strict=False):
            for uid, n in zip(chunk["uid"], chunk["__rollout_n__"], strict=True):
                self._open |= {(uid, session): worker for session in range(n)}
            self._starting[worker.generate_sequences.remote(chunk)] = worker

    def cancel(self, sessions: Sequence[Session]) -> None:
        """Ask the workers to stop these sessions if they are still generating. Do not wait for the workers' answer."""
        by_worker: dict[Any, list[Session]] = {}
        for session in sessions:
            if session in self._open:  # if not, the worker has died
                by_worker.setdefault(self._open[session], []).append(session)
        for worker, its_sessions in by_worker.items():
            worker.cancel.remote(its_sessions)

    def outcomes(self, wait: bool = True) -> list[SessionOutcome]:
        """The sessions that ended since the last call. With `wait`, waits until at least one session has ended."""
        while not self._lost:
            for worker in self.agent_loop_workers:
                if worker not in self._listening.values():
                    self._listening[worker.outcomes.remote()] = worker
            # Outcomes are read first, so that outcomes are not lost if the worker died after it reported them.
            calls = [*self._listening, *self._starting]
            if not ray.wait(calls, timeout=_PATIENCE if wait else 0)[0]:
                if not wait:
                    return []
                log.info("waiting for %d running sessions", len(self._open))
                continue
            ready, _ = ray.wait(calls, num_returns=len(calls), timeout=0)
            if (ended := [outcome for call in ready for outcome in self._result(call)]) or not (wait or self._lost):
                return ended
        lost, self._lost = self._lost, []
        return lost

    def _result(self, call: Any) -> list[SessionOutcome]:
        worker = self._starting.pop(call, None) or self._listening.pop(call, None)
        if worker is None:  # the worker died, and another call has already reported its death
            return []
        try:
            ended = ray.get(call) or []
        except RayActorError as error:
            self._give_up(worker, error)
            return []
        for outcome in ended:
            self._open.pop((outcome.uid, outcome.session), None)
        return ended

    def _give_up(self, worker: Any, error: RayActorError) -> None:
        """Mark the sessions of a dead worker as failed. Wait until Ray has restarted the worker or given it up."""
        lost = [session for session, owner in self._open.items() if owner == worker]
        log.warning("an agent loop worker died with %d sessions: %s", len(lost), error)
        for session in lost:
            del self._open[session]
            self._lost.append(SessionOutcome(*session, reason="its agent loop worker died"))
        for calls in (self._starting, self._listening):  # forget the calls of this worker, which would fail later
            for call in [call for call, callee in calls.items() if callee == worker]:
                del calls[call]
        if not _restarted(worker):
            self.agent_loop_workers = [alive for alive in self.agent_loop_workers if alive != worker]
            if not self.agent_loop_workers:
                raise RuntimeError("all agent loop workers died; their logs in Ray have the reason") from error


def _restarted(worker: Any) -> bool:
    """Wait until a worker answers again. Return False if Ray does not restart it."""
    while True:
        try:
            return ray.get(worker.ping.remote())
        except ActorDiedError:
            return False
        except RayActorError:  # Ray is still restarting it
            time.sleep(1)
