"""What foresight predicts from a prompt's own record, from its features, and from both, where prompts are visited again.

    python lab/experiments/records.py TASKS 0.15m [8m ...]        # TASKS: where the rungs' models are kept

No model is trained: outcomes are drawn by the exact success rates of a warmed-up model, which stay as they are. A pool
of 512 training prompts is visited for some epochs, each prompt once in an epoch, one rollout each. Printed after 1, 2, 4, 8
and 16 epochs: the AUC of the predicted rates for fresh outcomes of the same prompts, and the log-loss of a rollout, beside
those of the exact rates. Means over three seeds.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rollalloc.data.prompts import encode_prompts, load_prompts
from rollalloc.models.featurizer import features_of
from rollalloc.models.likelihood import exact_answers
from rollalloc.models.policy import Policy
from rollalloc.predict import quality
from rollalloc.predict.predictor import Predictor
from rollalloc.tasks.files import TaskFiles
from rollalloc.train.loading import one_thread
from rollalloc_lab.tasks import ladder
from rollalloc_lab.tasks.rungs import RUNGS

PROMPTS, EPOCHS, BATCH = 512, (1, 2, 4, 8, 16), 32
SEEDS = (0, 1, 2)
NO_RECORD = 1e9  # weight of the other experts in a record's prediction, with which the record says nothing
ARMS = {
    "features": (Predictor(record_weight=NO_RECORD), True),
    "record": (Predictor(), False),
    "both": (Predictor(), True),
}


def worth(said_P: NDArray[np.float64], rate_P: NDArray[np.float64]) -> tuple[float, float]:
    """AUC and log-loss of predictions for fresh outcomes, of which each prompt has as many as its rate says."""
    ones_P = np.ones(rate_P.size)
    loss = quality.log_losses(said_P[:, None], rate_P, ones_P)[0] / rate_P.size
    return quality.auc(said_P, rate_P, ones_P) or 0.0, float(loss)


def visited(
    predictor: Predictor, features: Mapping[str, NDArray[np.float32]], rate_P: NDArray[np.float64], seed: int
) -> list[tuple[float, float]]:
    """What the predictions are worth after each number of `EPOCHS`."""
    rng = np.random.default_rng(seed)
    memory = predictor.init(rate_P.size, {name: block.shape[1] for name, block in features.items()})
    everyone, found = np.arange(rate_P.size), []
    for epoch in range(1, EPOCHS[-1] + 1):
        for batch in np.array_split(rng.permutation(everyone), rate_P.size // BATCH):
            said_K = predictor(memory, features, batch)
            for prompt, said in zip(batch.tolist(), said_K.tolist(), strict=True):
                predictor.observe(memory, prompt, said, float(rng.random() < rate_P[prompt]), 1)
            if predictor.due(memory):
                predictor.refit(memory, features)
        if epoch in EPOCHS:
            found.append(worth(predictor(memory, features, everyone), rate_P))
    return found


def asked(files: TaskFiles, count: int) -> tuple[Policy, Sequence[tuple[int, ...]], NDArray[np.float64]]:
    """A task's model, the tokens of its first training prompts, and the model's exact success rates on them."""
    policy = Policy.load(str(files.model), device="cpu")
    prompts = encode_prompts(
        load_prompts(files.train), policy.tokenizer, context=policy.context, max_new_tokens=16, overlong="error"
    )
    tokens = prompts.tokens[:count]
    truths = [policy.answer(str(truth)) for truth in prompts.prompt_set.ground_truths[:count]]
    rate_P, _ = exact_answers(policy.model, tokens, truths, pad_id=policy.pad_id)
    return policy, tokens, rate_P


def of_rung(tasks: Path, name: str) -> tuple[dict[str, NDArray[np.float32]], NDArray[np.float64]]:
    """Features and exact rates of a rung's first training prompts."""
    policy, tokens, rate_P = asked(ladder.prepare(tasks / "ladder", RUNGS[name]), PROMPTS)
    blocks = features_of(policy.model, tokens, pad_id=policy.pad_id).blocks
    return {block: np.asarray(rows, np.float32) for block, rows in blocks.items()}, rate_P


def main(tasks: Path, names: list[str]) -> None:
    one_thread()
    print(f"| rung | predicted by | {' | '.join(f'after {epoch}' for epoch in EPOCHS)} |")
    print("|---" * (len(EPOCHS) + 2) + "|")
    for name in names:
        features, rate_P = of_rung(tasks, name)
        for arm, (predictor, reads) in ARMS.items():
            runs = [visited(predictor, features if reads else {}, rate_P, seed) for seed in SEEDS]
            cells = [f"{area:.3f}, {loss:.3f}" for area, loss in np.mean(runs, axis=0)]
            print(f"| {name} | {arm} | {' | '.join(cells)} |", flush=True)
        area, loss = worth(rate_P, rate_P)
        print(f"| {name} | exact rates | {area:.3f}, {loss:.3f}{' |' * len(EPOCHS)}")


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), sys.argv[2:])
