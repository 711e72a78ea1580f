"""What the gradients say of foresight's `neg`, while it trains: `python benchmarks/gradients.py TASKS TASK ...`.

Of 192 rollouts at a time, drawn as foresight draws and uniformly: how much more the gradients of wrong ones vary than those
of right ones, whose ratio would be the best weight of failures if all prompts were alike; and how far the mean gradient
stands out from its noise under each weight. A tuning seed; see LOG.md.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from foresight import encoded
from numpy.typing import NDArray

from rollalloc.generate.sampler import Generation, Request, generate
from rollalloc.lab.bench.presets import task_run
from rollalloc.models.features import features_of
from rollalloc.models.likelihood import completion_logprobs
from rollalloc.models.policy import Policy
from rollalloc.rewards.function import Scored, load_reward
from rollalloc.rewards.scorers import InlineScorer
from rollalloc.rules.predictions import Foresight
from rollalloc.train.execution import one_thread
from rollalloc.train.native import Trainer

MARKS = (320, 1920)  # rollouts paid
NEGS = (0.0, 0.03, 0.1, 0.3, 1.0)
SEED, ROWS, POOL = 1000, 192, 1024


@dataclass(frozen=True, slots=True)
class Stand:
    """A run of foresight between two batches."""

    trainer: Trainer
    rule: Foresight
    paid: int

    def drawn(self, exponent: float | None) -> tuple[list[int], NDArray[np.float64]]:
        """Prompts as the rule would draw them with that exponent, and their predictions."""
        rng = np.random.default_rng([0, self.paid])
        pool = rng.choice(len(self.trainer.train.tokens), POOL, replace=False)
        features = self.trainer.features
        memory = self.trainer.allocator._run.memory  # a look inside, which no rule gets
        belief_K = self.rule.predictor(memory, features.blocks if features else {}, pool)
        share_K = replace(self.rule, exponent=exponent).chances(belief_K)
        at = rng.choice(pool.size, ROWS, replace=False, p=share_K)
        return pool[at].tolist(), belief_K[at]

    def rolled_out(self, prompts: list[int]) -> tuple[list[Generation], NDArray[np.float64]]:
        """A rollout of each prompt under the weights as they are, and its reward."""
        trainer, policy = self.trainer, self.trainer.policy
        asked = [Request(at, trainer.train.tokens[at], (number,)) for number, at in enumerate(prompts)]
        sampling = trainer.settings.sampling
        made = generate(policy.model, asked, sampling, eos_ids=policy.eos_ids, pad_id=policy.pad_id, seed=1)
        scored = trainer.roller.submit(trainer.train, list(zip(prompts, made, strict=True))).result()
        return made, np.array([each.reward if isinstance(each, Scored) else 0.0 for each in scored])


def at_marks(task: str, tasks: Path) -> None:
    """Train foresight with its tuned settings, and look at the marks."""
    run = task_run(task, "", "foresight", SEED, tasks, target=None)
    policy, recipe = Policy.load(run.source.model, device="cpu"), run.made_recipe()
    train = encoded(run, policy, *run.source.prompts)
    features = features_of(policy.model, train.tokens, pad_id=policy.pad_id)
    marks, rule = list(MARKS), recipe.prompts
    assert isinstance(rule, Foresight)

    def listen(line: dict[str, Any]) -> None:
        if line["kind"] == "batch" and marks and line["rollouts_paid"] >= marks[0]:
            look_at_failures(Stand(trainer, rule, marks.pop(0)))

    settings = replace(run.settings, max_batches=-(-MARKS[-1] // recipe.groups))
    scorer = InlineScorer(load_reward(run.source.reward))
    trainer = Trainer(policy, recipe, train, scorer, settings, features=features, listener=listen)
    trainer.run()


def look_at_failures(stand: Stand) -> None:
    """The second moments of right and wrong rows, and the signal to noise of their weighted sums."""
    for name, exponent in (("drawn", stand.rule.exponent), ("uniform", None)):
        prompts, belief_R = stand.drawn(exponent)
        made, reward_R = stand.rolled_out(prompts)
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


if __name__ == "__main__":
    one_thread()
    folder, *names = sys.argv[1:]
    for name in names:
        print(name)
        at_marks(name, Path(folder))
