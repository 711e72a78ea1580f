"""`tiny_async` for the tests beside it, one thread, and no output of TRL's own; skipped where TRL lacks the trainer."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("trl")
pytest.importorskip("trl.experimental.async_grpo", exc_type=ImportError)
sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(1, str(Path(__file__).parents[1] / "trl"))

import torch
from transformers.utils.logging import disable_progress_bar, enable_progress_bar


@pytest.fixture(autouse=True)
def one_quiet_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    disable_progress_bar()
    yield
    enable_progress_bar()
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a tiny model with its tokenizer: TRL's asynchronous trainer loads models by name only."""
    import tiny_async

    return tiny_async.saved_model(tmp_path_factory.mktemp("model"))
