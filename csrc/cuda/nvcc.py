"""Where nvcc is and how smopd._C_cuda is built with it: for setup.py, and for the tests, which build it too.

No imports beyond the standard library, and not of torch: setup.py loads this file by its path.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCES = [HERE / "loss_rows.cu", HERE / "module.cpp"]
ARCHITECTURE = "arch=compute_90,code=sm_90"  # clusters and bulk copies; no other GPU is served
FLAGS = ["-std=c++20", "-O3", "-DUSE_CUDA", "-DTORCH_TARGET_VERSION=0x020a000000000000"]


def find_nvcc() -> Path | None:
    """$SMOPD_NVCC, else nvcc of $CUDA_HOME or $CUDA_PATH, of PATH, of the nvidia packages of this Python."""
    for candidate in _candidates():
        if candidate.is_file() and os.access(candidate, os.X_OK):
            return candidate
    return None


def _candidates() -> Iterator[Path]:
    given = os.environ.get("SMOPD_NVCC")
    if given:
        yield Path(given)
        return
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(name):
            yield Path(os.environ[name]) / "bin" / "nvcc"
    on_path = shutil.which("nvcc")
    if on_path:
        yield Path(on_path)
    packages = find_spec("nvidia")
    for folder in (packages.submodule_search_locations or []) if packages else []:
        yield from sorted(Path(folder).glob("*/bin/nvcc"), reverse=True)


def cuda_major(nvcc: Path) -> str | None:
    """The major version of nvcc's CUDA, or None if it does not run."""
    try:
        said = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    found = re.search(r"release (\d+)\.", said)
    return found[1] if found else None


def torch_cuda(torch: Path) -> str | None:
    """torch.version.cuda, read from the file."""
    text = (torch / "version.py").read_text(encoding="utf-8")
    found = re.search(r"^cuda\b[^=\n]*=\s*['\"]([^'\"]+)", text, re.MULTILINE)
    return found[1] if found else None


def cubin_command(nvcc: Path, torch: Path, output: Path) -> list[str]:
    """Machine code alone, with the assembler's report of registers and spills."""
    return [
        *_compile(nvcc, torch),
        "-cubin",
        "-Xptxas",
        "-v",
        "-o",
        str(output),
        str(SOURCES[0]),
    ]


def library_command(nvcc: Path, torch: Path, output: Path) -> list[str]:
    """The extension module, with the CUDA runtime inside and torch's libraries named but not bundled."""
    return [
        *_compile(nvcc, torch),
        "-DPy_LIMITED_API=0x030A0000",
        f"-I{sysconfig.get_paths()['include']}",
        "-Xcompiler",
        "-fPIC,-fvisibility=hidden,-g0",
        "-shared",
        "-cudart",
        "static",
        f"-L{torch / 'lib'}",
        "-Xlinker",
        "--no-as-needed",
        "-ltorch",
        "-ltorch_cpu",
        "-lc10",
        "-o",
        str(output),
        *map(str, SOURCES),
    ]


def _compile(nvcc: Path, torch: Path) -> list[str]:
    return [str(nvcc), *FLAGS, "-gencode", ARCHITECTURE, f"-I{torch / 'include'}"]
