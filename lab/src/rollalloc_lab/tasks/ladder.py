"""The ladder's mixture: six families of questions, worded the same for models of any size.

An answer is a list of symbols. In `add`, `multiply` and `next`, each symbol is computed from one part of the question. In
`reverse`, `sort` and `keep`, a procedure is applied to all symbols of the question. Longer questions are harder. The
warm-up shows mistakes: each fact, and each condition of a procedure, has its own mistake and its own rate. So success rates
range from 0 to 1 within each family, and models of every size sample wrong answers to questions that they could answer. Each
question has one right answer, so accuracy is computed exactly by teacher forcing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from hashlib import sha256
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rollalloc.data.prompts import load_prompts
from rollalloc.models.likelihood import exact_answers
from rollalloc.models.policy import Policy, computing
from rollalloc.models.pretrained import MODELS
from rollalloc.tasks.files import (
    Problem,
    Shown,
    TaskFiles,
    compute_score,
    make_once,
    prompt_files,
    unseen,
)
from rollalloc.tasks.tiny import (
    Examples,
    Shape,
    WarmUp,
    character_tokenizer,
    ids_of,
    one_thread,
    supervise,
    tiny_model,
)
from rollalloc.train.evaluation import EXACT_K
from rollalloc_lab.tasks.rungs import LadderRung, WarmedUp

__all__ = ["FAMILIES", "LEVELS", "LONGEST", "Mixture", "Part", "Question", "compute_score", "prepare"]

LEVELS = 4
LONGEST = 15  # maximum number of characters of an answer; with EOS, at most 16 tokens with any tokenizer
_LETTERS, _DIGITS = "abcdefghijklmnopqrstuvwxyz", "0123456789"
_CONTEXT = 48  # maximum number of tokens of a question and its answer, if a symbol with its leading space is one token
_CHECKED = 256  # number of training prompts on which a warm-up is checked
_SAMPLE = 256  # number of examples that are hashed to identify a warm-up
_DRAWS = 200  # questions drawn for each prompt that is needed; if too few differ, the mixture is too small


@dataclass(frozen=True, slots=True)
class Part:
    """A part of an answer: the fact that it depends on, the right text, and possible mistakes."""

    fact: str
    right: str
    wrong: tuple[str, ...]
    whole: bool = False  # True: this part is the whole answer of a procedure


@dataclass(frozen=True, slots=True)
class Question:
    """A question of a family and level, with the parts of its answer."""

    family: str
    level: int
    prompt: str
    parts: tuple[Part, ...]

    @property
    def answer(self) -> str:
        """The right answer, which begins with a space, so that there is a space before every symbol."""
        return _answer_text(part.right for part in self.parts)


def _answer_text(symbols: Iterable[str]) -> str:
    return " " + " ".join(symbols)


Drawn = tuple[str, tuple[Part, ...]]  # the question, and the parts of its answer


def _symbols(rng: np.random.Generator, alphabet: str, count: int) -> list[str]:
    return [alphabet[at] for at in rng.integers(len(alphabet), size=count)]


def _image(fact: str, alphabet: str, at: int) -> Part:
    """A part of an answer: the symbol at this position of the alphabet. The next three symbols are mistakes."""
    return Part(fact, alphabet[at % len(alphabet)], tuple(alphabet[(at + by) % len(alphabet)] for by in (1, 2, 3)))


def _add(rng: np.random.Generator, level: int) -> Drawn:
    pairs = rng.integers(1, 7, size=(level + 1, 2)).tolist()
    asked = " ".join(f"{a}+{b}" for a, b in pairs)
    return f"add: {asked}", tuple(_image(f"{a}+{b}", _DIGITS, a + b) for a, b in pairs)


def _multiply(rng: np.random.Generator, level: int) -> Drawn:
    pairs = rng.integers(2, 8, size=(level + 1, 2)).tolist()
    asked = " ".join(f"{a}*{b}" for a, b in pairs)
    return f"multiply: {asked}", tuple(_image(f"{a}*{b}", _DIGITS, a * b) for a, b in pairs)


def _next(rng: np.random.Generator, level: int) -> Drawn:
    letters = _symbols(rng, _LETTERS, level + 1)
    parts = (_image(f"next {letter}", _LETTERS, _LETTERS.index(letter) + 1) for letter in letters)
    return f"next: {' '.join(letters)}", tuple(parts)


def _procedure(family: str, level: int, asked: str, right: Sequence[str], *wrong: Sequence[str]) -> Drawn:
    """The whole answer of a procedure. Its mistake depends on the family, the level and the first symbol."""
    first = asked.partition(": ")[2][0]
    others = tuple(" ".join(each) for each in wrong if each and each != right)
    return asked, (Part(f"{family} {level} {first}", " ".join(right), others, whole=True),)


def _reverse(rng: np.random.Generator, level: int) -> Drawn:
    letters = _symbols(rng, _LETTERS, level + 1)
    right = letters[::-1]
    turned = [*right[1:], right[0]]
    return _procedure("reverse", level, f"reverse: {' '.join(letters)}", right, letters, turned, right[:-1])


def _sort(rng: np.random.Generator, level: int) -> Drawn:
    letters = _symbols(rng, _LETTERS, level + 1)
    right = sorted(letters)
    return _procedure("sort", level, f"sort: {' '.join(letters)}", right, right[::-1], letters, right[:-1])


def _keep(rng: np.random.Generator, level: int) -> Drawn:
    above, edge, digits = bool(rng.integers(2)), int(rng.integers(2, 8)), _symbols(rng, _DIGITS, level + 1)
    kept = [digit for digit in digits if (int(digit) > edge if above else int(digit) < edge)]
    left = [digit for digit in digits if digit not in kept]
    asked = f"keep {'above' if above else 'below'}: {edge} of {' '.join(digits)}"
    return _procedure("keep", level, asked, kept, left, digits, kept[:-1])


FAMILIES: Mapping[str, Callable[[np.random.Generator, int], Drawn]] = MappingProxyType(
    {"add": _add, "multiply": _multiply, "next": _next, "reverse": _reverse, "sort": _sort, "keep": _keep}
)

_WORDS = (*(f" {each}" for each in _LETTERS + _DIGITS), *FAMILIES, " above", " below", " of")


@dataclass(frozen=True)
class Mixture:
    """Sizes and seed of the mixture. The defaults define the task; other values are for tests.

    Attributes:
        facts: parameters a, b of a Beta distribution, from which the rate of each fact is drawn. In the warm-up, the fact is
            right at this rate.
        procedures: the same parameters for the conditions of a procedure.
        seed: seed of all draws.
    """

    train: int = 8192
    heldout: int = 512
    facts: tuple[float, float] = (3.0, 0.9)
    procedures: tuple[float, float] = (0.6, 0.8)
    seed: int = 17

    def drawn(self, rng: np.random.Generator) -> Question:
        """Draw a question: the family and then the level, each uniformly."""
        families = list(FAMILIES)
        while True:
            family, level = families[int(rng.integers(len(families)))], int(rng.integers(1, LEVELS + 1))
            asked, parts = FAMILIES[family](rng, level)
            if all(part.right and part.wrong for part in parts):
                return Question(family, level, f"{asked} =", parts)

    def problems(self, rng: np.random.Generator, count: int, taken: set[str]) -> list[Problem]:
        """Draw questions that are not in `taken`, and add them to it.

        Returns:
            The problems. For later analysis, `extra` has the family, the level and `shown`: the rate at which the warm-up
                shows the right answer.

        Raises:
            ValueError: too few new questions were found.
        """
        found: list[Problem] = []
        for _ in range(_DRAWS * count):
            if len(found) == count:
                break
            each = self.drawn(rng)
            if each.prompt not in taken:
                taken.add(each.prompt)
                shown = prod(self._shown(part)[0] for part in each.parts)
                extra = {"family": each.family, "level": each.level, "shown": shown}
                found.append(Problem(each.prompt, each.answer, extra))
        if len(found) < count:
            raise ValueError(f"expected {count} more different questions, found {len(found)}; ask for fewer")
        return found

    def examples(self, rng: np.random.Generator, count: int, heldout: frozenset[str]) -> Examples:
        """Draw warm-up data: questions that are not held out, and answers. Each part is right at the rate of its fact."""
        prompts: list[str] = []
        answers: list[str] = []
        while len(prompts) < count:
            each = self.drawn(rng)
            if each.prompt in heldout:
                continue
            symbols: list[str] = []
            for part in each.parts:
                rate, kind = self._shown(part)
                symbols.append(part.right if rng.random() < rate else part.wrong[kind % len(part.wrong)])
            prompts.append(each.prompt)
            answers.append(_answer_text(symbols))
        return prompts, answers

    def _shown(self, part: Part) -> tuple[float, int]:
        return _shown(self.seed, self.procedures if part.whole else self.facts, part.fact)


@cache
def _shown(seed: int, right: tuple[float, float], fact: str) -> tuple[float, int]:
    """The rate at which the warm-up shows a fact right, and the kind of mistake it shows otherwise."""
    rng = np.random.default_rng([seed, 4, *fact.encode()])
    return float(rng.beta(*right)), int(rng.integers(3))


# ---------------------------------------------------------------------------------------------------------------- rungs


def prepare(
    folder: Path,
    rung: LadderRung,
    mixture: Mixture = Mixture(),
    *,
    device: str | None = "cpu",
    progress: Shown = unseen,
) -> TaskFiles:
    """Create a rung's files unless they exist: the questions that all rungs share, and a folder for each warmed-up model.

    The name of the model's folder has the rung and a digest of model, warm-up and questions. If one of these changes, a new
    folder is created.

    Args:
        device: device of a pretrained model's warm-up, and of all runs; None: a GPU if there is one.

    Raises:
        FileNotFoundError: the model is missing. The message names the command that creates it.
        ValueError: the warm-up ended outside its band, or a folder does not belong to a task.
    """
    made = questions(folder / "questions", mixture)
    return TaskFiles(
        model=_warm(folder, rung, made, mixture, device, progress),
        train=made / "train.parquet",
        heldout=made / "heldout.parquet",
        reward=f"{__name__}:compute_score",
        max_new_tokens=LONGEST + 1,
        single_answer=True,
        device=device,
    )


def questions(folder: Path, mixture: Mixture = Mixture()) -> Path:
    """The folder with the mixture's training and held-out prompts, created if it does not exist."""
    return prompt_files(folder, mixture, mixture.problems, "ladder")


def pretrained_in(folder: Path, name: str, needing: str) -> Path:
    """The folder of a pretrained model.

    Args:
        folder: the task's folder.
        name: a key of `rollalloc.models.pretrained.MODELS`.
        needing: what needs the model, for the error, for example "the ladder needs".

    Raises:
        FileNotFoundError: it is missing. The message names the command that creates it.
    """
    place = folder / name
    if not (place / "config.json").is_file():
        raise FileNotFoundError(
            f"{needing} {MODELS[name].title} in {place}, which is missing; create it: rollalloc model {name} {place}"
        )
    return place


def _warm(folder: Path, rung: LadderRung, made: Path, mixture: Mixture, device: str | None, progress: Shown) -> Path:
    """The folder of a rung's warmed-up model, created if it does not exist."""
    decides = {
        "model": asdict(rung.model),
        "warm_up": asdict(rung.warm_up),
        "questions": [sha256((made / f"{split}.parquet").read_bytes()).hexdigest() for split in ("train", "heldout")],
        "examples": mixture.examples(np.random.default_rng(mixture.seed), _SAMPLE, frozenset()),
    }
    digest = sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()
    settings = _Warm(rung.name, digest)
    base = None
    if rung.model.pretrained is not None:
        place = pretrained_in(folder, rung.model.pretrained, "the ladder needs")
        base = partial(Policy.load, str(place), device=device)
    return make_once(
        folder / f"{rung.name}-{digest[:16]}",
        settings,
        lambda to: _warm_up(to, rung, base, made, mixture, progress),
    )


@dataclass(frozen=True)
class _Warm:
    """The settings that a warmed-up model's folder was created with."""

    rung: str
    digest: str


def _warm_up(
    to: Path, rung: LadderRung, base: Callable[[], Policy] | None, made: Path, mixture: Mixture, progress: Shown
) -> None:
    """Train a rung's model on demonstrations until it is in its band, and save it."""
    asked = load_prompts(made / "train.parquet")
    heldout = frozenset(map(str, load_prompts(made / "heldout.parquet").prompts))
    rng = np.random.default_rng([mixture.seed, 0])
    with torch.random.fork_rng(devices=[]), one_thread():
        torch.manual_seed(mixture.seed)
        model, tokenizer = _begun(rung, base, list(map(str, asked.prompts)), list(map(str, asked.ground_truths)))
        band = _Band(rung, model, tokenizer, asked.prompts[:_CHECKED], asked.ground_truths[:_CHECKED])
        warm_up = WarmUp(rung.warm_up.steps, rung.warm_up.batch, rung.warm_up.learning_rate)
        draw = partial(mixture.examples, rng, heldout=heldout)
        supervise(model, tokenizer, warm_up, draw, shown=progress, enough=band, precision=rung.warm_up.precision)
        found = band.ended()
    model.save_pretrained(to)
    tokenizer.save_pretrained(to)
    (to / "warm_up.json").write_text(json.dumps(found, indent=1))


def _begun(
    rung: LadderRung, base: Callable[[], Policy] | None, prompts: Sequence[str], answers: Sequence[str]
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    if base is not None:
        policy = base()
        return policy.model, policy.tokenizer
    tokenizer = character_tokenizer(prompts, answers, _WORDS)
    return tiny_model(tokenizer, Shape(rung.model.hidden, rung.model.layers, _CONTEXT)), tokenizer


class _Band:
    """Checks whether a model's accuracy on training prompts is in its rung's range (`WarmedUp`). Each check is recorded."""

    def __init__(
        self,
        rung: LadderRung,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        prompts: Sequence[Any],
        answers: Sequence[Any],
    ) -> None:
        self.rung, self.wanted, self.model = rung, rung.warm_up, model
        self.pad_id, eos_id = ids_of(tokenizer)
        self.prompts: list[list[int]] = [tokenizer(str(text))["input_ids"] for text in prompts]
        self.answers = [(*tokenizer(str(text))["input_ids"], eos_id) for text in answers]
        self.looks: list[dict[str, float]] = []

    def __call__(self, step: int) -> bool:
        return step > 0 and step % self.wanted.check_every == 0 and self.look(step)

    def look(self, step: int) -> bool:
        """Check whether the model is in the band now.

        Raises:
            ValueError: the model's accuracy is above the band.
        """
        self.model.eval()
        with computing(self.model, self.wanted.precision):
            p_N, _ = exact_answers(self.model, self.prompts, self.answers, pad_id=self.pad_id, temperature=1.0)
        self.model.train()
        found = spread(p_N)
        self.looks.append({"step": step, **found})
        if found["accuracy"] > self.wanted.high:
            raise ValueError(self.outside("a smaller learning_rate, or a smaller check_every"))
        return found["accuracy"] >= self.wanted.low and found["pass_at_8"] >= self.wanted.pass_at_8

    def ended(self) -> list[dict[str, float]]:
        """The results of all checks.

        Raises:
            ValueError: the warm-up ended outside the band.
        """
        last = self.wanted.steps
        if not self.looks or (self.looks[-1]["step"] < last and not _within(self.wanted, self.looks[-1])):
            self.look(last)
        if not _within(self.wanted, self.looks[-1]):
            raise ValueError(self.outside("more steps, a larger batch, or another learning_rate"))
        self.model.eval()
        return self.looks

    def outside(self, change: str) -> str:
        """The text of an error: the newest check, the band, and what to change."""
        last, wanted = self.looks[-1], self.wanted
        return (
            f"the warm-up of {self.rung.task} is outside its band after {last['step']:.0f} steps: "
            f"{last['accuracy']:.3f} of sampled answers are right, expected {wanted.low:g} to {wanted.high:g}, and pass@8 "
            f"is {last['pass_at_8']:.3f}, expected at least {wanted.pass_at_8:g}; in the rung's settings, try {change}"
        )


def _within(wanted: WarmedUp, found: Mapping[str, float]) -> bool:
    return wanted.low <= found["accuracy"] <= wanted.high and found["pass_at_8"] >= wanted.pass_at_8


def spread(p_N: NDArray[np.float64]) -> dict[str, float]:
    """Summary of the success rates p_N of prompts: mean, pass@8, and the shares of rates below 0.01 and above 0.9."""
    return {
        "accuracy": float(p_N.mean()),
        "pass_at_8": float((1 - (1 - p_N) ** EXACT_K).mean()),
        "below_0.01": float((p_N < 0.01).mean()),
        "above_0.9": float((p_N > 0.9).mean()),
    }
