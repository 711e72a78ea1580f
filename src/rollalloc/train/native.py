"""The native trainer: one process, one model, any recipe.

What a run does is `loop.Loop`: ask the allocator, generate what it orders, tell it the scores, train on the batch it
returns, tell it that the weights changed. Everything a recipe decides, it decides in the core.
"""

from __future__ import annotations

from pathlib import Path

from rollalloc.core.allocator import Allocator
from rollalloc.core.recipe import Recipe, refuse_unmeasured
from rollalloc.data.features import Features
from rollalloc.data.prompts import EncodedPrompts
from rollalloc.files.names import ROLLOUTS
from rollalloc.generate.engine import LocalEngine
from rollalloc.generate.stream.async_engine import AsyncEngine
from rollalloc.generate.stream.begin import begin
from rollalloc.generate.sync_engine import SyncEngine
from rollalloc.models.behaviour import Behaviour
from rollalloc.models.policy import Policy
from rollalloc.processes.stopping import Stopped, StopRequest
from rollalloc.rewards.scorers import Scorer
from rollalloc.train.config import Config
from rollalloc.train.evaluation import Evaluation, HeldOut, evaluate
from rollalloc.train.folder import RunFolder
from rollalloc.train.grid import Grid, patient
from rollalloc.train.loop import Listener, Loop
from rollalloc.train.state import NativeState
from rollalloc.train.update import Updater

__all__ = ["Config", "HeldOut", "Listener", "Stopped", "Trainer"]


class Trainer(Loop):
    """Trains a policy under a recipe.

    Args:
        policy: the model, or adapters in it (`Policy.with_lora`); trained in place.
        recipe: its budget ends the run.
        train: prompts to train on.
        scorer: rewards.
        config: everything else.
        heldout: prompts to evaluate on; None: no evaluation.
        features: of the prompts to train on, in their order (`rollalloc.models.features.features_of`), for a recipe that
            predicts. None: it predicts from what it sees during the run alone.
        folder: gets metrics, checkpoints and the model; None: nothing is written. One that holds a run is refused, unless
            it is resumed.
        listener: called with each line of the metrics, for progress.
    """

    def __init__(
        self,
        policy: Policy,
        recipe: Recipe,
        train: EncodedPrompts,
        scorer: Scorer,
        config: Config,
        *,
        heldout: HeldOut | None = None,
        features: Features | None = None,
        folder: Path | RunFolder | None = None,
        listener: Listener | None = None,
    ) -> None:
        self.policy, self.train, self.scorer, self.heldout, self.config = policy, train, scorer, heldout, config
        if config.engine == "sync":
            refuse_unmeasured(recipe, "the synchronous engine")
        place = RunFolder(folder) if isinstance(folder, Path) else folder
        allocator = Allocator(
            recipe, train.prompt_set.table(None if features is None else features.blocks), config.seed
        )
        logged = place.path / ROLLOUTS if place is not None and config.log_rollouts else None
        self.behaviour = Behaviour(policy, config.sampling_dtype, plain=config.engine == "async")
        engine = self._engine_of_run(recipe, logged)
        updater = Updater(policy, train.tokens, config)
        state = NativeState(policy, train, heldout, config, allocator, engine, updater)
        super().__init__(
            allocator=allocator,
            keys=train.prompt_set.keys,
            engine=engine,
            updater=updater,
            state=state,
            grid=Grid(self._measure, 0 if heldout is None else len(heldout.prompts.tokens), config, state.counters),
            model=policy,
            report=scorer.report,
            config=config,
            stop=StopRequest(),
            features=features,
            place=place,
            listener=listener,
        )
        updater.between = self._between

    engine: LocalEngine
    updater: Updater

    def _engine_of_run(self, recipe: Recipe, logged: Path | None) -> LocalEngine:
        config = self.config
        shared = (self.behaviour, self.train, self.scorer, config.sampling, config.seed, logged)
        if config.engine == "sync":
            return SyncEngine(*shared, stopping=recipe.stopping)
        how = (config.sampling, config.streaming)
        made = begin(self.behaviour, self.train.tokens, *how, seed=config.seed, limit_s=config.generator_limit_s)
        return AsyncEngine(*shared, begin=made, streaming=config.streaming)

    def _measure(self) -> Evaluation:
        assert self.heldout is not None
        config = self.config
        return evaluate(
            self.behaviour.policy(),
            self.heldout,
            lambda prompts, made: patient(self.engine.score_samples(prompts, made), lambda: self._stop.by is not None),
            sampling=config.sampling,
            samples=config.eval_samples,
            seed=config.seed,
            precision=config.precision,
        )
