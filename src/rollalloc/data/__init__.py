"""Prompts from files, with keys that do not depend on the order of the files. The core gets them as a `PromptTable`."""
