"""First import of every command. Keeps prints from failing and requires the packages of the extra `train`."""

import os
import sys
from importlib.util import find_spec
from io import TextIOWrapper

TRAIN = [
    "transformers", "tokenizers", "datasets", "safetensors", "numpy", "pyarrow", "pydantic", "tyro", "rich",
    "yaml", "jinja2", "httpx", "pooch", "tqdm", "platformdirs", "packaging",
]  # fmt: skip
"""Import names of the packages in the extra `train`."""

while (_free := os.open(os.devnull, os.O_RDWR)) < 3:  # otherwise a file would get a closed stream's number
    os.set_inheritable(_free, True)
os.close(_free)
sys.stdout, sys.stderr = sys.stdout or open(1, "w"), sys.stderr or open(2, "w")  # noqa: SIM115

for _stream in (sys.stdout, sys.stderr):
    if isinstance(_stream, TextIOWrapper):
        _stream.reconfigure(errors="backslashreplace")  # a terminal may not support every character

if absent := [name for name in TRAIN if find_spec(name) is None]:
    sys.exit(
        f"error: not installed: {', '.join(absent)}; the commands need the extra `train`: "
        "pip install 'smopd[train]', or pip install '.[train]' in a clone"
    )
