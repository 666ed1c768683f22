"""What docs/kernels.md asks of a GPU beside what rows say: a table of targets, then counters and choices.

python -m bench targets FILE...
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

LOGITS = "N8192-V151936"
HEAD = (
    "| # | operation | target | measured ms | ceiling ms | of it | x eager | |",
    "|---|---|---|---:|---:|---:|---:|---|",
)


@dataclass(frozen=True)
class Target:
    """The floor of what is accepted ("good"), of a row that one provider of one case of a benchmark gives.

    Attributes:
        share: of the ceiling that is timed in the same rounds; microseconds: of a call in a CUDA graph.
            Neither: the row is shown, and nothing is asked of it.
    """

    number: str
    benchmark: str
    case: str
    share: float | None = None
    microseconds: float | None = None
    provider: str = "triton"


def _loss(number: str, flags: str, share: float) -> Target:
    return Target(number, "smopd_loss", f"{LOGITS}-M2-kappa16-bf16{flags}", share, provider="triton in place")


def _linear(number: str, sizes: str, share: float, variant: str = "", flags: str = "") -> Target:
    provider = f"triton {variant}".strip()
    return Target(number, "linear_smopd_loss", f"{LOGITS}-{sizes}-bf16{flags}", share, provider=provider)


def _mixture(sizes: str, microseconds: float) -> Target:
    return Target("7", "teacher_mixture", f"N8192-{sizes}-fp32", microseconds=microseconds)


# The numbers are those of the table of targets; 1' and 3' are the library's default settings.
TARGETS = (
    _loss("1", "", 0.85),
    _loss("1'", "-merge-tail", 0.85),
    _loss("2", "-entropy", 0.75),
    *(
        _linear("3", sizes, share, "one chunk")
        for sizes, share in (
            ("D1536-M2-kappa16", 0.92), ("D2048-M2-kappa16", 0.94), ("D3584-M2-kappa64", 0.95)
        )
    ),
    _linear("3'", "D2048-M2-kappa16", 0.94, "one chunk", "-merge-tail"),
    *(
        _linear("3 default chunks", sizes, share)
        for sizes, share in (
            ("D1536-M2-kappa16", 0.82), ("D2048-M2-kappa16", 0.84), ("D3584-M2-kappa64", 0.86)
        )
    ),
    _linear("4", "D2048-M2-kappa16", 0.66, "recompute"),
    *(Target("5", "topk_logprobs", f"{LOGITS}-kappa{kappa}-bf16", 0.80) for kappa in (16, 32, 64)),
    *(
        Target("6", "linear_topk_logprobs", f"{LOGITS}-D{width}-kappa16-bf16", share)
        for width, share in ((1536, 0.80), (2048, 0.85), (3584, 0.90))
    ),
    _mixture("M2-kappa16", 8.0),
    _mixture("M4-kappa64", 14.0),
    _mixture("M8-kappa64", 25.2),
    Target("8", "advantages", "N16384-K4-G16-fp32", microseconds=8.0),
    Target("-", "topk_forward_kl", f"{LOGITS}-kappa16-bf16"),
    Target("-", "topk_forward_kl", f"{LOGITS}-kappa64-bf16-tail"),
)  # fmt: skip


def table(rows: Sequence[dict]) -> str:
    """Markdown: the machine, the targets, counters, open choices, and what was refused or left out."""
    parts = [*_machine(rows), *_targets(rows), *_counters(rows), *_choices(rows), *_refused(rows)]
    return "\n".join(parts)


def _machine(rows: Sequence[dict]) -> Iterator[str]:
    for row in rows[:1]:
        keys = ("device", "torch", "triton", "cuda", "commit")
        yield ", ".join(f"{key} {row[key]}" for key in keys if row.get(key)) + "\n"
    for row in rows:
        if row.get("kind") == "machine":
            facts = ("smi", "processors", "l2_mib", "memory_gib")
            yield "; ".join(f"{name}: {row[name]}" for name in facts if name in row) + "\n"
        if row.get("benchmark") in ("bandwidth", "gemm"):
            rates = {"gb_per_s": "GB/s", "gflop_per_s": "GFLOP/s"}
            rate = ", ".join(f"{row[key]} {unit}" for key, unit in rates.items() if key in row)
            yield f"- {row['provider']} {row['case']}: {row['ms']} ms, {rate}"


def _targets(rows: Sequence[dict]) -> Iterator[str]:
    yield "\n" + "\n".join(HEAD)
    for target in TARGETS:
        yield f"| {' | '.join(_cells(target, rows))} |"
    yield "\n(ms of one call, cold; us: a call in a CUDA graph, ms beside it alone.)"


def _cells(target: Target, rows: Sequence[dict]) -> tuple[str, ...]:
    head = (target.number, f"{target.benchmark} {target.case} ({target.provider})", _asked(target))
    mine = [
        row
        for row in rows
        if (row.get("benchmark"), row.get("case"), row.get("provider"))
        == (target.benchmark, target.case, target.provider)
    ]
    timed = [row for row in mine if "ms" in row]
    if not timed:
        why = next((row[word] for row in mine for word in ("refused", "left_out") if word in row), "")
        return (*head, "", "", "", "", f"not measured {why}".strip())
    row = timed[0]  # a later one ran beside plain PyTorch
    eager = next((one["times_eager"] for one in timed if one.get("times_eager")), None)
    ratio = "" if eager is None else f"{eager:.3g}"
    share = row.get("of_ceiling")
    bound = "" if share is None else f"{row['ceiling']} {row['ms'] * share:.4g}"
    alone, of_it = f"{row['ms']:.4g}", "" if share is None else f"{share:.1%}"
    if target.microseconds is None:
        holds = None if target.share is None or share is None else share >= target.share
        return (*head, alone, bound, of_it, ratio, _verdict(holds))
    if (graph_ms := row.get("graph_ms")) is None:
        return (*head, alone, bound, of_it, ratio, f"no graph: {row.get('no_graph', 'longer than a launch')}")
    graphed = f"{graph_ms * 1e3:.3g} us ({alone})"
    return (*head, graphed, bound, of_it, ratio, _verdict(graph_ms * 1e3 <= target.microseconds))


def _asked(target: Target) -> str:
    if target.microseconds is not None:
        return f"{target.microseconds:g} us"
    return "" if target.share is None else f"{target.share:.0%}"


def _verdict(holds: bool | None) -> str:
    return "" if holds is None else "good" if holds else "**misses**"


def _counters(rows: Sequence[dict]) -> Iterator[str]:
    mine = [row for row in rows if row.get("kind") == "counters"]
    if not mine:
        return
    yield "\nCounters of one launch (ncu):\n"
    for row in mine:
        said = row.get("left_out") or ", ".join(f"{name} {value}" for name, value in row["counters"].items())
        yield f"- {row['case']}: {said}"


def _choices(rows: Sequence[dict]) -> Iterator[str]:
    mine = [row for row in rows if row.get("kind") == "sweep"]
    if not mine:
        return
    yield "\nOpen choices, the same call with one thing changed (ms, of the ceiling):\n"
    for row in mine:
        said = row.get("left_out") or row.get("refused") or f"{row['ms']:.4g} ms, {row['of_ceiling']:.1%}"
        yield f"- {row['benchmark']} {row['case']}, {row['provider']}: {said}"


def _refused(rows: Sequence[dict]) -> Iterator[str]:
    wrong = [row for row in rows if "refused" in row and row.get("kind") != "sweep"]
    if wrong:
        yield "\nWrong, and therefore not timed:\n"
    for row in wrong:
        yield f"- {row.get('benchmark')} {row.get('case')}, {row.get('provider')}: {row['refused']}"
