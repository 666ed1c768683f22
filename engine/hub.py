"""Whether the Hugging Face hub responds: without a network its client retries for half a minute a file."""

import os
from functools import cache
from urllib.error import HTTPError
from urllib.request import Request, urlopen

HUB_SECONDS = 5.0  # ours


@cache
def hub_responds() -> bool:
    """Send one request to the hub, unless it is switched off (HF_HUB_OFFLINE)."""
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
