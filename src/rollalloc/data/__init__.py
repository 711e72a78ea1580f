"""Prompts from files, with keys that stay valid if the files are reordered. The core gets them as a `PromptTable`."""
