"""Checks once whether the Hugging Face hub answers, because the hub's own libraries retry for a minute."""

from __future__ import annotations

from functools import lru_cache

_PATIENCE_S = 5.0


@lru_cache
def why_unreachable() -> str | None:
    """The reason why the hub cannot be reached; None if the hub answers.

    If the hub does not answer, `huggingface_hub` is set to offline mode.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    try:
        get_session().head(constants.ENDPOINT, timeout=_PATIENCE_S)
    except Exception as error:  # the type of the error depends on the library's version
        constants.HF_HUB_OFFLINE = True
        return str(error).partition("\n")[0] or type(error).__name__
    return None
