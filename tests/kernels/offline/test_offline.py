"""Every Triton kernel as it ships compiles without spills and is no worse than recorded; no GPU is needed.

The gate itself is a process of its own (offline.py), because Triton decides at import whether it interprets.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("triton", reason="triton is not installed")

import torch

from tests.kernels.offline import __main__ as offline
from tests.kernels.offline import offline_code, offline_launches
from tests.kernels.pairwise import pairwise
from tests.patience import HANG_SECONDS


@pytest.mark.slow
def test_everything_that_ships_compiles_and_holds(repository_root, tmp_path) -> None:
    assert_well("tests.kernels.offline", repository_root, tmp_path)


@pytest.mark.slow
def test_no_offset_is_subtracted_unrounded(repository_root, tmp_path) -> None:
    assert_well("tests.kernels.offline.contraction", repository_root, tmp_path)


def assert_well(module: str, folder: Path, cache: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", module]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=HANG_SECONDS
    )
    print(done.stdout)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"


SASS = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;        /* 0x00000a0000017a02 */
        /*0010*/                   LDG.E.128 R4, [R2.64] ;       /* 0x0000000402047981 */
        /*0020*/                   SHFL.BFLY PT, R5, R4, 0x1 ;   /* 0x0000000004057f89 */
        /*0030*/              @!P0 MUFU.EX2 R6, R5 ;             /* 0x0000000500067308 */
        /*0040*/                   STG.E.64 [R2.64], R6 ;        /* 0x0000000602007986 */
        /*0050*/               @P1 BRA 0x10 ;                    /* 0xffffffb000007947 */
        /*0060*/                   BAR.SYNC 0x0 ;                /* 0x0000000000007b1d */
        /*0070*/               @P2 BRA 0x0 ;                     /* 0xffffff8000007947 */
        /*0080*/                   STL [R1], R6 ;                /* 0x0000000601007387 */
        /*0090*/                   BRA 0x90;                     /* 0xfffffff000007947 */
"""


def test_loops_are_read_from_the_machine_code() -> None:
    lines = offline_code.sass_of(SASS)
    assert [offline_code.opcode(text) for _, text in lines[2:5]] == ["SHFL", "MUFU", "STG"]
    (loop,) = offline_code.main_loops(lines)  # not the outer one, nor the branch to itself at the end
    assert loop == offline_code.Loop(
        instructions=5, loaded_bytes=16, stored_bytes=8, shuffles=1, barriers=0, special=1
    )


def built(**changes) -> offline_code.Built:
    loop = offline_code.Loop(100, 16, 0, 0, 0, 8)
    facts = {
        "registers": 64,
        "stack": 0,
        "local": 0,
        "shared": 0,
        "warps": 4,
        "itemsize": 2,
        "instructions": 300,
        "loops": (loop,),
    }
    return offline_code.Built(name="k", case="c", digest="d", **(facts | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"stack": 8}, "spills"), ({"local": 1}, "spills"), ({"shared": 200 << 10}, "of shared memory")],
)
def test_what_no_kernel_may_have(changes: dict, message: str) -> None:
    assert offline.faults(built(), {}) == []
    (fault,) = offline.faults(built(**changes), {})
    assert message in fault


@pytest.mark.parametrize(("stack", "message"), [(8, None), (16, "16 bytes"), (0, "0 bytes")])
def test_a_known_spill_is_held_to_its_bytes(stack: int, message: str | None) -> None:
    found = offline.faults(built(stack=stack), {built().name: 8})
    assert (found == []) == (message is None) and all(str(message) in fault for fault in found)


def test_a_known_spill_is_of_a_launch_and_not_of_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = [SimpleNamespace(name=name) for name in ("a sm_80", "a sm_90")]
    monkeypatch.setattr(offline, "KNOWN_SPILLS", {"1.0": {"a sm_80": 8, "b sm_80": 8}, "2.0": {"a sm_90": 8}})
    gone, hopper = offline.unknown_spills(launches)
    assert "b sm_80: in known_spills.py for Triton 1.0" in gone and "a sm_90: sm_90 may not spill" in hopper


def test_bounds_are_those_of_the_installed_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offline, "BOUNDS", tmp_path / "bounds")
    assert offline.load_bounds() is None and offline.recorded_versions() == []
    rows = {"k c": {"digest": "d", **built().held}}
    for version, registers in (("1.0", 64), ("1.10", 72)):
        monkeypatch.setattr(offline.triton, "__version__", version)
        rows["k c"]["registers"] = registers
        offline.store_bounds(rows)
        assert offline.load_bounds() == rows
    monkeypatch.setattr(offline.triton, "__version__", "1.0")
    assert offline.load_bounds() == {"k c": rows["k c"] | {"registers": 64}}
    monkeypatch.setattr(offline.triton, "__version__", "3.0")
    assert offline.load_bounds() is None and offline.recorded_versions() == ["1.0", "1.10"]


def test_a_column_that_came_later_is_held_once_it_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offline, "BOUNDS", tmp_path)
    path = offline.bounds_file(offline.triton.__version__)
    path.write_text('{"columns": ["digest", "registers"], "rows": {"k c": ["d", 64]}}')
    rows = offline.load_bounds()
    assert rows == {"k c": {"digest": "d", "registers": 64}}
    assert offline.regressions(built(shared=9999), rows["k c"]) == []
    (fault,) = offline.regressions(built(registers=73), rows["k c"])
    assert "73 registers" in fault
    offline.store_bounds(rows | {"l c": {"digest": "e", **built().held}})
    assert offline.load_bounds() == rows | {"l c": {"digest": "e", **built().held}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"registers": 73}, "73 registers, recorded 64, expected at most 72"),
        ({"shared": 1025}, "1025 shared, recorded 0, expected at most 1024"),
        ({"instructions": 311}, "844 outside, recorded 800, expected at most 840"),
        (
            {"loops": (offline_code.Loop(106, 16, 0, 0, 0, 8),), "instructions": 306},
            "106 instructions, recorded 100, expected at most 105",
        ),
        ({"loops": (offline_code.Loop(100, 16, 0, 1, 0, 8),)}, "1 shuffles, recorded 0, expected at most 0"),
        ({"loops": (offline_code.Loop(100, 16, 0, 0, 1, 8),)}, "1 barriers, recorded 0, expected at most 0"),
    ],
)
def test_what_may_not_get_worse(changes: dict, message: str) -> None:
    recorded = built().held
    assert offline.regressions(built(), recorded) == []
    assert offline.regressions(built(registers=72, shared=1024), recorded) == []
    (fault,) = offline.regressions(built(**changes), recorded)
    assert message in fault


def test_what_is_not_recorded_is_a_fault() -> None:
    (fault,) = offline.regressions(built(), None)
    assert "not recorded" in fault and "--update" in fault


def test_what_is_as_recorded_is_built_once_a_kernel_and_architecture() -> None:
    launches = [
        SimpleNamespace(kernel=kernel, capability=capability, name=f"{kernel} {case}", digest=digest)
        for kernel, capability, case, digest in [
            ("a", 80, 1, "x"),
            ("a", 80, 2, "y"),
            ("a", 80, 3, "z"),
            ("a", 90, 4, "x"),
            ("a", 90, 5, "y"),
            ("b", 80, 1, "x"),
            ("b", 80, 2, "n"),
        ]
    ]
    bounds = {launch.name: {"digest": launch.digest} for launch in launches[:6]}
    bounds["a 2"]["digest"] = "another"
    built_again = [launch.name for launch in offline.to_build(launches, bounds)]
    assert built_again == ["a 1", "a 2", "a 4", "b 1", "b 2"]


DIGESTS = """
import importlib, linecache, pathlib, sys
from tests.kernels.offline.offline_launches import Launch, Pointer
source = '''
import triton
ONE = triton.language.constexpr(1)
@triton.jit
def part(x):
    return x + ONE
@triton.jit
def whole(p, n, K):
    part(p)
'''
def digest(text, *arguments, capability=90, **options):
    pathlib.Path(sys.argv[1], "made.py").write_text(text)
    linecache.clearcache()
    sys.modules.pop("made", None)
    importlib.invalidate_caches()
    return Launch("made:whole", "case", arguments, tuple(options.items()), capability).digest
sys.dont_write_bytecode = True
sys.path.insert(0, sys.argv[1])
p = Pointer("bfloat16", True)
same = digest(source, p, 32, 3), digest(source, p, 48, 3), digest(f"# moved\\n{source}", p, 32, 3)
others = (
    digest(source.replace("x + ONE", "x - ONE"), p, 32, 3),
    digest(source.replace("constexpr(1)", "constexpr(2)"), p, 32, 3),
    digest(source, p, 33, 3),
    digest(source, Pointer("float16", True), 32, 3),
    digest(source, p, 32, 3, capability=100),
    digest(source, p, 32, 3, num_warps=8),
)
assert len(set(same)) == 1 and len({same[0], *others}) == 7, (same, others)
for wrong in ("ONE = 1", "import math as ONE"):
    try:
        digest(source.replace("ONE = triton.language.constexpr(1)", wrong), p, 32, 3)
    except TypeError as error:
        assert "names ['ONE'], which are not followed here" in str(error)
    else:
        raise AssertionError(wrong)
"""


@pytest.mark.slow
def test_a_digest_is_of_the_code_and_of_what_it_is_specialized_on(repository_root, tmp_path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ran = subprocess.run(
        [sys.executable, "-c", DIGESTS, str(tmp_path)],
        cwd=repository_root,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr


def test_pairs_of_values_all_meet() -> None:
    factors = {"a": (1, 2, 3), "b": "xy", "c": (False, True), "d": "pqr"}
    rows = pairwise(factors)
    for first in factors:
        for second in factors:
            if first < second:
                met = {(row[first], row[second]) for row in rows}
                assert len(met) == len(factors[first]) * len(factors[second])
    assert len(rows) <= 12 and rows == pairwise(factors)


def test_alignment_is_that_of_the_view() -> None:
    whole = torch.empty(64, dtype=torch.bfloat16)
    assert offline_launches.noted((whole, 3, None)) == (offline_launches.Pointer("bfloat16", True), 3, None)
    assert offline_launches.noted(whole[8:]).aligned and not offline_launches.noted(whole[1:]).aligned
