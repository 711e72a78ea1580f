"""Speed of the sampler, against `generate` of transformers: `make bench`.

One process, one thread, a small model with random weights, whose rollouts end where they happen to draw the end. Each repeat
times both, one after the other, by the processor's seconds; figures are medians of the repeats' ratios.

`--model FOLDER` samples with that model instead, on the prompts of a chat task, every rollout to its last token.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import GenerationConfig

from bars import Bars, with_smallest
from rollalloc.data.prompts import encode_prompts, load_prompts
from rollalloc.generate.sampler import Generation, Request, generate, stream
from rollalloc.models.likelihood import padded
from rollalloc.models.policy import Policy
from rollalloc.models.settings import Sampling
from rollalloc.tasks import chat
from rollalloc.tasks.chat import CHAT_TASKS
from small import small_model

PAD, EOS, VOCABULARY = 0, 1, 54
GROUP, PROMPT_TOKENS = 8, 8
BARS = {32: {"natural stops": 1.4}, 128: {"natural stops": 2.5, "a quarter stopped": 3.5}}  # by the tokens of a rollout


@dataclass(frozen=True)
class Size:
    """What is measured: rollouts at once, repeats of a figure, and by how much rollouts are shorter than in the bars."""

    rows: int = 1024
    repeats: int = 5
    shorter: int = 1


SMALLEST = Size(rows=32, repeats=1, shorter=16)


def baseline(model: Any, requests: list[Request], max_new_tokens: int) -> float:
    """Sample with transformers; returns the mean length."""
    prompts_BP, mask_BP = padded([request.tokens for request in requests for _ in request.rollouts], PAD, side="left")
    config = GenerationConfig(
        max_new_tokens=max_new_tokens, do_sample=True, top_k=0, pad_token_id=PAD, eos_token_id=EOS
    )
    with torch.no_grad():
        made = model.generate(prompts_BP, attention_mask=mask_BP.long(), generation_config=config)
    ended_BT = (made[:, PROMPT_TOKENS:] == EOS).cumsum(1)
    return ((ended_BT == 0).sum() + (ended_BT.amax(1) > 0).sum()).item() / len(made)


def streamed(
    model: Any, requests: list[Request], sampling: Sampling, stop: Callable[[list[Generation]], Iterable[int]]
) -> list[Generation]:
    """All rollouts. Whenever some have ended, `stop` gets all that have ended so far, and names those to stop."""
    made: list[Generation] = []
    running, stopped = stream(model, requests, sampling, eos_ids=[EOS], pad_id=PAD, seed=0), None
    with suppress(StopIteration):
        while True:
            made += running.send(stopped)
            stopped = stop(made)
    return made


def until_a_quarter_is_left(model: Any, requests: list[Request], sampling: Sampling) -> list[Generation]:
    """Sample, and stop what runs once three quarters of the rollouts ended."""
    rows = sum(len(request.rollouts) for request in requests)
    return streamed(model, requests, sampling, lambda made: range(rows if len(made) >= rows * 3 // 4 else 0))


def flips(model: Any, requests: list[Request], compositions: int) -> tuple[int, int]:
    """Rollouts whose tokens depend on their company, and tokens compared.

    Rounding depends on the shape of the batch, and changes a token whose draw falls within it of the border between two.
    What follows a changed token is another rollout, so that it is not compared.
    """
    sampling, flipped, compared = Sampling(32), 0, 0
    whole = generate(model, requests, sampling, eos_ids=[EOS], pad_id=PAD, seed=0)
    for composition in range(compositions):
        torch.manual_seed(composition)
        some = [requests[at] for at in torch.randperm(len(requests))]
        size = int(torch.randint(3, len(whole) // 2, ()))
        stopped = set((torch.rand(len(whole)) < 0.1).nonzero()[:, 0].tolist())
        for each in streamed(model, some, replace(sampling, max_rows=size), lambda _, stopped=stopped: stopped):
            pairs = list(zip(each.tokens, whole[each.rollout].tokens, strict=False))
            differ = [at for at, (one, other) in enumerate(pairs) if one != other]
            flipped += bool(differ)
            compared += differ[0] + 1 if differ else len(pairs)
    return flipped, compared


def with_a_model(folder: str, prompts: int, rollouts: int, length: int, repeats: int) -> None:
    """A pretrained model on word problems as messages, against `generate`."""
    policy = Policy.load(folder, device="cpu")
    model: Any = policy.model
    with TemporaryDirectory() as place:
        task = replace(CHAT_TASKS["stories"], train=prompts, heldout=1)
        found = encode_prompts(
            load_prompts(chat.prepare(Path(place) / "stories", task).train), policy.tokenizer, context=None
        )
    requests = [
        Request(at, tokens, tuple(range(at * rollouts, (at + 1) * rollouts))) for at, tokens in enumerate(found.tokens)
    ]
    rows_BP, mask_BP = padded([each.tokens for each in requests for _ in each.rollouts], policy.pad_id, side="left")
    config = GenerationConfig(
        max_new_tokens=length, min_new_tokens=length, do_sample=True, top_k=0, pad_token_id=policy.pad_id
    )

    def ours() -> object:
        return generate(policy.model, requests, Sampling(length), eos_ids=(), pad_id=policy.pad_id, seed=0)

    def theirs() -> object:
        with torch.inference_mode():
            return model.generate(rows_BP, attention_mask=mask_BP.long(), generation_config=config)

    taken = [(seconds(theirs), seconds(ours)) for _ in range(repeats)]
    ratios = [base / mine for base, mine in taken]
    print(
        f"{prompts} prompts of {mask_BP.sum(1).float().mean():.0f} tokens × {rollouts} × {length}: "
        f"{statistics.median(ratios):.2f} times generate ({min(ratios):.2f} to {max(ratios):.2f}), bar 2 at 64 × 8 × 32; "
        f"{prompts * rollouts * length / statistics.median(mine for _, mine in taken):,.0f} tokens a second of one core"
    )


def seconds(action: Callable[[], object]) -> float:
    """Seconds of the processor: with one thread, what an action takes alone, however busy the machine is."""
    start = time.process_time()
    action()
    return time.process_time() - start


def requests_of(rows: int) -> list[Request]:
    """Groups of prompts of unequal length, so that there is padding."""
    requests: list[Request] = []
    for prompt in range(rows // GROUP):
        tokens = torch.randint(2, VOCABULARY, (PROMPT_TOKENS - prompt % 4,))
        requests.append(Request(prompt, tuple(tokens.tolist()), tuple(range(prompt * GROUP, (prompt + 1) * GROUP))))
    return requests


def measure(size: Size, bars: Bars) -> None:
    """Rollouts per second with natural stops, and where a quarter of the rollouts is stopped, against `generate`."""
    model = small_model(VOCABULARY, pad_id=PAD, eos_id=EOS).eval()
    requests = requests_of(size.rows)
    for tokens, of_limit in BARS.items():
        limit = tokens // size.shorter
        sampling = Sampling(limit)
        ways: dict[str, Callable[[], list[Generation]]] = {
            "natural stops": lambda s=sampling: generate(model, requests, s, eos_ids=[EOS], pad_id=PAD, seed=0),
            "a quarter stopped": lambda s=sampling: until_a_quarter_is_left(model, requests, s),
        }
        mean = sum(len(each.tokens) for each in ways["natural stops"]()) / size.rows  # it warms up, too
        theirs = baseline(model, requests, limit)
        taken = [
            (seconds(lambda n=limit: baseline(model, requests, n)), {name: seconds(ways[name]) for name in of_limit})
            for _ in range(size.repeats)
        ]
        print(f"{size.rows}x{limit}: {mean:.1f} tokens per rollout, {theirs:.1f} with generate, which samples "
              f"{size.rows / statistics.median(base for base, _ in taken):,.0f} rollouts per second")  # fmt: skip
        for name, bar in of_limit.items():
            ratios = [base / ours[name] for base, ours in taken]
            rate = size.rows / statistics.median(ours[name] for _, ours in taken)
            held = bars.at_least(f"{size.rows}x{limit}, {name}", statistics.median(ratios), bar)
            print(
                f"  {name}: {statistics.median(ratios):.2f} times generate ({min(ratios):.2f} to {max(ratios):.2f}), "
                f"{held}; {rate:,.0f} rollouts per second"
            )
    flipped, compared = flips(model, requests, 4 * size.repeats)
    print("on a device, which the CPU stands in for:")
    print(f"tokens that depend on a rollout's company: {flipped} of {compared:,}, over {4 * size.repeats} compositions")


def main() -> None:
    parser = with_smallest(
        argparse.ArgumentParser(description="rollouts per second, as ratios to transformers' generate")
    )
    parser.add_argument("--repeats", type=int, default=Size.repeats)
    parser.add_argument("--model", help="folder of a pretrained model; default: a small one with random weights")
    parser.add_argument("--asked", type=int, nargs=3, default=(64, 8, 32), metavar=("PROMPTS", "ROLLOUTS", "TOKENS"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.model:
        prompts, rollouts, length = given.asked
        with_a_model(given.model, prompts, rollouts, length, given.repeats)
        return
    bars = Bars(judged=not given.smallest)
    measure(SMALLEST if given.smallest else Size(repeats=given.repeats), bars)
    bars.end()


if __name__ == "__main__":
    main()
