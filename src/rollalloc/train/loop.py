"""The loop of a run, whoever samples and trains: ask, roll out, tell, train, evaluate, save, stop, go on.

`native.Trainer` is the one whose model is in this process; `rollalloc.drivers.tinker` has one that asks a service.
"""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any, NoReturn

from rollalloc.core.allocator import Allocator
from rollalloc.core.errors import NoScores
from rollalloc.core.events import Actions, Batch, Updated
from rollalloc.core.recipe import Budget
from rollalloc.data.features import Features
from rollalloc.files.atomic import append_text, write_text
from rollalloc.files.names import ALLOCATOR, CHECKPOINTS, METRICS, REWARDS
from rollalloc.generate.engine import RolloutEngine
from rollalloc.generate.outcomes import RolloutResult, mostly_unscored, no_scores, tell
from rollalloc.generate.stream.backend import BackendDied
from rollalloc.processes.stopping import Stopped, StopRequest
from rollalloc.runs.files import digest_of
from rollalloc.runs.metrics import of_batch, totals
from rollalloc.runs.teaching import notice
from rollalloc.train import checkpoint
from rollalloc.train.checkpoint import Checkpoint
from rollalloc.train.config import Config
from rollalloc.train.folder import RunFolder, Saves
from rollalloc.train.grid import Grid, Interrupted
from rollalloc.train.growing import GrowingFiles
from rollalloc.train.notices import Notices
from rollalloc.train.schedule import check_budget, share_spent
from rollalloc.train.state import ChangedData, RunState, Updates

log = logging.getLogger(__name__)

Listener = Callable[[dict[str, Any]], None]
_PATIENCE = 256  # groups, at least, without variance before a run is given up
_NAMED = 20  # quarantined prompts that the last line of the metrics names


class Loop:
    """A run under a recipe.

    Args:
        allocator: decides.
        keys: of the prompts to train on.
        engine: carries out its orders.
        updater: trains.
        state: what outlives the process.
        grid: of evaluations.
        model: what is kept at the end.
        report: says what scoring was like, as plain data.
        config: everything else.
        stop: whether the run was asked to.
        features: of the prompts, with what they cost; kept with the run.
        place: its folder; None: nothing is written.
        listener: called with each line of the metrics, for progress.

    Raises:
        ValueError: the learning rate falls over a budget, and the run has none.
    """

    def __init__(
        self,
        *,
        allocator: Allocator,
        keys: Sequence[str],
        engine: RolloutEngine,
        updater: Updates,
        state: RunState,
        grid: Grid,
        model: Saves,
        report: Callable[[], Mapping[str, Any]],
        config: Config,
        stop: StopRequest,
        features: Features | None,
        place: RunFolder | None,
        listener: Listener | None,
    ) -> None:
        check_budget(config.schedule, allocator.recipe.budget, config.max_batches)
        self.allocator, self.keys, self.model, self.config = allocator, keys, model, config
        self.engine, self.updater, self.state, self.grid = engine, updater, state, grid
        self.features, self.place, self.listener = features, place, listener
        self.folder = None if place is None else place.path
        self._growing = None if place is None else GrowingFiles(place.path)
        self.counters = state.counters
        self._stop, self._scoring = stop, report
        self._notices = Notices(config, report)
        grid.on_first = self._notices.first_evaluation
        self.counters.made = self._spent()
        self._saved_at: int | None = None  # batches trained at the newest checkpoint of this run
        self._saved_s = 0.0  # when that was, or the run began, by a clock that is never set

    # ------------------------------------------------------------------------------------------------------- the loop

    def run(self, *, overwrite: bool = False) -> str:
        """Train until the budget is spent, the data are used up or the target is reached; returns why it ended.

        Args:
            overwrite: remove what another run wrote in the folder, and nothing else; a resumed run removes nothing.

        Raises:
            FileExistsError, InUse: as `RunFolder.check`.
            Stopped: SIGTERM, SIGINT (Ctrl-C) or SIGHUP came, and a checkpoint was written after the batch or in the
                evaluation that was at work. Only a run with a folder, in the main thread, is stopped so.
            KeyboardInterrupt: Ctrl-C came after one of these; nothing was saved.
            NoScores: no rollout got a score, or none any more.
            MetricError: a metric outside [0, 1] under a recipe whose rules take it for a success rate.
            BackendDied: what generates is gone or silent; what the run came to is saved.
            OSError: a checkpoint could not be written; the one before it is still there.
        """
        try:
            return self._run_in_place(overwrite=overwrite)
        finally:
            self.engine.close()

    def _run_in_place(self, *, overwrite: bool) -> str:
        if self.place is None:
            return self._run()
        with self.place:  # let go of it whatever is raised
            if self._saved_at is None:
                self.place.begin(overwrite=overwrite)
                self._describe()
                if self.features is not None:
                    self.place.save_features(self.keys, self.features)
            self._saved_s = time.monotonic()
            with self._stop.heard():
                return self._run_and_save()

    def _run_and_save(self) -> str:
        try:
            return self._run()
        except Interrupted:
            self._tell(self.engine.drain())
            self._save()
            raise self._stopped("in an evaluation after") from None
        except BackendDied as died:
            raise self._saved_as_it_is(died) from died
        except (Stopped, NoScores):
            raise
        except Exception as error:
            self._write_failure(error)
            raise

    def _run(self) -> str:
        begins = self._saved_at is None and not self.counters.batches and not self.counters.next_at
        if self.features is not None and begins:
            self.counters.seconds += self.features.cost.seconds
            cost = {f"features_{name}": value for name, value in asdict(self.features.cost).items()}
            self._write({"kind": "features", **self._spent(), **cost})
        self._evaluate_until(0)
        why = self._why_stop()
        if why is None:
            self._begin_rollouts()
        while why is None:
            batch = self.allocator.batch  # there is one already if the run was stopped in the evaluation before it
            if batch is None or not self.engine.can_update:
                why = self._roll_out()
                continue
            # The batch's own weights come too late for the points that its rollouts went beyond.
            before = self.allocator.paid - 1
            if self.grid.is_due(before):
                self.engine.pause()
                self._evaluate_until(before)
            self._between()
            self._train_on(batch)
            why = self._why_stop()
            if why is None:
                self._save_if_due()
        self._finish(why)
        return why

    def _begin_rollouts(self) -> None:
        """Begin to generate, after a load or an interruption with what the allocator has outstanding."""
        self.engine.load_weights(self.allocator.version)
        outstanding = self.allocator.outstanding()
        self.engine.submit(outstanding.generate)
        self.engine.cancel(outstanding.cancel)

    def _roll_out(self) -> str | None:
        """Ask the allocator once, have the engine carry that out, and tell what ended; returns why the run is over."""
        started = time.perf_counter()
        actions = self._ask()
        if not self._is_due(actions):
            goes_on = self.engine.streams and bool(actions.generate or actions.release)
            self._tell(self.engine.poll(wait=not goes_on))
        self.counters.seconds += time.perf_counter() - started
        if self._is_due(actions) or not self.engine.streams:
            self._notices.rolled_out(self.allocator, self.engine.outcomes)
        if actions.finished is None or self.allocator.batch is not None:
            return None
        paid, accounts = self.allocator.paid, self.allocator.accounts()
        if 2 * accounts["failed"] <= paid:
            return actions.finished
        why = mostly_unscored(actions.finished, self.engine.outcomes.commonest_failure())
        if self.allocator.scoreless():
            self._give_up(why)
        return why

    def _ask(self) -> Actions:
        """Ask for as many rollouts as the engine has room for, and hand the orders on."""
        actions = self.allocator.ask(self.engine.capacity())
        self.engine.release(actions.release)
        self.engine.cancel(actions.cancel)
        self.engine.submit(actions.generate)
        return actions

    def _is_due(self, actions: Actions) -> bool:
        """Whether a batch is to be trained, or the run is over."""
        return self.engine.can_update and (actions.batch is not None or actions.finished is not None)

    def _tell(self, results: Sequence[RolloutResult]) -> None:
        tell(self.allocator, results, outcomes=self.engine.outcomes, remedy=self.engine.remedy)

    def _give_up(self, why: str) -> NoReturn:
        """End a run whose rewards fail, without a checkpoint of it: the one before goes on once they are repaired."""
        if self.folder is not None:
            self._report()
        self._write_last("failed", why)
        raise no_scores(why)

    def _train_on(self, batch: Batch) -> None:
        """The configured number of optimizer steps on a batch; then the weights have a new version."""
        started = time.perf_counter()
        what = of_batch(self.allocator, batch)
        self._give_notices(what)
        figures = self.updater.update(
            batch,
            self.engine.generations,
            spent=self._share_spent(self.allocator.recipe.budget),
            measure_kl=self.allocator.recipe.reads_kl,
        )
        self.counters.batches += 1
        groups = len({row.group for row in batch.rows if not row.replays})
        has_signal = any(row.advantage for row in batch.rows)
        self.counters.barren_groups = 0 if has_signal else self.counters.barren_groups + groups
        latency = self.engine.latency() if self.allocator.recipe.reads_latency else None
        self.allocator.tell([Updated(batch.version + 1, figures.get("approx_kl"), latency)])
        self.engine.load_weights(self.allocator.version)
        seconds = time.perf_counter() - started
        self.counters.seconds += seconds
        self.counters.made = self._spent()
        ages = Counter(batch.version - row.version for row in batch.rows)
        self._write(
            {
                "kind": "batch",
                "batch": self.counters.batches,
                **self.counters.made,
                **self.engine.figures(),
                **what,
                "short_because": batch.short_because,
                "ages": {str(age): ages[age] for age in sorted(ages)},
                **self.allocator.away(),
                "prediction": self.allocator.prompt_figures(),
                **figures,
                "update_seconds": round(seconds, 4),
            }
        )

    def _give_notices(self, what: dict[str, Any]) -> None:
        """Log what is to be said of this batch; without notices the line has no shares, so that no view says it either."""
        if not self.config.notices:
            what["teaching"] = {}
            return
        self._notices.teaching(notice(self.allocator.teaching), self.allocator.paid)
        if (line := self.allocator.few_prompts()) is not None:
            log.warning("%s", line)

    def _share_spent(self, budget: Budget) -> float | None:
        return share_spent(budget, self.config.max_batches, self.counters.batches, self.counters.made)

    def _between(self) -> None:
        """While a batch is trained: if rollouts go on meanwhile, tell what ended and order others."""
        if self.engine.streams:
            self._tell(self.engine.poll(wait=False))
            self._ask()

    def _evaluate_until(self, rollouts: int) -> None:
        self._write_evaluations(self.grid.until(rollouts, self.allocator.version))

    def _write_evaluations(self, evaluations: Iterable[dict[str, Any]]) -> None:
        """Write held-out accuracies, each beside what was paid when its weights were made."""
        for found in evaluations:
            self._write({"kind": "eval", **self.counters.made, **found})

    def _why_stop(self) -> str | None:
        """Why the run is over after this batch, if it is."""
        config, counters = self.config, self.counters
        if (accuracy := self.grid.confirmed()) is not None:
            return f"target: held-out accuracy {accuracy:.4f} reaches {config.target}"
        if config.max_batches is not None and counters.batches >= config.max_batches:
            return f"max_batches: {counters.batches} batches are trained"
        if config.stop_when_barren and counters.barren_groups >= max(_PATIENCE, len(self.keys)):
            return (
                f"barren: no learning signal in the last {counters.barren_groups} groups, whose rewards were equal; prompts "
                f"by the end of their last visit: {self.allocator.statistics.counts()}"
            )
        return None

    def _finish(self, why: str) -> None:
        """The last evaluation and everything that is written at the end; the metrics' last line says that it all is."""
        self._tell(self.engine.drain())
        self._save()
        self._evaluate_until(self.allocator.paid)
        self._write_evaluations(self.grid.last(self.allocator.version))
        if self.place is not None:
            self.place.save_model(self.model)
            write_text(self.place.path / ALLOCATOR, json.dumps(self.allocator.state_dict()))
            self._report()
        self._write_last("end", why)

    def _write_failure(self, error: Exception) -> None:
        """Let the metrics say that the run is over; resuming cuts that off again."""
        with suppress(Exception):  # whatever is broken: what is raised is the first error
            self._write_last("failed", f"{type(error).__name__}: {error}")

    def _write_last(self, kind: str, why: str) -> None:
        named = self._quarantined()[:_NAMED]
        last = {"kind": kind, "why": why, **self._spent(), **self.allocator.away(), "quarantined_keys": named}
        if self.config.notices:
            last["teaching"] = self.allocator.teaching.final_shares()
        self._write(last if self.folder is None else last | {"digest": digest_of(self.folder)})

    # ----------------------------------------------------------------------------------------------------- checkpoints

    def resume(self, *, accept_recipe: bool = False, accept_data: bool = False) -> int:
        """Take the state of the newest whole checkpoint in the folder, so that `run` goes on from it.

        What the metrics hold beyond it is cut off: the run writes it again.

        Args:
            accept_recipe: go on under this trainer's recipe although the checkpoint was saved under another.
            accept_data: go on with this trainer's prompts, held-out prompts and chat template although the checkpoint was
                saved with others. Each prompt is found again by its key; what is known of those that are gone is dropped. A
                line of kind "resume" counts them.

        Returns:
            The batches trained so far.

        Raises:
            FileNotFoundError: no checkpoint.
            InUse: another trainer is at work in the folder.
            ValueError: no folder, no whole checkpoint, or one of another run; names the difference. Nothing was changed.
        """
        if self.place is None or self._growing is None:
            raise ValueError("a trainer without a folder has no checkpoints; give it the folder of the run")
        folder = self.place.path
        try:
            self.place.lock()
            saved = checkpoint.load_newest(folder)
            changed = self.state.refuse_another(saved, folder, accept_data=accept_data)
            self._refuse_changed_files(saved, self._growing)
            self.state.load(
                saved, accept_recipe=accept_recipe, remap=changed is not None and changed.prompts is not None
            )
        except BaseException:
            self.place.release()
            raise
        self.place.go_on()
        checkpoint.clear_away(folder)
        self._growing.cut(saved.state["written"])
        self._saved_at = saved.batches
        self._warn_of_another_budget(saved.state["allocator"]["recipe"]["budget"])
        if changed is not None:
            self._go_on_with(changed)
        return saved.batches

    def _refuse_changed_files(self, saved: Checkpoint, growing: GrowingFiles) -> None:
        """Refuse to go on where what the metrics or the log held at the checkpoint is not what they hold now.

        Raises:
            ValueError: names the file, and the checkpoint for which all files are unchanged, if there is one.
        """
        assert self.folder is not None
        reason = growing.why_changed(saved.state["written"])
        if reason is None:
            return
        newest = self.folder / CHECKPOINTS / str(saved.batches)
        earlier = checkpoint.newest_before(
            self.folder, saved.batches, lambda state: growing.why_changed(state["written"]) is None
        )
        do = "put it back as it was, or start the run afresh (--overwrite)"
        if earlier is not None:
            do = f"put it back as it was, or remove {newest} to go on from the checkpoint after batch {earlier}"
        raise ValueError(f"{reason}, although the checkpoint after batch {saved.batches} goes on from it; {do}")

    def _go_on_with(self, changed: ChangedData) -> None:
        """Say that the data are others, and forget what was counted of the old ones."""
        log.warning("going on with other data: %s", changed)
        if "heldout" in changed.others:
            self.counters.accuracies.clear()
            self.counters.watched.clear()
        if (prompts := changed.prompts) is not None:
            self.counters.barren_groups = 0
            self._write({"kind": "resume", **self._spent(), "lost": prompts.lost, "new": prompts.new})

    def _warn_of_another_budget(self, saved: Mapping[str, Any]) -> None:
        """Say what a rate that falls over the budget becomes under another budget than the checkpoint's."""
        schedule, budget = self.config.schedule, self.allocator.recipe.budget
        if not schedule.over_budget:
            return
        before = Budget(**{name: value for name, value in saved.items() if name != "is"})
        was, now = self._share_spent(before), self._share_spent(budget)
        if before != budget and was is not None and now is not None:
            step = self.updater.steps + 1
            rates = [self.config.learning_rate * schedule.share(step, spent) for spent in (was, now)]
            log.warning(
                "the learning rate falls over the budget, which is another now: %.0f%% of it are spent, no longer %.0f%%, "
                "and the rate goes from %.3g to %.3g",
                *(100 * now, 100 * was, *rates),
            )

    def _save_if_due(self) -> None:
        batches, minutes = self.config.checkpoint_every, self.config.checkpoint_minutes
        is_due = batches is not None and self.counters.batches % batches == 0
        is_late = minutes is not None and time.monotonic() - self._saved_s >= 60 * minutes
        if self._stop.by is not None:
            self._tell(self.engine.drain())
        if is_due or is_late or self._stop.by is not None:
            self._save()
        if self._stop.by is not None:
            raise self._stopped("after")

    def _stopped(self, when: str) -> Stopped:
        by = self._stop.by
        assert by is not None
        where = f"{when} batch {self.counters.batches}"
        return Stopped(f"stopped by {by.name} {where}; a checkpoint is in {self.folder}, resuming goes on from it", by)

    def _saved_as_it_is(self, died: BackendDied) -> BackendDied:
        """Save what there is without what generates; the error that says so."""
        if self.allocator.tokens_paid:
            self._save()
        self._write_failure(died)
        if self._saved_at is None:
            return BackendDied(f"{died}; nothing was generated before, so that there is no checkpoint")
        place = f"after batch {self._saved_at} is in {self.folder}"
        return BackendDied(f"{died}; a checkpoint {place}, resuming (--resume) goes on from it")

    def _save(self) -> None:
        """Write a checkpoint, unless there is one after this batch or the run writes nothing."""
        batches = self.counters.batches
        if self.folder is None or self._growing is None or self._saved_at == batches:
            return
        state, tensors = self.state.packed(self._growing.stamps())
        checkpoint.save(self.folder, batches, state, tensors, keep=self.config.keep_checkpoints)
        self._saved_at, self._saved_s = batches, time.monotonic()
        self._report()

    # --------------------------------------------------------------------------------------------------------- figures

    def _spent(self) -> dict[str, Any]:
        return {
            **totals(self.allocator),
            "optimizer_steps": self.updater.steps,
            "version": self.allocator.version,
            "seconds": round(self.counters.seconds, 3),
            "unscored": dict(self.engine.outcomes.unscored),
            **self._bill(),
        }

    def _describe(self) -> None:
        """Write what the run was told to do, unless whoever made the trainer does."""

    def _bill(self) -> dict[str, Any]:
        """What a service charged so far, as further fields of every line."""
        return {}

    def _quarantined(self) -> list[str]:
        """Keys of the prompts whose rollouts always failed."""
        return [self.keys[prompt] for prompt in self.allocator.quarantined()]

    def _report(self) -> None:
        """Write what scoring was like since this process began, and which prompts it has given up."""
        assert self.folder is not None
        report = dict(self._scoring()) | {"quarantined": self._quarantined()}
        write_text(self.folder / REWARDS, json.dumps(report, indent=1))

    def _write(self, line: dict[str, Any]) -> None:
        if self.folder is not None:
            append_text(self.folder / METRICS, json.dumps(line) + "\n")
        if self.listener is not None:
            self.listener(line)
