"""Whether the Hugging Face hub answers, asked once and without the minute of retries that its libraries take."""

from __future__ import annotations

from functools import lru_cache

_PATIENCE_S = 5.0


@lru_cache
def why_unreachable() -> str | None:
    """Why the hub cannot be asked; None where it answers. Where it cannot, its libraries take what is here already."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    try:
        get_session().head(constants.ENDPOINT, timeout=_PATIENCE_S)
    except Exception as error:  # which one depends on the library's version
        constants.HF_HUB_OFFLINE = True
        return str(error).partition("\n")[0] or type(error).__name__
    return None
