"""The verdict says which recipe to start with. Its rule is a table in docs/advise.md, so that users can check it.

Each branch rests on measured figures, quoted with their task and model size. No saving is predicted for the
reader's own task, because no experiment has shown that a profile before training predicts it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Literal

from rollalloc.advise.profile import Profile
from rollalloc.runs.own import OwnRun

# Number of rollouts that a profile needs. The missing number is rounded up to a multiple of `_ROUND`.
ENOUGH, _ROUND = 1024, 100
BATCH = 64  # rollouts per batch, if only the group size is known
USUAL_N = 8  # TRL's default of `num_generations`, assumed if the present setting is unknown
_EVEN = 8  # if there are too few prompts for a batch, a batch has their number rounded down to a multiple of this
# No recipe can learn much if at least the share BARREN of groups of LARGE_GROUP rollouts has no variance.
LARGE_GROUP, BARREN = 16, 0.95
MANY_ANSWERS = 0.5  # if two right answers of a prompt differ with at least this probability, expect a smaller saving
# Foresight is worth a comparison from this AUC, and this share of groups of 4 without variance.
PREDICTABLE, FEW_MIXED = 0.9, 0.7

# Measured figures. tests/advise/test_verdict.py names the guide or log that contains each number.
ONE_PER_PROMPT = (
    "Measured: for equal accuracy, GRPO with groups of 4 needed 3.31 [3.09–3.66] times REINFORCE's rollouts on "
    "skills/balanced, > 3.55 times on skills/late and > 3.37 times on skills/mixed (0.15M parameters). With groups of 16 it "
    "needed 5.32 [3.86–6.33] times as many at 8M and 3.70 [2.71–4.53] times at 135M "
    "(lab/docs/leaderboard.md, lab/docs/scale.md)."
)
GRADED = (
    "Measured with graded rewards: GRPO needed > 1.93 times REINFORCE's rollouts on skills/graded. RAFT reached the "
    "target in 0 of 8 runs (lab/docs/leaderboard.md)."
)
DIFFERENT_ANSWERS = (
    "Measured on tasks with many right answers: GRPO with groups of 4 needed 1.50 [1.39–1.69] times REINFORCE's rollouts on "
    "walks/mixed (eight seeds), and 1.13 times on walks/late (two seeds, earlier defaults; lab/log). REINFORCE's update "
    "takes up to 2.2 times as many seconds as GRPO's, because it trains on all rows."
)
PREDICTION = (
    "Measured, and not always a gain: on pools of hopeless and solved prompts, REINFORCE "
    "needed 0.85 [0.56–1.06] times foresight's rollouts at 0.15M and 1.50 [0.66–1.94] times at 8M (lab/docs/foresight.md). "
    "It needed 1.37 [1.26–1.51] times as many on skills/late and 1.10 [0.96–1.36] times on skills/mixed, but 1.05 "
    "[0.97–1.15] and 0.90 [0.80–1.11] times the tokens, so foresight saved none (0.15M, lab/docs/leaderboard.md)."
)
RAFT_IS_LEVEL = (
    "RAFT, which trains only on right rollouts, is an alternative. REINFORCE's rollouts divided by RAFT's were "
    "1.00 [0.95–1.03] on skills/balanced, 0.94 [0.87–0.98] at 135M, and 0.85 [0.78–0.93] on skills/late."
)
NO_GAIN = (
    "Some tasks gain nothing: on rg/simple_equations and rg/spell_backward neither GRPO nor REINFORCE reached the target, "
    "on SmolLM2's filter task both needed as many rollouts (one seed), and on rg/letter_counting GRPO needed 1.01 times "
    "REINFORCE's rollouts (two seeds, earlier defaults). No figure of a profile predicts this: compare both on your task."
)
FIXED_GROUPS = (
    "If your framework needs groups, keep GRPO and use small groups: at 8M, with earlier defaults, groups of 16 needed "
    "5.99 [4.40–30.74] times REINFORCE's rollouts, and groups of 4 needed 3.56 [2.80–3.96] times (lab/docs/scale.md)."
)
_NEEDS_RATES = "Foresight is ruled out: it predicts success rates, and these rewards are not within [0, 1]."


@dataclass(frozen=True, slots=True)
class Choice:
    """A recipe with its batch shape.

    Attributes:
        recipe: a key of `rollalloc.named.RECIPES`; "" for a recipe of the user's own that has no name.
        groups: prompts per batch, at least 1.
        n: rollouts per prompt that are trained on, at least 1.
    """

    recipe: str
    groups: int
    n: int

    @property
    def name(self) -> str:
        """Name for folders: "grpo_n4", or the recipe alone if each prompt has one rollout."""
        return self.recipe if self.n == 1 else f"{self.recipe}_n{self.n}"

    @property
    def words(self) -> str:
        """Name in sentences: "GRPO n = 4", or the recipe alone."""
        named = {"grpo": "GRPO", "reinforce": "REINFORCE", "raft": "RAFT", "": "your recipe"}.get(
            self.recipe, self.recipe
        )
        return named if self.n == 1 else f"{named} n = {self.n}"

    @property
    def rows(self) -> int:
        """Rollouts per batch."""
        return self.groups * self.n


@dataclass(frozen=True, slots=True)
class Advice:
    """The advice: what to do, and why.

    Attributes:
        kind: "switch": start with another recipe. "keep": keep the present one. "too few": sample more first. "barren":
            use other prompts, because no recipe learns from these.
        sentence: the verdict in words.
        choice: the recipe and batch shape to train with. None: `kind` is "too few" or "barren".
        present: the present setting.
        because: sentences with the reasons and with the measurements that support them.
        notes: further sentences for the reader.
        more: number of rollouts that are still needed for a verdict; 0 if there are enough, or if more would not help.
    """

    kind: Literal["switch", "keep", "too few", "barren"]
    sentence: str
    choice: Choice | None
    present: Choice
    because: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    more: int = 0


def present_of(profile: Profile, *, sampled: bool, runs: Sequence[OwnRun] = ()) -> tuple[Choice, str]:
    """The present setting if the user does not name it, with a sentence that says how it was found.

    Args:
        profile: profile of the log.
        sampled: whether `rollalloc advise` sampled the log. Such a log does not show how the user trains.
        runs: the runs of rollalloc that wrote the log. If there is one, its own records are used.
    """
    if len(runs) == 1 and runs[0].each:
        run = runs[0]
        present = Choice(run.recipe, run.groups, run.each)
        generated = "".join(f", {name} = {value}" for name, value in run.parameters.items() if name.startswith("n"))
        shape = f"batches of {run.groups:,} prompts × {run.each:,} rows{generated}"
        named = run.recipe or "a recipe of your own"
        return present, f"Present setting: {named} with {shape}, as {run.source} records."
    if sampled:
        present = Choice("grpo", BATCH // USUAL_N, USUAL_N)
        why = f"num_generations={USUAL_N} is TRL's default, and a sampled profile does not show your setting"
    else:
        recipe = "grpo" if profile.n > 1 else "reinforce"
        present = Choice(recipe, profile.groups or max(1, round(BATCH / profile.n)), profile.n)
        why = f"the log has groups of {profile.n}"
    return present, f"Assumed present setting: {present.words}, because {why}. Use --present to name another."


def verdict_of(profile: Profile, present: Choice, prompts: int | None = None) -> Advice:
    """The verdict on a profile, by the rule of docs/advise.md.

    Args:
        profile: profile of the model on the prompts.
        present: the present setting.
        prompts: number of prompts to train on, at least 1. A batch has at most this number. None: unknown.
    """
    if profile.remedy:
        return Advice("too few", f"No verdict: {profile.too_few}. What helps: {profile.remedy}.", None, present)
    if profile.too_few:
        more = _ROUND * max(1, ceil((ENOUGH - profile.rollouts) / _ROUND))
        sentence = f"Too few to tell ({profile.too_few}): sample {more:,} more rollouts."
        return Advice("too few", sentence, None, present, more=more)
    if not profile.reward.graded and profile.zero_variance[LARGE_GROUP].value >= BARREN:
        return Advice("barren", _barren(profile), None, present)
    recipe, because = _recipe(profile, present)
    notes = _notes(profile, present)
    if recipe == present.recipe:
        return Advice("keep", f"Keep {present.words}.", present, present, because, notes)
    groups = present.rows if prompts is None or present.rows <= prompts else max(1, prompts // _EVEN * _EVEN)
    choice = Choice(recipe, groups, 1)
    sentence = f"Begin with {choice.words}: one rollout per prompt, {choice.groups:,} prompts per batch."
    return Advice("switch", sentence, choice, present, because, notes)


def _recipe(profile: Profile, present: Choice) -> tuple[str, tuple[str, ...]]:
    """The recipe that the rule chooses, and why."""
    graded, outside = profile.reward.graded, profile.reward.outside
    ruled_out = {"raft"} if graded else set[str]()
    ruled_out |= {"foresight"} if outside else set()
    differ = profile.right_pairs_differ
    if present.n == 1 and present.recipe not in ruled_out:
        return present.recipe, (f"{present.words} has one rollout per prompt already.", ONE_PER_PROMPT)
    if graded:
        return "reinforce", ("Rewards are graded.", GRADED)
    if differ is not None and differ.value >= MANY_ANSWERS:
        why = f"Two right answers to a prompt differ with a probability of {differ.value:.0%}: expect a smaller saving."
        return "reinforce", (why, DIFFERENT_ANSWERS)
    alike = profile.zero_variance[4].value
    why = f"In {alike:.0%} of groups of 4 all rewards are equal, so GRPO learns nothing from them."
    return "reinforce", (why, ONE_PER_PROMPT)


def _notes(profile: Profile, present: Choice) -> tuple[str, ...]:
    notes = [*_compared(profile, present)]
    if present.n > 1:
        notes += [NO_GAIN, FIXED_GROUPS]
    if not profile.reward.graded:
        notes.append(RAFT_IS_LEVEL)
    if profile.reward.outside:
        notes.append(_NEEDS_RATES)
    return tuple(notes)


def _compared(profile: Profile, present: Choice) -> tuple[str, ...]:
    """What to compare the recipe with, where success can be predicted and few groups would teach."""
    graded, auc = profile.reward.graded, profile.auc or 0.5
    alike = 0.0 if graded else profile.zero_variance[4].value  # graded rewards are no success that could be predicted
    if auc < PREDICTABLE or alike < FEW_MIXED or profile.reward.outside:
        return ()
    other = "REINFORCE" if present.recipe == "foresight" else "foresight"
    why = f"success can be predicted with an AUC of {auc:.2f}, and {alike:.0%} of groups of 4 have no variance"
    return (f"Compare {other} with it: {why}. {PREDICTION}",)


def _barren(profile: Profile) -> str:
    """Say why little can be learned from these prompts, and what would help."""
    mean = profile.mean.value
    if mean <= 1 - BARREN:
        how = "hardly any are right"
        do = "Use easier prompts, train on demonstrations first, or check that the reward accepts a right answer"
    elif mean >= BARREN:
        how, do = "nearly all are right", "Use harder prompts"
    else:
        how, do = "each prompt is nearly always solved, or hardly ever", "Use prompts of medium difficulty"
    return (
        f"No recipe learns much from these prompts: of {profile.rollouts:,} rollouts {how}, and "
        f"{profile.zero_variance[LARGE_GROUP].value:.0%} of groups of {LARGE_GROUP} would have equal rewards. {do}."
    )
