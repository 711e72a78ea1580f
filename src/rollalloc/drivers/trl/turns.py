"""Rollouts with TRL's tools and environments: several turns of the model, and between them what a tool answered."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollalloc.drivers.trl.chats import Tokens, decode
from rollalloc.generate.sampler import Generation

_NO_PROMPT = [{"role": "user", "content": ""}]  # where an environment says what the prompt is


@dataclass(frozen=True, slots=True, eq=False)
class Played:
    """A rollout before it is scored.

    Attributes:
        prompt: as reward functions get it: text, or messages, with what an environment said first.
        prompt_tokens: its token ids.
        made: the completion's tokens, those of tools' answers among them.
        completion: as reward functions get it: text, or messages, tools' answers among them.
        own: True at each token that the model generated, False at those of tools; None: all are the model's.
        environment: that it was played in.
    """

    prompt: Any
    prompt_tokens: Tokens
    made: Generation
    completion: Any
    own: tuple[bool, ...] | None = None
    environment: Any = None


class Turns:
    """TRL's tools and environments at work, for as many rollouts as the recipe orders.

    Calling the tools is TRL's own loop; turns come from the driver's generator.

    Args:
        trainer: TRL's.
        generate: the driver's generator.
        tools: TRL's `tools`.
        factory: TRL's `environment_factory`.
    """

    def __init__(self, trainer: Any, generate: Any, tools: Sequence[Any] | None, factory: Any) -> None:
        self._trainer, self._generate, self._tools = trainer, generate, tuple(tools or ())
        self._environments = None if factory is None else _Environments(trainer, factory)

    def __call__(
        self, rollouts: Sequence[int], rows: Sequence[Mapping[str, Any]]
    ) -> tuple[list[Played], dict[str, Any]]:
        """Play rollouts to their end.

        Args:
            rollouts: their ids.
            rows: the data set's row of each.

        Returns:
            Each rollout, and TRL's figures of tools, to be averaged.

        Raises:
            ValueError: a row names an environment that there is not.
        """
        if not rollouts:
            return [], {}
        trainer, generate = self._trainer, self._generate
        instances = [None] * len(rows) if self._environments is None else self._environments.take(rows)
        with _given(trainer, _per_rollout(self._tools, instances)):
            prompts = [row.get("prompt", _NO_PROMPT) for row in rows]
            if self._environments is not None:
                prompts = self._environments.begin(instances, prompts, rows)
            talks = deepcopy(prompts)  # TRL's loop appends to them
            prompt_ids, *_ = trainer._tokenize_prompts(talks)
            turns, logprobs = generate.complete([tuple(ids) for ids in prompt_ids])
            ids, logprobs = [list(tokens) for tokens in turns], logprobs and [each.tolist() for each in logprobs]
            schemas = self._environments.tools(rows) if self._environments is not None else [trainer.tools] * len(rows)
            completions = decode(trainer, prompts, list(zip(prompt_ids, ids, strict=True)), schemas)
            masks: Any = [None] * len(rows)
            figures: dict[str, Any] = {}
            if trainer.tools:
                masks, completions, ids, logprobs, calls, failures = trainer._tool_call_loop(
                    talks, prompt_ids, ids, completions, logprobs, None, {}
                )[:6]
                figures = {
                    "tools/call_frequency": [calls / len(rows)] * len(rows),
                    "tools/failure_frequency": [1.0] * failures + [0.0] * (calls - failures),
                }
        pairs = [(tuple(prompt), tuple(made)) for prompt, made in zip(prompt_ids, ids, strict=True)]
        likely = generate.filled(pairs, None if logprobs is None else [np.array(each, np.float32) for each in logprobs])
        return [
            Played(
                prompts[at],
                pairs[at][0],
                Generation(rollout, pairs[at][1], likely[at], truncated=pairs[at][1][-1] not in generate.eos_ids),
                completions[at],
                masks[at] and tuple(map(bool, masks[at][: len(pairs[at][1])])),
                instances[at],
            )
            for at, rollout in enumerate(rollouts)
        ], figures


class _Environments:
    """Instances of environments, one a rollout; used again, and more are made as more are needed at once."""

    def __init__(self, trainer: Any, factory: Any) -> None:
        self._trainer = trainer
        self._named = isinstance(factory, Mapping)
        self._factories: Mapping[Any, Any] = factory if isinstance(factory, Mapping) else {None: factory}
        # TRL has made some to look at them.
        made = getattr(trainer, "_environment_pool", None)
        self._pool: dict[Any, list[Any]] = {None: list(trainer.environments)} if made is None else made

    def take(self, rows: Sequence[Mapping[str, Any]]) -> list[Any]:
        """An instance for each row, no two the same."""
        taken: dict[Any, int] = {}
        found: list[Any] = []
        for name in self._names(rows):
            if name not in self._factories:
                raise ValueError(
                    f"a row has environment={name!r}, which is not among the environments of environment_factory: "
                    f"{', '.join(map(repr, self._factories))}; name one of them, or add it"
                )
            pool, at = self._pool[name], taken.get(name, 0)
            if at == len(pool):
                pool.append(self._factories[name]())
            taken[name] = at + 1
            found.append(pool[at])
        self._trainer._batch_environments = self._names(rows)  # by which TRL renders and parses
        return found

    def begin(self, instances: Sequence[Any], prompts: Sequence[Any], rows: Sequence[Mapping[str, Any]]) -> list[Any]:
        """Reset each instance with its row; the prompts, with what it said at their end."""
        begun: list[Any] = []
        for instance, prompt, row in zip(instances, prompts, rows, strict=True):
            said = instance.reset(**{key: row[key] for key in row if not (self._named and key == "environment")})
            begun.append(prompt if said is None else [*prompt[:-1], _with(prompt[-1], said)])
        return begun

    def tools(self, rows: Sequence[Mapping[str, Any]]) -> list[Any]:
        """The tools that each row's prompt is rendered with."""
        known = getattr(self._trainer, "_env_tools", {})
        return [known.get(name, self._trainer.tools) for name in self._names(rows)]

    def _names(self, rows: Sequence[Mapping[str, Any]]) -> list[Any]:
        return [row.get("environment") if self._named else None for row in rows]


def _with(message: Mapping[str, Any], said: Any) -> dict[str, Any]:
    """A message with more at its end; text and lists of parts may meet."""
    content: Any = message["content"]
    if isinstance(content, str) and isinstance(said, str):
        return {**message, "content": content + said}
    return {**message, "content": [*_parts(content), *_parts(said)]}


def _parts(content: Any) -> list[Any]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)


def _per_rollout(tools: Sequence[Any], instances: Sequence[Any]) -> dict[str, Any]:
    """What TRL's tool loop looks up by a rollout's number: its environment, and its tools by name, async ones apart."""

    def by_name(waits: bool) -> list[dict[str, Any]]:
        return [
            {tool.__name__: tool for tool in (*tools, *_methods(each)) if inspect.iscoroutinefunction(tool) is waits}
            for each in instances
        ]

    return {
        "environments": None if instances[0] is None else list(instances),
        "_sync_tool_dicts": by_name(False),
        "_async_tool_dicts": by_name(True),
    }


def _methods(instance: Any) -> list[Any]:
    """What an environment offers as tools."""
    names = [name for name, _ in inspect.getmembers(type(instance), predicate=inspect.isfunction)]
    return [getattr(instance, name) for name in names if name not in ("reset", "get_reward") and name[0] != "_"]


@contextmanager
def _given(trainer: Any, attributes: Mapping[str, Any]) -> Iterator[None]:
    """Attributes of the trainer; put back where TRL itself does not make them anew for each batch."""
    before = {name: getattr(trainer, name, None) for name in attributes}
    for name, value in attributes.items():
        setattr(trainer, name, value)
    try:
        yield
    finally:
        if not hasattr(trainer, "_environment_pool"):
            for name, value in before.items():
                setattr(trainer, name, value)
