"""Tests of smopd._C on the instruction sets that this CPU does not choose, AVX2 and plain x86-64.

    python -m tests.kernels.cpp.test_cpp_clones FOLDER {arch_x86_64_v3,default}[,...] PYTEST-ARGUMENT...

Resolvers choose a function's clone for the CPU. In a copy of smopd._C in FOLDER the resolvers return the
given clone, and all other clones start with an illegal instruction: passing tests ran on the given clones.
Each is tested in a fork, which has imported torch already.
"""

import os
import re
import shutil
import struct
import subprocess
import sys
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch

from smopd.ops import topk_logprobs
from tests.ranks import python

CLONES = ("arch_x86_64_v4", "arch_x86_64_v3", "default")
ILLEGAL = b"\x0f\x0b"  # ud2
KERNELS = ("topk", "mixture", "loss", "hostile")
FILES = [f"tests/kernels/conformance/test_{name}.py" for name in KERNELS]
WORDS = "equals or hostile or weights or every_half or nan or tail or support"
TESTS = f"cpp and not fp64 and ({WORDS})"
LEAST_TESTS = 140


def functions(path: Path) -> dict[str, int]:
    """Return name -> offset in the file; {} if the library is stripped."""
    names = subprocess.run(["nm", path], capture_output=True, text=True).stdout
    sections = subprocess.run(["objdump", "-h", path], capture_output=True, text=True, check=True).stdout
    address, offset = (int(x, 16) for x in re.findall(r" \.text +\w+ +(\w+) +\w+ +(\w+)", sections)[0])
    found = re.findall(r"(?m)^(\w+) [tTiW] (\S+)$", names)
    return {name: int(at, 16) - address + offset for at, name in found}


def with_clone(path: Path, chosen: str) -> bytes:
    """Return the library with only these clones enabled."""
    at, patched = functions(path), bytearray(path.read_bytes())
    cloned = [name.removesuffix(".resolver") for name in at if name.endswith(".resolver")]
    assert cloned
    for function in cloned:
        # A separately written default has the name of the function.
        starts = {clone: at.get(f"{function}.{clone}", at.get(function, 0)) for clone in CLONES}
        resolver = at[f"{function}.resolver"]
        distance = starts[chosen] - (resolver + 7)
        patched[resolver : resolver + 8] = b"\x48\x8d\x05" + struct.pack("<i", distance) + b"\xc3"
        for other, place in starts.items():
            if other != chosen:
                patched[place : place + len(ILLEGAL)] = ILLEGAL
    return bytes(patched)


def library() -> Path | None:
    spec = find_spec("smopd._C")
    return None if spec is None or spec.origin is None else Path(spec.origin)


def main(folder: str, clones: str, *arguments: str) -> int:
    failed = 0
    for clone in clones.split(","):
        if os.fork() == 0:
            load(clone, folder)
            status = pytest.main(list(arguments))
            sys.stdout.flush()
            os._exit(status)
        failed |= os.wait()[1]
    return int(failed != 0)


def load(clone: str, folder: str) -> None:
    path = library()
    assert path is not None and clone in CLONES
    copy = Path(folder) / f"_C{EXTENSION_SUFFIXES[0]}"
    copy.write_bytes(with_clone(path, clone))
    spec = spec_from_file_location("smopd._C", copy, loader=ExtensionFileLoader("smopd._C", str(copy)))
    assert spec is not None and spec.loader is not None
    sys.modules["smopd._C"] = module = module_from_spec(spec)
    spec.loader.exec_module(module)


def why_not(clone: str) -> str | None:
    """Return why this CPU or library cannot run the clones, or None."""
    path = library()
    if path is None or shutil.which("nm") is None:
        return "smopd._C is not built here"
    if not any(name.endswith(f".{clone}") for name in functions(path)):
        return "smopd._C has no clones, or no names"
    if clone == "arch_x86_64_v3" and not re.search(r"\bavx2\b", Path("/proc/cpuinfo").read_text()):
        return "this CPU has no AVX2"
    return None


@pytest.mark.slow
def test_every_clone_passes_the_kernels_tests(tmp_path: Path) -> None:
    reasons = {clone: why_not(clone) for clone in CLONES[1:]}
    clones = [clone for clone, reason in reasons.items() if reason is None]
    if not clones:
        pytest.skip(str(reasons))
    words = [str(tmp_path), ",".join(clones), "-q", "-p", "no:cacheprovider", "-k", TESTS, *FILES]
    done = python("-m", "tests.kernels.cpp.test_cpp_clones", *words)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-2000:]}"
    passed = [int(number) for number in re.findall(r"(\d+) passed", done.stdout)]
    assert len(passed) == len(clones) and min(passed) > LEAST_TESTS and "skipped" not in done.stdout


@pytest.mark.skipif(library() is None, reason="smopd._C is not built")
def test_import_leaves_denormals_alone() -> None:
    """A library linked with -ffast-math would flush them in threads that load it."""
    topk_logprobs(torch.randn(64, 2000), 4)
    assert "smopd._C" in sys.modules
    assert 1e-310 * 0.5 > 0.0 and bool((torch.full((100000,), 1e-40) * 0.5 > 0).all())


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
