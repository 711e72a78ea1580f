"""`rollalloc advise --export`: write a curriculum, which weights each prompt by its success rate."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from rollalloc.cli.options import on_output, place
from rollalloc.cli.progress import say

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from rollalloc.lab.advise.profile import Profile
    from rollalloc.lab.waste.groups import Log

_USUAL_MIX = "variance"


@dataclass(frozen=True, kw_only=True)
class Exported:
    """Options that say where a curriculum is written and how its prompts are weighted."""

    export: Path | None = on_output(
        None, "Write a curriculum to this Parquet file: each prompt's success rate and sampling weight.", parser=place
    )
    mix: str = on_output(_USUAL_MIX, "Weights for --export: variance, uniform, gaussian:MEAN,DEVIATION or foresight.")

    def check_export(self, log: Path | None) -> None:
        """Refuse an impossible export before anything is read or sampled.

        Args:
            log: file or folder from which the curriculum is computed; None if it is not known yet.

        Raises:
            ValueError: --mix without --export, or as `curriculum.check_export`.
            FileExistsError: as `curriculum.check_export`.
        """
        from rollalloc.lab.advise.curriculum import check_export

        if self.export is not None:
            check_export(self.export, self.mix, log)
        elif self.mix != _USUAL_MIX:
            raise ValueError(
                "--mix needs --export, whose sampling weights it sets; give --export FILE too, or leave --mix out"
            )

    def write_export(
        self,
        at: Path,
        log: Log,
        profile: Profile,
        features_PD: NDArray[np.float32] | None,
        *,
        from_step: int | None,
        seed: int,
    ) -> None:
        """Write the curriculum if --export was given.

        Args:
            at: file or folder of the log; a prompts file beside it supplies the prompts' rows.
            log: the rollouts that were read from it.
            profile: profile of that log.
            features_PD: features of each prompt, (P, D) float32; None: use the log's own.
            from_step: ignore rollouts logged before this step, as for `profile_of`.
            seed: seed of the cross-validation folds in which success rates are predicted.
        """
        from rollalloc.lab.advise.curriculum import curriculum_of, write_curriculum
        from rollalloc.lab.advise.profile_folder import prompts_beside
        from rollalloc.lab.waste.finding import chosen

        groups, _ = chosen(log, from_step)
        if self.export is None or groups is None:
            return
        judged, prompts = groups.judged(profile.reward.threshold), prompts_beside(at)
        rows = curriculum_of(judged, profile.rates, self.mix, features_PD=features_PD, prompts=prompts, seed=seed)
        write_curriculum(self.export, rows)
        say(Console(stderr=True), f"{len(rows):,} prompts, with weights to draw them by, are in {self.export}")
