"""The recipes that are put through the kit."""

from dataclasses import replace

from rollalloc import recipes
from rollalloc.rules import prompts

PC = recipes.pilot_commit(4, 4, 4, 12)
RECIPES = {
    "grpo": recipes.grpo(4, 4),
    "dapo": recipes.dapo(4, 4, 12),
    "dapo_carry": recipes.dapo(4, 4, 12, "carry"),
    "dapo_max_candidates": recipes.dapo(4, 4, 12, max_candidates=16),
    "pilot_commit": PC,
    "pilot_commit_random": recipes.pilot_commit(4, 4, 4, 12, promote="random"),
    "pilot_commit_oldest": recipes.pilot_commit(4, 4, 4, 12, promote="oldest", max_candidates=24),
    "pilot_commit_most_recent": recipes.pilot_commit(4, 4, 4, 12, promote="most_recent"),
    "pilot_commit_fresh": recipes.pilot_commit(4, 4, 4, 12, max_staleness=0),
    "pilot_commit_fresh_random": recipes.pilot_commit(4, 4, 4, 12, max_staleness=0, promote="random"),
    "pilot_commit_one_step_old": recipes.pilot_commit(4, 4, 4, 12, max_staleness=1),
    "pilot_commit_reprobe": recipes.pilot_commit(4, 4, 4, 8, reprobe_every=2),
    "grpo_sample": recipes.grpo(4, 4, deviation="sample"),
    "pods": recipes.pods(4, 8, 4),
    "pods_max_reward": recipes.pods(4, 8, 4, rule="max_reward"),
    "pods_random": recipes.pods(4, 8, 4, rule="random"),
    "pods_percentile": recipes.pods(4, 8, 4, rule="percentile"),
    "darts_exact": recipes.darts(4, 3, 1),
    "darts_sampled": recipes.darts(4, 3, 1, tail="sampled"),
    "darts_none": recipes.darts(4, 3, 1, tail="none"),
    "pilot_commit_and_pods": recipes.mix(PC, recipes.pods(4, 8, 4)),
    "dapo_and_darts": recipes.mix(recipes.dapo(4, 4, 12), recipes.darts(4, 3, 1)),
    "dapo_and_darts_sampled": recipes.mix(recipes.dapo(4, 4, 12), recipes.darts(4, 3, 1, tail="sampled")),
    "racing": recipes.racing(4, (4, 8, 16), 12),
    "racing_stale": recipes.racing(4, (4, 8, 16), 12, 4),
    "posterior_and_pilot_commit": replace(PC, prompts=prompts.Posterior()),
    "in_order": replace(recipes.dapo(4, 4, 12, "carry"), prompts=prompts.InOrder()),
    "offered": replace(recipes.grpo(4, 4), prompts=prompts.AsOffered()),
    "offered_dapo_carry": replace(recipes.dapo(4, 4, 12, "carry"), prompts=prompts.AsOffered()),
    "offered_pilot_commit": replace(PC, prompts=prompts.AsOffered()),
}

TRACED = ("grpo", "dapo_carry", "pilot_commit_random", "darts_sampled", "racing_stale", "posterior_and_pilot_commit")
