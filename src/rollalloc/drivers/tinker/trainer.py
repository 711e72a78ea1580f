"""A run of any recipe at a service."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rollalloc.core.allocator import Allocator
from rollalloc.core.events import Order
from rollalloc.core.packing import describe
from rollalloc.core.recipe import Recipe, refuse_unmeasured
from rollalloc.data.features import Features
from rollalloc.drivers.tinker.costs import Prices, Usage, bill
from rollalloc.drivers.tinker.episodes import Episodes, Wave
from rollalloc.drivers.tinker.rollouts import RemoteEngine, Remotely
from rollalloc.drivers.tinker.service import Service, begun
from rollalloc.drivers.tinker.state import RemoteState
from rollalloc.drivers.tinker.update import RemoteUpdater
from rollalloc.files.atomic import write_text
from rollalloc.files.names import DESCRIPTION, ROLLOUTS
from rollalloc.processes.stopping import StopRequest
from rollalloc.recipes.streaming import streamed_aloud
from rollalloc.runs.reader import newest_line
from rollalloc.train.evaluation import Evaluation, judged
from rollalloc.train.folder import RunFolder
from rollalloc.train.grid import Grid, Interrupted, patient
from rollalloc.train.loop import Listener, Loop
from rollalloc.train.settings import Settings

log = logging.getLogger(__name__)


class TinkerTrainer(Loop):
    """Trains a model of a service under a recipe; `run`, `resume` and what they raise are `Loop`'s.

    A service that fails ends `run` with a `ServiceFailed`: the newest checkpoint is still there, resume once it answers.

    The settings are the native trainer's, as far as the service has them: no KL term, no dual clip, temperature 1, the whole
    distribution; `precision`, `tokens_per_forward`, `adaptive_clip`, `averaging`, and of sampling `max_rows` and
    `kv_tokens`, mean nothing here.

    Args:
        service: a model that is trained there.
        recipe: which prompts get how many rollouts; its budget ends the run.
        train: what is trained on.
        settings: everything else.
        heldout: what is evaluated on, `settings.eval_samples` rollouts each, which are billed; None: no evaluation.
        prices: for the cost so far in money; None: in tokens only.
        features: of the prompts, for a recipe that predicts; None: it predicts from what it sees during the run.
        folder: gets what the native trainer writes; where the service keeps the model is in `model/tinker.json`.
        listener: called with each line of the metrics.

    Raises:
        ValueError: settings that the service cannot have; names them.
    """

    def __init__(
        self,
        service: Service,
        recipe: Recipe,
        train: Episodes,
        settings: Settings,
        *,
        heldout: Episodes | None = None,
        prices: Prices | None = None,
        features: Features | None = None,
        folder: Path | None = None,
        listener: Listener | None = None,
    ) -> None:
        _refuse_what_it_has_not(settings)
        self.service, self.heldout, self.prices, self.remotely = (
            service,
            heldout,
            prices,
            Remotely(service.remote.request_seconds),
        )
        place = None if folder is None else RunFolder(folder)
        blocks = None if features is None else features.blocks
        if service.remote.concurrency is not None:
            recipe = streamed_aloud(recipe, log, ahead=service.remote.ahead)
        allocator = Allocator(recipe, train.table(blocks), settings.seed)
        logged = folder / ROLLOUTS if folder is not None and settings.log_rollouts else None
        engine = RemoteEngine(service, train, settings.sampling, self.remotely, logged)
        updater = RemoteUpdater(service, settings)
        self.remote = RemoteState(service, train, heldout, settings, allocator, engine, updater)
        refuse_unmeasured(recipe, "the Tinker API")
        _warn_of(recipe)
        super().__init__(
            allocator=allocator,
            keys=train.keys,
            engine=engine,
            updater=updater,
            state=self.remote,
            grid=Grid(self._measure, 0 if heldout is None else len(heldout.keys), settings, self.remote.counters),
            model=service,
            report=train.report,
            settings=settings,
            stop=StopRequest(),
            features=features,
            place=place,
            listener=listener,
        )

    def resume(self, *, accept_recipe: bool = False, accept_data: bool = False) -> int:
        """As `Loop.resume`; what was paid after the checkpoint, as far as the metrics say, is counted as lost.

        Raises:
            ServiceFailed: the service does not have the checkpoint's weights any more.
        """
        if accept_data:
            raise ValueError("a run at a service cannot go on with other prompts yet; start it afresh")
        paid = self._paid_before()
        batches = super().resume(accept_recipe=accept_recipe)
        self.remote.lost = self.remote.lost + (paid - (self.service.usage + self.remote.lost))
        self.counters.made |= self._bill()
        return batches

    def _paid_before(self) -> Usage:
        """What the newest line of the metrics says, what an earlier kill lost included."""
        last = None if self.folder is None else newest_line(self.folder)
        return Usage() if last is None else _usage(last.get("cost")) + _usage(last.get("cost_lost"))

    def _describe(self) -> None:
        assert self.folder is not None
        described = {
            "label": "tinker",
            "settings": {"seed": self.settings.seed, "target": self.settings.target},
            "source": {"model": self.service.model},
            "tinker": describe(self.service.remote),
        }
        write_text(self.folder / DESCRIPTION, json.dumps(described, indent=2))

    def _bill(self) -> dict[str, Any]:
        return bill(self.service.usage, self.remote.lost, self.prices)

    def _measure(self) -> Evaluation:
        assert self.heldout is not None
        each, sampler = self.settings.eval_samples, self.service.sampler()
        wave = Wave(self.service, sampler, self.settings.sampling, lambda rollout: self._stop.by is not None)
        orders = [
            Order(prompt, prompt, 0, tuple(range(prompt * each, (prompt + 1) * each)))
            for prompt in range(len(self.heldout.keys))
        ]
        asked = [self.remotely.start(self.heldout, order, wave) for order in orders]
        played = patient(begun(lambda: self.remotely.all_of(asked)), lambda: self._stop.by is not None)
        if self._stop.by is not None:  # what was to be stopped was not scored
            raise Interrupted
        return judged([one.trajectory.generation() for one in played], [one.outcome for one in played], each)


def _usage(said: Any) -> Usage:
    """What a line of the metrics says, which anybody may have changed."""
    known = {name: said.get(name) for name in asdict(Usage())} if isinstance(said, dict) else {}
    return Usage(**{name: value for name, value in known.items() if type(value) is int and value >= 0})


def _refuse_what_it_has_not(settings: Settings) -> None:
    has_not = {
        "loss.kl": settings.loss.kl > 0,
        "loss.clip.dual": settings.loss.clip.dual is not None,
        "sampling.temperature other than 1": settings.sampling.temperature != 1,
    }
    if refused := [name for name, is_set in has_not.items() if is_set]:
        raise ValueError(f"the service has no {', '.join(refused)}; leave them at their defaults")


def _warn_of(recipe: Recipe) -> None:
    if recipe.stopping:
        log.warning(
            "the recipe stops rollouts, which the Tinker API cannot: each runs to its end and is paid, nothing is saved"
        )
    if recipe.reads_kl:
        log.warning(
            "the recipe forgets by how far updates move the policy, which is not measured here: it does not forget"
        )
