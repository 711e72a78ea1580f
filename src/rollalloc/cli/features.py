"""`rollalloc features`: compute the prompt features from which some recipes predict success."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from rollalloc.cli.options import source
from rollalloc.cli.progress import staged

if TYPE_CHECKING:
    from rollalloc.data.features import Features


def features(
    model: Annotated[str, typer.Option(help="The model that training starts from, by name or folder.")],
    prompts: Annotated[
        list[Path], typer.Option(help="Prompts, Parquet or JSONL in verl's schema; repeatable.", parser=source)
    ],
    out: Annotated[Path, typer.Option(help="File to write, ending in .safetensors.")],
    width: Annotated[int, typer.Option(help="Maximum number of columns per block of features.")] = 256,
    seed: Annotated[int, typer.Option(help="Seed of the random projection and of the hash.")] = 0,
    device: Annotated[str | None, typer.Option(help="Device: cpu, cuda, ... (default: a GPU if there is one).")] = None,
    batch_tokens: Annotated[
        int, typer.Option(help="Tokens per forward pass (at least one prompt); fewer need less memory.")
    ] = 4096,
    drop_overlong: Annotated[
        bool, typer.Option("--drop-overlong", help="Leave out prompts that do not fit the model.")
    ] = False,
    chat_template_args: Annotated[
        str | None, typer.Option(help="Arguments of the chat template as a JSON object; the same as in training.")
    ] = None,
    tokens_only: Annotated[
        bool,
        typer.Option("--tokens-only", help="Load only the tokenizer: token counts and lengths, no hidden states."),
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing file.")] = False,
) -> None:
    """Compute features of each prompt with the initial model, for recipes that predict success rates."""
    from rollalloc.cli.sources import model_name  # torch takes seconds to import, `--help` should not
    from rollalloc.core.recipe import at_least
    from rollalloc.data.encoding import template_arguments
    from rollalloc.data.feature_file import Origin, refuse_place, write_features
    from rollalloc.data.features import check_width
    from rollalloc.data.prompts import encode_prompts, load_prompts
    from rollalloc.models.features import BATCH_TOKENS, features_of, weights_digest
    from rollalloc.models.policy import Policy, load_tokenizer, usable_device

    console = Console(stderr=True)
    name = model_name(model)
    check_width(width)
    at_least("seed", seed, 0)
    at_least("batch_tokens", batch_tokens, 1)
    refuse_place(out, overwrite=overwrite)
    if tokens_only and (device is not None or batch_tokens != BATCH_TOKENS or drop_overlong):
        raise ValueError(
            "--device, --batch-tokens, --drop-overlong: no effect with --tokens-only, which loads no model; leave one of "
            "the two out"
        )
    usable_device(device)
    template_args = template_arguments(chat_template_args)
    with console.status("preparing"):
        prompt_set = load_prompts(*prompts)
        policy = None if tokens_only else Policy.load(name, device=device)
        encoded = encode_prompts(
            prompt_set,
            load_tokenizer(name) if policy is None else policy.tokenizer,
            context=None if policy is None else policy.context,
            overlong="drop" if drop_overlong else "error",
            template_args=template_args,
        )
    with staged() as shown:
        made = features_of(
            None if policy is None else policy.model,
            encoded.tokens,
            pad_id=0 if policy is None else policy.pad_id,
            width=width,
            seed=seed,
            batch_tokens=batch_tokens,
            progress=lambda done, of: shown("tokens", done, of),
        )
    origin = Origin(name, None if policy is None else weights_digest(policy.model), seed)
    write_features(out, encoded.prompt_set.keys, made, origin=origin, overwrite=overwrite)
    dropped = encoded.prompt_set.dropped.get("overlong", 0)
    if dropped:
        console.print(f"{dropped:,} prompts that do not fit the model are left out", style="yellow", highlight=False)
    console.print(f"{_summary(made)}; they are in {out}", markup=False, emoji=False, highlight=False, soft_wrap=True)


def _summary(made: Features) -> str:
    cost = made.cost
    blocks = ", ".join(f"{name} ({block_ND.shape[1]})" for name, block_ND in made.blocks.items())
    passed = f"{cost.tokens:,} tokens forwarded" if cost.tokens else "nothing forwarded"
    return f"features of {cost.prompts:,} prompts: {blocks}; {passed}, {cost.seconds:.1f} s"
