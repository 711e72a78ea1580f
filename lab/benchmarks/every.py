"""Every figure that lab/docs/speed.md has a limit for, each program in a process of its own: `make bench`.

Given names of programs, only these run: `make bench ONLY=core.py`, as in CI. All of them run, whatever one of them says; the
code is 1 if one failed, or missed a bar.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

COMMANDS = (
    "core.py",
    "predictor.py speed",
    "sampler.py",
    "features.py",
    "rewards.py speed",
    "rewards.py hostile",
    "trl_driver.py speed",
)


def main() -> int:
    known = {command.split()[0] for command in COMMANDS}
    only = sys.argv[1:] or sorted(known)
    if unknown := set(only) - known:
        raise SystemExit(f"expected some of {', '.join(sorted(known))}, got {', '.join(sorted(unknown))}")
    failed: list[str] = []
    for command in COMMANDS:
        program, *words = command.split()
        if program not in only:
            continue
        print(f"# {command}", flush=True)
        begun = time.monotonic()
        if subprocess.run([sys.executable, Path(__file__).with_name(program), *words], check=False).returncode:
            failed.append(command)
        print(f"# took {time.monotonic() - begun:.0f} s\n", flush=True)
    if failed:
        print(f"failed, or missed a bar: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
