"""Compilation of a recorded launch without a GPU, and counts from its machine code by cuobjdump.

Backward branches end loops. Main loops are innermost loops that access global memory.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton.backends.nvidia
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import MockTensor

from tests.kernels.offline.offline_launches import Launch, Pointer, kernel_of

CUOBJDUMP = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"


@dataclass(frozen=True)
class Built:
    """Counts of machine code.

    Attributes:
        stack, local: spills in bytes per thread, and loads and stores of local memory.
        held: numbers that may not increase. outside: instructions outside main loops times warps, at least 0
            because overlapping loops count twice.
    """

    name: str
    digest: str
    stack: int
    local: int
    held: dict[str, int]


class StubDriver:
    """A driver that can compile but not launch."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class _Tensor(MockTensor):
    """A tensor with dtype and alignment but no memory."""

    def __init__(self, pointer: Pointer) -> None:
        super().__init__(getattr(torch, pointer.dtype))
        self._address = 16 if pointer.aligned else min(8, self.dtype.itemsize)

    def data_ptr(self) -> int:
        return self._address


def _mocked(value: Any) -> Any:
    if isinstance(value, Pointer):
        return _Tensor(value)
    return tuple(map(_mocked, value)) if isinstance(value, tuple) else value


def compiled_of(launch: Launch) -> Any:
    driver.set_active(StubDriver(launch.capability))
    kernel = kernel_of(launch)
    kernel.device_caches.clear()
    options = {name: _mocked(value) for name, value in launch.options}
    return kernel.run(*map(_mocked, launch.arguments), grid=(1,), warmup=True, **options)


def build(launch: Launch) -> Built:
    compiled = compiled_of(launch)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        dump = subprocess.run(
            [CUOBJDUMP, "--dump-resource-usage", "-sass", cubin.name],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    usage = re.search(r"REG:(\d+) STACK:(\d+)", dump)
    assert usage is not None, dump[:500]
    lines = [(address, opcode(text), text) for address, text in sass_of(dump)]
    codes = [code for _, code, _ in lines]
    loops = list(main_loops(lines))
    inside = sum(map(len, loops))
    instructions = len(codes) - codes.count("NOP")
    return Built(
        name=launch.name,
        digest=launch.digest,
        stack=int(usage.group(2)),
        local=codes.count("LDL") + codes.count("STL"),
        held={
            "registers": int(usage.group(1)),
            "shared": compiled.metadata.shared,
            "instructions": inside,
            "shuffles": sum(loop.count("SHFL") for loop in loops),
            "barriers": sum(loop.count("BAR") for loop in loops),
            "outside": compiled.metadata.num_warps * max(0, instructions - inside),
        },
    )


def sass_of(dump: str) -> list[tuple[int, str]]:
    """Return (address, instruction) pairs."""
    found = re.findall(r"/\*([0-9a-f]{4,6})\*/\s+([^;/]+?)\s*;", dump)
    return [(int(address, 16), text) for address, text in found]


def opcode(text: str) -> str:
    """Return LDG for "@!P0 LDG.E.128 R4, ..."."""
    return re.sub(r"^@!?U?P\w+\s+", "", text).split()[0].split(".")[0]


def main_loops(lines: list[tuple[int, str, str]]) -> Iterator[list[str]]:
    """Yield the opcodes of each main loop, from (address, opcode, instruction)."""
    place = {address: index for index, (address, _, _) in enumerate(lines)}
    spans = []
    for index, (address, _, text) in enumerate(lines):
        target = re.search(r"\bBRA\b.*?\b0x([0-9a-f]+)", text)
        if target and int(target.group(1), 16) < address and int(target.group(1), 16) in place:
            spans.append((place[int(target.group(1), 16)], index))
    for start, stop in spans:
        inner = any(start <= other[0] and other[1] <= stop for other in spans if other != (start, stop))
        codes = [code for _, code, _ in lines[start : stop + 1]]
        if not inner and any(code in ("LDG", "STG", "LDGSTS") for code in codes):
            yield codes
