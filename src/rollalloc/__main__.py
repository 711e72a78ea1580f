"""`python -m rollalloc` is the command `rollalloc`."""

from rollalloc.cli import main

if __name__ == "__main__":
    main()
