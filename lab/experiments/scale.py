"""Do the methods' ratios hold as models grow? Tables and figure of the ladder's rungs, from the folders of their runs.

    rollalloc-lab bench --tier ladder --tasks ladder/1m --out runs/ladder-1m         # each rung, in its own folder or in one
    python lab/experiments/scale.py table runs/ladder-0.15m runs/ladder-1m
    python lab/experiments/scale.py draw lab/docs/scale.md lab/docs/scale.png         # of the page's own ratios
    python lab/experiments/scale.py against reinforce runs/ladder-8m runs/grpo-at-another-rate    # of `rollalloc compare`
    python lab/experiments/scale.py predict TASKS 0.15m 1m                          # TASKS: where the rungs' models are kept

A ratio is at equal accuracy: of each seed the lower of the two runs' accuracies after 1,024 rollouts is taken, or at their
end, and the rollouts that each paid until it first stood there, interpolated on the grid. So every pair of runs has one,
whoever ends higher, and no target is chosen; a run that never rises above its start gives none.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from numpy.typing import NDArray

from rollalloc.advise.predictability import predicted_rates
from rollalloc.compare.summary import EndedRun, Interval, ended, interval
from rollalloc.data.prompts import encode_prompts, load_prompts
from rollalloc.models.featurizer import features_of
from rollalloc.models.likelihood import exact_answers
from rollalloc.models.policy import Policy
from rollalloc.predict.quality import auc
from rollalloc.runs.reader import lines_in
from rollalloc.train.config import read_config
from rollalloc.train.loading import one_thread
from rollalloc_lab.bench.plan import frozen_in, place_of
from rollalloc_lab.tasks import ladder
from rollalloc_lab.tasks.rungs import PREFIX, RUNGS

PAIRS = (
    ("grpo", "reinforce"),
    ("raft", "reinforce"),
    ("reinforce", "foresight"),
    ("grpo_4", "reinforce"),
    ("grpo_4_replay", "reinforce"),
    ("grpo", "pilot_commit_4"),
)
DRAWN = {  # pair → how the picture says it
    PAIRS[0]: "GRPO (groups of 16) over REINFORCE",
    PAIRS[1]: "RAFT over REINFORCE",
    PAIRS[2]: "REINFORCE over foresight",
}
COLORS = dict(zip(DRAWN, ("#0072b2", "#d55e00", "#009e73"), strict=True))  # told apart by colour-blind readers
PREDICTED, RECORD = 2048, 8  # prompts whose success is predicted; rollouts of a record
WITHIN = 1_024  # rollouts that the largest rung's runs paid, at which all rungs are compared
_RESAMPLES = 10_000
_RATIOS = re.compile(r"^\| rollouts at equal accuracy, [^|]*\|(.*)\n\|[-|]*\n((?:\|.*\n)+)", re.MULTILINE)
_CELL = re.compile(r"([\d.]+) \[([\d.]+)–([\d.]+)\]")  # a ratio with its interval


@dataclass(frozen=True, slots=True)
class OnRung:
    """The runs of a rung that are over: label → seed → run."""

    name: str
    parameters: int
    runs: Mapping[str, Mapping[int, EndedRun]]


# ------------------------------------------------------------------------------------------------------------- its tables


def rungs_in(folders: Sequence[Path]) -> list[OnRung]:
    """The rungs of several leaderboards, the small ones first; a method that two of them have is the later one's."""
    found: dict[str, OnRung] = {}
    for folder in folders:
        plan, _ = frozen_in(folder)
        for task in plan.tasks:
            name = task.name.removeprefix(PREFIX)
            runs: dict[str, dict[int, EndedRun]] = {}
            for each in plan.contestants:
                for seed in plan.seeds_of(task):
                    place = folder / place_of(task, each.label, seed)
                    if (place / "run.json").exists() and (one := ended(read_config(place), place, target=task.target)):
                        runs.setdefault(each.label, {})[seed] = one
            before = found[name].runs if name in found else {}
            found[name] = OnRung(name, RUNGS[name].parameters, {**before, **runs})
    return sorted(found.values(), key=lambda rung: rung.parameters)


def ratio(dear: EndedRun, cheap: EndedRun, within: float = inf) -> float | None:
    """The first run's rollouts over the second's, at the lower of their accuracies after so many; None: one never rose."""
    level = min(float(np.interp(within, run.curve.rollouts, run.curve.accuracy)) for run in (dear, cheap))
    paid = [_paid(run, level) for run in (dear, cheap)]
    return paid[0] / paid[1] if min(paid) > 0 else None


def _paid(run: EndedRun, level: float) -> float:
    """Rollouts until a run's accuracy first stands at a level that it reaches."""
    at, accuracy = np.array(run.curve.rollouts), np.array(run.curve.accuracy)
    first = int(np.argmax(accuracy >= level))
    if first == 0:
        return float(at[0])
    share = (level - accuracy[first - 1]) / (accuracy[first] - accuracy[first - 1])
    return float(at[first - 1] + share * (at[first] - at[first - 1]))


def ratios(rung: OnRung, dear: str, cheap: str, within: float = inf) -> list[float]:
    """Of each seed that both have."""
    one, other = rung.runs.get(dear, {}), rung.runs.get(cheap, {})
    return [each for seed in sorted(one.keys() & other) if (each := ratio(one[seed], other[seed], within)) is not None]


def slope(by_rung: Sequence[tuple[int, tuple[float, float, float]]]) -> tuple[float, float, float]:
    """What a ratio is times for ten times the parameters: least squares of logs through rungs, with 95%.

    Args:
        by_rung: parameters, and the ratio with its interval, which is taken for normal in logs.
    """
    at_R = np.log10([parameters for parameters, _ in by_rung])
    point_R, low_R, high_R = np.log([cell for _, cell in by_rung]).T
    noise_RB = np.random.default_rng(0).standard_normal((len(at_R), _RESAMPLES))
    drawn_RB = point_R[:, None] + noise_RB * ((high_R - low_R) / (2 * 1.96))[:, None]
    point = float(np.exp(np.polyfit(at_R, point_R, 1)[0]))
    low, high = np.exp(np.quantile(np.polyfit(at_R, drawn_RB, 1)[0], [0.025, 0.975]))
    return point, float(low), float(high)


def against(label: str, folder: Path, others: Sequence[Path]) -> None:
    """What runs of comparisons paid over a method of a rung, seed by seed: the same method at another rate, say."""
    (rung,) = rungs_in([folder])
    for file in sorted(file for other in others for file in other.rglob("run.json")):
        run = read_config(file.parent)
        if (one := ended(run, file.parent)) is not None:
            cheap = rung.runs[label].get(run.seed)
            found = None if cheap is None else ratio(one, cheap)
            last = f"{one.last['accuracy']:.3f}, pass@8 {one.last['pass_at_k']:.3f}"
            over = "–" if found is None else f"{found:.2f}"
            print(f"{run.name} at {run.learning_rate:g}, {run.seed}: {last}; over {label}'s {over}")


def said(one: Interval | None, form: str = ".2f") -> str:
    """A figure with its interval, or its values."""
    if one is None:
        return "–"
    ends = (
        f"{one.low:{form}}–{one.high:{form}}" if one.low is not None else ", ".join(f"{v:{form}}" for v in one.values)
    )
    return f"{one.bound}{one.point:{form}} [{ends}]"


def table(folders: Sequence[Path]) -> None:
    """Print all that is known of the rungs in some folders."""
    every = rungs_in(folders)
    for within, when in ((WITHIN, f"within {WITHIN:,}"), (inf, "at the end")):
        print(f"| rollouts at equal accuracy, {when} | {' | '.join(rung.name for rung in every)} |")
        print(f"|---|{'---|' * len(every)}")
        for pair in PAIRS:
            shown = [said(interval(v)) if (v := ratios(rung, *pair, within)) else "–" for rung in every]
            if {*shown} != {"–"}:
                print(f"| {pair[0]} / {pair[1]} | {' | '.join(shown)} |")
        print()
    for rung in every:
        _of_rung(rung)


def _of_rung(rung: OnRung) -> None:
    target = next(iter(next(iter(rung.runs.values())).values())).target
    print(
        f"\n| {rung.name}: {rung.parameters:,} parameters | to {target:g} | rollouts | accuracy at the end | pass@8 ",
        end="",
    )
    print("| entropy | tokens | seconds | without variance | AUC |\n|---|---|---|---|---|---|---|---|---|---|")
    for label, by_seed in rung.runs.items():
        runs = [by_seed[seed] for seed in sorted(by_seed)]
        costs = [run.cost for run in runs if run.cost is not None]
        reached = sum(not cost.censored for cost in costs)
        paid = interval([cost.paid["rollouts"] for cost in costs], ">" if reached < len(costs) else "")
        last = {name: interval([run.last[name] for run in runs]) for name in ("accuracy", "pass_at_k", "entropy")}
        tokens = np.mean([run.end["tokens_paid"] for run in runs])
        seconds = np.median([run.end["seconds"] for run in runs])
        barren = np.mean([run.end["accounts"]["zero_variance"] / run.end["rollouts_paid"] for run in runs])
        predicted = [value for run in runs if (value := _auc(run)) is not None]
        row = [
            label,
            f"{reached} of {len(runs)}",
            f"{paid.bound}{paid.point:,.0f}" if paid.bound else said(paid, ",.0f"),
            said(last["accuracy"], ".3f"),
            said(last["pass_at_k"], ".3f"),
            f"{last['entropy'].point:.2f}",
            f"{tokens:,.0f}",
            f"{seconds:,.0f}",
            f"{barren:.0%}" if runs[0].grouped else "–",
            f"{np.mean(predicted):.3f}" if predicted else "–",
        ]
        print(f"| {' | '.join(row)} |")


def _auc(run: EndedRun) -> float | None:
    """Of what a run predicted, weighed by rollouts; None: it predicts nothing."""
    found = dict(_fits(run.folder))
    return (
        sum(rollouts * each for (rollouts, each) in found.values()) / sum(n for n, _ in found.values())
        if found
        else None
    )


def _fits(folder: Path) -> Iterator[tuple[str, tuple[float, float]]]:
    for line in lines_in(folder / "metrics.jsonl"):
        each: Mapping[str, Any] = line.get("prediction") or {}
        if each.get("auc") is not None:
            yield f"{each['log_loss']}", (each["rollouts"], each["auc"])  # a fit's figures stand in several lines


def draw(page: Path, to: Path) -> None:
    """Draw the ratios of a page's first table against parameters, and print what each is times for ten times as many."""
    tables = _RATIOS.findall(page.read_text(encoding="utf-8"))
    figure, axes = plt.subplots(figsize=(6.4, 3.4), layout="constrained")
    for heads, rows in tables:
        sizes = [RUNGS[name.strip()].parameters for name in heads.split("|") if name.strip() in RUNGS]
        for pair, *cells in (line.strip("|").split("|") for line in rows.strip().splitlines()):
            found = [(size, _CELL.search(cell)) for size, cell in zip(sizes, cells, strict=False)]
            known = [(size, (float(one[1]), float(one[2]), float(one[3]))) for size, one in found if one]
            print(f"{pair.strip()}: × {{:.2f}} [{{:.2f}}–{{:.2f}}] for ten times the parameters".format(*slope(known)))
            one, _, other = pair.strip().partition(" / ")
            if heads is tables[0][0] and (one, other) in DRAWN:
                x, y = zip(*known, strict=True)
                point_R, low_R, high_R = np.array(y).T
                shift = 1.06 ** (len(axes.containers) - 1)
                reach = [point_R - low_R, high_R - point_R]
                how = {"color": COLORS[one, other], "label": DRAWN[one, other], "marker": "o", "capsize": 3}
                axes.errorbar(np.array(x) * shift, point_R, reach, **how)
    axes.axhline(1, color="0.6", linewidth=0.8)
    axes.set(xscale="log", yscale="log", xlabel="parameters of the model", ylabel="ratio of rollouts to equal accuracy")
    axes.set_yticks([0.5, 1, 2, 4, 8], ["0.5", "1: as many", "2", "4", "8"])
    first = [RUNGS[name.strip()] for name in tables[0][0].split("|") if name.strip() in RUNGS]
    axes.set_xticks([rung.parameters for rung in first], [rung.name.upper() for rung in first])
    axes.minorticks_off()
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="center", bbox_to_anchor=(0.5, 0.5))
    figure.savefig(to, dpi=160)


# -------------------------------------------------------------------------------------------------------- predictability


def predict(tasks: Path, names: Sequence[str]) -> None:
    """How well the first model's hidden states, and a record, tell which rollouts will be right, beside the true rates."""
    one_thread()
    print(
        "| rung | right | never (< .01) | always (> .9) | AUC: true rates | features | within family | record | within |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for name in names:
        files = ladder.prepare(tasks / "ladder", RUNGS[name])
        policy = Policy.load(str(files.model), device="cpu")
        asked = load_prompts(files.train)
        prompts = encode_prompts(asked, policy.tokenizer, context=policy.context, max_new_tokens=16, overlong="error")
        tokens = prompts.tokens[:PREDICTED]
        truths = [policy.answer(str(truth)) for truth in prompts.prompt_set.ground_truths[:PREDICTED]]
        family_P = np.array([each["family"] for each in prompts.prompt_set.extra_infos[:PREDICTED]])
        true_P, _ = exact_answers(policy.model, tokens, truths, pad_id=policy.pad_id)
        random = np.random.default_rng(0)
        hits_P, ones_P = random.binomial(1, true_P), np.ones(len(true_P), np.int64)
        hidden_PD = features_of(policy.model, tokens, pad_id=policy.pad_id).blocks["hidden"]
        by_features_P = predicted_rates(hits_P, ones_P, np.asarray(hidden_PD, np.float32))
        by_record_P = random.binomial(RECORD, true_P) / RECORD
        spread = ladder.spread(true_P)
        cells = [spread["accuracy"], spread["below_0.01"], spread["above_0.9"], _of(true_P, hits_P)]
        for each_P in (by_features_P, by_record_P):
            cells += [_of(each_P, hits_P), _within(each_P, hits_P, family_P)]
        print(f"| {name} | {' | '.join(f'{cell:.3f}' for cell in cells)} |", flush=True)


def _of(said_P: NDArray[Any], hits_P: NDArray[Any]) -> float:
    found = auc(np.asarray(said_P, np.float64), hits_P.astype(np.float64), np.ones(len(hits_P)))
    return float("nan") if found is None else found


def _within(said_P: NDArray[Any], hits_P: NDArray[Any], family_P: NDArray[Any]) -> float:
    """The mean over families."""
    return float(np.nanmean([_of(said_P[family_P == one], hits_P[family_P == one]) for one in np.unique(family_P)]))


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["table", *folders] if folders:
            table([Path(folder) for folder in folders])
        case ["draw", page, figure]:
            draw(Path(page), Path(figure))
        case ["against", label, folder, *others] if others:
            against(label, Path(folder), [Path(other) for other in others])
        case ["predict", tasks, *names] if names:
            predict(Path(tasks), names)
        case _:
            sys.exit(__doc__)
