"""The page's example runs as it stands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

PAGE = (Path(__file__).parents[3] / "docs" / "trl.md").read_text("utf-8")


def test_the_pages_example_trains(tmp_path):
    section = PAGE[PAGE.index("## The asynchronous trainer") :]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    (tmp_path / "example.py").write_text(code)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "example.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    accounts = done.stdout.splitlines()[-1]
    assert "'trained'" in accounts
    assert "'out_of_band'" in accounts
    assert len(code.splitlines()) <= 45
