"""`tiny_trl` for the tests beside it, one thread, and no output of TRL's own."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("trl")
sys.path.insert(0, str(Path(__file__).parent))

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
