"""Prompts from files, with keys that stay the same if the files are reordered. The core gets them as a `PromptTable`."""
