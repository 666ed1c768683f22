"""docs/study.md: a table of verdicts, the chapters, every comparison. The sentences are in page.yaml.

A finding is written by hand for one set of runs: it is shown where each of its numbers stands in the
chapter's table or comparisons, and left out for other runs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from bench.study.finished import KINDS, Finished, plural
from bench.study.measures import commit, cores, seconds
from bench.study.verdicts import ANSWERS, DECIDED, Verdict
from smopd.report.tables import heading

WORDS = yaml.safe_load((Path(__file__).parent / "page.yaml").read_text())
SAMPLED = KINDS["sampled"]
DECODED = tuple(f" ({said})" for said in KINDS.values())
NUMBER = re.compile(r"(?<![\w.§])[+-]?\d+(?:\.\d+)?(?!\w)")  # not in "GD2PO", not "§1"
Rows = Sequence[Sequence[object]]


@dataclass(frozen=True)
class Chapter:
    """A section of the page.

    Attributes:
        name: of its sentences in page.yaml, and of its picture.
        header: of the table, whose rows have as many cells; None is a cell without a value.
        done: the runs that it reads.
        facts: what the {names} in its note are.
    """

    name: str
    header: Sequence[str]
    rows: Rows
    verdicts: Sequence[Verdict] = ()
    done: Sequence[Finished] = ()
    facts: Mapping[str, object] = field(default_factory=dict)

    @property
    def title(self) -> str:
        return WORDS["chapters"][self.name]["title"]

    @property
    def link(self) -> str:
        anchor = re.sub(r"[^\w\- ]", "", self.title.lower()).replace(" ", "-")
        return f"[{self.title}](#{anchor})"

    @property
    def finding(self) -> str:
        """The sentences written by hand, where they are about these numbers."""
        finding = WORDS["chapters"][self.name]["finding"].strip()
        shown = [table(self.header, self.rows), *(f"{claim} {found}" for claim, found, _ in self.verdicts)]
        known = set(NUMBER.findall(" ".join(shown)))
        return finding if known.issuperset(NUMBER.findall(finding)) else WORDS["no_finding"]

    def markdown(self) -> str:
        note = WORDS["chapters"][self.name]["note"].strip().format(**self.facts)
        cost = f"*{self._cost()}*" if self.done else ""
        picture = f"![{self.title}](study/{self.name}.png)"
        parts = (f"## {self.title}", picture, self.finding, table(self.header, self.rows), note, cost)
        return "\n\n".join(part for part in parts if part)

    def _cost(self) -> str:
        counts = sorted({len(done.folders) for done in self.done})
        seeds = f"{counts[0]} to {counts[-1]} seeds" if len(counts) > 1 else plural(counts[0], "seed")
        folders = [folder for done in self.done for folder in done.folders]
        took = [seconds(folder) for folder in folders]
        known = [n for folder in folders if (n := cores(folder)) is not None]
        shared = ""
        if len(known) == len(folders):
            there = " or ".join(map(str, sorted(set(known))))
            minutes = sum(t / n for t, n in zip(took, known, strict=True)) / 60
            shared = f" ({minutes:.0f} minutes where {there} cores are kept busy)"
        return (
            f"{seeds}; {plural(len(took), 'job')} of together {sum(took) / 60:.0f} thread-minutes{shared}, "
            f"the longest {max(took) / 60:.0f}."
        )


def page(chapters: Sequence[Chapter], folders: Sequence[Path], size: str) -> str:
    """The page of chapters whose runs are in these folders."""
    every = [(chapter, *_claimed(verdict)) for chapter in chapters for verdict in chapter.verdicts]
    introduction = WORDS["introduction"].format(
        size=size,
        jobs=plural(len(folders), "job"),
        hours=sum(map(seconds, folders)) / 3600,
        commits=", ".join(sorted({commit(folder) for folder in folders})) or "none",
        decided=DECIDED,
    )
    overview = []
    for family, words in WORDS["claims"].items():
        if found := [(chapter, verdict) for chapter, of, verdict in every if of == family]:
            links = ", ".join(dict.fromkeys(chapter.link for chapter, _ in found))
            overview.append([words["claim"], words["paper"], links, *_counts([v for _, v in found])])
    overview.append([f"All {len(every)} comparisons", "", "", *_counts([v for *_, v in every])])
    parts = [
        introduction.strip(),
        table(["claim", "in the paper", "here", *ANSWERS], overview, text=3),
        *(chapter.markdown() for chapter in chapters),
        f"## Every comparison\n\n{WORDS['judging'].strip()}",
        table(["chapter", "in the paper", "claim", *KINDS.values()], _compared(every), text=5),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _compared(every: Sequence[tuple[Chapter, str, Verdict]]) -> Rows:
    """A row a claim; what is measured while training, on sampled responses, is beside the sampled ones."""
    found: dict[tuple[str, ...], dict[str, str]] = {}
    for chapter, family, verdict in every:
        claim, said = verdict.claim, SAMPLED
        if claim.endswith(DECODED):
            claim, said = claim.removesuffix(")").rsplit(" (", 1)
        cells = found.setdefault((chapter.title, WORDS["claims"][family]["paper"], claim), {})
        cells[said] = f"{verdict.found}, {verdict.answer}"
    return [[*claim, *(cells.get(said) for said in KINDS.values())] for claim, cells in found.items()]


def table(header: Sequence[str], rows: Rows, text: int = 1) -> str:
    """As Markdown; the columns after the first `text` are aligned right."""
    lines = [[heading(column) for column in header], ["---"] * text + ["---:"] * (len(header) - text)]
    lines += [["-" if cell is None else str(cell).replace("|", "\\|") for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _claimed(verdict: Verdict) -> tuple[str, Verdict]:
    """The family of a verdict's claim, `family: claim`, and the verdict without it."""
    family, claim = verdict.claim.split(": ", 1)
    return family, verdict._replace(claim=claim)


def _counts(verdicts: Sequence[Verdict]) -> list[int]:
    return [sum(verdict.answer == answer for verdict in verdicts) for answer in ANSWERS]
