"""The command line. It needs the extra `native` (`pip install 'rollalloc[native]'`)."""

import sys

from rollalloc.cli import began as began


def main() -> None:
    """Entry point of `rollalloc`. Without the extra `native`, it names the missing package and exits with code 1."""
    try:
        from rollalloc.cli.app import main as run
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("rollalloc"):
            raise
        sys.exit(f"error: the command rollalloc needs {error.name}; pip install 'rollalloc[native]'")
    run()
