"""Unsloth's backend for CPUs, in processes of their own: there `FastLanguageModel` loads, and TRL's class stays TRL's."""

# pyright: reportMissingImports=false

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import tiny_trl

import tiny_policy

ROOT = Path(__file__).parents[3]
# Those of `conftest` let Unsloth take the machine for one with a GPU.
OTHERS = ("UNSLOTH_ALLOW_CPU", "UNSLOTH_COMPILE_DISABLE", "UNSLOTH_FORCE_FLOAT32", "ACCELERATE_MIXED_PRECISION")


def run(*arguments: object, within: Path) -> str:
    """Python's output, without a GPU, without the network and in this folder; the process must succeed."""
    environment = {name: value for name, value in os.environ.items() if name not in OTHERS}
    environment |= {"HF_HUB_OFFLINE": "1", "UNSLOTH_FORCE_CPU": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, cwd=within, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_the_example_trains_and_accounts_for_every_rollout(tmp_path):
    output = run(ROOT / "examples" / "unsloth_reinforce.py", within=tmp_path)
    assert "'step_time'" in output
    counts = re.findall(r"'(\w+)': (\d+)", output.splitlines()[-1])
    assert sum(int(count) for _, count in counts) == 4 * 16


def test_the_guides_script_trains(tmp_path, monkeypatch):
    """As it stands on the page, with a tiny model under the name that it has there."""
    (script,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "unsloth.md").read_text("utf-8"), re.DOTALL)
    (name,) = re.findall(r'from_pretrained\("(.+?)"', script)
    for module in (tiny_policy, tiny_trl):
        monkeypatch.setattr(module, "WORDS", [*map(str, range(100)), "+"])
    tiny_trl.tiny_model().save_pretrained(tmp_path / name)
    tiny_trl.tiny_tokenizer().save_pretrained(tmp_path / name)
    (tmp_path / "script.py").write_text(script, "utf-8")
    run("script.py", within=tmp_path)
    assert any((tmp_path / "out").glob("checkpoint-*/adapter_model.safetensors"))
