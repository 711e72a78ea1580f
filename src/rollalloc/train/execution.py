"""A run carried out: trained, or resumed, in its folder."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, replace
from errno import ENOENT
from pathlib import Path

import torch
from transformers.utils.logging import disable_progress_bar

from rollalloc.core.allocator import Allocator
from rollalloc.core.packing import differences
from rollalloc.core.recipe import Recipe
from rollalloc.data.encoding import template_arguments
from rollalloc.data.feature_file import holds_features, read_features
from rollalloc.data.features import Features
from rollalloc.data.overlap import MOST_SHARED, normalised, repeated, same_text
from rollalloc.data.prompts import EncodedPrompts, PromptSet, encode_prompts, load_prompts, refuse_longer
from rollalloc.files.atomic import write_text
from rollalloc.files.names import DESCRIPTION, FEATURES
from rollalloc.generate.sampling import Sampling
from rollalloc.generate.stream.begin import refuse_unfit_model
from rollalloc.models.adapter import peft_module
from rollalloc.models.features import features_of, weights_digest
from rollalloc.models.policy import Policy, context_of, usable_device
from rollalloc.rewards.function import RewardFunction, load_reward
from rollalloc.rewards.overlong import OverlongScorer
from rollalloc.rewards.scorers import InlineScorer, Scorer, WorkerScorer
from rollalloc.train import checkpoint
from rollalloc.train.description import Run, Source, digests_of
from rollalloc.train.evaluation import HeldOut
from rollalloc.train.folder import RunFolder
from rollalloc.train.native import Listener, Trainer
from rollalloc.train.settings import Settings
from rollalloc.train.trackers import tracked

log = logging.getLogger(__name__)

_NO_FEATURES = "none"

# Of a source; a resumed run may have others:
_WHERE_IT_RUNS = ("reward_workers", "reward_limit_s", "reward_cache", "device")
_DATA = ("prompts", "heldout", "chat_template_args", "accept_overlap")  # of these the content counts, see `NativeState`


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
        folder: of the run; made new, resumed or refused.
        listener: called with each line of the metrics.
        resume: go on from the newest checkpoint in the folder; this very run begins again where it came to none.
        accept_recipe: resume under this run's recipe although the checkpoint was saved under another.
        accept_data: resume with this run's prompts although the checkpoint was saved with others; see `Trainer.resume`.
        overwrite: remove what another run wrote there, as its manifest says, when this one begins.

    Raises:
        InUse, FileExistsError: as `RunFolder.check`.
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
            overwrite = overwrite or (resume and place.is_broken() and _is_begun_in(run, folder))
            place.check(overwrite=overwrite)
        prompts, held = check(run)
        recipe = run.made_recipe()
        with tracked(run.track, folder, run.description(), listener) as listen, scorer_of(run) as scorer:
            policy = Policy.load(source.model, device=source.device)
            train = encoded(source, policy, run.settings.sampling, prompts)
            if run.settings.engine == "async":
                refuse_unfit_model(policy.model, train.tokens, run.settings.sampling, run.settings.streaming)
            heldout = None if held is None else _held_out(source, policy, run.settings, held)
            features = _features(source, recipe, policy, train, folder if goes_on else None)
            if source.lora is not None:  # after the features, which are the base model's
                policy = policy.with_lora(source.lora, seed=run.settings.seed)
            trainer = Trainer(
                *(policy, recipe, train, scorer, run.settings),
                heldout=heldout,
                features=features,
                folder=place,
                listener=listen,
            )
            if goes_on:
                trainer.resume(accept_recipe=accept_recipe, accept_data=accept_data)
            else:
                place.begin(overwrite=overwrite)
            described = run.description() | {"digests": digests_of(source)}
            write_text(folder / DESCRIPTION, json.dumps(described, indent=2))
            return trainer.run()


Loaded = tuple[PromptSet, PromptSet | None]  # those to train on, and those held out


def check(run: Run, loaded: Loaded | None = None) -> Loaded:
    """Refuse a run that cannot be, as far as that can be told without its model; its prompts.

    Args:
        run: a run.
        loaded: its prompts, where they were loaded and its reward tried before.

    Raises:
        ValueError: a device that cannot be used; a recipe that cannot be made, or with too few prompts or rollouts for it;
            files that nobody would read; rollouts longer than the model's context; too many held-out prompts that are in
            the training set.
        OSError: a file that is not there.
        ImportError: what is needed is not installed, or the reward function cannot be imported.
    """
    source = run.source
    usable_device(source.device)
    recipe = run.made_recipe()
    if source.lora is not None:
        peft_module()
    _check_features(source, recipe)
    if loaded is None:
        try_reward(source, run.settings.sampling)
        held = None if source.heldout is None else load_prompts(source.heldout)
        loaded = load_prompts(*source.prompts), held
        _check_repeated(loaded[0])
        if held is not None:
            _check_overlap(loaded[0], held, accepted=source.accept_overlap)
    _refuse_less_than_a_batch(recipe, len(loaded[0].keys), run.settings.seed)
    return loaded


def _refuse_less_than_a_batch(recipe: Recipe, prompts: int, seed: int) -> None:
    """Refuse a budget that does not pay the first batch: such a run would train nothing, and end as if all were well."""
    begun = Allocator(recipe, prompts, seed).ask(capacity=0)
    if begun.finished is not None:
        raise ValueError(f"max_rollouts: not one group fits, {begun.finished}; give more, or smaller groups (--set)")
    budget = recipe.budget.run_rollouts
    if budget is None:
        return
    orders = Allocator(replace(recipe, budget=replace(recipe.budget, run_rollouts=None)), prompts, seed).ask().generate
    sizes = sorted(len(order.rollouts) for order in orders)[: recipe.groups]
    if budget < sum(sizes):
        raise ValueError(
            f"max_rollouts: {budget:,} is less than the first batch takes, {sum(sizes):,} rollouts for {len(sizes)} "
            f"prompts; give at least --max-rollouts {sum(sizes)}, or smaller batches (--set groups=... or n=...)"
        )


def try_reward(source: Source, sampling: Sampling) -> None:
    """Refuse a reward that cannot be imported, and rollouts that no prompt fits beside; no model is loaded.

    Raises:
        ValueError, TypeError, OSError, ImportError, AttributeError: says which.
    """
    loaded_reward(source.reward)
    context = context_of(source.model)
    if context is not None:
        refuse_longer(sampling.max_new_tokens, context)


def _check_repeated(train: PromptSet) -> None:
    """Say how many prompts to train on have the text of another one."""
    again = repeated([normalised(prompt) for prompt in train.prompts])
    if not again:
        return
    keys, truths = train.keys, train.ground_truths
    differ = sum(truths[at] != truths[first] for at, first in again.items())
    at, first = next(iter(again.items()))
    log.warning(
        "%d of %d training prompts have the text of another one but for case, layout and system messages (%r that of %r); "
        "%d of these have another ground truth", len(again), len(train), keys[at], keys[first], differ,
    )  # fmt: skip


def _check_overlap(train: PromptSet, held: PromptSet, *, accepted: bool) -> None:
    """Say how many held-out prompts are in the training set, and refuse more than `MOST_SHARED` unless accepted."""
    shared = same_text(map(normalised, held.prompts), map(normalised, train.prompts))
    if not shared:
        return
    at, seen = next(iter(shared.items()))
    problem = (
        f"{len(shared)} of {len(held)} held-out prompts ({len(shared) / len(held):.0%}) are in the training set too, the "
        f"first {held.keys[at]!r} as {train.keys[seen]!r}, so that the accuracy is partly that of prompts trained on"
    )
    if len(shared) > MOST_SHARED * len(held) and not accepted:
        raise ValueError(
            f"{problem}; take them out of one of the files, or accept it with --accept-overlap (more than {MOST_SHARED:.0%} "
            "are refused)"
        )
    log.warning("%s", problem)


def _is_begun_in(run: Run, folder: Path) -> bool:
    """Whether a folder describes this run, wherever it is carried out now and with however many workers."""
    if not (folder / DESCRIPTION).exists():
        return False
    begun = Run.described_in(folder).source
    where = {name: getattr(begun, name) for name in _WHERE_IT_RUNS}
    return replace(run, source=replace(run.source, **where)).is_described_in(folder)


def _refuse_another_source(run: Run, folder: Path) -> None:
    """Refuse to resume with another model or reward, or another way to evaluate."""
    saved, given = (asdict(each.source) for each in (Run.described_in(folder), run))
    for name in (*_WHERE_IT_RUNS, *_DATA):
        saved[name] = given[name]
    if others := list(differences(saved, given, "source")):
        what = f"the checkpoints in {folder} are of another run: {'; '.join(others)}"
        raise ValueError(f"{what}; give what it was started with, or another folder")


def _check_features(source: Source, recipe: Recipe) -> None:
    """Refuse features that nobody would read, or that are not there, before a model is loaded."""
    if source.features is None:
        return
    if not recipe.reads_features:
        raise ValueError(f"features: the prompt rule {recipe.prompts!r} does not look at them; take them out")
    if source.features == _NO_FEATURES:
        return
    if not Path(source.features).is_file():
        raise FileNotFoundError(ENOENT, "expected a file that `rollalloc features` made, or none", source.features)
    if not holds_features(Path(source.features).resolve()):
        raise ValueError(f"features: {source.features} is not what `rollalloc features` writes, or it is damaged")


def _features(
    source: Source, recipe: Recipe, policy: Policy, train: EncodedPrompts, resumed: Path | None
) -> Features | None:
    """Features for a recipe that predicts: those that a resumed run began with, those of a file, or the initial model's."""
    if not recipe.reads_features:
        return None
    keys = train.prompt_set.keys
    if resumed is not None and (resumed / FEATURES).is_file():
        try:
            return read_features(resumed / FEATURES, keys)
        except ValueError as error:
            log.warning("the features of the run are made anew, since the prompts are others: %s", error)
    if source.features == _NO_FEATURES:
        log.warning("%s predicts without features: from each prompt's own record and the mean only", recipe.prompts)
        return None
    if source.features is not None:
        return read_features(Path(source.features), keys, weights=weights_digest(policy.model))
    return features_of(policy.model, train.tokens, pad_id=policy.pad_id)


def one_thread() -> None:
    """For a tiny model, or a run a core: more threads than cores would make each other wait."""
    torch.set_num_threads(1)
    disable_progress_bar()  # of transformers, which would write into ours


def scorer_of(run: Run) -> Scorer:
    """What scores a run's rollouts, in processes that may be killed unless its source says otherwise."""
    source = run.source
    scorer: Scorer = InlineScorer(loaded_reward(source.reward))  # a wrong path fails now, not with the first rollouts
    if source.reward_workers > 0:
        workers, limit_s = source.reward_workers, source.reward_limit_s
        scorer = WorkerScorer(source.reward, workers, limit_s, cached=source.reward_cache)
    if source.overlong_buffer is None:
        return scorer
    return OverlongScorer(scorer, run.settings.sampling.max_new_tokens, source.overlong_buffer)


def loaded_reward(reward: str) -> RewardFunction:
    """A reward function by its path."""
    try:
        return load_reward(reward)
    except (ValueError, TypeError, OSError, ImportError, AttributeError):  # these name what to do
        raise
    except (Exception, SystemExit) as error:
        what = f"since its module raises {type(error).__name__} when it is imported: {error}"
        raise ImportError(f"{reward} cannot be loaded, {what}") from error


def encoded(source: Source, policy: Policy, sampling: Sampling, prompts: PromptSet) -> EncodedPrompts:
    """Prompts as the policy's tokens.

    Raises:
        ValueError: as `encode_prompts`; a tokenizer that is another model's.
    """
    made = encode_prompts(
        prompts,
        policy.tokenizer,
        context=policy.context,
        max_new_tokens=sampling.max_new_tokens,
        overlong="drop" if source.drop_overlong else "error",
        template_args=template_arguments(source.chat_template_args),
    )
    for key, tokens in zip(made.prompt_set.keys, made.tokens, strict=True):
        policy.refuse_unknown(tokens, f"prompt {key!r}")
    return made


def _held_out(source: Source, policy: Policy, settings: Settings, given: PromptSet) -> HeldOut:
    prompts = encoded(source, policy, settings.sampling, given)
    if not source.single_answer:
        return HeldOut(prompts)
    named, truths = prompts.prompt_set.keys, prompts.prompt_set.ground_truths
    answers = tuple(
        policy.answer(str(truth), to=f"held-out prompt {key!r}") for key, truth in zip(named, truths, strict=True)
    )
    longest, limit = max(map(len, answers)), settings.sampling.max_new_tokens
    if longest > limit:
        what = f"a held-out answer has {longest} tokens, end of sequence included, a rollout at most {limit}"
        raise ValueError(f"{what}, so that it can never be right; raise max_new_tokens")
    return HeldOut(prompts, answers)
