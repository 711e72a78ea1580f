"""Tables that show an advice profile in the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from rollalloc.cli.reading import points, table

if TYPE_CHECKING:
    from rollalloc.advise.lengths import LengthProfile
    from rollalloc.advise.predictability import Predictability
    from rollalloc.advise.profile import Profile
    from rollalloc.waste.shares import Share

_SAID = "95% interval"


def show_profile(console: Console, profile: Profile) -> None:
    """Print a profile's tables, then its notes."""
    console.print(_rates(profile))
    if profile.predictability is not None:
        console.print(_predictability(profile.predictability))
    if profile.lengths is not None:
        console.print(_lengths(profile.lengths))
    console.print(points(profile.notes))


def _rates(profile: Profile) -> Table:
    which = "rollouts" if profile.complete else "rollouts that were trained on,"
    of = f"{profile.rollouts:,} {which} of {profile.prompts:,} prompts"
    shares = {
        "mean success rate": profile.mean,
        "deviation of the prompts' rates": profile.rates.sd,
        "prompts hardly ever solved (rate at most .02)": profile.hopeless,
        "prompts nearly always solved (at least .98)": profile.solved,
        **{f"groups of {n} without variance": share for n, share in profile.zero_variance.items()},
        "pairs of right answers that differ": profile.right_pairs_differ,
        "rollouts without a score": profile.reward.unscored,
    }
    return _estimates(of, [(name, share, ".1%") for name, share in shares.items()])


def _predictability(found: Predictability) -> Table:
    shown = table((f"success of {found.prompts:,} prompts, predicted from", "AUC", _SAID, "log-loss", _SAID))
    named = {"the prompt's text": found.features, "its other rollouts": found.record, "both": found.both}
    for name, quality in named.items():
        if quality is not None:
            shown.add_row(name, *_cells(quality.auc, ".3f"), *_cells(quality.log_loss, ".3f"))
    shown.add_row("the mean rate alone", "0.500", "", *_cells(found.blind, ".3f"))
    return shown


def _lengths(lengths: LengthProfile) -> Table:
    rows = [
        ("median", lengths.p50, ",.0f"),
        ("95th percentile", lengths.p95, ",.0f"),
        ("hit the limit", lengths.truncated, ".1%"),
        ("stopped at the recipe's limit", lengths.limited, ".1%"),
        ("95th percentile of right rollouts", lengths.right_p95, ",.0f"),
        (f"{lengths.unit} beyond it, of all", lengths.beyond, ".1%"),
    ]
    return _estimates(f"{lengths.unit} of a rollout, {lengths.longest:,} in the longest", rows)


# ------------------------------------------------------------------------------------------------------------- figures


def _estimates(title: str, rows: list[tuple[str, Share | None, str]]) -> Table:
    shown = table((title, "estimate", _SAID))
    for name, share, form in rows:
        if share is not None:
            shown.add_row(name, *_cells(share, form))
    return shown


def _cells(share: Share, form: str) -> tuple[str, str]:
    within = "too few" if share.interval is None else " – ".join(f"{end:{form}}" for end in share.interval)
    return f"{share.value:{form}}", within
