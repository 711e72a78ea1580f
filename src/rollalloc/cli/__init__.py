"""The command line; needs the extra `native`."""

import sys


def main() -> None:
    """Entry point of `rollalloc`; where the extra `native` is missing, one line that says so, and exit code 1."""
    try:
        from rollalloc.cli.app import main as run
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("rollalloc"):
            raise
        sys.exit(f"error: the command rollalloc needs {error.name}; pip install 'rollalloc[native]'")
    run()
