"""Test whether the Hugging Face hub responds. If not, its client would retry each file for 30 seconds."""

import os
from functools import cache
from urllib.error import HTTPError
from urllib.request import Request, urlopen

HUB_SECONDS = 5.0  # ours


@cache
def hub_responds() -> bool:
    """Return whether the hub answers a request. If HF_HUB_OFFLINE is true, return False without a request."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return False
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    try:
        urlopen(Request(endpoint, method="HEAD"), timeout=HUB_SECONDS).close()
    except HTTPError:
        return True
    except OSError:
        return False
    return True
