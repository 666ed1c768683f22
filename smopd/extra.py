"""Imported first by every command: make output safe, and require the packages of the extra `train`."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from io import TextIOWrapper

TRAIN = [
    "transformers", "tokenizers", "datasets", "safetensors", "numpy", "pyarrow", "pydantic", "tyro", "rich",
    "yaml", "jinja2", "httpx", "pooch", "tqdm", "platformdirs", "packaging",
]  # fmt: skip
"""Import names of the packages in the extra."""

for _stream in (sys.stdout, sys.stderr):
    if isinstance(_stream, TextIOWrapper):
        _stream.reconfigure(errors="backslashreplace")  # a terminal may not know every character

if absent := [name for name in TRAIN if find_spec(name) is None]:
    sys.exit(
        f"error: not installed: {', '.join(absent)}; the commands need the extra `train`: "
        "pip install 'smopd[train]', or pip install '.[train]' in a clone"
    )
