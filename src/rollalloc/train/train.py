"""Training: `train` loads what a configuration names and runs the loop.

`Loop` asks the allocator for orders, generates the rollouts, tells the allocator their scores, trains on the allocator's
batch, evaluates and saves. The recipe's decisions are made in the core. `Trainer` is the loop for a model in this process.
`rollalloc.drivers.tinker` has a loop for a model at a service.
"""

from __future__ import annotations

import json
import logging
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

from rollalloc.core.allocator import Allocator
from rollalloc.core.events import Actions, Batch, Moved, NoScores, Updated
from rollalloc.core.recipe import Recipe
from rollalloc.data.feature_blocks import Features
from rollalloc.data.prompts import EncodedPrompts
from rollalloc.files.names import ALLOCATOR, DECISIONS, DESCRIPTION, METRICS, REWARDS, ROLLOUTS
from rollalloc.files.origin import origin
from rollalloc.files.regular import append_text, write_text
from rollalloc.files.text import told
from rollalloc.generate.engine import LocalEngine, SyncEngine
from rollalloc.generate.outcomes import RolloutResult, mostly_unscored, no_scores, tell
from rollalloc.generate.stream.async_engine import AsyncEngine
from rollalloc.generate.stream.backend import BackendDied
from rollalloc.generate.stream.begin import begin, refuse_unfit_model
from rollalloc.models import checkpoint
from rollalloc.models.policy import Behaviour, Policy
from rollalloc.models.weights import Diverged, in_batch
from rollalloc.processes.stopping import Stopped, StopRequest
from rollalloc.rewards.scorers import Scorer
from rollalloc.runs.metrics import of_batch, totals
from rollalloc.train.config import Config, check_budget, resumed, share_spent, was_begun_in, write_config
from rollalloc.train.evaluation import Evaluation, HeldOut, Interrupted, evaluate, wait_unless_stopped
from rollalloc.train.loading import check_run, encoded, features_for, held_out_of, scorer_of
from rollalloc.train.notices import Notices
from rollalloc.train.store import Checkpoints, DecisionLog, Grid, RunFolder, RunState, Saves, identity_of
from rollalloc.train.trackers import EXAMPLES, Listener, tracked
from rollalloc.train.update import Updater

log = logging.getLogger(__name__)

_PATIENCE = 256  # minimum number of groups in a row with equal rewards that ends a run (`stop_when_barren`)
_NAMED = 20  # maximum number of quarantined prompts named in the last line of the metrics


def train(
    config: Config,
    folder: Path,
    listener: Listener | None = None,
    *,
    resume: bool = False,
    accept_recipe: bool = False,
    accept_data: bool = False,
    overwrite: bool = False,
) -> str:
    """Train, and write `run.json`, `metrics.jsonl`, checkpoints and the trained model. Return why the run ended.

    The folder, the reward and the prompts are checked before the model is loaded.

    Args:
        config: configuration of the run.
        folder: folder of the run.
        listener: called with each line of the metrics.
        resume: continue from the newest checkpoint in the folder. If there is no checkpoint, the run starts again.
        accept_recipe: resume with this recipe, even if the checkpoint was saved with another recipe.
        accept_data: resume with these prompts, even if the checkpoint was saved with other prompts; see `Loop.resume`.
        overwrite: remove the files that another run wrote in the folder. Only files in the folder's manifest are removed.

    Raises:
        InUse, FileExistsError: the folder cannot be used, see `RunFolder.check`.
        ValueError: the configuration is impossible; the checkpoint belongs to another run (the message names the
            differences); or every checkpoint is damaged.
        ImportError: a tracker's library is not installed, or the reward function cannot be imported.
    """
    with RunFolder(folder) as place:
        resumes = resume and checkpoint.newest(folder) is not None
        if resumes:
            place.lock()
            config = resumed(config, folder)
        else:
            overwrite = overwrite or (resume and place.is_broken() and was_begun_in(config, folder))
            place.check(overwrite=overwrite)
        checked = check_run(config)
        listening = (
            tracked(config.track, folder, config.description(), listener) if config.track else nullcontext(listener)
        )
        with listening as listen, scorer_of(config) as scorer:
            policy = Policy.load(config.model, device=config.device)
            train_prompts = encoded(config, policy, checked.prompts, folder if resumes else None)
            if config.engine == "async":
                refuse_unfit_model(policy.model, train_prompts.tokens, config.sampling, config.streaming)
            heldout = None if checked.heldout is None else held_out_of(config, policy, checked.heldout)
            features = features_for(config, checked.recipe, policy, train_prompts, folder if resumes else None)
            if config.lora is not None:  # after the features, which are computed with the base model
                policy = policy.with_lora(config.lora, seed=config.seed)
            trainer = Trainer(
                *(policy, checked.recipe, train_prompts, scorer, config),
                heldout=heldout,
                features=features,
                folder=place,
                listener=listen,
            )
            if resumes:
                trainer.resume(accept_recipe=accept_recipe, accept_data=accept_data)
            else:
                place.begin(overwrite=overwrite)
                place.save_encoded(train_prompts, policy.tokenizer)
            write_config(config, folder)
            return trainer.run()


class Loop(ABC):
    """The training loop under a recipe, for a model in this process or elsewhere.

    Args:
        keys: keys of the training prompts.
        state: the part of the run that checkpoints contain: the allocator, the engine, the updater and the counters.
        model: the model to save at the end.
        heldout: number of held-out prompts. 0: no evaluation.
        report: returns figures about scoring, as plain data.
        config: all other settings.
        features: features of the prompts; saved with the run.
        place: the run's folder. None: nothing is written.
        listener: called with each line of the metrics.

    Raises:
        ValueError: the learning rate falls over a budget, but the run has none.
    """

    def __init__(
        self,
        *,
        keys: Sequence[str],
        state: RunState,
        model: Saves,
        heldout: int,
        report: Callable[[], Mapping[str, Any]],
        config: Config,
        features: Features | None,
        place: RunFolder | None,
        listener: Listener | None,
    ) -> None:
        check_budget(config.schedule, state.allocator.recipe.budget, config.max_batches)
        if state.allocator.recipe.limit is not None and not state.engine.limits:
            raise ValueError(
                f"the recipe stops rollouts at a length (limit_at), and {type(state.engine).__name__} does not stop them; "
                "leave limit_at out"
            )
        self.keys, self.state, self.model, self.config = keys, state, model, config
        self.allocator, self.engine, self.updater = state.allocator, state.engine, state.updater
        self.counters = state.counters
        self.features, self.place, self.listener = features, place, listener
        self.folder = None if place is None else place.path
        self.grid = Grid(heldout, config, state.counters)
        self.checkpoints = Checkpoints(place, state, config)
        decided = None if place is None or not config.log_rollouts else place.path / DECISIONS
        self._decisions = DecisionLog(decided, state.allocator)
        self.stop = StopRequest()
        self._report_of_scoring, self._notices = report, Notices(config, report)
        self.counters.made = self._spent()

    @abstractmethod
    def evaluate(self) -> Evaluation:
        """Evaluate the current weights.

        Raises:
            Interrupted: the run was asked to stop.
        """

    def bill(self) -> dict[str, Any]:
        """The cost at a service so far, as fields for every line of the metrics."""
        return {}

    def description(self) -> dict[str, Any] | None:
        """The contents of `run.json`. None: the caller of `run` writes the file."""
        return None

    def run(self, *, overwrite: bool = False) -> str:
        """Train until the budget is spent, the data are used up or the target is reached. Return why the run ended.

        Args:
            overwrite: remove the files that another run wrote in the folder. A resumed run removes nothing.

        Raises:
            FileExistsError, InUse: the folder cannot be used, see `RunFolder.check`.
            Stopped: SIGTERM, SIGINT (Ctrl-C) or SIGHUP asked the run to stop, and a checkpoint was written. Only for a
                run with a folder, in the main thread.
            KeyboardInterrupt: Ctrl-C came after such a signal; nothing was saved.
            NoScores: no rollout got a score, or the recent rollouts got none.
            MetricError: a metric is outside [0, 1], and a rule of the recipe reads it as a success rate.
            BackendDied: the generating process died or stopped responding; a checkpoint was written.
            Diverged: a loss, a gradient or a weight is not finite. The message names the batch, its prompts and the last
                checkpoint, which is finite.
            OSError: a checkpoint could not be written. The previous checkpoint is kept.
        """
        try:
            if self.place is None:
                return self._train()
            with self.place:  # releases the lock also after an error
                if self.checkpoints.newest is None:
                    self.place.begin(overwrite=overwrite)
                    if (description := self.description()) is not None:
                        described = description | {"starts": [origin()]}
                        write_text(self.place.path / DESCRIPTION, json.dumps(described, indent=2))
                    if self.features is not None:
                        self.place.save_features(self.keys, self.features)
                self.checkpoints.start_clock()
                with self.stop.heard():
                    return self._train_and_save()
        finally:
            self.engine.close()

    # ------------------------------------------------------------------------------------------------------- the loop

    def _train(self) -> str:
        """Run the loop. Return why the run is over."""
        self._count_cost_of_features()
        self._evaluate_until(0)
        why = self._why_stop()
        if why is None:
            self._begin_rollouts()
        while why is None:
            # If the run was stopped in an evaluation before a batch, this batch is still to be trained.
            batch = self.allocator.batch
            if batch is None or not self.engine.can_update:
                why = self._generate()
                continue
            # The number of rollouts may have passed grid points. For these points, evaluate the weights before this batch.
            before = self.allocator.paid - 1
            if self.grid.is_due(before):
                self.engine.pause()
                self._evaluate_until(before)
            self._go_on()
            self._train_on(batch)
            why = self._why_stop()
            if why is None:
                self._save_if_due()
        self._finish(why)
        return why

    def _count_cost_of_features(self) -> None:
        """Count the cost of the features, unless the run is resumed."""
        if self.features is None or self.checkpoints.newest is not None:
            return
        if self.counters.next_at or self.counters.batches:
            return
        self.counters.seconds += self.features.cost.seconds
        cost = {f"features_{name}": value for name, value in asdict(self.features.cost).items()}
        self._write({"kind": "features", **self._spent(), **cost})

    def _begin_rollouts(self) -> None:
        """Start the engine. After a load or an interruption, submit the allocator's outstanding orders again."""
        self.engine.load_weights(self.allocator.version)
        outstanding = self.allocator.outstanding()
        self.engine.submit(outstanding.generate)
        self.engine.cancel(outstanding.cancel)

    def _generate(self) -> str | None:
        """Ask the allocator once, submit its orders, and tell it which rollouts ended.

        Return why the run is over, or None.
        """
        started = time.perf_counter()
        actions = self._ask()
        if not self._is_due(actions):
            goes_on = self.engine.streams and bool(actions.generate or actions.release)
            self._tell(self.engine.poll(wait=not goes_on))
        self.counters.seconds += time.perf_counter() - started
        if self._is_due(actions) or (self.engine.can_update and not self.engine.streams):
            self._notices.check_rollouts(self.allocator, self.engine.outcomes)
        if actions.finished is None or self.allocator.batch is not None:
            return None
        if 2 * self.allocator.accounts()["failed"] <= self.allocator.paid:
            return actions.finished
        why = mostly_unscored(actions.finished, self.engine.outcomes.commonest_failure())
        if self.allocator.scoreless():
            self._give_up(why)
        return why

    def _ask(self) -> Actions:
        """Ask for as many rollouts as the engine has room for, and submit the orders."""
        actions = self.allocator.ask(self.engine.capacity())
        self.engine.release(actions.release)
        self.engine.cancel(actions.cancel)
        self.engine.submit(actions.generate)
        self.allocator.rest()  # an engine in other processes is generating meanwhile
        return actions

    def _tell(self, results: Sequence[RolloutResult]) -> None:
        tell(self.allocator, results, outcomes=self.engine.outcomes, remedy=self.engine.remedy)

    def _is_due(self, actions: Actions) -> bool:
        """Whether there is a batch to train on, or the run is over."""
        return self.engine.can_update and (actions.batch is not None or actions.finished is not None)

    def _go_on(self) -> None:
        """If the engine streams, tell the allocator which rollouts have ended, and submit the new orders."""
        if self.engine.streams:
            self._tell(self.engine.poll(wait=False))
            self._ask()

    def _train_on(self, batch: Batch) -> None:
        """Take the configured number of optimizer steps on a batch, and tell the allocator the new version."""
        started = time.perf_counter()
        recipe, counters = self.allocator.recipe, self.counters
        batch, gated = self._admit(batch)
        figures_of_batch = of_batch(self.allocator, batch)
        if self.config.notices:
            self._notices.check_batch(self.allocator)
        else:
            figures_of_batch["teaching"] = {}  # so that the page does not warn either
        try:
            figures = self.updater.update(
                batch,
                self.engine.generations,
                spent=share_spent(recipe.budget, self.config.max_batches, counters.batches, counters.made),
                measure_kl=recipe.reads_kl,
                between_passes=self._go_on,
            )
        except Diverged as error:
            raise in_batch(error, batch, self.keys.__getitem__, self.checkpoints.where()) from None
        counters.batches += 1
        self._decisions.write(counters.batches, batch)
        groups = len({row.group for row in batch.rows if not row.replays})
        has_signal = any(row.advantage for row in batch.rows)
        counters.barren_groups = 0 if has_signal else counters.barren_groups + groups
        self.allocator.tell([Updated(batch.version + 1, figures.get("approx_kl"))])
        self.engine.load_weights(self.allocator.version)
        seconds = time.perf_counter() - started
        counters.seconds += seconds
        counters.made = self._spent()
        ages = Counter(batch.version - row.version for row in batch.rows)
        self._write(
            {
                "kind": "batch",
                "batch": counters.batches,
                **counters.made,
                **self.engine.figures(),
                **figures_of_batch,
                "short_because": batch.short_because,
                "ages": {str(age): ages[age] for age in sorted(ages)},
                **self.allocator.prompt_counts(),
                "prediction": self.allocator.prompt_figures(),
                **figures,
                **gated,
                "update_seconds": round(seconds, 4),
            }
        )

    def _admit(self, batch: Batch) -> tuple[Batch, dict[str, Any]]:
        """Let the recipe's gate decide whether the replayed rows are trained on.

        Return the batch to train on, and figures for its line of the metrics, both unchanged and empty without a gate.
        """
        core = self.allocator
        if core.recipe.gate is None:
            return batch, {}
        moved = None
        if any(row.replays for row in batch.rows):
            moved = self.updater.moved(batch, self.engine.generations)
            core.tell([Moved(moved)])
            batch = core.batch or batch
        return batch, {"moved": moved, "left_out": core.left_out}

    def _evaluate_until(self, rollouts: int) -> None:
        """Evaluate for each grid point that was reached with this number of rollouts and not evaluated yet."""
        while self.grid.is_due(rollouts):
            self._evaluate(self.counters.next_at)
            self.counters.next_at += self.config.eval_every

    def _evaluate(self, at: int | None) -> None:
        """Evaluate for a grid point or, if `at` is None, for the end. The same weights are evaluated only once."""
        started, version = time.perf_counter(), self.allocator.version
        if self.grid.latest != version:
            is_first = self.grid.latest is None and not version
            evaluation = self.evaluate()
            self.grid.add(version, evaluation)
            if is_first:
                self._notices.check_first_evaluation(evaluation)
            else:
                self._notices.check_later_evaluation(evaluation)
        figures = self.grid.record(at) | {"eval_seconds": round(time.perf_counter() - started, 4)}
        self._write({"kind": "eval", **self.counters.made, **figures}, {"examples": self.engine.examples()})

    def _why_stop(self) -> str | None:
        """Why the run is over after this batch; None if the run continues."""
        config, counters = self.config, self.counters
        if (accuracy := self.grid.confirmed()) is not None:
            return f"target: held-out accuracy {accuracy:.4f} reaches {config.target}"
        if config.max_batches is not None and counters.batches >= config.max_batches:
            return f"max_batches: {counters.batches} batches are trained"
        if config.stop_when_barren and counters.barren_groups >= max(_PATIENCE, len(self.keys)):
            return (
                f"barren: no learning signal in the last {counters.barren_groups} groups, because all rewards in each group "
                f"were equal; numbers of prompts, by how the last visit ended: {self.allocator.statistics.counts()}"
            )
        return None

    def _save_if_due(self) -> None:
        if self.stop.by is not None:
            self._tell(self.engine.drain())
        if self.checkpoints.is_due() or self.stop.by is not None:
            self._save()
        if self.stop.by is not None:
            raise self._stopped("after")

    def _finish(self, why: str) -> None:
        """Evaluate the final weights, write the model, and then write the last line of the metrics."""
        self._tell(self.engine.drain())
        self._save()
        self._evaluate_until(self.allocator.paid)
        if self.grid.prompts:
            self._evaluate(None)
        if self.place is not None:
            self.place.save_model(self.model)
            write_text(self.place.path / ALLOCATOR, json.dumps(self.allocator.state_dict()))
            self._report()
        self._write_last("end", why)

    # ------------------------------------------------------------------------------------ what happens when a run fails

    def _train_and_save(self) -> str:
        """Run the loop. After an error, save the run if possible, then raise the error."""
        try:
            return self._train()
        except Interrupted:
            self._tell(self.engine.drain())
            self._save()
            raise self._stopped("in an evaluation after") from None
        except BackendDied as died:
            if self.allocator.tokens_paid:
                self._save()
            self._write_failure(died)
            raise BackendDied(f"{died}; {self.checkpoints.where()}") from died
        except (Stopped, NoScores):
            raise
        except Exception as error:
            self._write_failure(error)
            raise

    def _give_up(self, why: str) -> NoReturn:
        """End a run without scores. No checkpoint is written, so that a repaired run resumes from the last checkpoint."""
        if self.folder is not None:
            self._report()
        self._write_last("failed", why)
        raise no_scores(why)

    def _stopped(self, when: str) -> Stopped:
        by = self.stop.by
        assert by is not None
        where = f"{when} batch {self.counters.batches}"
        return Stopped(
            f"stopped by {by.name} {where}; a checkpoint is in {self.folder}, resume to continue from it", by
        )

    def _write_failure(self, error: Exception) -> None:
        """Add a line to the metrics that says that the run failed. Resuming removes this line."""
        with suppress(Exception):  # an error of writing this line must not hide the first error
            self._write_last("failed", told(error))

    # ----------------------------------------------------------------------------------------------------- resuming

    def resume(self, *, accept_recipe: bool = False, accept_data: bool = False) -> int:
        """Load the newest undamaged checkpoint in the folder. `run` then continues from it.

        Lines of the metrics after the checkpoint are removed, because the run writes them again.

        Args:
            accept_recipe: continue with this recipe, even if the checkpoint was saved with another recipe.
            accept_data: continue with these prompts, held-out prompts and chat template, even if the checkpoint was saved
                with others. Prompts are matched by key. Records of prompts that are now missing are dropped. A line of kind
                "resume" in the metrics counts the changes.

        Returns:
            The number of batches trained so far.

        Raises:
            FileNotFoundError: the folder has no checkpoint.
            InUse: another trainer is using the folder.
            ValueError: there is no folder or no undamaged checkpoint; or the checkpoint belongs to another run (the message
                names the difference). Nothing was changed.
        """
        changed = self.checkpoints.load(accept_recipe=accept_recipe, accept_data=accept_data)
        if changed is not None and (prompts := changed.prompts) is not None:
            self._write({"kind": "resume", **self._spent(), "lost": prompts.lost, "new": prompts.new})
        return self.counters.batches

    # ----------------------------------------------------------------------------------------------- what is written

    def _save(self) -> None:
        """Write a checkpoint, unless this batch's checkpoint exists already or the run writes nothing."""
        self._decisions.write()
        if self.checkpoints.save():
            self._report()

    def _spent(self) -> dict[str, Any]:
        """The cost of the run so far, as fields for a line of the metrics."""
        return {
            **totals(self.allocator),
            "optimizer_steps": self.updater.steps,
            "version": self.allocator.version,
            "seconds": round(self.counters.seconds, 3),
            "unscored": dict(self.engine.outcomes.unscored),
            **self.bill(),
        }

    def _write_last(self, kind: str, why: str) -> None:
        named = self._quarantined()[:_NAMED]
        last = {"kind": kind, "why": why, **self._spent(), **self.allocator.prompt_counts(), "quarantined_keys": named}
        if self.config.notices:
            last["teaching"] = self.allocator.teaching.final_shares()
        self._write(last)

    def _write(self, line: dict[str, Any], unwritten: Mapping[str, Any] = MappingProxyType({})) -> None:
        """Append a line to the metrics, and pass it to the listener together with what is not written."""
        if self.folder is not None:
            append_text(self.folder / METRICS, json.dumps(line) + "\n")
        if self.listener is not None:
            self.listener({**line, **unwritten})

    def _quarantined(self) -> list[str]:
        """Keys of the prompts that are quarantined, because their rollouts always failed."""
        return [self.keys[prompt] for prompt in self.allocator.quarantined()]

    def _report(self) -> None:
        """Log figures about scoring since this process began, and which prompts are quarantined."""
        assert self.folder is not None
        report = dict(self._report_of_scoring()) | {"quarantined": self._quarantined()}
        write_text(self.folder / REWARDS, json.dumps(report, indent=1))


class Trainer(Loop):
    """Trains a policy of this process under a recipe.

    Args:
        policy: the model, or adapters in it (`Policy.with_lora`). It is trained in place.
        recipe: the recipe to train under. Its budget ends the run.
        train: prompts to train on.
        scorer: scores rollouts.
        config: all other settings. Its fields about the model, prompts, reward and recipe are ignored.
        heldout: prompts to evaluate on; None: no evaluation.
        features: features of the training prompts, in the same order (`rollalloc.models.featurizer.features_of`), for a
            recipe that predicts. None: predict without features.
        folder: folder for metrics, checkpoints and the model. None: nothing is written. If it already has a run, `run`
            raises an error, unless `resume` was called.
        listener: called with each line of the metrics.
    """

    engine: LocalEngine
    updater: Updater

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
        place = RunFolder(folder) if isinstance(folder, Path) else folder
        table = train.prompt_set.table(None if features is None else features.blocks)
        self.behaviour = Behaviour(policy, config.sampling_dtype, plain=config.engine == "async")
        log_file = place.path / ROLLOUTS if place is not None and config.log_rollouts else None
        engine = self._make_engine(recipe, log_file)
        updater = Updater(policy, train.tokens, config)
        super().__init__(
            keys=train.prompt_set.keys,
            state=RunState(
                *(config, Allocator(recipe, table, config.seed), engine, updater),
                lambda: identity_of(policy, train, heldout, config, updater.reference_digest()),
            ),
            model=policy,
            heldout=0 if heldout is None else len(heldout.prompts.tokens),
            report=scorer.report,
            config=config,
            features=features,
            place=place,
            listener=listener,
        )

    def _make_engine(self, recipe: Recipe, log_file: Path | None) -> LocalEngine:
        config = self.config
        keep = EXAMPLES if config.track else 0
        shared = (self.behaviour, self.train, self.scorer, config.sampling, config.seed, log_file, keep)
        if config.engine == "sync":
            return SyncEngine(*shared, stopping=recipe.stopping)
        backend = begin(
            *(self.behaviour, self.train.tokens, config.sampling, config.streaming),
            seed=config.seed,
            limit_s=config.generator_limit_s,
        )
        return AsyncEngine(*shared, begin=backend, streaming=config.streaming)

    def evaluate(self) -> Evaluation:
        assert self.heldout is not None
        return evaluate(
            self.behaviour.policy(),
            self.heldout,
            lambda prompts, generations: wait_unless_stopped(
                self.engine.score_samples(prompts, generations), self.stop
            ),
            sampling=self.config.sampling,
            samples=self.config.eval_samples,
            seed=self.config.seed,
            precision=self.config.precision,
        )
