"""Imported first by every command: exit with an install hint if a package of the extra `train` is missing."""

from __future__ import annotations

import sys
from importlib.util import find_spec

TRAIN = [
    "transformers", "tokenizers", "datasets", "safetensors", "numpy", "pyarrow", "pydantic", "tyro", "rich",
    "yaml", "jinja2", "httpx", "pooch", "tqdm", "platformdirs", "packaging",
]  # fmt: skip
"""Import names of the packages in the extra."""

if absent := [name for name in TRAIN if find_spec(name) is None]:
    sys.exit(
        f"error: not installed: {', '.join(absent)}; the commands need the extra `train`: "
        "pip install 'smopd[train]', or pip install '.[train]' in a clone"
    )
