"""Single-turn environments of `verifiers` 0.4: check whether they can be scored here, and use their rubric as a reward.

An environment is a package that exports a taskset. `rollalloc data environment` writes its prompts, each with its task in
`extra_info`. `compute_score` recreates the task, and applies the task's rewards to the completion as the only answer.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from rollalloc.files.text import error_text
from rollalloc.rewards.function import summed

# Imported here and not in the reward function, so that the time limit of a sample does not include importing.
try:
    import verifiers.v1 as verifiers  # pyright: ignore[reportMissingImports]
    from verifiers.v1.envs.single_agent import SingleAgentEnv  # pyright: ignore[reportMissingImports]
    from verifiers.v1.graph import MessageNode  # pyright: ignore[reportMissingImports]
    from verifiers.v1.state import state_cls  # pyright: ignore[reportMissingImports]
    from verifiers.v1.trace import AgentInfo, ModelCall, TraceTask  # pyright: ignore[reportMissingImports]
    from verifiers.v1.utils import loaders  # pyright: ignore[reportMissingImports]
except ImportError as error:
    raise ImportError(
        f"an environment of verifiers needs verifiers 0.4 ({error}); pip install 'rollalloc[environments]'"
    ) from error

REWARD = f"{__name__}:compute_score"
NAME, CONFIG, TASK = "environment", "environment_config", "task"  # in `extra_info`
_SANDBOX_HOOKS = ("setup", "finalize", "stage_verifier")
_ELSEWHERE = "train it with TRL's environment_factory or verl's tool_agent (docs/agents.md), or with prime-rl"


def load_taskset(name: str, config: Mapping[str, Any]) -> Any:
    """Load an environment's taskset. Its rollouts must be single answers that are scored without a sandbox or a key.

    Args:
        name: name of an installed package, as `vf-eval` takes it.
        config: configuration of its taskset.

    Raises:
        ImportError: the package is not installed.
        ValueError: the environment cannot be used here, or does not accept the config; the message says why.
    """
    try:
        environment = loaders.environment_class(name)
        taskset = loaders.load_taskset(loaders.taskset_config_type(name).model_validate({"id": name, **config}))
    except ModuleNotFoundError as error:
        raise ImportError(
            f"environment {name!r}: {str(error).rstrip('.')}; install its package where rollalloc is installed"
        ) from error
    except (Exception, SystemExit) as error:  # importing a package can raise anything, for example if a key is missing
        raise ValueError(
            f"environment {name!r} is not a taskset of verifiers 0.4, or its config is wrong, or its package needs "
            f"something that is missing ({error_text(error)})"
        ) from error
    if environment is not SingleAgentEnv:
        raise ValueError(f"environment {name!r} has several agents or turns ({environment.__name__}); {_ELSEWHERE}")
    if loaders.default_harness_id(name) == name:
        raise ValueError(
            f"environment {name!r} has a harness of its own, so its rollouts can have several turns; {_ELSEWHERE}"
        )
    if type(taskset).toolsets(taskset.config):
        raise ValueError(
            f"environment {name!r} gives the model tools, so its rollouts have several turns; {_ELSEWHERE}"
        )
    return taskset


def check_task(name: str, task: Any) -> None:
    """Raise an error if a task needs anything besides one answer and a rubric, for example tools, a sandbox or a judge.

    Args:
        name: name of the environment.
        task: a `verifiers` task.

    Raises:
        ValueError: the message says what the task needs, and where it can be trained.
    """
    base = verifiers.Task
    of_task = f"environment {name!r}, {type(task).__name__}"
    if type(task).toolsets(task.config):
        raise ValueError(f"{of_task} gives the model tools, so its rollouts have several turns; {_ELSEWHERE}")
    if task.hooks("stop"):
        raise ValueError(f"{of_task} stops a conversation by rules of its own, so it has several turns; {_ELSEWHERE}")
    if task.data.prompt is None:
        raise ValueError(f"{of_task} lets a user open the conversation, so it has several turns; {_ELSEWHERE}")
    if not task.data.prompt or not all(isinstance(message["content"], str) for message in prompt_of(task.data)):
        raise ValueError(f"{of_task} has a prompt that is empty or not text; only prompts of text can be exported")
    if task.config.judges:
        raise ValueError(f"{of_task} is scored by a judge, a model that needs a server and a key; {_ELSEWHERE}")
    hooks = [hook for hook in _SANDBOX_HOOKS if getattr(type(task), hook) is not getattr(base, hook)]
    needs = [fn.__name__ for kind in ("reward", "metric") for fn in task.hooks(kind) if _needs_runtime(fn)]
    if task.NEEDS_CONTAINER or task.data.image or task.data.artifacts or hooks or needs:
        what = ", ".join([*hooks, *needs]) or "its container"
        raise ValueError(f"{of_task} needs a sandbox, for {what}; {_ELSEWHERE}")
    if not task.hooks("reward"):
        raise ValueError(f"{of_task} has no reward; expected a method with @vf.reward")
    if (declared := loaders.task_type(name)) is not type(task):
        raise ValueError(
            f"{of_task} is not the class that the taskset declares, {declared.__name__}: the rubric of that class would "
            f"score the task; {_ELSEWHERE}"
        )


async def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]
) -> dict[str, float] | None:
    """Score a completion by its environment's rubric.

        score = Σ_k weight_k · reward_k

    Args:
        data_source: not used.
        solution_str: the completion, which becomes the assistant's only message.
        ground_truth: not used, because the task contains it.
        extra_info: `extra_info` of a prompt that `rollalloc data environment` wrote.

    Returns:
        `score`, and each reward and metric by name; None if no reward has a value.

    Raises:
        ValueError: `extra_info` has no task of an environment.
    """
    missing = [name for name in (NAME, TASK) if not isinstance(extra_info.get(name), str)]
    if missing:
        raise ValueError(
            f"extra_info has no {' and no '.join(missing)}; make the prompts with `rollalloc data environment NAME`"
        )
    task = _task(extra_info[NAME], extra_info.get(CONFIG) or "{}", extra_info[TASK])
    trace = _trace(task, solution_str)
    await task.score(trace, None)
    if all(reward is None for reward in trace.rewards.values()):
        return None
    parts = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
    parts |= {name: value for name, value in trace.metrics.items() if value is not None}
    return {**{f"of_{name}": float(value) for name, value in parts.items()}, "score": summed([trace.reward])}


@lru_cache(4096)
def _task(name: str, config: str, data: str) -> Any:
    """Create a task from its data, without loading the other tasks of its taskset."""
    kind = loaders.task_type(name)
    settings = loaders.taskset_config_type(name).model_validate({"id": name, **json.loads(config)})
    return kind(kind.data_type().model_validate_json(data), settings.task)


def _trace(task: Any, completion: str) -> Any:
    """The trace of one answer to a task."""
    described = TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
    agent, state = AgentInfo(config=verifiers.AgentConfig()), state_cls(type(task))()
    trace = verifiers.Trace(task=described, agent=agent, state=state)
    messages = [message for message in prompt_of(task.data) if message["role"] in ("system", "user", "assistant")]
    for message in [*messages, {"role": "assistant", "content": completion}]:
        parent = len(trace.nodes) - 1 if trace.nodes else None
        trace.nodes.append(MessageNode(parent=parent, message=message, sampled=False))
    trace.nodes[-1].sampled = True
    trace.calls.append(ModelCall(node=len(trace.nodes) - 1, finish_reason="stop"))
    trace.stop_condition, trace.is_completed, trace.ok = "agent_completed", True, True
    return trace


def prompt_of(data: Any) -> list[dict[str, Any]]:
    """The messages that a task's conversation begins with."""
    system = [] if data.system_prompt is None else [{"role": "system", "content": data.system_prompt}]
    if isinstance(data.prompt, str):
        return [*system, {"role": "user", "content": data.prompt}]
    return [*system, *(message.model_dump(mode="json", exclude_none=True) for message in data.prompt)]


def _needs_runtime(function: Any) -> bool:
    """Whether a reward or metric needs the sandbox in which a rollout ran."""
    parameter = inspect.signature(function).parameters.get("runtime")
    return parameter is not None and parameter.default is inspect.Parameter.empty
