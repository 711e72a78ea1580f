"""One run as a value: a model, prompts, a reward, a recipe and settings; `execute` trains it."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from errno import ENOENT
from functools import cache
from hashlib import file_digest
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, get_type_hints

import torch
from transformers.utils.logging import disable_progress_bar

from rollalloc.core.allocator import Allocator
from rollalloc.core.packing import differences
from rollalloc.core.recipe import Recipe, at_least
from rollalloc.data.prompts import EncodedPrompts, PromptSet, encode_prompts, load_prompts
from rollalloc.engines import checkpoint
from rollalloc.engines.evaluation import HeldOut
from rollalloc.engines.folder import DESCRIPTION, RunFolder
from rollalloc.engines.native import Listener, Trainer
from rollalloc.engines.policy import Policy, usable_device
from rollalloc.engines.settings import SAVING, Settings
from rollalloc.engines.trackers import tracked
from rollalloc.named import make_recipe
from rollalloc.rewards.function import RewardFunction, load_reward
from rollalloc.rewards.overlong import OverlongScorer
from rollalloc.rewards.scorers import InlineScorer, Scorer, WorkerScorer
from rollalloc.whole import write_text

_WHERE_IT_RUNS = (
    "reward_workers",
    "reward_limit_s",
    "reward_cache",
    "device",
)  # of a source: a resumed run may have others


@dataclass(frozen=True, kw_only=True)
class Source:
    """What is trained, on what, for what reward.

    Attributes:
        model: name or folder of a causal language model.
        prompts: parquet or JSONL files in verl's schema.
        heldout: such a file for evaluation; None: no evaluation.
        reward: `package.module:function`, or `file.py:function`, with verl's `compute_score` signature.
        single_answer: every held-out prompt has just one right answer, its ground truth: accuracy is then exact.
        drop_overlong: leave out prompts that do not fit the model's context, instead of refusing them.
        reward_workers: processes that score; 0 scores in this process, for trusted rewards only.
        reward_limit_s: seconds a sample may take, in a process of its own.
        reward_cache: scores to remember; 0 for a reward that is not deterministic.
        overlong_buffer: last tokens of a rollout over which DAPO's overlong penalty grows; None: no penalty.
        device: e.g. "cpu"; None: a GPU where there is one.

    Raises:
        ValueError: a number out of its range.
    """

    model: str
    prompts: tuple[str, ...]
    heldout: str | None = None
    reward: str
    single_answer: bool = False
    drop_overlong: bool = False
    reward_workers: int = 1
    reward_limit_s: float = 10.0
    reward_cache: int = 10_000
    overlong_buffer: int | None = None
    device: str | None = None

    def __post_init__(self) -> None:
        at_least("reward_workers", self.reward_workers, 0, "0 scores in this process")
        at_least("reward_cache", self.reward_cache, 0, "0 remembers nothing")
        if not 0 < self.reward_limit_s < 1e6:
            raise ValueError(f"reward_limit must be a positive number of seconds, got {self.reward_limit_s}")
        if self.overlong_buffer is not None:
            at_least("overlong_buffer", self.overlong_buffer, 1)


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training run.

    Attributes:
        source: model, prompts and reward.
        recipe: name of a recipe, as `rollalloc.named.make_recipe` takes it.
        parameters: of the recipe.
        settings: of the trainer.
        max_rollouts: rollouts the run may pay; None: no limit.
        label: what the run is called in tables and figures; the recipe's name by default.
        task: the built-in task that it trains on; "" for a model and prompts of the user's own.
        track: trackers that its metrics go to as well (see `rollalloc.engines.trackers`); they change nothing.

    Raises:
        ValueError: a number out of its range.
    """

    source: Source
    recipe: str
    parameters: Mapping[str, Any] = field(default_factory=dict[str, Any])
    settings: Settings
    max_rollouts: int | None = None
    label: str = ""
    task: str = ""
    track: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.max_rollouts is not None:
            at_least("max_rollouts", self.max_rollouts, 1)

    def made_recipe(self) -> Recipe:
        """The recipe, with the run's budget.

        Raises:
            ValueError: it cannot be made.
        """
        recipe = make_recipe(self.recipe, self.parameters)
        if self.max_rollouts is None:
            return recipe
        return replace(recipe, budget=replace(recipe.budget, run_rollouts=self.max_rollouts))

    @property
    def name(self) -> str:
        """The label, or the recipe's name."""
        return self.label or self.recipe

    def description(self) -> dict[str, Any]:
        """The run as plain data: what must be equal for a finished run to be used again."""
        described = asdict(self)
        for name in SAVING:
            del described["settings"][name]
        del described["track"]
        return json.loads(json.dumps(described))

    def is_in(self, folder: Path) -> bool:
        """Whether a folder's `run.json` is of this very run, on files with the same contents as now."""
        saved, digests = self._saved_in(folder)
        if saved != self.description():
            return False
        now = digests_of(self.source)
        # A file that is gone has no contents that could differ.
        return all(digests.get(name) == now[name] for name in now)

    def is_described_in(self, folder: Path) -> bool:
        """Whether a folder's `run.json` says the same, whatever its files held then; quick, however large they are."""
        return self._saved_in(folder)[0] == self.description()

    @staticmethod
    def _saved_in(folder: Path) -> tuple[dict[str, Any], dict[str, str]]:
        """The description in a folder, and the digests beside it; empty where there is none."""
        path = folder / DESCRIPTION
        try:
            saved = json.loads(path.read_text()) if path.exists() else {}
            return saved, saved.pop("digests", {})  # of the files, which are not the run's
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} does not describe a run ({error}); it is damaged, or another program's") from None

    @staticmethod
    def described_in(folder: Path) -> Run:
        """The run that a folder's `run.json` describes.

        Raises:
            FileNotFoundError: there is none.
            ValueError: it is of another version.
        """
        path = folder / DESCRIPTION
        if not path.exists():
            raise FileNotFoundError(ENOENT, "expected the folder of a run, with run.json in it", str(folder))
        try:
            return _revived(Run, Run._saved_in(folder)[0])
        except TypeError as error:
            raise ValueError(f"{path} is not of this version of rollalloc: {error}") from None


def _revived(kind: type[Any], saved: Mapping[str, Any]) -> Any:
    """A dataclass from what `asdict` and JSON made of it; in it, lists were tuples.

    Raises:
        TypeError: it has not those fields.
    """
    hints = get_type_hints(kind)
    given: dict[str, Any] = {}
    for name, value in saved.items():
        nested = is_dataclass(hints.get(name))
        given[name] = _revived(hints[name], value) if nested else tuple(value) if isinstance(value, list) else value
    return kind(**given)


def folder_of(run: Run, folder: Path) -> Path:
    """Where a run stands among others."""
    return folder / run.task.replace("/", "-") / f"{run.name}-{run.settings.seed}"


def execute(
    run: Run,
    folder: Path,
    listener: Listener | None = None,
    *,
    resume: bool = False,
    accept_recipe: bool = False,
    accept_data: bool = False,
    overwrite: bool = False,
) -> str:
    """Train; writes `run.json`, `metrics.jsonl`, checkpoints and the trained model. Returns why the run ended.

    What can be wrong is checked in the order of what it costs: the folder, the reward, the prompts, and then the model.

    Args:
        folder: of the run; made new, or resumed, or refused.
        listener: called with each line of the metrics.
        resume: go on from the newest checkpoint in the folder; this very run begins again where it came to none.
        accept_recipe: resume under this run's recipe although the checkpoint was saved under another.
        accept_data: resume with this run's prompts although the checkpoint was saved with others; see `Trainer.resume`.
        overwrite: remove what another run wrote there, as its manifest says, when this one begins.

    Raises:
        InUse: another trainer is at work in the folder.
        FileExistsError: the folder holds a run that is not to be resumed or overwritten, or files that are not ours.
        ValueError: a run that cannot be; a checkpoint of another run, naming the differences, or none that is whole.
        ImportError: a tracker's library is not installed, or the reward function cannot be imported.
    """
    source = run.source
    with RunFolder(folder) as place:
        goes_on = resume and checkpoint.newest(folder) is not None
        if goes_on:
            place.lock()
            _refuse_another_source(run, folder)
        else:
            overwrite = overwrite or (resume and place.is_broken() and run.is_described_in(folder))
            place.check(overwrite=overwrite)
        usable_device(source.device)
        recipe = run.made_recipe()
        with tracked(run.track, folder, run.description(), listener) as listen, _scorer(run) as scorer:
            prompts = load_prompts(*source.prompts)
            held = None if source.heldout is None else load_prompts(source.heldout)
            Allocator(
                recipe, len(prompts.keys), run.settings.seed
            )  # too few prompts are said before the model is loaded
            policy = Policy.load(source.model, device=source.device)
            train = _encoded(source, policy, run.settings, prompts)
            heldout = None if held is None else _held_out(source, policy, run.settings, held)
            trainer = Trainer(
                policy, recipe, train, scorer, run.settings, heldout=heldout, folder=place, listener=listen
            )
            if goes_on:
                trainer.resume(accept_recipe=accept_recipe, accept_data=accept_data)
            else:
                place.begin(overwrite=overwrite)
            described = run.description() | {"digests": digests_of(source)}
            write_text(folder / DESCRIPTION, json.dumps(described, indent=2))
            return trainer.run()


def digests_of(source: Source) -> dict[str, str]:
    """SHA-256 of each file that a source names and that is on this machine, by its path."""
    named = [*source.prompts, source.heldout, source.model, _reward_file(source.reward)]
    places = [Path(name) for name in named if name is not None]
    files = [file for place in places for file in (sorted(place.rglob("*")) if place.is_dir() else [place])]
    return {str(file): _digest(file, file.stat().st_mtime_ns) for file in files if file.is_file()}


@cache
def _digest(file: Path, changed_ns: int) -> str:
    with file.open("rb") as opened:
        return file_digest(opened, "sha256").hexdigest()


def _reward_file(reward: str) -> str | None:
    """The file of a reward function, `file.py:function` or `package.module:function`; nothing is imported."""
    module = reward.rpartition(":")[0]
    if module.endswith(".py"):
        return module
    package, *inner = module.split(".")
    found = PathFinder.find_spec(package, [str(Path.cwd()), *sys.path])
    if found is None or not inner:
        return None if found is None else found.origin
    places = [Path(place, *inner) for place in found.submodule_search_locations or ()]
    files = [file for place in places for file in (place.with_suffix(".py"), place / "__init__.py") if file.is_file()]
    return str(files[0]) if files else None


def _refuse_another_source(run: Run, folder: Path) -> None:
    """Refuse to resume with another model, evaluation or reward."""
    saved, given = (asdict(each.source) for each in (Run.described_in(folder), run))
    for name in (*_WHERE_IT_RUNS, "prompts"):  # of the prompts the content counts, which the checkpoint knows
        saved[name] = given[name]
    others = list(differences(saved, given, "source"))
    if others:
        raise ValueError(
            f"the checkpoints in {folder} are of another run: {'; '.join(others)}; give what it was started with, or start "
            "afresh in another folder"
        )


def one_thread() -> None:
    """For a tiny model, or a run a core: more threads than cores would make each other wait."""
    torch.set_num_threads(1)
    disable_progress_bar()  # of transformers, which would write into ours


def _scorer(run: Run) -> Scorer:
    source = run.source
    scorer: Scorer = InlineScorer(_loaded(source.reward))  # a wrong path fails now, not with the first rollouts
    if source.reward_workers > 0:
        workers, limit_s = source.reward_workers, source.reward_limit_s
        scorer = WorkerScorer(source.reward, workers, limit_s, cached=source.reward_cache)
    if source.overlong_buffer is None:
        return scorer
    return OverlongScorer(scorer, run.settings.sampling.max_new_tokens, source.overlong_buffer)


def _loaded(reward: str) -> RewardFunction:
    """A reward function by its path.

    Raises:
        ImportError: its module raises when it is imported, or leaves.
    """
    try:
        return load_reward(reward)
    except (ValueError, TypeError, OSError, ImportError, AttributeError):  # these name what to do
        raise
    except (Exception, SystemExit) as error:
        raise ImportError(
            f"{reward} cannot be loaded, since its module raises {type(error).__name__} when it is imported: {error}"
        ) from error


def _encoded(source: Source, policy: Policy, settings: Settings, prompts: PromptSet) -> EncodedPrompts:
    encoded = encode_prompts(
        prompts,
        policy.tokenizer,
        context=policy.context,
        max_new_tokens=settings.sampling.max_new_tokens,
        overlong="drop" if source.drop_overlong else "error",
    )
    highest, known = max(map(max, encoded.tokens)), policy.vocabulary
    if highest >= known:
        raise ValueError(
            f"the tokenizer gives token {highest}, but {source.model} has embeddings for {known} tokens only; "
            "load the tokenizer that belongs to the model, or resize its embeddings"
        )
    return encoded


def _held_out(source: Source, policy: Policy, settings: Settings, given: PromptSet) -> HeldOut:
    prompts = _encoded(source, policy, settings, given)
    if not source.single_answer:
        return HeldOut(prompts)
    answers = tuple(policy.answer(str(truth)) for truth in prompts.prompt_set.ground_truths)
    longest, limit = max(map(len, answers)), settings.sampling.max_new_tokens
    if longest > limit:
        raise ValueError(
            f"a held-out answer has {longest} tokens, end of sequence included, but a rollout at most {limit}, so that it "
            "can never be right; raise max_new_tokens"
        )
    return HeldOut(prompts, answers)
