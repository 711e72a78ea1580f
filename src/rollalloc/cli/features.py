"""`rollalloc features`: compute features of prompts, from which some recipes predict success rates."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from rollalloc.cli.options import file_path
from rollalloc.cli.progress import staged

if TYPE_CHECKING:
    from rollalloc.data.feature_blocks import Features


def features(
    model: Annotated[str, typer.Option(help="The model that training starts from, by name or folder.")],
    prompts: Annotated[
        list[Path], typer.Option(help="Prompts, Parquet or JSONL in verl's schema; repeatable.", parser=file_path)
    ],
    out: Annotated[Path, typer.Option(help="File to write, ending in .safetensors.")],
    device: Annotated[str | None, typer.Option(help="Device: cpu, cuda, ... (default: a GPU if there is one).")] = None,
    drop_overlong: Annotated[
        bool, typer.Option("--drop-overlong", help="Leave out prompts that do not fit the model's context.")
    ] = False,
    chat_template_args: Annotated[
        str | None, typer.Option(help="Arguments of the chat template as a JSON object; the same as in training.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing file.")] = False,
) -> None:
    """Compute features of each prompt with the initial model, for recipes that predict success rates."""
    from rollalloc.cli.sources import model_name  # imported here, so that `--help` does not import torch
    from rollalloc.data.encoding import template_arguments
    from rollalloc.data.feature_file import Origin, refuse_place, write_features
    from rollalloc.data.prompts import encode_prompts, load_prompts
    from rollalloc.models.featurizer import features_of, weights_digest
    from rollalloc.models.policy import Policy, usable_device

    console = Console(stderr=True)
    name = model_name(model)
    refuse_place(out, overwrite=overwrite)
    usable_device(device)
    template_args = template_arguments(chat_template_args)
    with console.status("preparing"):
        prompt_set = load_prompts(*prompts)
        policy = Policy.load(name, device=device)
        encoded = encode_prompts(
            prompt_set,
            policy.tokenizer,
            context=policy.context,
            overlong="drop" if drop_overlong else "error",
            template_args=template_args,
        )
    with staged() as shown:
        made = features_of(
            policy.model,
            encoded.tokens,
            pad_id=policy.pad_id,
            progress=lambda done, of: shown("tokens", done, of),
        )
    origin = Origin(name, weights_digest(policy.model), seed=0)
    write_features(out, encoded.prompt_set.keys, made, origin=origin, overwrite=overwrite)
    dropped = encoded.prompt_set.dropped.get("overlong", 0)
    if dropped:
        console.print(f"{dropped:,} prompts that do not fit the model are left out", style="yellow", highlight=False)
    console.print(f"{_summary(made)}; they are in {out}", markup=False, emoji=False, highlight=False, soft_wrap=True)


def _summary(made: Features) -> str:
    cost = made.cost
    blocks = ", ".join(f"{name} ({block_ND.shape[1]})" for name, block_ND in made.blocks.items())
    return f"features of {cost.prompts:,} prompts: {blocks}; {cost.tokens:,} tokens forwarded, {cost.seconds:.1f} s"
