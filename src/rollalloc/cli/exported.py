"""The curriculum that `rollalloc advise` writes beside its verdict, where it is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.console import Console

from rollalloc.cli.options import output, place
from rollalloc.cli.progress import say

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from rollalloc.lab.advise.profile import Profile
    from rollalloc.lab.waste.groups import Log

_USUAL_MIX = "variance"


@dataclass(frozen=True, kw_only=True)
class Exported:
    """Where a curriculum goes, and how it is drawn, as the command line says it."""

    export: Annotated[
        Path | None,
        output("Parquet file of a curriculum: each prompt's rate, and how often to draw it.", parser=place),
    ] = None
    mix: Annotated[str, output("With --export: draw by variance, uniform, gaussian:MEAN,DEVIATION or foresight.")] = (
        _USUAL_MIX
    )

    def check_export(self, log: Path | None) -> None:
        """Refuse what cannot be exported, before anything is read or sampled; `log`: what the curriculum is made from.

        Raises:
            ValueError, FileExistsError: as `curriculum.check_export`; a mix of nothing.
        """
        from rollalloc.lab.advise.curriculum import check_export

        if self.export is not None:
            check_export(self.export, self.mix, log)
        elif self.mix != _USUAL_MIX:
            raise ValueError("--mix: says how a curriculum is drawn; give --export FILE as well, or take it out")

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
        """Write the curriculum, where one is asked for.

        Args:
            at: the log's place; rows of the prompts may be beside it.
            log: what was read.
            profile: of that log.
            features_PD: numbers of each of its prompts; None: the log's own.
            from_step: as for `profile_of`.
            seed: of the folds in which rates are predicted.
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
