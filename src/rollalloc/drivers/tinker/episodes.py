"""Two kinds of rollout: a completion that a reward function scores, or an episode in an environment of tinker-cookbook."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from rollalloc.core.events import LARGEST, Order
from rollalloc.core.prompts import PromptTable
from rollalloc.data.prompts import EncodedPrompts
from rollalloc.drivers.tinker.service import REASON_LENGTH, RequestFailed, SampledSequence, Service, ServiceFailed
from rollalloc.drivers.tinker.trajectories import NOTHING, Piece, Trajectory
from rollalloc.files.text import error_text
from rollalloc.models.settings import Sampling
from rollalloc.rewards.function import Outcome, Scored, Unscored, summed
from rollalloc.rewards.scorers import Scorer
from rollalloc.train.store import digest, sha

Blocks = Mapping[str, NDArray[np.float32]]


class EndedRollout(NamedTuple):
    """A rollout that ended.

    Attributes:
        trajectory: the tokens of the rollout.
        outcome: the score, or the reason why there is no score.
        text: the completion, for the log of rollouts.
        answered: False if the service did not answer a request of this rollout.
    """

    trajectory: Trajectory
    outcome: Outcome
    text: str = ""
    answered: bool = True


@dataclass(frozen=True)
class Wave:
    """The weights and settings with which orders are sampled.

    Attributes:
        service: the service that samples.
        sampler: a sampling client, whose weights never change.
        sampling: the sampling settings.
        stopped: tells whether a rollout must stop. The service cannot abort a request, so a stopped rollout first finishes
            its current request.
    """

    service: Service
    sampler: Any
    sampling: Sampling
    stopped: Callable[[int], bool]


class Episodes(Protocol):
    """A set of prompts, and how to sample and score rollouts of them.

    Attributes:
        keys: unique names of the prompts.
    """

    @property
    def keys(self) -> Sequence[str]: ...

    def table(self, features: Blocks | None) -> PromptTable:
        """The table of prompts for the core."""
        ...

    def digest(self) -> str:
        """A digest of the prompts. A resumed run compares the digest, to check that the prompts are the same."""
        ...

    async def play(self, order: Order, wave: Wave) -> list[EndedRollout]:
        """Sample and score all rollouts of an order. Return them in the sequence of `order.rollouts`."""
        ...

    def report(self) -> dict[str, Any]:
        """Statistics of scoring, as plain data."""
        ...


@dataclass(frozen=True)
class Rewarded:
    """Prompts with completions that a rollalloc reward function scores.

    All rollouts of an order are sampled in one request, so that the service reads the prompt only once.

    Args:
        prompts: prompts encoded by the model's tokenizer (`rollalloc.data.prompts.encode_prompts`).
        scorer: scores completions. The caller closes it.
        decode: converts token ids to text.
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
            samples = await wave.service.sample(
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
        missing = len(order.rollouts) - len(samples)
        samples += [f"the service returned {len(samples)} of {len(order.rollouts)} samples"] * missing
        ended = [self._ended(rollout, start, sample) for rollout, sample in zip(order.rollouts, samples, strict=True)]
        to_score = [
            index
            for index, rollout in enumerate(ended)
            if rollout.outcome is _PENDING and not wave.stopped(order.rollouts[index])
        ]
        outcomes = await self._scores(order.prompt, [ended[index] for index in to_score])
        for index, outcome in zip(to_score, outcomes, strict=True):
            ended[index] = ended[index]._replace(outcome=outcome)
        return ended

    def _ended(self, rollout: int, start: Piece, sample: SampledSequence | str) -> EndedRollout:
        """The rollout of a sample, not scored yet. If the sample cannot be used, the outcome is `Unscored`."""
        if isinstance(sample, str):
            return EndedRollout(Trajectory(rollout, (start,), False), Unscored(sample))
        trajectory = Trajectory(rollout, (start.then(sample.tokens, sample.logprobs),), sample.truncated)
        try:
            return EndedRollout(trajectory, _PENDING, self.decode(sample.tokens))
        except Exception as error:  # for example, the tokenizer does not know an id
            return EndedRollout(trajectory, Unscored(f"cannot be decoded, {error_text(error, REASON_LENGTH)}"))

    async def _scores(self, prompt: int, ended: Sequence[EndedRollout]) -> list[Outcome]:
        prompt_set = self.prompts.prompt_set
        samples = [prompt_set.sample(prompt, one.trajectory.rollout, one.text, one.trajectory.length) for one in ended]
        return await asyncio.wrap_future(self.scorer.submit(samples)) if samples else []


_PENDING = Scored(0.0, 0.0)  # the outcome of a rollout that is not scored yet


@dataclass
class _Turns:
    """The turns of a rollout. tinker-cookbook's `compute_group_rewards` reads these attributes by name."""

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
    """Environments with tinker-cookbook's interface: `EnvGroupBuilder.make_envs`, `Env.initial_observation`, `Env.step`.

    Each builder is a prompt. `make_envs` is called until each rollout of the order has an environment. If the builder has
    `compute_group_rewards`, it is called with the rollouts of one order. A rollout's reward is the sum of its turns' rewards
    and its group reward. Observations must consist of tokens.

    Args:
        builders: an `EnvGroupBuilder` for each prompt.
        keys: a unique key for each builder. A resumed run finds its prompts by these keys.
        metric: name of the environment's metric that selection uses, for example "correct". If several turns report it, the
            last value is used. None: selection uses the reward.
        decode: converts token ids to text for the log of rollouts. None: the log has no text.
        max_turns: number of turns after which a rollout is truncated, at least 1.

    Raises:
        ValueError: there are no builders, the builders do not have one unique key each, or `max_turns` is below 1.
    """

    builders: Sequence[Any]
    keys: Sequence[str]
    metric: str | None = None
    decode: Callable[[Sequence[int]], str] | None = None
    max_turns: int = 64

    def __post_init__(self) -> None:
        if len(self.keys) != len(self.builders) or len(set(self.keys)) != len(self.keys) or not self.builders:
            raise ValueError(
                f"expected one or more builders and a unique key for each, got {len(self.builders)} builders and "
                f"{len(self.keys)} keys, {len(set(self.keys))} of them different"
            )
        if self.max_turns < 1:
            raise ValueError(f"max_turns must be at least 1, got {self.max_turns}")

    def table(self, features: Blocks | None) -> PromptTable:
        return PromptTable(keys=tuple(self.keys), features=features)

    def digest(self) -> str:
        return sha([list(self.keys), self.metric, self.max_turns])

    def report(self) -> dict[str, Any]:
        return {}

    async def play(self, order: Order, wave: Wave) -> list[EndedRollout]:
        builder, count = self.builders[order.prompt], len(order.rollouts)
        try:
            envs = await self._envs(builder, count, wave)
        except Exception as error:
            return [
                _failed(rollout, f"make_envs failed, {error_text(error, REASON_LENGTH)}") for rollout in order.rollouts
            ]
        try:
            played = await asyncio.gather(
                *(self._play(rollout, env, wave) for rollout, env in zip(order.rollouts, envs, strict=True))
            )
            return await self._grouped(builder, played, envs, wave)
        finally:
            cleanup = getattr(builder, "cleanup", None)
            if cleanup is not None:
                with suppress(Exception):  # the rollouts are paid for, and can be used even if this fails
                    await wave.service.answered(cleanup())

    async def _envs(self, builder: Any, count: int, wave: Wave) -> list[Any]:
        envs: list[Any] = []
        while len(envs) < count:
            batch = list(await wave.service.answered(builder.make_envs()))
            if not batch:
                raise ValueError("expected environments, got an empty list")
            envs += batch
        return envs[:count]

    async def _play(self, rollout: int, env: Any, wave: Wave) -> tuple[EndedRollout, _Turns]:
        turns, pieces, truncated = _Turns(), [NOTHING], False
        outcome: Outcome | None = None
        answered = True
        try:
            first = await wave.service.answered(env.initial_observation())
            if not isinstance(first, tuple):  # if the prompt is too long, tinker-cookbook returns no tuple
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
            outcome = Unscored(f"the environment failed, {error_text(error, REASON_LENGTH)}")
        trajectory = Trajectory(rollout, tuple(piece for piece in pieces if piece.tokens), truncated)
        return EndedRollout(trajectory, outcome or _PENDING, self._text(turns), answered), turns

    async def _turn(
        self, env: Any, turns: _Turns, pieces: list[Piece], stop: Any, wave: Wave
    ) -> tuple[bool, bool, Any]:
        """Sample one action and take it.

        Returns:
            Whether the episode is over, whether the action was truncated, and the stop condition for the next action.
        """
        observed = _ints(turns.final_ob)
        before = pieces[-1].tokens
        if observed[: len(before)] == before:
            pieces[-1] = pieces[-1].then(observed[len(before) :])
        else:
            pieces.append(NOTHING.then(observed))
        [sample] = await wave.service.sample(
            wave.sampler, observed, 1, max_tokens=wave.sampling.max_new_tokens, stop=stop or None
        ) or ["the service returned no sample"]
        if isinstance(sample, str):
            raise _Unusable(sample)
        pieces[-1] = pieces[-1].then(sample.tokens, sample.logprobs)
        reason = "length" if sample.truncated else "stop"
        result = await wave.service.answered(env.step(list(sample.tokens), extra={"stop_reason": reason}))
        action = _Action(list(sample.tokens), list(sample.logprobs), reason)
        turns.transitions.append(
            _Transition(turns.final_ob, action, result.reward, result.episode_done, result.metrics, result.logs)
        )
        turns.final_ob = result.next_observation
        return bool(result.episode_done), sample.truncated, result.next_stop_condition

    async def _grouped(
        self, builder: Any, played: Sequence[tuple[EndedRollout, _Turns]], envs: Sequence[Any], wave: Wave
    ) -> list[EndedRollout]:
        """The rollouts with their final outcomes, including the group reward."""
        pending = [index for index, (ended, _) in enumerate(played) if ended.outcome is _PENDING]
        group_rewards: dict[int, tuple[float, Mapping[str, Any]]] = {}
        failure: str | None = None
        if pending and hasattr(builder, "compute_group_rewards"):
            try:
                answer = builder.compute_group_rewards([played[i][1] for i in pending], [envs[i] for i in pending])
                group_rewards = dict(zip(pending, await wave.service.answered(answer), strict=True))
            except Exception as error:
                failure = f"compute_group_rewards failed, {error_text(error, REASON_LENGTH)}"
        return [
            ended._replace(outcome=self._outcome(turns, group_rewards.get(index), failure))
            if ended.outcome is _PENDING
            else ended
            for index, (ended, turns) in enumerate(played)
        ]

    def _outcome(
        self, turns: _Turns, group_reward: tuple[float, Mapping[str, Any]] | None, failure: str | None
    ) -> Outcome:
        if failure is not None:
            return Unscored(failure)
        of_group, group_metrics = group_reward or (0.0, {})
        metrics: dict[str, Any] = {}
        for transition in turns.transitions:
            metrics |= transition.metrics
        metrics |= group_metrics
        try:
            reward = float(summed([*(transition.reward for transition in turns.transitions), of_group]))
            metric = reward if self.metric is None else float(metrics[self.metric])
        except KeyError:
            return Unscored(f"the environment has no metric {self.metric!r}; it has {sorted(map(str, metrics))[:5]}")
        except (TypeError, ValueError) as error:
            return Unscored(f"the reward or the metric is not a number, {error_text(error, REASON_LENGTH)}")
        if not (abs(reward) <= LARGEST and abs(metric) <= LARGEST):
            return Unscored(f"the reward or the metric is not a number within ±{LARGEST:g}")
        return Scored(reward, metric)

    def _text(self, turns: _Turns) -> str:
        if self.decode is None:
            return ""
        try:
            return "\n".join(self.decode(transition.ac.tokens) for transition in turns.transitions)
        except Exception:  # the text is only shown to people
            return ""


class _Unusable(ValueError):
    """A sample or an observation that cannot be trained on."""


def _ints(observation: Any) -> tuple[int, ...]:
    try:
        tokens = tuple(observation.to_ints())
    except Exception as error:
        raise _Unusable(f"an observation must consist of tokens, {error_text(error, REASON_LENGTH)}") from None
    if not tokens:
        raise _Unusable("an observation has no tokens")
    return tokens


def _failed(rollout: int, reason: str) -> EndedRollout:
    return EndedRollout(Trajectory(rollout, (), False), Unscored(reason))
