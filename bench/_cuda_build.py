"""python -m bench._cuda_build: smopd._C_cuda into the checkout; exit status 2 where it cannot be built."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import torch

from bench import _record
from smopd.kernels import cuda

LIBRARY = _record.ROOT / "smopd" / "_C_cuda.abi3.so"
SOURCES = tuple((_record.ROOT / "csrc" / "cuda").iterdir())


def main() -> int:
    """0: the library is there; 1: nvcc failed; 2: it is not for this machine."""
    if LIBRARY.exists() and LIBRARY.stat().st_mtime >= max(file.stat().st_mtime for file in SOURCES):
        _record.note(f"{LIBRARY.name} is there already")
        return 0
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != cuda.CAPABILITY:
        _record.note(f"the cuda backend is for compute capability {cuda.CAPABILITY}")
        return 2
    tools = runpy.run_path(str(_record.ROOT / "csrc" / "cuda" / "nvcc.py"))
    nvcc = tools["find_nvcc"]()
    if nvcc is None or tools["cuda_major"](nvcc) != str(torch.version.cuda).partition(".")[0]:
        _record.note(f"smopd._C_cuda is not built: no nvcc of torch's CUDA {torch.version.cuda} was found")
        return 2
    unfinished = LIBRARY.with_name(f"_C_cuda.{os.getpid()}.so")
    try:
        subprocess.run(
            tools["library_command"](nvcc, Path(torch.__file__).parent, unfinished),
            cwd=_record.ROOT,
            check=True,
        )
        unfinished.replace(LIBRARY)
    except (OSError, subprocess.SubprocessError) as error:
        _record.note(f"smopd._C_cuda is not built: {error}")
        return 1
    finally:
        unfinished.unlink(missing_ok=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
