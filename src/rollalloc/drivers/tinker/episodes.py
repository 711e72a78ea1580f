"""What a rollout is: a prompt, a completion and a reward function; or an environment of tinker-cookbook's kind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from rollalloc.core.events import LARGEST, Order
from rollalloc.core.table import PromptTable
from rollalloc.data.prompts import EncodedPrompts
from rollalloc.drivers.tinker.service import RequestFailed, SampledSequence, Service, ServiceFailed
from rollalloc.drivers.tinker.trajectories import NOTHING, Piece, Trajectory
from rollalloc.generate.sampling import Sampling
from rollalloc.rewards.function import Outcome, Sample, Scored, Unscored
from rollalloc.rewards.scorers import Scorer
from rollalloc.train.state import digest, sha

Blocks = Mapping[str, NDArray[np.float32]]


class EndedRollout(NamedTuple):
    """A rollout that ended.

    Attributes:
        trajectory: what was sampled, as far as it came.
        outcome: its score.
        text: for a log.
        answered: False where the service gave no answer.
    """

    trajectory: Trajectory
    outcome: Outcome
    text: str = ""
    answered: bool = True


@dataclass(frozen=True)
class Wave:
    """What an order is played with.

    Attributes:
        service: samples.
        sampler: the weights.
        sampling: how.
        stopped: whether a rollout was to be stopped meanwhile; what the service has begun it ends all the same.
    """

    service: Service
    sampler: Any
    sampling: Sampling
    stopped: Callable[[int], bool]


class Episodes(Protocol):
    """What prompts are, and how a rollout of one goes.

    Attributes:
        keys: of the prompts.
    """

    @property
    def keys(self) -> Sequence[str]: ...

    def table(self, features: Blocks | None) -> PromptTable:
        """What the core may know of them."""
        ...

    def digest(self) -> str:
        """Names them, so that a run does not go on with others."""
        ...

    async def play(self, order: Order, wave: Wave) -> list[EndedRollout]:
        """Each rollout of an order, in its order."""
        ...

    def report(self) -> dict[str, Any]:
        """What scoring was like, as plain data."""
        ...


@dataclass(frozen=True)
class Rewarded:
    """A prompt, a completion, and a score of rollalloc's kind of reward function.

    All rollouts of an order are one request: then the service reads the prompt once.

    Args:
        prompts: encoded by the model's tokenizer (`rollalloc.data.prompts.encode_prompts`).
        scorer: scores completions; closed by whoever made it.
        decode: token ids → text.
    """

    prompts: EncodedPrompts
    scorer: Scorer
    decode: Callable[[Sequence[int]], str]

    @property
    def keys(self) -> Sequence[str]:
        return self.prompts.prompt_set.keys

    def table(self, features: Blocks | None) -> PromptTable:
        return self.prompts.prompt_set.table(features)

    def digest(self) -> str:
        return digest(self.prompts)

    def report(self) -> dict[str, Any]:
        return self.scorer.report()

    async def play(self, order: Order, wave: Wave) -> list[EndedRollout]:
        prompt, sampling = self.prompts.tokens[order.prompt], wave.sampling
        start = NOTHING.then(prompt)
        try:
            made = await wave.service.sample(
                wave.sampler,
                prompt,
                len(order.rollouts),
                max_tokens=sampling.max_new_tokens,
                stop=list(sampling.stop_ids) or None,
            )
        except RequestFailed as error:
            return [
                EndedRollout(Trajectory(rollout, (start,), False), Unscored(str(error)), answered=False)
                for rollout in order.rollouts
            ]
        made += [f"the service gave {len(made)} of {len(order.rollouts)} samples"] * (len(order.rollouts) - len(made))
        ended = [self._ended(rollout, start, each) for rollout, each in zip(order.rollouts, made, strict=True)]
        wanted = [
            at
            for at, each in enumerate(ended)
            if isinstance(each.outcome, Scored) and not wave.stopped(order.rollouts[at])
        ]
        outcomes = await self._scores(order.prompt, [ended[at] for at in wanted])
        for at, outcome in zip(wanted, outcomes, strict=True):
            ended[at] = ended[at]._replace(outcome=outcome)
        return ended

    def _ended(self, rollout: int, start: Piece, made: SampledSequence | str) -> EndedRollout:
        """A rollout that is still to be scored, where it can be."""
        if isinstance(made, str):
            return EndedRollout(Trajectory(rollout, (start,), False), Unscored(made))
        trajectory = Trajectory(rollout, (start.then(made.tokens, made.logprobs),), made.truncated)
        try:
            return EndedRollout(trajectory, _PENDING, self.decode(made.tokens))
        except Exception as error:  # ids that the tokenizer does not know
            return EndedRollout(trajectory, Unscored(f"cannot be decoded, {type(error).__name__}: {error}"))

    async def _scores(self, prompt: int, ended: Sequence[EndedRollout]) -> list[Outcome]:
        given = self.prompts.prompt_set
        samples = [
            Sample(
                data_source=given.sources[prompt],
                completion=each.text,
                ground_truth=given.ground_truths[prompt],
                extra_info=given.extra_infos[prompt],
                tokens=each.trajectory.length,
                name=f"{given.keys[prompt]}#{each.trajectory.rollout}",
            )
            for each in ended
        ]
        return await asyncio.wrap_future(self.scorer.submit(samples)) if samples else []


_PENDING = Scored(0.0, 0.0)


@dataclass
class _Turns:
    """A rollout in an environment, under the names by which tinker-cookbook's group rewards look at one."""

    transitions: list[Any] = field(default_factory=list[Any])
    final_ob: Any = None
    stop_reason: str | None = None


class _Action(NamedTuple):
    tokens: list[int]
    logprobs: list[float]
    stop_reason: str


class _Transition(NamedTuple):
    ob: Any
    ac: _Action
    reward: float
    episode_done: bool
    metrics: Mapping[str, Any]
    logs: Mapping[str, Any]


@dataclass(frozen=True)
class Environments:
    """Environments as tinker-cookbook has them: `EnvGroupBuilder.make_envs`, `Env.initial_observation` and `Env.step`.

    A prompt is a builder. An order makes as many environments as it has rollouts, calling `make_envs` again where one
    call gives too few; `compute_group_rewards` sees the rollouts of one order. The reward is the sum over turns and the
    group's. Only observations of tokens can be trained on.

    Args:
        builders: one a prompt.
        keys: names that outlive a re-ordering of the builders, each once.
        metric: the entry of the environment's metrics that selection looks at, "correct" say, its last value counts; None:
            the reward.
        decode: token ids → text, for the log of rollouts; None: none.
        max_turns: after which a rollout is cut off, at least 1.

    Raises:
        ValueError: keys that are not one a builder, each once.
    """

    builders: Sequence[Any]
    keys: Sequence[str]
    metric: str | None = None
    decode: Callable[[Sequence[int]], str] | None = None
    max_turns: int = 64

    def __post_init__(self) -> None:
        if len(self.keys) != len(self.builders) or len(set(self.keys)) != len(self.keys) or not self.builders:
            raise ValueError(
                f"expected builders, and a key of its own for each, got {len(self.builders)} builders and "
                f"{len(set(self.keys))} different keys of {len(self.keys)}"
            )
        if self.max_turns < 1:
            raise ValueError(f"max_turns must be at least 1, got {self.max_turns}")

    def table(self, features: Blocks | None) -> PromptTable:
        count = len(self.keys)
        return PromptTable(
            keys=tuple(self.keys),
            source_N=np.zeros(count, np.int32),
            features=features,
        )

    def digest(self) -> str:
        return sha([list(self.keys), self.metric, self.max_turns])

    def report(self) -> dict[str, Any]:
        return {}

    async def play(self, order: Order, wave: Wave) -> list[EndedRollout]:
        builder, count = self.builders[order.prompt], len(order.rollouts)
        try:
            envs = await self._envs(builder, count, wave)
        except Exception as error:
            return [_failed(rollout, f"make_envs failed, {_named(error)}") for rollout in order.rollouts]
        try:
            played = await asyncio.gather(
                *(self._play(rollout, env, wave) for rollout, env in zip(order.rollouts, envs, strict=True))
            )
            return await self._grouped(builder, played, envs, wave)
        finally:
            cleanup = getattr(builder, "cleanup", None)
            if cleanup is not None:
                with suppress(Exception):  # what it was to free is not ours, and the rollouts are paid
                    await wave.service.answered(cleanup())

    async def _envs(self, builder: Any, count: int, wave: Wave) -> list[Any]:
        envs: list[Any] = []
        while len(envs) < count:
            made = list(await wave.service.answered(builder.make_envs()))
            if not made:
                raise ValueError("expected environments, got none")
            envs += made
        return envs[:count]

    async def _play(self, rollout: int, env: Any, wave: Wave) -> tuple[EndedRollout, _Turns]:
        turns, pieces, truncated = _Turns(), [NOTHING], False
        outcome: Outcome | None = None
        answered = True
        try:
            first = await wave.service.answered(env.initial_observation())
            if not isinstance(first, tuple):  # the cookbook's word for a prompt that is too long to begin with
                return _failed(rollout, "the first observation is too long"), turns
            turns.final_ob, stop = first
            for _ in range(self.max_turns):
                done, truncated, stop = await self._turn(env, turns, pieces, stop, wave)
                if done or wave.stopped(rollout):
                    break
            else:
                truncated, turns.stop_reason = True, "max_turns"
        except RequestFailed as error:
            outcome, answered = Unscored(str(error)), False
        except _Unusable as error:
            outcome = Unscored(str(error))
        except ServiceFailed:
            raise
        except Exception as error:
            outcome = Unscored(f"the environment failed, {_named(error)}")
        kept = tuple(piece for piece in pieces if piece.tokens)
        text = self._text(turns)
        return EndedRollout(Trajectory(rollout, kept, truncated), outcome or _PENDING, text, answered), turns

    async def _turn(
        self, env: Any, turns: _Turns, pieces: list[Piece], stop: Any, wave: Wave
    ) -> tuple[bool, bool, Any]:
        """One action and what the environment makes of it: whether it is over, was cut off, and how to stop the next."""
        observed = _ints(turns.final_ob)
        before = pieces[-1].tokens
        if observed[: len(before)] == before:
            pieces[-1] = pieces[-1].then(observed[len(before) :])
        else:
            pieces.append(NOTHING.then(observed))
        [made] = await wave.service.sample(
            wave.sampler, observed, 1, max_tokens=wave.sampling.max_new_tokens, stop=stop or None
        ) or ["the service gave no sample"]
        if isinstance(made, str):
            raise _Unusable(made)
        pieces[-1] = pieces[-1].then(made.tokens, made.logprobs)
        reason = "length" if made.truncated else "stop"
        result = await wave.service.answered(env.step(list(made.tokens), extra={"stop_reason": reason}))
        action = _Action(list(made.tokens), list(made.logprobs), reason)
        turns.transitions.append(
            _Transition(turns.final_ob, action, result.reward, result.episode_done, result.metrics, result.logs)
        )
        turns.final_ob = result.next_observation
        return bool(result.episode_done), made.truncated, result.next_stop_condition

    async def _grouped(
        self, builder: Any, played: Sequence[tuple[EndedRollout, _Turns]], envs: Sequence[Any], wave: Wave
    ) -> list[EndedRollout]:
        """With their rewards, those of the group included."""
        whole = [at for at, (ended, _) in enumerate(played) if isinstance(ended.outcome, Scored)]
        of_group: dict[int, tuple[float, Mapping[str, Any]]] = {}
        failure: str | None = None
        if whole and hasattr(builder, "compute_group_rewards"):
            try:
                asked = builder.compute_group_rewards([played[at][1] for at in whole], [envs[at] for at in whole])
                of_group = dict(zip(whole, await wave.service.answered(asked), strict=True))
            except Exception as error:
                failure = f"compute_group_rewards failed, {_named(error)}"
        return [
            ended if at not in whole else ended._replace(outcome=self._outcome(turns, of_group.get(at), failure))
            for at, (ended, turns) in enumerate(played)
        ]

    def _outcome(self, turns: _Turns, of_group: tuple[float, Mapping[str, Any]] | None, failure: str | None) -> Outcome:
        if failure is not None:
            return Unscored(failure)
        more, metrics = of_group or (0.0, {})
        seen: dict[str, Any] = {}
        for transition in turns.transitions:
            seen |= transition.metrics
        seen |= metrics
        try:
            reward = float(sum(transition.reward for transition in turns.transitions) + more)
            metric = reward if self.metric is None else float(seen[self.metric])
        except KeyError:
            return Unscored(f"the environment gave no metric {self.metric!r}, but {sorted(map(str, seen))[:5]}")
        except (TypeError, ValueError) as error:
            return Unscored(f"a reward that is no number, {_named(error)}")
        if not (abs(reward) <= LARGEST and abs(metric) <= LARGEST):
            return Unscored(f"a reward that is not a number within ±{LARGEST:g}")
        return Scored(reward, metric)

    def _text(self, turns: _Turns) -> str:
        if self.decode is None:
            return ""
        try:
            return "\n".join(self.decode(transition.ac.tokens) for transition in turns.transitions)
        except Exception:  # only for reading
            return ""


class _Unusable(ValueError):
    """A sample or an observation that cannot be trained on."""


def _ints(observation: Any) -> tuple[int, ...]:
    try:
        tokens = tuple(observation.to_ints())
    except Exception as error:
        raise _Unusable(f"an observation must be of tokens, {_named(error)}") from None
    if not tokens:
        raise _Unusable("an observation has no tokens")
    return tokens


def _failed(rollout: int, reason: str) -> EndedRollout:
    return EndedRollout(Trajectory(rollout, (), False), Unscored(reason))


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:200]
