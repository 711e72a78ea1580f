"""README's figures: each is computed from a results file, and a number that comes from none is refused.

    python tools/readme.py          # compares README with the results files; ends with an error if a figure differs
    python tools/readme.py --draw   # draws docs/result.png and docs/result-dark.png anew

Results files: lab/docs/against_trl.json (`lab/benchmarks/against_trl.py report`), the tables of lab/docs/leaderboard.md
(`rollalloc-lab bench`).
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rollalloc.compare.summary import interval

ROOT = Path(__file__).parents[1]
MEASURED = ROOT / "lab" / "docs"
README, AGAINST, LEADERBOARD = ROOT / "README.md", MEASURED / "against_trl.json", MEASURED / "leaderboard.md"
SIZE, TARGET, STOCK, LINE, BEST = "135m", 0.70, "stock-4", "line-only", "line-64"
# Rows of the table "Measured": size, arm, and its clock. On CPUs shared with other work, seconds are CPU seconds.
ROWS = ((SIZE, BEST, "wall seconds"), (SIZE, LINE, "wall seconds"), ("8m", "foresight", "cpu seconds"))
# Numbers that are settings or sizes and no results, as README writes them.
SETTINGS = (
    r"Python 3\.11 and 3\.12", r"SmolLM2(?:-135M)?", r"\.70\b", r"\.85\b", r"β₂ 0\.95", r"8M parameters",
    r"groups of \d+", r"64 rollouts a step", r"four learning rates", r"2026-11-25 and 26",
    r"95% intervals", r"[Aa]t (?:135M|8M)\b", r"\(8M: of three", r"H100", r"Apache-2\.0", r"two CPU cores",
    r"rewards are 0 and 1", r"(?:32|64) prompts a step", r"0\.15M parameters", r"and 30% were answered right",
    r"answer 70% of held-out questions", r"8M: CPU", r"32 rows", r"45 minutes", r"one CPU core",
)  # fmt: skip


def against(size: str) -> dict[str, Any]:
    return json.loads(AGAINST.read_text("utf-8"))[size]


def arm(size: str, name: str) -> dict[str, Any]:
    """The figures of one arm of lab/benchmarks/against_trl.py."""
    return next(each for each in against(size)["arms"] if each["arm"] == name)


def ratio(found: Mapping[str, Any]) -> str:
    return f"{found['point']:.2f} [{found['low']:.2f}–{found['high']:.2f}]"


def over_line(size: str, name: str, cost: str) -> dict[str, Any]:
    """What REINFORCE under TRL needed, divided by what an arm needed, paired by seed."""
    arms = arm(size, "line"), arm(size, name)
    line, other = (
        {seed: value for seed, (value, _) in zip(of["seeds"], of["costs"][cost], strict=True)} for of in arms
    )
    found = interval([line[seed] / other[seed] for seed in line if seed in other])
    return {"point": found.point, "low": found.low, "high": found.high}


def cells(of: str, heading: str, row: str) -> list[str]:
    """The cells of a row of the leaderboard: of the first table whose heading has these words."""
    _, _, after = LEADERBOARD.read_text("utf-8").partition(heading)
    line = next((line for line in after.splitlines() if line.startswith(f"| {row}")), None)
    if line is None:
        raise ValueError(
            f"lab/docs/leaderboard.md has no row {row!r} after {heading!r}; {of} of README comes from there"
        )
    return [cell.strip() for cell in line.strip("|").split("|")]


def rate_found(size: str) -> int:
    """At how many of the tuning's rates the best stock arm reached the target within the tuning's budget."""
    found = against(size)["tuning"][against(size)["best_stock"]]
    most = max(found.values())
    return sum(value < most for value in found.values())


def figures() -> Iterator[tuple[str, str]]:
    """What each figure is, and how README has to write it."""
    for size, name, clock in ROWS:
        over = arm(size, name)["over"]
        row = " | ".join(ratio(over[cost]) for cost in ("rollouts", "tokens", clock))
        yield f"ratios of {name} at {size}", f"| {row} |"
    line, best = arm(SIZE, LINE)["over"], arm(SIZE, BEST)["over"]
    yield "one line: rollouts", f"needed {ratio(line['rollouts'])} times the rollouts"
    yield "one line: seconds", f"{ratio(line['wall seconds'])} times the seconds"
    yield "our settings", f"it needed {ratio(best['rollouts'])} and {ratio(best['wall seconds'])} times as much"
    yield "the seeds at 135M", {5: "five"}[len(arm("135m", BEST)["seeds"])] + " seeds at 135M"
    yield "the seeds at 8M", {8: "eight"}[len(arm("8m", "foresight")["seeds"])] + " at 8M"
    yield "rates that reach the target, 135M", {1: "only one"}[rate_found("135m")] + " of the four learning rates"
    yield "rates that reach the target, 8M", {0: "at none of its four"}[rate_found("8m")]
    late = cells("foresight on late", "| skills/late, to 0.85 |", "foresight, 32")
    fewer = 100 * (1 - 1 / float(late[5].split()[0]))
    yield "foresight's rollouts on late", f"On `skills/late`, it needed {fewer:.0f}% fewer in our trainer"
    tokens = ratio(over_line("8m", "foresight", "tokens"))
    yield "foresight's tokens on late", f"REINFORCE needed {late[6]} and {tokens} times as many"
    fewer = 100 * (1 - 1 / over_line("8m", "foresight", "rollouts")["point"])
    yield "foresight's rollouts at 8M", f"and {fewer:.0f}% fewer under TRL"
    misled = cells("number_filtering_misled", "## Summary", "rg/number_filtering_misled")
    reached = [re.findall(r"\((\d of \d)\)", cell)[0] for cell in misled[2:4]]
    yield "seeds of number_filtering_misled", f"with {reached[0]} seeds, foresight with {reached[1]}"
    for name, of in ((BEST, "ours"), (STOCK, "TRL's trainer")):
        yield f"rollouts in the picture's text, {of}", f"about {round(rollouts_to_target(name), -1):,.0f} rollouts"


def rollouts_to_target(name: str) -> float:
    """The interquartile mean over seeds, as in the table of lab/docs/against_trl.md."""
    return interval([value for value, _ in arm(SIZE, name)["costs"]["rollouts"]]).point


def problems(readme: str) -> list[str]:
    """What README says otherwise than the results files, and numbers of its prose that come from none."""
    prose = re.sub(r"```.*?```|`[^`]*`|\]\([^)]*\)|<source[^>]*>|src=\"[^\"]*\"", " ", readme, flags=re.DOTALL)
    found, flat = list[str](), re.sub(r"\s+", " ", readme)
    for what, text in figures():
        if text not in flat:
            found.append(f"{what}: README should say {text!r}")
        prose = re.sub(r"\s+", " ", prose).replace(re.sub(r"`[^`]*`", " ", text).replace("  ", " "), " ")
    for number in re.sub("|".join(SETTINGS), " ", prose).split():
        if re.search(r"\d", number):
            found.append(
                f"{number!r} comes from no results file: add it to `figures`, or to SETTINGS if it is no result"
            )
    return found


# -------------------------------------------------------------------------------------------------------------- picture


def draw(to: Path, *, dark: bool) -> None:
    """Held-out accuracy against rollouts, for TRL's trainer and for one rollout per prompt; an arrow at the target."""
    import matplotlib.pyplot as plt

    ink, paper, ours_color, stock_color = ("#e6edf3", "#0d1117", "#56b4e9", "#e69f00") if dark else (
        "#1f2328", "#ffffff", "#0072b2", "#d55e00",
    )  # fmt: skip
    with plt.rc_context({"text.color": ink, "axes.labelcolor": ink, "xtick.color": ink, "ytick.color": ink}):
        figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained", facecolor=paper)
        axes.set_facecolor(paper)
        lines = (
            (STOCK, stock_color, "TRL's GRPOTrainer, 16 groups of 4", (-36, -30)),
            (BEST, ours_color, "rollalloc, one rollout for each of 64 prompts a step", (-150, 26)),
        )
        for name, color, label, offset in lines:
            curve = arm(SIZE, name)["curve"]
            axes.plot(curve["rollouts"], curve["mean"], color=color, linewidth=2.2)
            axes.fill_between(curve["rollouts"], curve["low"], curve["high"], color=color, alpha=0.2, linewidth=0)
            place = len(curve["rollouts"]) * 2 // 3
            axes.annotate(
                label, (curve["rollouts"][place], curve["mean"][place]), xytext=offset, textcoords="offset points",
                color=color, fontweight="bold",
            )  # fmt: skip
        early, late = rollouts_to_target(BEST), rollouts_to_target(STOCK)
        axes.annotate("", (early, TARGET), (late, TARGET), arrowprops={"arrowstyle": "->", "color": ink, "lw": 1.4})
        times = arm(SIZE, BEST)["over"]["rollouts"]["point"]
        axes.text(early + 60, TARGET - 0.012, f"{times:.1f} times fewer rollouts to .70", ha="left", va="top")
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        for side in ("left", "bottom"):
            axes.spines[side].set_color(ink)
        axes.set(xlabel="rollouts", ylabel="held-out accuracy", xlim=(0, None), ylim=(None, 0.84))
        figure.savefig(to, dpi=150, facecolor=paper)
        plt.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--draw", action="store_true", help="draw the picture of the first screen anew")
    if parser.parse_args().draw:
        draw(ROOT / "docs" / "result.png", dark=False)
        draw(ROOT / "docs" / "result-dark.png", dark=True)
    found = problems(README.read_text("utf-8"))
    print(*found or ["README's figures are those of the results files"], sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
