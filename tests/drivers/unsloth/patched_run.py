"""A run of `tiny_trl` under Unsloth's patch, for several processes; and words enough for it."""

# pyright: reportMissingImports=false

import conftest  # noqa: F401  # first: it patches TRL, and finds `tiny_trl`

# isort: split
import tiny_trl

import tiny_policy

# So many that a micro-batch does not have them all: Unsloth needs one id for padding.
WORDS = [*tiny_policy.WORDS, *(f"b{number}" for number in range(51))]

if __name__ == "__main__":
    tiny_policy.WORDS = tiny_trl.WORDS = WORDS
    tiny_trl.run_as_program(tiny_trl.main)
