"""A callback for stock `GRPOTrainer`, without a recipe. It warns when most groups have equal rewards."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from transformers import TrainerCallback

from rollalloc.core.teaching import WINDOW, Teaching, silent

log = logging.getLogger(__name__)


class SilenceCallback(TrainerCallback):
    """Warns when most recent groups have equal rewards, so that their loss is zero. It repeats the warning only if the share
    becomes much larger.

        GRPOTrainer(..., callbacks=[SilenceCallback()])

    It reads `frac_reward_zero_std` and `reward` from TRL's log. A resumed run first reads the saved log, so that it warns at
    the same steps as an uninterrupted run.
    """

    def __init__(self) -> None:
        self._teaching, self._step = Teaching(), 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._teaching, self._step = Teaching(), 0
        for logged in state.log_history:
            self._take(args, state, logged["step"], logged)

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **_: Any) -> None:
        if self._take(args, state, state.global_step, logs or {}) and state.is_world_process_zero:
            share, reward = silent(self._teaching.shares())[0], (logs or {}).get("reward", float("nan"))
            if share == 1:
                log.warning(
                    "check the reward function: of the last rollouts no two to the same prompt got different rewards, so "
                    "the loss is zero; mean reward %.3g. Test it with an answer that you know to be right, and with one "
                    "that is wrong. If it is correct, the prompts are too hard or too easy for the model",
                    reward,
                )
                return
            log.warning(
                "%.0f%% of the last %s rollouts were in groups of equal rewards, whose loss is zero; mean reward %.3g. "
                "If they are all wrong, easier prompts or a stronger model would help; if all right, harder prompts",
                *(100 * share, f"{WINDOW:,}", reward),
            )

    def _take(self, args: Any, state: Any, step: int, logs: Mapping[str, Any]) -> bool:
        """Count the rollouts since the last log entry. Return whether to warn."""
        if (share := logs.get("frac_reward_zero_std")) is None or step <= self._step:
            return False
        rows = args.per_device_train_batch_size * args.world_size * args.gradient_accumulation_steps
        # TRL trains on each rollout `num_iterations` times.
        rollouts = (step - self._step) * max(1, rows // args.num_iterations)
        self._step = step
        equal = round(share * rollouts)
        self._teaching.add({"all_alike": equal, "mixed": rollouts - equal})
        self._teaching.after_batch()
        return self._teaching.should_warn
