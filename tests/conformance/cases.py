"""The recipes that are put through the kit."""

from dataclasses import replace
from math import inf

import numpy as np

from rollalloc import PromptTable, recipes
from rollalloc.core.recipe import Gate, Limit, Replay, Retire
from rollalloc.predict.predictor import Predictor
from rollalloc.recipes.foresight import Foresight
from rollalloc.recipes.mopps import Posterior
from rollalloc.rules import prompts, rows

PC = recipes.pilot_commit(4, 4, 4, 12)
# Fitted early and often, and cheap to copy: the kit copies a rule's memory at every decision.
QUICK = Predictor(ridges=(1.0,), events=48, first_fits=(8, 16), fit_every=32, track_every=8)


def foresight(n=2, exponent: float | None = 3.0, **how):
    """Foresight that predicts after a few rollouts."""
    rule = Foresight(exponent, pool=4, warm=8, predictor=QUICK)
    return replace(recipes.foresight(4, n, exponent, **{"neg": 0.3, "once": False} | how), prompts=rule)


def featured(prompts):
    """A data set with keys where it is small, priors of some prompts, and two blocks of features."""
    x_N = np.arange(prompts)
    return PromptTable(
        [f"p{x}" for x in x_N] if prompts < 10_000 else prompts,
        prior_N=np.where(x_N % 5, np.nan, 0.3),
        features={"length": (x_N % 7 - 3)[:, None], "kind": np.stack([x_N % 2, x_N % 3 - 1], 1)},
    )


def visited(prompts):
    """A data set of whose prompts most are known: failed, contested or solved."""
    return PromptTable(prompts, prior_N=np.resize([0.0, 0.3, 0.6, 1.0, np.nan], prompts))


RECIPES = {
    "grpo": recipes.grpo(4, 4),
    "dapo": recipes.dapo(4, 4, 12),
    "dapo_carry": recipes.dapo(4, 4, 12, "carry"),
    "dapo_max_candidates": recipes.dapo(4, 4, 12, max_candidates=16),
    "pilot_commit": PC,
    "pilot_commit_expiring_first": recipes.pilot_commit(4, 4, 4, 12, promote="expiring_first"),
    "pilot_commit_random": recipes.pilot_commit(4, 4, 4, 12, promote="random"),
    "pilot_commit_oldest": recipes.pilot_commit(4, 4, 4, 12, promote="oldest", max_candidates=24),
    "pilot_commit_most_recent": recipes.pilot_commit(4, 4, 4, 12, promote="most_recent"),
    "pilot_commit_fresh": recipes.pilot_commit(4, 4, 4, 12, max_staleness=0),
    "pilot_commit_fresh_random": recipes.pilot_commit(4, 4, 4, 12, max_staleness=0, promote="random"),
    "pilot_commit_one_step_old": recipes.pilot_commit(4, 4, 4, 12, max_staleness=1),
    "pilot_commit_streamed": recipes.streamed(PC),
    "pilot_commit_every_round": recipes.pilot_commit(4, 4, 4, 6, pilots="every_round"),
    "pilot_commit_n_effective": recipes.pilot_commit(4, 4, 4, 12, n_effective=2),
    "grpo_retire": recipes.grpo(4, 4).replace(retire=Retire(level=0.7, epochs=2, least=4)),
    "pilot_commit_reprobe": recipes.pilot_commit(4, 4, 4, 8, reprobe_every=2),
    "grpo_ahead": recipes.streamed(recipes.grpo(4, 4), ahead=2),
    "grpo_sample": recipes.grpo(4, 4, deviation="sample"),
    "pods": recipes.pods(4, 8, 4),
    "pods_max_reward": recipes.pods(4, 8, 4, rule="max_reward"),
    "pods_random": recipes.pods(4, 8, 4, rule="random"),
    "pods_percentile": recipes.pods(4, 8, 4, rule="percentile"),
    "darts_exact": recipes.darts(4, 3, 1),
    "darts_sampled": recipes.darts(4, 3, 1, tail="sampled"),
    "darts_whole": recipes.darts(4, 3, 1, tail="sampled", latency=((1, 1.0), (64, 3.0)), solved=0.5, share=0.5),
    "darts_none": recipes.darts(4, 3, 1, tail="none"),
    "darts_floor": recipes.darts(4, 3, 1, tail="sampled", least=5, normalise=True, unseen="recorded"),
    "darts_longest_by_size": recipes.darts(4, 3, 2, tail="sampled", longest_by="size"),
    "darts_lengths_of_trained": recipes.darts(4, 3, 2, tail="sampled", lengths_of="trained"),
    "pilot_commit_and_pods": recipes.mix(PC, recipes.pods(4, 8, 4)),
    "dapo_and_darts": recipes.mix(recipes.dapo(4, 4, 12), recipes.darts(4, 3, 1)),
    "dapo_and_darts_sampled": recipes.mix(recipes.dapo(4, 4, 12), recipes.darts(4, 3, 1, tail="sampled")),
    "racing": recipes.racing(4, (4, 8, 16), 12),
    "racing_stale": recipes.racing(4, (4, 8, 16), 12, 4),
    "posterior_and_pilot_commit": replace(PC, prompts=Posterior()),
    "in_order": replace(recipes.dapo(4, 4, 12, "carry"), prompts=prompts.InOrder()),
    "grpo_replay": recipes.grpo(4, 4, replay=8, replay_staleness=3),
    "reinforce": recipes.reinforce(8, neg=1.0),
    "reinforce_by_variance": recipes.reinforce(8),
    "reinforce_by_variance_of_chosen": replace(recipes.reinforce(6, 4), rows=rows.Random(2)),
    "reinforce_neg": recipes.reinforce(4, 2, neg=0.3),
    "reinforce_running": recipes.reinforce(8, baseline="running", neg=0.5, replay=4, replay_staleness=3),
    "rloo": recipes.rloo(4, 4),
    "dr_grpo": recipes.dr_grpo(4, 4),
    "raft": recipes.raft(8),
    "mopps": recipes.mopps(4, 4, target=0.4, decay=0.9, pool=3),
    "greso": recipes.greso(4, 4, 12),
    "knapsack": recipes.knapsack(6, 5, most=16),
    "vcrl": recipes.vcrl(4, 4, kappa=0.8, first=2, max_candidates=24),
    "cgrpo": recipes.cgrpo(4, (2, 4, 8), visits=5),
    "reinforce_ada": recipes.reinforce_ada(4, 4, 4, 3),
    "spo": recipes.spo(8),
    "spo_pairs": recipes.spo(4, 2),
    "foresight": foresight(replay=6, replay_staleness=3),
    "foresight_one_rollout": foresight(1),
    "foresight_by_variance": foresight(1, neg=None),
    "foresight_uniform": foresight(exponent=None),
    "foresight_features": foresight(1, replay=3, replay_staleness=2),
    "replay_all": replace(recipes.dapo(4, 4, 12, "carry"), replay=Replay(rows=9, times=1, max_staleness=3, above=-inf)),
    "gated": replace(recipes.reinforce(6), replay=Replay(rows=5, max_staleness=3, gate=Gate(most=0.5, pause=1))),
    "limited": replace(recipes.reinforce(6), limit=Limit(share=0.5, every=2, last=20)),
    "limited_stages": replace(PC, limit=Limit(share=0.8, every=3)),
    "offered": replace(recipes.grpo(4, 4), prompts=prompts.AsOffered()),
    "offered_dapo_carry": replace(recipes.dapo(4, 4, 12, "carry"), prompts=prompts.AsOffered()),
    "offered_pilot_commit": replace(PC, prompts=prompts.AsOffered()),
}

TABLES = {
    "foresight_features": featured,
    "mopps": featured,
    "knapsack": visited,
}
TRACED = (
    "grpo", "dapo_carry", "pilot_commit_random", "darts_sampled", "darts_whole", "racing_stale",
    "posterior_and_pilot_commit", "greso", "vcrl", "knapsack", "cgrpo", "reinforce_ada", "spo", "foresight",
)  # fmt: skip
