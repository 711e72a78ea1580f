"""What does a projection of wide features cost foresight's predictions, and what does it save?

    python lab/experiments/projection.py TASKS 0.15m 8m 8m-u      # TASKS: where the models are kept; -u: the U-shaped twin

No model is trained: outcomes are drawn by the exact success rates of the warmed-up model. The features are the sums of the
hidden states of all layers, as wide as they are, and projected by `own_features`. One rollout is drawn for each of the
first prompts of a random order; a logistic regression is fitted to them as `Predictor` fits it (ridges 0.1, 1 and 10, of
which the best on average is printed). Printed: AUC and log-loss for fresh outcomes of 1,024 other prompts, beside those of
the exact rates, and the CPU seconds of a fit; means over three seeds of the projection and the outcomes.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from records import asked, worth
from rollalloc.data.feature_blocks import own_features, standardised
from rollalloc.models.featurizer import HiddenSums
from rollalloc.models.likelihood import evaluating
from rollalloc.predict import ridge
from rollalloc.train.loading import one_thread
from rollalloc_lab.tasks import ladder, twins
from rollalloc_lab.tasks.rungs import RUNGS

PROMPTS, JUDGED, VISITS = 4096, 1024, (320, 1_280, 3_072)
WIDTHS = (16, 64, 256, 1_024)
RIDGES, SEEDS = (0.1, 1.0, 10.0), (0, 1, 2)


def of_task(tasks: Path, name: str) -> tuple[NDArray[np.float32], NDArray[np.float64]]:
    """The sums of the hidden states of a task's training prompts, shape (N, layers · width), and the exact rates."""
    rung = name.removesuffix(twins.SUFFIX)
    ladders, twin = tasks / "ladder", name != rung
    files = twins.prepare(ladders, RUNGS[rung], twins.TWINS[rung]) if twin else ladder.prepare(ladders, RUNGS[rung])
    policy, tokens, rate_N = asked(files, PROMPTS)
    with evaluating(policy.model):
        made = list(HiddenSums(policy.model, tokens, policy.pad_id)(np.arange(len(tokens))))
    rows_N = np.concatenate([rows_B for rows_B, _ in made])
    sums_ND = torch.cat([sums_LBH.transpose(0, 1).flatten(start_dim=1) for _, sums_LBH in made]).numpy()
    return sums_ND[np.argsort(rows_N)], rate_N


def projected(sums_ND: NDArray[np.float32], width: int, seed: int) -> NDArray[np.float32]:
    """The sums with so many columns, as for a feature file of one's own."""
    return own_features({"sums": sums_ND}, width=width, seed=seed).blocks["sums"]


def fitted(
    block_ND: NDArray[np.float32], rate_N: NDArray[np.float64], visits: int, seed: int
) -> tuple[NDArray[np.float64], float]:
    """AUC and log-loss by ridge, shape (ridges, 2), after so many visits, and the CPU seconds of the fit."""
    rng = np.random.default_rng(seed)
    order_N = rng.permutation(rate_N.size)
    seen_K, judged_P = order_N[JUDGED : JUDGED + visits], order_N[:JUDGED]
    hits_K = (rng.random(rate_N.size) < rate_N)[seen_K].astype(float)
    ones_K, start = np.ones(visits), time.process_time()
    centre_D, scale_D = ridge.measure(block_ND[seen_K])
    phi_KF = ridge.design(block_ND[seen_K], centre_D, scale_D).astype(np.float64)
    theta_RF = np.zeros((len(RIDGES), phi_KF.shape[1]))
    theta_RF, basis_FF, spread_RF = ridge.fit(phi_KF, hits_K, ones_K, ones_K, 0 * ones_K, RIDGES, theta_RF)
    seconds = time.process_time() - start
    mean_PR, variance_PR = ridge.moments(
        ridge.design(block_ND[judged_P], centre_D, scale_D), theta_RF, basis_FF, spread_RF
    )
    said_PR = np.clip(ridge.sigmoid(ridge.flatness(variance_PR) * mean_PR), 1e-3, 1 - 1e-3)
    return np.array([worth(said_P, rate_N[judged_P]) for said_P in said_PR.T]), seconds


def main(tasks: Path, names: list[str]) -> None:
    one_thread()
    print(f"| task | columns | {' | '.join(f'after {visits:,} visits' for visits in VISITS)} | seconds of a fit |")
    print("|---" * (len(VISITS) + 3) + "|")
    for name in names:
        sums_ND, rate_N = of_task(tasks, name)
        whole = sums_ND.shape[1]
        for width in (*(each for each in WIDTHS if each < whole), whole):
            blocks = [standardised(sums_ND) if width == whole else projected(sums_ND, width, seed) for seed in SEEDS]
            cells: list[str] = []
            seconds = 0.0
            for visits in VISITS:
                made = [fitted(block_ND, rate_N, visits, seed) for block_ND, seed in zip(blocks, SEEDS, strict=True)]
                by_ridge = np.mean([each for each, _ in made], axis=0)
                area, loss = by_ridge[np.argmin(by_ridge[:, 1])]
                cells.append(f"{area:.3f}, {loss:.3f}")
                seconds = float(np.mean([taken for _, taken in made]))
            print(f"| {name} | {width:,} | {' | '.join(cells)} | {seconds:.2f} |", flush=True)
        judged = [rate_N[np.random.default_rng(seed).permutation(rate_N.size)[:JUDGED]] for seed in SEEDS]
        area, loss = np.mean([worth(rate_P, rate_P) for rate_P in judged], axis=0)
        print(f"| {name} | exact rates | {area:.3f}, {loss:.3f}{' |' * (len(VISITS) + 1)}")


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), sys.argv[2:])
