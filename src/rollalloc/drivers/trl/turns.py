"""Rollouts with TRL's tools and environments: turns of the model, with the tools' answers between them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import numpy as np

from rollalloc.drivers.trl.rollout import Rollout, decode
from rollalloc.generate.sampler import Generation

_NO_PROMPT = [{"role": "user", "content": ""}]  # for a row without a prompt; the environment adds text


class Turns:
    """Generates rollouts of several turns, with TRL's tools and environments.

    TRL's own loop calls the tools. The driver's generator generates the turns.

    Args:
        trainer: TRL's trainer.
        generate: the driver's generator.
        tools: TRL's `tools`.
        factory: TRL's `environment_factory`.
    """

    def __init__(self, trainer: Any, generate: Any, tools: Sequence[Any] | None, factory: Any) -> None:
        self._trainer, self._generate, self._tools = trainer, generate, tuple(tools or ())
        self._environments = None if factory is None else _Environments(trainer, factory)

    def __call__(
        self, prompt_of: Mapping[int, int], rows: Sequence[Mapping[str, Any]]
    ) -> tuple[list[Rollout], dict[str, Any]]:
        """Generate rollouts with all their turns.

        Args:
            prompt_of: index of the prompt, by the rollout's id.
            rows: for each rollout, the row of its prompt in the data set.

        Returns:
            The rollouts, and the values that TRL averages into its metrics of tool calls.

        Raises:
            ValueError: a row names an unknown environment.
        """
        try:
            return self._play(prompt_of, rows) if prompt_of else ([], {})
        finally:
            self._generate.keep_up()  # because other processes may still be generating turns

    def _play(
        self, prompt_of: Mapping[int, int], rows: Sequence[Mapping[str, Any]]
    ) -> tuple[list[Rollout], dict[str, Any]]:
        trainer, generate = self._trainer, self._generate
        instances = [None] * len(rows) if self._environments is None else self._environments.take(rows)
        with _given(trainer, _per_rollout(self._tools, instances)):
            prompts = [row.get("prompt", _NO_PROMPT) for row in rows]
            if self._environments is not None:
                prompts = self._environments.begin(instances, prompts, rows)
            talks = deepcopy(prompts)  # because TRL's tool loop appends messages
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
            Rollout(
                prompt=prompt,
                prompt_tokens=pairs[at][0],
                made=Generation(rollout, pairs[at][1], likely[at], truncated=pairs[at][1][-1] not in generate.eos_ids),
                texts=(prompts[at], completions[at]),
                own=masks[at] and tuple(map(bool, masks[at][: len(pairs[at][1])])),
                environment=instances[at],
            )
            for at, (rollout, prompt) in enumerate(prompt_of.items())
        ], figures


class _Environments:
    """A pool of environment instances, one per rollout of a batch. The pool reuses instances, and creates missing ones."""

    def __init__(self, trainer: Any, factory: Any) -> None:
        self._trainer = trainer
        self._named = isinstance(factory, Mapping)
        self._factories: Mapping[Any, Any] = factory if isinstance(factory, Mapping) else {None: factory}
        # TRL has created instances to read their tools. These instances are used first.
        made = getattr(trainer, "_environment_pool", None)
        self._pool: dict[Any, list[Any]] = {None: list(trainer.environments)} if made is None else made

    def take(self, rows: Sequence[Mapping[str, Any]]) -> list[Any]:
        """A separate instance for each row.

        Raises:
            ValueError: a row names an unknown environment.
        """
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
        # TRL reads these names when it renders prompts and parses answers.
        self._trainer._batch_environments = self._names(rows)
        return found

    def begin(self, instances: Sequence[Any], prompts: Sequence[Any], rows: Sequence[Mapping[str, Any]]) -> list[Any]:
        """Reset each instance with its row. Return the prompts, each with the environment's first observation at its end."""
        begun: list[Any] = []
        for instance, prompt, row in zip(instances, prompts, rows, strict=True):
            said = instance.reset(**{key: row[key] for key in row if not (self._named and key == "environment")})
            begun.append(prompt if said is None else [*prompt[:-1], _with(prompt[-1], said)])
        return begun

    def tools(self, rows: Sequence[Mapping[str, Any]]) -> list[Any]:
        """For each row, the tools with which its prompt is rendered."""
        known = getattr(self._trainer, "_env_tools", {})
        return [known.get(name, self._trainer.tools) for name in self._names(rows)]

    def _names(self, rows: Sequence[Mapping[str, Any]]) -> list[Any]:
        return [row.get("environment") if self._named else None for row in rows]


def _with(message: Mapping[str, Any], said: Any) -> dict[str, Any]:
    """A message with `said` at the end of its content. The content is text if both are text, otherwise a list of parts."""
    content: Any = message["content"]
    if isinstance(content, str) and isinstance(said, str):
        return {**message, "content": content + said}
    return {**message, "content": [*_parts(content), *_parts(said)]}


def _parts(content: Any) -> list[Any]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)


def _per_rollout(tools: Sequence[Any], instances: Sequence[Any]) -> dict[str, Any]:
    """Attributes that TRL's tool loop reads, with one entry per rollout: environments, sync tools and async tools."""

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
    """The methods that an environment offers as tools: all public methods except `reset` and `get_reward`."""
    names = [name for name, _ in inspect.getmembers(type(instance), predicate=inspect.isfunction)]
    return [getattr(instance, name) for name in names if name not in ("reset", "get_reward") and name[0] != "_"]


@contextmanager
def _given(trainer: Any, attributes: Mapping[str, Any]) -> Iterator[None]:
    """A context in which the trainer has these attributes. For TRL without an environment pool, it restores old values."""
    before = {name: getattr(trainer, name, None) for name in attributes}
    for name, value in attributes.items():
        setattr(trainer, name, value)
    try:
        yield
    finally:
        if not hasattr(trainer, "_environment_pool"):
            for name, value in before.items():
                setattr(trainer, name, value)
