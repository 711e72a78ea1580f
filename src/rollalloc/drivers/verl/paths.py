# pyright: reportMissingImports=false
# (verl and its dependencies are installed in a separate environment: constraints/verl-cpu.txt)
"""The files in verl's configuration: relative paths are made absolute, and the files are checked before training starts."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf, open_dict

from rollalloc.drivers.verl.reserved import READ_IN_VALIDATION, refuse_columns

_ROLLOUT = "actor_rollout_ref.rollout"
_READ = (
    *("data.train_files", "data.val_files", "data.custom_cls.path", "trainer.v1.rollalloc.features"),
    *("reward.custom_reward_function.path", "reward.reward_manager.module.path", "reward.reward_model.model_path"),
    *(f"{_ROLLOUT}.agent.agent_loop_config_path", f"{_ROLLOUT}.multi_turn.tool_config_path"),
    *(f"{_ROLLOUT}.multi_turn.function_tool_path", "actor_rollout_ref.model.path", "critic.model.path"),
    *("actor_rollout_ref.model.tokenizer_path", "trainer.resume_from_path"),
)
_WRITTEN = ("trainer.default_local_dir", "trainer.rollout_data_dir", "trainer.validation_data_dir")
_DATA = {"data.train_files": frozenset[str](), "data.val_files": READ_IN_VALIDATION}
_REWARD = "reward.custom_reward_function"
_MODULE, _FILE = "pkg://", "file://"  # prefixes that verl uses


def make_absolute(config: Any) -> None:
    """Replace relative paths in the configuration by absolute ones, resolved from the current working directory.

    verl reads its files in Ray processes, which may have another working directory. The path of an input is replaced only
    if the file exists, so that URLs and names on a model hub are not changed.
    """
    with open_dict(config):
        for key in (*_READ, *_WRITTEN):
            value = OmegaConf.select(config, key)
            if isinstance(value, str) and (absolute := _absolute(value, key in _WRITTEN)) != value:
                OmegaConf.update(config, key, absolute)
            elif OmegaConf.is_list(value):
                OmegaConf.update(config, key, [_absolute(path, False) for path in value])


def _absolute(path: Any, written: bool) -> Any:
    if not isinstance(path, str) or not path or "://" in path or path.startswith("~"):
        return path
    return str(Path(path).absolute()) if written or Path(path).exists() else path


def missing_or_wrong(config: Any) -> Iterator[str]:
    """Problems with the files of a configuration: missing files, missing or reserved columns, a missing reward function.

    Data at URLs such as `hdfs://…` are not checked. The file of the reward function is parsed, but not run.
    """
    for key, allowed in _DATA.items():
        for path in _local(OmegaConf.select(config, key)):
            try:
                _check_data(config, key, path, allowed)
            except (OSError, ValueError) as error:
                yield str(error)
    if path := OmegaConf.select(config, f"{_REWARD}.path"):
        try:
            _check_reward(path, OmegaConf.select(config, f"{_REWARD}.name"))
        except (OSError, ValueError, SyntaxError) as error:
            yield f"{_REWARD}.path={path}: {error}"


def _local(paths: Any) -> list[str]:
    paths = list(paths) if OmegaConf.is_list(paths) else [paths]
    return [path for path in paths if path and "://" not in str(path)]


def _check_data(config: Any, key: str, path: str, allowed: frozenset[str]) -> None:
    file = Path(path).expanduser()
    if not file.is_file():
        raise ValueError(f"{key}: there is no file {path} (relative paths start at {Path.cwd()})")
    if OmegaConf.select(config, "data.custom_cls.path"):
        return  # a custom data set class may need other columns
    columns = _columns_of(file)
    prompt = OmegaConf.select(config, "data.prompt_key") or "prompt"
    needed: dict[str, str | None] = {prompt: None}
    # verl's own reward managers need these columns. A custom reward manager may need others.
    if OmegaConf.select(config, "reward.reward_manager.source") == "register":
        needed |= {"data_source": None, "reward_model": "ground_truth"}
    for column, field in needed.items():
        if column not in columns:
            raise ValueError(f"{key}: {path} has no column {column!r}; its columns are {', '.join(columns)}")
        if field and field not in columns[column]:
            raise ValueError(f"{key}: the column {column} of {path} must hold dictionaries with the field {field!r}")
    refuse_columns(columns, columns.get("extra_info"), f"{key}: {path}", allowed)


def _columns_of(file: Path) -> dict[str, tuple[str, ...]]:
    """The columns of a file, from its parquet schema or its first JSON row. Raise a ValueError if it has neither.

    For each column, the names of the fields of its dictionaries are given; none if the column has other values.
    """
    if file.suffix == ".parquet":
        from pyarrow import ArrowException, types
        from pyarrow.parquet import read_schema

        try:
            schema = read_schema(file)
        except ArrowException as error:
            raise ValueError(f"{file} cannot be read as parquet: {error}") from error
        return {
            field.name: tuple(sub.name for sub in field.type) if types.is_struct(field.type) else () for field in schema
        }
    if file.suffix not in (".json", ".jsonl"):
        raise ValueError(f"verl reads .parquet, .json and .jsonl files, not {file}")
    with file.open(encoding="utf-8") as lines:
        first = next((line for line in lines if line.strip()), "")
    try:
        row = json.loads(first)
    except ValueError as error:
        raise ValueError(f"{file}: the first line must be a JSON object, but is not JSON: {error}") from error
    if not isinstance(row, dict):
        raise ValueError(f"{file}: the first line must be a JSON object, got {type(row).__name__}")
    return {name: tuple(value) if isinstance(value, dict) else () for name, value in row.items()}


def _check_reward(path: str, name: Any) -> None:
    file = _file_of_module(path.removeprefix(_MODULE)) if path.startswith(_MODULE) else Path(path.removeprefix(_FILE))
    if not file.is_file():
        raise ValueError(f"there is no such file (relative paths start at {Path.cwd()})")
    names = set(_top_level(ast.parse(file.read_bytes(), path).body))
    if not {str(name), "*", "__getattr__"} & names:
        public = ", ".join(sorted(defined for defined in names if not defined.startswith("_"))) or "nothing"
        raise ValueError(f"it does not define {name}; it defines {public}; set {_REWARD}.name")


def _file_of_module(name: str) -> Path:
    """The file of a module that verl would import. Only the packages that contain the module are imported here."""
    try:
        spec = find_spec(name.replace("/", "."))
    except ImportError:
        spec = None
    if spec is None or spec.origin is None:
        raise ValueError("there is no such module in this environment; install it, on every node")
    return Path(spec.origin)


def _top_level(body: Iterable[ast.stmt]) -> Iterator[str]:
    """Names that the statements of a module define; "*" if the module imports everything from another module."""
    for statement in body:
        for node in ast.walk(statement):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                yield node.name
            elif isinstance(node, ast.alias):
                yield (node.asname or node.name).partition(".")[0]
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield node.id
