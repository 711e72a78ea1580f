"""Names that verl and this driver reserve: no column of a data set and no argument of a reward function may use them.

verl passes every column of a prompt on as a keyword argument, and stores it together with the generated data. A column
with a reserved name would make every rollout fail, or silently replace a value of verl or of the driver.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

LIMIT = "__rollout_limit__"  # the driver's column with the maximum number of tokens of a rollout; 0: verl's own
SINGLE_TURN = "single_turn_agent"  # verl's agent loop without tools
_OF_THE_LOOP = "an argument of verl's agent loops"
_OF_THE_PROMPT = "set for each prompt by the trainer"
_GENERATED = "where verl stores what was generated or computed for a rollout"
_OF_THE_REWARD = "added by verl to what the reward receives"
_COLUMNS = {
    _OF_THE_LOOP: ("sampling_params", "trajectory", "trace", "session_id", "output", "validate", "priority", "self"),
    _OF_THE_PROMPT: ("uid", "__rollout_n__", LIMIT, "global_steps"),
    _OF_THE_REWARD: ("reward_scores", "tool_extra_fields", "__num_turns__", "prompt_len", "response_len"),
    _GENERATED: (
        *("prompts", "responses", "response_mask", "attention_mask", "input_ids", "position_ids", "loss_mask"),
        *("rollout_log_probs", "old_log_probs", "log_probs", "ref_log_prob", "entropys", "routed_experts", "metrics"),
        *("rm_scores", "token_level_scores", "token_level_rewards", "advantages", "returns", "values", "num_turns"),
        *("extra_fields", "multi_modal_data", "multi_modal_inputs", "mm_processor_kwargs", "mm_processor_output"),
        *("teacher_ids", "teacher_logprobs", "rollout_is_weights"),
    ),
}
_RESERVED_COLUMNS = {name: owner for owner, names in _COLUMNS.items() for name in names}
# Fields that verl writes into `extra_info` before it calls the reward function.
_RESERVED_INFO = {
    *("num_turns", "rollout_reward_scores", "turn_scores", "tool_rewards"),
    *("global_steps", "min_global_steps", "max_global_steps", "num_cached_tokens"),
}
# Keyword arguments that verl passes to the reward function. Equal names in `reward_kwargs` would replace them.
_REWARD_ARGUMENTS = frozenset(
    ("data_source", "solution_str", "ground_truth", "extra_info", "reward_router_address", "reward_model_tokenizer")
)
READ_IN_VALIDATION = frozenset(["__rollout_n__"])  # a column that verl reads in validation data: the number of rollouts


def refuse_columns(row: Iterable[str], extra_info: Any, files: str, allowed: frozenset[str] = frozenset()) -> None:
    """Raise an error for a data set with reserved column names. Their values would be lost, or replace values of verl.

    Args:
        row: names of the columns.
        extra_info: names of the fields of the column `extra_info`. None: there is no such column.
        files: the key of verl's configuration that names the data files.
        allowed: names that are not reserved in this data set.

    Raises:
        ValueError: columns have reserved names. The message lists them, and says what each name is used for.
    """
    reserved = [(name, _RESERVED_COLUMNS[name]) for name in row if name in _RESERVED_COLUMNS and name not in allowed]
    reserved += [(f"extra_info.{name}", _OF_THE_REWARD) for name in extra_info or () if name in _RESERVED_INFO]
    if reserved:
        listed = "; ".join(f"{name} ({owner})" for name, owner in reserved)
        raise ValueError(f"{files} has columns whose names are reserved: {listed}. Rename or remove them")


def refuse_turns(loops: Iterable[str], files: str) -> None:
    """Raise an error for a data set whose rollouts may have several turns, under a recipe with a limit on length.

    Args:
        loops: the values of the column `agent_name`, which chooses an agent loop for each prompt.
        files: as for `refuse_columns`.

    Raises:
        ValueError: a prompt has another agent loop than verl's of one turn.
    """
    if others := sorted({str(loop) for loop in loops} - {SINGLE_TURN}):
        raise ValueError(
            f"the recipe stops rollouts at a length (limit_at), which counts all turns of the model, so the column "
            f"agent_name of {files} must be {SINGLE_TURN} in every row, got {', '.join(others)}; change it, or leave "
            "limit_at out"
        )


def refuse_reward_arguments(arguments: Iterable[str]) -> None:
    """Raise a ValueError if `reward_kwargs` would replace arguments that verl passes to the reward function."""
    if taken := sorted(_REWARD_ARGUMENTS.intersection(arguments)):
        raise ValueError(
            f"reward.custom_reward_function.reward_kwargs must not set {', '.join(taken)}: verl passes the sample in these "
            "arguments, and every rollout would be scored on the value given there; use other names"
        )
