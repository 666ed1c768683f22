"""Write build/docs, the sources of the site that `make docs` builds: the pages, and references from the code.

Relative links are checked. Links to files outside docs/ lead to the repository if its address is given.
"""

from __future__ import annotations

import argparse
import inspect
import json
import re
import shutil
import sys
from pathlib import Path

from smopd import ops
from smopd.config.errors import is_setting, kind, schemas
from smopd.config.recipe import dotted

ROOT = Path(__file__).resolve().parents[1]
SITE = ROOT / "build/docs"
TOP = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
TUTORIAL = "examples/tutorial.py"
LINK = re.compile(r"\]\(([^)#\s]+)(#[^)\s]*)?\)")


def operations() -> str:
    """Return the signature and docstring of every public name of smopd.ops."""
    parts = ["# Operations", f"```text\n{inspect.getdoc(ops)}\n```"]
    names = [name for name in ops.__all__ if not name.isupper()]
    for name in sorted(names, key=lambda name: (name[0].isupper(), name)):  # functions first
        value = getattr(ops, name)
        lines: list[str] = []
        for each in inspect.signature(value).parameters.values():
            if each.kind == each.KEYWORD_ONLY and "*" not in lines:
                lines.append("*")
            lines.append(re.sub(r": '([^']*)'", r": \1", str(each)))  # annotations are strings
        parameters = "".join(f"\n    {line}," for line in lines)
        parts.append(
            f"## {name}\n\n```python\n{name}({parameters}\n)\n```\n\n```text\n{inspect.getdoc(value)}\n```"
        )
    limits = [f"| `{name}` | {int(getattr(ops, name))} |" for name in ops.__all__ if name.isupper()]
    parts.append("\n".join(["## Bits of LossStats.clipped_N", "", "| name | value |", "|---|---:|", *limits]))
    return "\n\n".join(parts) + "\n"


def settings() -> str:
    """Return a table of the settings of each section."""
    lines = ["# Settings", "", "`smopd train --help SECTION` prints the same.", "", "## Top level"]
    tops = [keys for keys in schemas() if len(keys) == 1 and is_setting(keys)]
    lines += table(tops)
    for (section, *below), schema in ((keys, schema) for keys, schema in schemas().items() if keys):
        if not below and not is_setting((section,)):
            inside = [keys for keys in schemas() if keys and keys[0] == section and is_setting(keys)]
            lines += ["", f"## {section}", "", schema.get("description", ""), *table(inside)]
    return "\n".join(lines) + "\n"


def table(settings: list[tuple[str, ...]]) -> list[str]:
    rows = ["", "| setting | type | default | meaning |", "|---|---|---|---|"]
    for keys in settings:
        schema = schemas()[keys]
        default = json.dumps(schema["default"]) if "default" in schema else "required"
        meaning = " ".join(schema.get("description", "").split())
        cells = (f"`{dotted(keys)}`", f"`{kind(schema)}`", f"`{default}`", meaning)
        rows.append("| " + " | ".join(cells) + " |")  # pipes in code need no escape, and would show it
    return rows


def page(source: Path, target: Path, repository: str) -> str:
    """Return a page with links for its place in the site.

    Raises:
        ValueError: a relative link leads to no file.
    """

    def linked(match: re.Match[str]) -> str:
        link, anchor = match[1], match[2] or ""
        if "://" in link or link.startswith("mailto:"):
            return match[0]
        file = (source.parent / link).resolve()
        if not file.exists():
            raise ValueError(f"{source.relative_to(ROOT)}: link {link!r} leads to no file")
        inside = file.relative_to(ROOT).as_posix()
        if inside == TUTORIAL:
            return f"](tutorial.md{anchor})"
        if inside in TOP or inside.startswith("docs/"):
            return f"]({TOP.get(inside, inside.removeprefix('docs/'))}{anchor})"
        return f"]({repository}/blob/main/{inside}{anchor})" if repository else f"](#{anchor.lstrip('#')})"

    return LINK.sub(linked, source.read_text())


def tutorial() -> str:
    """Return examples/tutorial.py as a page, with its outputs if `make tutorial` has run it."""
    made = ROOT / "build/tutorial"
    if (made / "tutorial.md").exists():
        shutil.copytree(made, SITE, ignore=shutil.ignore_patterns("*.ipynb", "*.md"), dirs_exist_ok=True)
        return (made / "tutorial.md").read_text()
    cells = re.split(r"^# %%( \[markdown\])?\n", (ROOT / TUTORIAL).read_text(), flags=re.M)[1:]
    parts = []
    for is_text, cell in zip(cells[::2], cells[1::2], strict=True):
        text = re.sub(r"^# ?", "", cell, flags=re.M)
        parts.append(text if is_text else f"```python\n{cell.strip()}\n```\n")
    return "\n".join(parts)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repository", default="", help="address for links to files outside docs/")
    repository = parser.parse_args(argv).repository
    shutil.rmtree(SITE, ignore_errors=True)
    shutil.copytree(ROOT / "docs", SITE, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    pages = {ROOT / name: SITE / target for name, target in TOP.items()}
    pages |= {file: SITE / file.name for file in (ROOT / "docs").glob("*.md")}
    for source, target in pages.items():
        target.write_text(page(source, target, repository))
    (SITE / "tutorial.md").write_text(tutorial())
    (SITE / "reference").mkdir()
    (SITE / "reference/operations.md").write_text(operations())
    (SITE / "reference/settings.md").write_text(settings())
    return 0


if __name__ == "__main__":
    sys.exit(main())
