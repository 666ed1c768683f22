"""`python docs/pictures.py RUNS/report.html`: make docs/token_view.png from a report, with Chromium."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

PICTURE = Path(__file__).resolve().parent / "token_view.png"
SIZE = (900, 320)  # pixels
ONE = "details:not(.shown),.note{display:none!important}body{padding:0}section{margin:0;border:0}"


def token_view(page: str) -> str:
    """Return the page with its last open token view alone."""
    (section,) = re.findall(r"<section><h2>Tokens.*?</section>", page, re.DOTALL)
    before, _, after = section.rpartition("<details open>")
    style = page[: page.index("</style>")] + ONE + "</style></head><body>"
    return f"{style}{before}<details open class=shown>{after}"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "page.html"
        file.write_text(token_view(Path(sys.argv[1]).read_text()))
        shot = [f"--screenshot={PICTURE}", f"--window-size={SIZE[0]},{SIZE[1]}", str(file)]
        options = ["--headless", "--no-sandbox", "--hide-scrollbars", "--force-device-scale-factor=1.5"]
        subprocess.run(["chromium", *options, *shot], check=True, capture_output=True)


if __name__ == "__main__":
    main()
