"""Prompts from files, with keys that outlive a re-ordering. Stands beside the core and tells it a `PromptTable`."""
