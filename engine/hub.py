"""Test whether the Hugging Face hub responds. If not, the hub's client retries each file for 30 seconds."""

import os
from functools import cache
from urllib.error import HTTPError
from urllib.request import Request, urlopen

HUB_SECONDS = 5.0  # ours


@cache
def hub_responds() -> bool:
    """Return whether the hub answers a request; False, without asking, if HF_HUB_OFFLINE is set."""
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
