"""Prompts from files, with keys that do not depend on the files' order. The core gets the prompts as a `PromptTable`."""
