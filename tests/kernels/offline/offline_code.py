"""Compiles a noted launch for its GPU generation without a GPU, and reads the machine code (see offline.py).

Registers, stack and shared memory come from the cubin (cuobjdump), loops from its disassembly: a loop is what
a backward branch closes, a main loop an innermost one that touches global memory. What a kernel has outside
such loops, all of it if there is none, costs its instructions once for each warp.
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
class Loop:
    """One pass of a main loop, of one thread."""

    instructions: int
    loaded_bytes: int
    stored_bytes: int
    shuffles: int
    barriers: int
    special: int


@dataclass(frozen=True)
class Built:
    """Machine code, measured. digest: the launch's; local: loads and stores of local memory."""

    name: str
    case: str
    digest: str
    registers: int
    stack: int
    local: int
    shared: int
    warps: int
    itemsize: int
    instructions: int
    loops: tuple[Loop, ...]

    @property
    def outside(self) -> int:
        """Instructions outside the main loops, times the warps: what a program pays before and after them.

        At least 0: loops that overlap count what they share twice.
        """
        return self.warps * max(0, self.instructions - sum(loop.instructions for loop in self.loops))

    @property
    def held(self) -> dict[str, int]:
        """The numbers that may not get worse."""
        return {
            "registers": self.registers,
            "shared": self.shared,
            "instructions": sum(loop.instructions for loop in self.loops),
            "shuffles": sum(loop.shuffles for loop in self.loops),
            "barriers": sum(loop.barriers for loop in self.loops),
            "outside": self.outside,
        }


class StubDriver:
    """As much of a driver as compiling takes; it cannot launch."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class _Tensor(MockTensor):
    """Dtype and alignment, no memory."""

    def __init__(self, pointer: Pointer) -> None:
        super().__init__(getattr(torch, pointer.dtype))
        self._address = 16 if pointer.aligned else pointer_step(self.dtype)

    def data_ptr(self) -> int:
        return self._address


def pointer_step(dtype: torch.dtype) -> int:
    return min(8, dtype.itemsize)


def _mocked(value: Any) -> Any:
    if isinstance(value, Pointer):
        return _Tensor(value)
    return tuple(map(_mocked, value)) if isinstance(value, tuple) else value


def build(launch: Launch) -> Built:
    driver.set_active(StubDriver(launch.capability))
    kernel = kernel_of(launch)
    kernel.device_caches.clear()
    options = {name: _mocked(value) for name, value in launch.options}
    compiled = kernel.run(*map(_mocked, launch.arguments), grid=(1,), warmup=True, **options)
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
    lines = sass_of(dump)
    return Built(
        name=launch.name,
        case=launch.case,
        digest=launch.digest,
        registers=int(usage.group(1)),
        stack=int(usage.group(2)),
        local=sum(opcode(text) in ("LDL", "STL") for _, text in lines),
        shared=compiled.metadata.shared,
        warps=compiled.metadata.num_warps,
        itemsize=_itemsize(launch.arguments),
        instructions=sum(opcode(text) != "NOP" for _, text in lines),
        loops=tuple(main_loops(lines)),
    )


def _itemsize(arguments: tuple) -> int:
    """Of the first tensor, the one that streams."""
    for value in arguments:
        if isinstance(value, Pointer):
            return getattr(torch, value.dtype).itemsize
        if isinstance(value, tuple) and value and isinstance(value[0], Pointer):
            return _itemsize(value)
    return 1


def sass_of(dump: str) -> list[tuple[int, str]]:
    """(address, instruction) pairs."""
    found = re.findall(r"/\*([0-9a-f]{4,6})\*/\s+([^;/]+?)\s*;", dump)
    return [(int(address, 16), text) for address, text in found]


def opcode(text: str) -> str:
    """LDG of "@!P0 LDG.E.128 R4, ..."."""
    return re.sub(r"^@!?U?P\w+\s+", "", text).split()[0].split(".")[0]


def main_loops(lines: list[tuple[int, str]]) -> Iterator[Loop]:
    place = {address: index for index, (address, _) in enumerate(lines)}
    spans = []
    for index, (address, text) in enumerate(lines):
        target = re.search(r"\bBRA\b.*?\b0x([0-9a-f]+)", text)
        if target and int(target.group(1), 16) < address and int(target.group(1), 16) in place:
            spans.append((place[int(target.group(1), 16)], index))
    for start, stop in spans:
        inner = any(start <= other[0] and other[1] <= stop for other in spans if other != (start, stop))
        body = [text for _, text in lines[start : stop + 1]]
        codes = [opcode(text) for text in body]
        if inner or not any(code in ("LDG", "STG", "LDGSTS") for code in codes):
            continue
        yield Loop(
            instructions=len(body),
            loaded_bytes=sum(_width(text) for text, code in zip(body, codes, strict=True) if code == "LDG"),
            stored_bytes=sum(_width(text) for text, code in zip(body, codes, strict=True) if code == "STG"),
            shuffles=codes.count("SHFL"),
            barriers=codes.count("BAR"),
            special=codes.count("MUFU"),
        )


def _width(text: str) -> int:
    """Bytes that an LDG or STG moves for a thread."""
    wide = re.search(r"\.(256|128|64)\b", text)
    if wide:
        return int(wide.group(1)) // 8
    return 2 if re.search(r"\.[US]16\b", text) else 1 if re.search(r"\.[US]8\b", text) else 4
