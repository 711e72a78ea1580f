"""What the gradients say of two settings of foresight, while it trains; tuning seeds, see LOG.md.

`python benchmarks/gradients.py neg TASKS TASK ...`: the weight of failures under which the mean gradient of a batch stands
out most from its noise. `python benchmarks/gradients.py gain TASKS TASK ...`: what one batch drawn with each exponent gains
on held-out prompts with one right answer, and how surely one batch tells one exponent from another.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from foresight import encoded, with_answers
from numpy.typing import NDArray

from rollalloc.bench.execution import one_thread
from rollalloc.bench.presets import TUNING_SEEDS, task_run
from rollalloc.core.events import Batch, Row
from rollalloc.engines.features import features_of
from rollalloc.engines.likelihood import completion_logprobs, exact_answers
from rollalloc.engines.native import Trainer
from rollalloc.engines.policy import Policy
from rollalloc.engines.sampler import Generation, Request, generate
from rollalloc.engines.update import Updater
from rollalloc.rewards.function import Scored, load_reward
from rollalloc.rewards.scorers import InlineScorer
from rollalloc.rules.beliefs import Foresight

MARKS = (320, 1920)  # rollouts paid
NEGS = (0.0, 0.03, 0.1, 0.3, 1.0)
EXPONENTS = (None, 0.0, 1.0, 3.0)
ROWS, BATCH, REPEATS, HELD = 192, 64, 8, 256
LEAST = 0.02  # added to a rate before its logarithm


@dataclass(frozen=True, slots=True)
class Stand:
    """A run of foresight between two batches."""

    trainer: Trainer
    rule: Foresight
    paid: int
    answers: tuple[tuple[int, ...], ...]  # of the held-out prompts
    heldout: tuple[tuple[int, ...], ...]

    def drawn(self, exponent: float | None, count: int, seed: int) -> tuple[list[int], NDArray[np.float64]]:
        """Prompts as the rule would draw them with that exponent, and their beliefs."""
        rng = np.random.default_rng([seed, self.paid])
        pool = rng.choice(len(self.trainer.train.tokens), 16 * BATCH, replace=False)
        features = self.trainer.features
        belief_K = self.rule.predictor(
            self.trainer.allocator._run.memory, features.blocks if features else {}, pool
        )  # a look inside, which no rule gets
        share_K = replace(self.rule, exponent=exponent).chances(belief_K)
        at = rng.choice(pool.size, count, replace=False, p=share_K)
        return pool[at].tolist(), belief_K[at]

    def rolled_out(self, prompts: list[int], seed: int) -> tuple[list[Generation], NDArray[np.float64]]:
        """A rollout of each prompt under the weights as they are, and its reward."""
        trainer, policy = self.trainer, self.trainer.policy
        asked = [Request(at, trainer.train.tokens[at], (number,)) for number, at in enumerate(prompts)]
        sampling = trainer.settings.sampling
        made = generate(policy.model, asked, sampling, eos_ids=policy.eos_ids, pad_id=policy.pad_id, seed=seed)
        scored = trainer.roller.submit(trainer.train, list(zip(prompts, made, strict=True))).result()
        return made, np.array([each.reward if isinstance(each, Scored) else 0.0 for each in scored])


def at_marks(task: str, seed: int, tasks: Path, look: Callable[[Stand], None], single: bool) -> None:
    """Train foresight with its tuned settings, and look at the marks."""
    run = task_run(task, "", "foresight", seed, tasks, target=None)
    policy, recipe = Policy.load(run.source.model, device="cpu"), run.made_recipe()
    train = encoded(run, policy, *run.source.prompts)
    held, answers = with_answers(run, policy, str(run.source.heldout)) if single else (train, ())
    features = features_of(policy.model, train.tokens, pad_id=policy.pad_id)
    marks, rule = list(MARKS), recipe.prompts
    assert isinstance(rule, Foresight)

    def listen(line: dict[str, Any]) -> None:
        if line["kind"] == "batch" and marks and line["rollouts_paid"] >= marks[0]:
            look(Stand(trainer, rule, marks.pop(0), answers[:HELD], tuple(held.tokens[:HELD])))

    settings = replace(run.settings, max_batches=-(-MARKS[-1] // BATCH))
    scorer = InlineScorer(load_reward(run.source.reward))
    trainer = Trainer(policy, recipe, train, scorer, settings, features=features, listener=listen)
    trainer.run()


# ------------------------------------------------------------------------------------------------------- failures' weight


def look_at_failures(stand: Stand) -> None:
    """The second moments of right and wrong rows, and the signal to noise of their weighted sums."""
    for name, exponent in (("drawn", stand.rule.exponent), ("uniform", None)):
        prompts, belief_R = stand.drawn(exponent, ROWS, 0)
        made, reward_R = stand.rolled_out(prompts, 1)
        right_R, over_R = reward_R > 0.5, reward_R - belief_R
        if right_R.all() or not right_R.any():
            continue
        for scale, gram_RR in grams(stand.trainer, prompts, made).items():
            norm_R = np.diag(gram_RR)
            ratio = norm_R[right_R].mean() / norm_R[~right_R].mean()
            strength = [signal_to_noise(gram_RR, np.where(right_R, over_R, neg * over_R)) for neg in NEGS]
            shown = " ".join(f"{neg:g}: {each:+.5f}" for neg, each in zip(NEGS, strength, strict=True))
            print(
                f"  {stand.paid:5d} {name:7s} {scale:5s} right {right_R.mean():.2f}, V right / V wrong {ratio:.3f}; "
                f"signal to noise of a row at neg {shown}",
                flush=True,
            )


def grams(trainer: Trainer, prompts: list[int], made: list[Generation]) -> dict[str, NDArray[np.float64]]:
    """Inner products of the rows' ∇ log π, shape (R, R), as they are and in units of the optimizer's steps."""
    policy, moments = trainer.policy, trainer.updater.optimizer.state
    parameters = [each for each in policy.model.parameters() if each.requires_grad]
    unit = torch.cat([(1 / (moments[each]["exp_avg_sq"].pow(0.25) + 1e-6)).flatten() for each in parameters])
    rows = []
    for prompt, one in zip(prompts, made, strict=True):
        logprobs_BT, _ = completion_logprobs(
            policy.model, [trainer.train.tokens[prompt]], [one.tokens], pad_id=policy.pad_id
        )
        rows.append(torch.cat([each.flatten() for each in torch.autograd.grad(logprobs_BT.sum(), parameters)]))
    plain = torch.stack(rows)
    return {name: (each @ each.T).double().numpy() for name, each in (("plain", plain), ("adam", plain * unit))}


def signal_to_noise(gram_RR: NDArray[np.float64], credit_R: NDArray[np.float64]) -> float:
    """‖E A∇‖² / E‖A∇‖², the first without bias, from pairs of different rows; below 0 by chance."""
    of_RR = gram_RR * np.outer(credit_R, credit_R)
    own = np.trace(of_RR)
    rows = len(credit_R)
    return float((of_RR.sum() - own) / (rows - 1) / own)


# -------------------------------------------------------------------------------------------------- what a batch gains


def look_at_gains(stand: Stand) -> None:
    """What a batch drawn with each exponent gains in the step after it, and the deviation of that over batches."""
    trainer = stand.trainer
    neg = getattr(trainer.allocator.recipe.advantage, "neg", 1.0)
    before_N = rates(stand)
    kept = deepcopy(trainer.policy.model.state_dict()), deepcopy(trainer.updater.optimizer.state_dict())
    gains: dict[float | None, NDArray[np.float64]] = {}
    for exponent in EXPONENTS:
        found = []
        for repeat in range(REPEATS):
            prompts, belief_R = stand.drawn(exponent, BATCH, 100 + repeat)
            made, reward_R = stand.rolled_out(prompts, 200 + repeat)
            over_R = reward_R - belief_R
            credit_R = np.where(over_R < 0, neg * over_R, over_R)
            version = trainer.allocator.version
            rows = [
                Row(number, at, number, float(credit), 1.0, version)
                for number, (at, credit) in enumerate(zip(prompts, credit_R, strict=True))
            ]
            a_small_step(trainer.updater)
            trainer.updater.update(Batch(tuple(rows), version), dict(enumerate(made)))
            trainer.updater.settings = trainer.settings
            after_N = rates(stand)
            logarithm = np.log(after_N + LEAST) - np.log(before_N + LEAST)
            found.append([(after_N - before_N).mean(), logarithm.mean(), sum(len(one.tokens) for one in made)])
            trainer.policy.model.load_state_dict(kept[0])
            trainer.updater.optimizer.load_state_dict(deepcopy(kept[1]))
        gains[exponent] = np.array(found)
    trainer.updater.steps -= REPEATS * len(EXPONENTS)
    for exponent, found in gains.items():
        mean, deviation = 100 * found.mean(0), 100 * found.std(0, ddof=1)
        print(
            f"  {stand.paid:5d} p {before_N.mean():.2f} exponent {exponent}: a step gains {mean[0]:+.3f} ± "
            f"{deviation[0]:.3f} points of accuracy, {mean[1]:+.3f} ± {deviation[1]:.3f} of log; {mean[2] / 100:.0f} tokens",
            flush=True,
        )


def a_small_step(updater: Updater) -> None:
    """Let the next step be what its batch alone does to it, a tenth of the whole: short enough to be linear."""
    betas = updater.settings.betas
    updater.settings = replace(updater.settings, learning_rate=updater.settings.learning_rate * (1 - betas[0]))
    for group in updater.optimizer.param_groups:
        group["betas"] = (0.0, betas[1])


def rates(stand: Stand) -> NDArray[np.float64]:
    """Exact success rates of the held-out prompts."""
    policy, sampling = stand.trainer.policy, stand.trainer.settings.sampling
    return exact_answers(
        policy.model, stand.heldout, stand.answers, pad_id=policy.pad_id, temperature=sampling.temperature
    )[0]


LOOKS = {"neg": look_at_failures, "gain": look_at_gains}

if __name__ == "__main__":
    one_thread()
    what, folder, *names = sys.argv[1:]
    for name in names:
        for one in TUNING_SEEDS[:1]:
            print(f"{what} {name} {one}")
            at_marks(name, one, Path(folder), LOOKS[what], single=what == "gain")
