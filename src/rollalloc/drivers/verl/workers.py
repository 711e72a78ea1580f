# pyright: reportMissingImports=false
# (verl and what it needs live in an environment of their own: constraints/verl-cpu.txt)
"""verl's agent loops, each session of which reports how it ended, whatever happens to it."""

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
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ, apply_greedy_sampling_params
from verl.workers.rollout.utils import get_max_position_embeddings

from rollalloc.drivers.verl.client import LIVE, Live, SessionStopped
from rollalloc.drivers.verl.rounds import Session, SessionOutcome
from rollalloc.drivers.verl.scores import read_score
from rollalloc.drivers.verl.tools import ToolLoop as ToolLoop  # verl finds it by its name
from rollalloc.generate.outcomes import uncertainty_of
from rollalloc.rewards.function import Scored

log = logging.getLogger(__name__)

_RESTARTS = 3  # of a worker that died
_PATIENCE = 60.0  # seconds without an outcome after which the log says what is waited for
_REASON = 200  # characters of an exception that go to the log


class NoReward(Exception):
    """The reward function gave no score. Unscored is not wrong."""


class Worker(AgentLoopWorkerTQ.__ray_actor_class__):  # pyright: ignore
    """verl's worker; training prompts run session by session, validation as verl runs it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        AgentLoopWorker.__init__(self, *args, **kwargs)  # the base is a Ray actor: its own super() call fails here
        tq.init()
        self.background_tasks: set[asyncio.Task[None]] = set()
        section = self.config.trainer.v1.rollalloc
        self._reward_timeout = section.get("reward_timeout", 300.0)
        self._tool_timeout = section.get("tool_timeout", 300.0)
        self._poll_interval = section.get("poll_interval", 0.02)
        self._most_tokens = self._context()
        self._live: dict[Session, Live] = {}
        self._scored: dict[Session, SessionOutcome] = {}
        self._ended: list[SessionOutcome] = []
        self._any_ended = asyncio.Event()

    def _context(self) -> int:
        """Tokens of prompt and response after which verl's servers end a rollout."""
        rollout = self.rollout_config
        most = rollout.max_model_len or get_max_position_embeddings(self.model_config.hf_config)
        if most < rollout.prompt_length + rollout.response_length:
            log.warning(
                "rollouts end at %d tokens of prompt and response, before data.max_prompt_length + data.max_response_length "
                "= %d: take a model of more positions, or a larger actor_rollout_ref.rollout.max_model_len",
                most,
                rollout.prompt_length + rollout.response_length,
            )
        return most

    async def outcomes(self) -> list[SessionOutcome]:
        """Sessions that ended since the last call; waits for one."""
        await self._any_ended.wait()
        await asyncio.sleep(self._poll_interval)  # those that end together are told together
        self._any_ended.clear()
        ended, self._ended = self._ended, []
        return ended

    async def answers(self) -> bool:
        """It does."""
        return True

    async def cancel(self, sessions: Sequence[Session]) -> None:
        """Stop those of these sessions that are not being scored."""
        stops = [self._live[session].stop() for session in sessions if session in self._live]
        for error in await asyncio.gather(*stops, return_exceptions=True):
            if error is not None:
                log.warning("a session could not be stopped, and goes on: %s: %s", type(error).__name__, error)

    async def _run_prompt(
        self, prompt: dict[str, Any], sampling_params: dict[str, Any], trajectory: dict[str, Any], trace: bool = False
    ) -> None:
        if trajectory["validate"]:
            await super()._run_prompt(prompt, sampling_params, trajectory, trace)
            return
        if not prompt.pop("__do_sample__", True):
            apply_greedy_sampling_params(sampling_params := dict(sampling_params))
        how = {"trajectory": trajectory, "trace": trace}
        sessions = range(prompt.pop("__rollout_n__"))
        await asyncio.gather(*(self._run_session(session, prompt, sampling_params, how) for session in sessions))

    async def _run_session(
        self, index: int, prompt: dict[str, Any], sampling_params: dict[str, Any], how: dict[str, Any]
    ) -> None:
        """One session, from the first token to its outcome."""
        session = (prompt["uid"], index)
        live = self._live[session] = Live(self._tool_timeout)
        LIVE.set(live)  # each session is a task with a context of its own
        reason, cancelled = "the agent loop returned nothing", False
        try:
            async with asyncio.timeout(None) as live.clock:
                live.between_turns()
                await self._run_agent_loop(sampling_params, session_id=index, **how, **prompt)
        except SessionStopped:
            cancelled = True
        except BaseException as error:  # a tool may raise what is none of Exception; a session without an outcome hangs
            late = live.clock is not None and live.clock.expired()
            cancelled = late and live.stopped
            reason = (
                f"a tool took more than {live.patience} s" if late else f"{type(error).__name__}: {error}"[:_REASON]
            )
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
            for each in outputs:
                self._check(each)
        await super()._agent_loop_postprocess(output, validate, **kwargs)
        if not validate and outputs:
            session = (kwargs["uid"], kwargs["session_id"])
            self._scored[session] = self._outcome(session, outputs)

    def _check(self, output: Any) -> None:
        """An agent loop's row, before it is written: one that does not fit would end the run at its update."""
        tokens, mask, logprobs = output.response_ids, output.response_mask, output.response_logprobs
        if not tokens or len(mask) != len(tokens) or not {0, 1}.issuperset(mask):
            raise ValueError(
                f"an agent loop must return a response_mask of 1 (generated) and 0 (not) for each of its response_ids, at "
                f"least one, got {len(mask)} for {len(tokens)}"
            )
        if logprobs is None and not self.rollout_config.calculate_log_probs:
            return
        if logprobs is None or len(logprobs) != len(tokens):
            raise ValueError(
                "an agent loop must return response_logprobs, 0 where nothing was generated, for each of its "
                f"{len(tokens)} response_ids, got {logprobs if logprobs is None else len(logprobs)}: "
                "actor_rollout_ref.rollout.calculate_log_probs is true"
            )

    def _outcome(self, session: Session, outputs: Sequence[Any]) -> SessionOutcome:
        first, last, live = outputs[0], outputs[-1], LIVE.get() or Live()
        scored = _scored(last)
        length = len(last.response_ids)
        full = length >= self.rollout_config.response_length or len(last.prompt_ids) + length >= self._most_tokens
        return SessionOutcome(
            *session,
            # What the model generated, in all turns: tools' answers are masked. A loop may drop turns that were paid for.
            tokens=max(live.tokens, sum(sum(output.response_mask) for output in outputs)),
            reward=scored.reward,
            metric=scored.metric,
            version=_known(live.first_version, first.extra_fields.get("min_global_steps")),
            last_version=_known(live.last_version, last.extra_fields.get("max_global_steps")),
            truncated=live.truncated or (full and last.response_ids[-1] != self.tokenizer.eos_token_id),
            rows=len(outputs),
            uncertainty=_uncertainty(outputs),
        )

    async def _compute_score(self, outputs: Sequence[Any], kwargs: dict[str, Any]) -> None:
        try:
            await asyncio.wait_for(super()._compute_score(outputs, kwargs), self._reward_timeout)
        except TimeoutError:
            raise NoReward(f"the reward took more than {self._reward_timeout} s") from None
        _scored(outputs[-1])


def _uncertainty(outputs: Sequence[Any]) -> float | None:
    """Of what the model generated, in all turns; None where verl was not asked for log-probabilities."""
    if any(output.response_logprobs is None for output in outputs):
        return None
    of_turns = [np.asarray(output.response_logprobs)[np.asarray(output.response_mask, bool)] for output in outputs]
    return uncertainty_of(np.concatenate(of_turns))


def _known(version: int | None, verls: int | None) -> int | None:
    """Our own record of a version; verl's where there is none, which also counts requests that generated nothing."""
    return verls if version is None else version


def _scored(output: Any) -> Scored:
    read = read_score(output.reward_score, output.extra_fields.get("reward_extra_info", {}))
    if not isinstance(read, Scored):
        raise NoReward(read.reason)
    return read


class Manager(AgentLoopManagerTQ):
    """verl's manager of workers, which knows what each of them owes and outlives them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = ray.remote(max_restarts=_RESTARTS)(Worker)
        self._open: dict[Session, Any] = {}  # -> its worker
        self._lost: list[SessionOutcome] = []
        self._starting: dict[Any, Any] = {}  # call that starts prompts -> its worker
        self._listening: dict[Any, Any] = {}  # call for the next outcomes -> its worker

    def generate_sequences(self, prompts: TensorDict) -> None:
        """Start prompts on the workers, shared out as verl does it."""
        if "validate" in prompts:
            super().generate_sequences(prompts)
            return
        chunks = prompts.chunk(len(self.agent_loop_workers))
        for worker, chunk in zip(self.agent_loop_workers, chunks, strict=False):
            for uid, n in zip(chunk["uid"], chunk["__rollout_n__"], strict=True):
                self._open |= {(uid, session): worker for session in range(n)}
            self._starting[worker.generate_sequences.remote(chunk)] = worker

    def cancel(self, sessions: Sequence[Session]) -> None:
        """Have these sessions stopped if they still generate; does not wait for it."""
        of_worker: dict[Any, list[Session]] = {}
        for session in sessions:
            if session in self._open:  # not one whose worker died
                of_worker.setdefault(self._open[session], []).append(session)
        for worker, named in of_worker.items():
            worker.cancel.remote(named)

    def outcomes(self, wait: bool = True) -> list[SessionOutcome]:
        """Sessions that ended; waits for one, or else may return none."""
        while not self._lost:
            for worker in self.agent_loop_workers:
                if worker not in self._listening.values():
                    self._listening[worker.outcomes.remote()] = worker
            calls = [*self._listening, *self._starting]  # what a worker told before it died is read first
            if not ray.wait(calls, timeout=_PATIENCE if wait else 0)[0]:
                if not wait:
                    return []
                log.info("%d sessions are still to end", len(self._open))
                continue
            ready, _ = ray.wait(calls, num_returns=len(calls), timeout=0)
            if (ended := [outcome for call in ready for outcome in self._result(call)]) or not (wait or self._lost):
                return ended
        lost, self._lost = self._lost, []
        return lost

    def _result(self, call: Any) -> list[SessionOutcome]:
        worker = self._starting.pop(call, None) or self._listening.pop(call, None)
        if worker is None:  # it was given up together with another call of its worker
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
        """A worker died: what it owed has failed. Waits until Ray has started it again, which it does a few times."""
        owed = [session for session, owner in self._open.items() if owner == worker]
        log.warning("an agent loop worker died with %d sessions: %s", len(owed), error)
        for session in owed:
            del self._open[session]
            self._lost.append(SessionOutcome(*session, reason="its agent loop worker died"))
        for calls in (self._starting, self._listening):  # else they fail later, when it has sessions anew
            for call in [call for call, callee in calls.items() if callee == worker]:
                del calls[call]
        if not _comes_back(worker):
            self.agent_loop_workers = [other for other in self.agent_loop_workers if other != worker]
            if not self.agent_loop_workers:
                raise RuntimeError("all agent loop workers died; see their logs for the reason") from error


def _comes_back(worker: Any) -> bool:
    """Wait until a worker answers again; False where it never will."""
    while True:
        try:
            return ray.get(worker.answers.remote())
        except ActorDiedError:
            return False
        except RayActorError:  # it is being started
            time.sleep(1)
