"""Pilot-Commit over the Tinker API, with its cost so far. Needs TINKER_API_KEY, or TINKER_BASE_URL of a server of your own:

python examples/tinker_pilot_commit.py train.parquet runs/tinker
"""

import sys
from dataclasses import replace
from pathlib import Path

from rollalloc import Budget, recipes
from rollalloc.data.prompts import encode_prompts, load_prompts
from rollalloc.drivers.tinker import Prices, Remote, Rewarded, Service, TinkerTrainer
from rollalloc.models.settings import Sampling
from rollalloc.rewards.scorers import WorkerScorer
from rollalloc.train.config import Config


def main(prompts: str, out: str) -> None:
    service = Service("Qwen/Qwen3-8B", Remote(rank=32), seed=0)
    tokenizer = service.tokenizer()
    train = encode_prompts(load_prompts(prompts), tokenizer, context=32_768, max_new_tokens=2048)
    recipe = recipes.pilot_commit(groups=16, n_pilot=4, n_commit=12, gen_groups=48)
    with WorkerScorer("rollalloc.rewards.math:compute_score") as scorer:
        trainer = TinkerTrainer(
            service,
            replace(recipe, budget=Budget(run_rollouts=20_000)),
            Rewarded(train, scorer, tokenizer.decode),
            Config(sampling=Sampling(max_new_tokens=2048), learning_rate=4e-5, checkpoint_every=10),
            prices=Prices(prefill=0.13, sampled=0.40, trained=0.40),  # look them up: a million tokens, in USD
            folder=Path(out),
            listener=lambda line: print(line["kind"], line["rollouts_paid"], line["money"], line["currency"]),
        )
        if any(Path(out, "checkpoints").glob("[0-9]*")):
            trainer.resume()
        print(trainer.run())


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python examples/tinker_pilot_commit.py PROMPTS OUT")
    main(*sys.argv[1:])
