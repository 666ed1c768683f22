"""Whether the Hugging Face hub responds: without a network its client retries for half a minute a file."""

from __future__ import annotations

import os
from functools import cache

HUB_SECONDS = 5.0  # ours


@cache
def hub_responds() -> bool:
    import httpx

    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return False
    try:
        httpx.head(os.environ.get("HF_ENDPOINT", "https://huggingface.co"), timeout=HUB_SECONDS)
    except httpx.HTTPError:
        return False
    return True
