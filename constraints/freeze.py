"""Prints the versions of an environment as constraints: `.venv-engines/bin/python constraints/freeze.py`.

.venv-engines lies over .venv, so one list has both. A release that needs a newer Python than smopd does is
pinned from that Python on. A local version (2.13.0+cpu) is left off: any build of that version will do.
"""

from __future__ import annotations

import re
import sys
from importlib.metadata import distributions

OLDEST = (3, 10)
SKIPPED = {"pip", "smopd"}

python = ".".join(map(str, sys.version_info[:2]))
print(
    f"# What `make quickstart` and `make test` install. Made by constraints/freeze.py with Python {python}."
)
lines: dict[str, str] = {}
for found in distributions():
    name = re.sub(r"[-_.]+", "-", found.metadata["Name"]).lower()
    least = re.search(r">=\s*3\.(\d+)", found.metadata.get("Requires-Python") or "")
    marker = f'; python_version >= "3.{least[1]}"' if least and (3, int(least[1])) > OLDEST else ""
    lines.setdefault(
        name, f"{name}=={found.version.partition('+')[0]}{marker}"
    )  # the first on the path counts
print(*(line for name, line in sorted(lines.items()) if name not in SKIPPED), sep="\n")
