"""`TinkerTrainer`: a run of any recipe over the Tinker API."""

from __future__ import annotations

import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rollalloc.core.allocator import Allocator
from rollalloc.core.events import Order
from rollalloc.core.packing import describe
from rollalloc.core.recipe import Recipe, doubts
from rollalloc.data.feature_blocks import Features
from rollalloc.drivers.tinker.costs import Prices, Usage, bill
from rollalloc.drivers.tinker.episodes import Episodes, Wave
from rollalloc.drivers.tinker.remote_engine import EpisodeThread, RemoteEngine
from rollalloc.drivers.tinker.service import Service, in_thread
from rollalloc.drivers.tinker.update import RemoteUpdater
from rollalloc.files.names import ROLLOUTS
from rollalloc.recipes.streaming import streamed, streaming_notes
from rollalloc.runs.reader import newest_line
from rollalloc.train.config import Config
from rollalloc.train.evaluation import Evaluation, Interrupted, judged, wait_unless_stopped
from rollalloc.train.store import RunFolder, RunState
from rollalloc.train.trackers import Listener
from rollalloc.train.train import Loop

log = logging.getLogger(__name__)


class TinkerTrainer(Loop):
    """Trains a model at a service under a recipe. See `Loop` for `run`, `resume` and their errors.

    If the service fails, `run` raises `ServiceFailed`. Resume from the newest checkpoint when the service answers again.

    The configuration is the native trainer's, with these exceptions. A KL term, a dual clip and temperatures other than 1
    raise an error, because the service does not support them. `precision`, `tokens_per_forward`, `averaging`,
    `sampling.max_rows` and `sampling.kv_tokens` are ignored.

    Args:
        service: the model to train.
        recipe: decides which prompts get how many rollouts. Its budget ends the run.
        train: the training set.
        config: all other settings of the run.
        heldout: the evaluation set. An evaluation samples `config.eval_samples` rollouts of each prompt. The service
            bills these rollouts. None: no evaluation.
        prices: prices of tokens. None: the metrics show the cost in tokens, but not in money.
        features: features of the prompts, for a recipe that predicts success rates. None: the recipe predicts only from the
            rollouts of this run.
        folder: folder of the run, in the native trainer's format. Its file `model/tinker.json` has the service's paths of
            the trained weights. None: nothing is written.
        listener: called with each line of the metrics.

    Raises:
        ValueError: the service does not support some settings; the message names them.
    """

    def __init__(
        self,
        service: Service,
        recipe: Recipe,
        train: Episodes,
        config: Config,
        *,
        heldout: Episodes | None = None,
        prices: Prices | None = None,
        features: Features | None = None,
        folder: Path | None = None,
        listener: Listener | None = None,
    ) -> None:
        _check_supported(config, recipe)
        self.service, self.heldout, self.prices = service, heldout, prices
        self.thread = EpisodeThread(service.remote.request_seconds)
        place = None if folder is None else RunFolder(folder)
        blocks = None if features is None else features.blocks
        if service.remote.concurrency is not None:
            given, recipe = recipe, streamed(recipe, ahead=service.remote.ahead)
            for note in streaming_notes(given, recipe):
                log.info(note)
        allocator = Allocator(recipe, train.table(blocks), config.seed)
        logged = folder / ROLLOUTS if folder is not None and config.log_rollouts else None
        engine = RemoteEngine(service, train, config.sampling, self.thread, recipe.stopping, logged)
        updater = RemoteUpdater(service, config)
        _warn_of(recipe)
        super().__init__(
            keys=train.keys,
            state=RunState(*(config, allocator, engine, updater), lambda: _identity(service, train, heldout, config)),
            model=service,
            heldout=0 if heldout is None else len(heldout.keys),
            report=train.report,
            config=config,
            features=features,
            place=place,
            listener=listener,
        )

    def resume(self, *, accept_recipe: bool = False, accept_data: bool = False) -> int:
        """Resume as `Loop.resume` does. The cost includes tokens that were billed after the checkpoint, if the last line of
        the metrics counts them.

        Raises:
            ServiceFailed: the service has deleted the checkpoint's weights.
            ValueError: see `Loop.resume`; or `accept_data` is True.
        """
        if accept_data:
            raise ValueError(
                "accept_data is not supported at a service: resume with the prompts that the run began with, or start a new "
                "run"
            )
        last = None if self.folder is None else newest_line(self.folder)
        paid = Usage() if last is None else _usage(last.get("cost"))
        batches = super().resume(accept_recipe=accept_recipe)
        self.service.usage = self.service.usage.at_least(paid)
        self.counters.made |= self.bill()
        return batches

    def description(self) -> dict[str, Any]:
        return {
            "label": "tinker",
            "model": self.service.model,
            "seed": self.config.seed,
            "target": self.config.target,
            "tinker": describe(self.service.remote),
        }

    def bill(self) -> dict[str, Any]:
        return bill(self.service.usage, self.prices)

    def evaluate(self) -> Evaluation:
        assert self.heldout is not None
        samples, sampler = self.config.eval_samples, self.service.sampler()
        wave = Wave(self.service, sampler, self.config.sampling, lambda rollout: self.stop.by is not None)
        orders = [
            Order(prompt, prompt, 0, tuple(range(prompt * samples, (prompt + 1) * samples)))
            for prompt in range(len(self.heldout.keys))
        ]
        futures = [self.thread.start(self.heldout, order, wave) for order in orders]
        played = wait_unless_stopped(in_thread(lambda: self.thread.all_of(futures)), self.stop)
        if self.stop.by is not None:  # stopped rollouts have no scores, so there is no evaluation
            raise Interrupted
        generations = [rollout.trajectory.generation() for rollout in played]
        return judged(generations, [rollout.outcome for rollout in played], samples)


def _identity(service: Service, train: Episodes, heldout: Episodes | None, config: Config) -> dict[str, Any]:
    remote = service.remote
    return {
        "config": {name: value for name, value in config.identity().items() if name != "averaging"},
        "prompts": train.digest(),
        "heldout": None if heldout is None else heldout.digest(),
        "model": {
            "is": service.model,
            "rank": remote.rank,
            "loss": remote.loss,
            "waves": remote.concurrency is None,
        },
    }


def _usage(fields: Any) -> Usage:
    """The usage in a line of the metrics. An invalid field is read as 0, because somebody may have edited the file."""
    counts = {name: fields.get(name) for name in asdict(Usage())} if isinstance(fields, dict) else {}
    return Usage(**{name: count for name, count in counts.items() if type(count) is int and count >= 0})


def _check_supported(config: Config, recipe: Recipe) -> None:
    unsupported = {
        "a gate on replay (replay_moved)": recipe.gate is not None,
        "a limit on the length of rollouts (limit_at)": recipe.limit is not None,
        "loss.kl": config.loss.kl > 0,
        "loss.clip.dual": config.loss.clip.dual is not None,
        "sampling.temperature other than 1": config.sampling.temperature != 1,
    }
    if names := [name for name, is_set in unsupported.items() if is_set]:
        raise ValueError(f"the service does not support {', '.join(names)}; leave them at their defaults")


def _warn_of(recipe: Recipe) -> None:
    for doubt in doubts(recipe):
        log.warning(doubt)
    if recipe.stopping:
        log.warning(
            "the recipe stops rollouts early, but the Tinker API cannot abort a request: each rollout runs to its end and "
            "is billed, so that stopping saves nothing"
        )
    if recipe.reads_kl:
        log.warning(
            "the recipe discounts old outcomes by the KL divergence of each update, which the Tinker API does not measure: "
            "old outcomes are not discounted"
        )
