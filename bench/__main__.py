"""`python -m bench FILE...`: print one table of the rows that `pytest bench` stored in these files."""

from __future__ import annotations

import sys
from pathlib import Path

from bench.harness import record

if __name__ == "__main__":
    files = [Path(name) for name in sys.argv[1:]]
    if not files:
        sys.exit(__doc__)
    try:
        print("\n".join(record.table([row for file in files for row in record.rows_of(file)])))
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
