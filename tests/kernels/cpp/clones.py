"""Runs pytest on a copy of smopd._C in which one instruction set's clones serve, whatever this CPU has.

    python -m tests.kernels.cpp.clones {arch_x86_64_v3,default} FOLDER PYTEST-ARGUMENT...

A function with clones is reached through a resolver that looks at the CPU. In the copy, written to FOLDER,
each resolver answers with the chosen clone, and every other clone begins with an instruction that kills the
process: what passes has run on the chosen ones alone, in the machine code that ships.
"""

from __future__ import annotations

import importlib
import struct
import sys
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

CLONES = ("arch_x86_64_v4", "arch_x86_64_v3", "default")
SYMTAB, LOAD = 2, 1  # a section's and a segment's type
ILLEGAL = b"\x0f\x0b"  # ud2


def symbols(elf: bytes) -> dict[str, int]:
    """Name -> offset in the file, of all symbols of a 64-bit shared library; {} if it was stripped."""
    if elf[:6] != b"\x7fELF\x02\x01":
        return {}
    n_segments, section_size, n_sections = struct.unpack_from("<HHH", elf, 56)
    (segments, sections) = struct.unpack_from("<QQ", elf, 32)
    loads = []
    for index in range(n_segments):
        kind, _, offset, address, _, n_bytes = struct.unpack_from("<IIQQQQ", elf, segments + 56 * index)
        if kind == LOAD:
            loads.append((address, n_bytes, offset))

    def section(index: int) -> tuple[int, int, int, int]:
        """type, offset, bytes, the section that it links to."""
        at = sections + section_size * index
        (kind,) = struct.unpack_from("<I", elf, at + 4)
        offset, n_bytes, link = struct.unpack_from("<QQI", elf, at + 24)
        return kind, offset, n_bytes, link

    found: dict[str, int] = {}
    for kind, offset, n_bytes, link in map(section, range(n_sections)):
        if kind != SYMTAB:
            continue
        names = section(link)[1]
        for at in range(offset, offset + n_bytes, 24):
            name, _, _, _, address = struct.unpack_from("<IBBHQ", elf, at)
            text = elf[names + name : elf.index(b"\0", names + name)].decode()
            for start, n_loaded, place in loads:
                if start <= address < start + n_loaded:
                    found[text] = address - start + place
    return found


def with_clone(elf: bytes, chosen: str) -> tuple[bytes, int]:
    """The library in which these clones serve and no others can, and of how many functions."""
    at, patched = symbols(elf), bytearray(elf)
    functions = [name.removesuffix(".resolver") for name in at if name.endswith(".resolver")]
    for function in functions:
        resolver, starts = at[f"{function}.resolver"], clones_of(function, at)
        distance = starts[chosen] - (resolver + 7)  # both in the one segment of code
        patched[resolver : resolver + 8] = b"\x48\x8d\x05" + struct.pack("<i", distance) + b"\xc3"
        for other, place in starts.items():
            if other != chosen:
                patched[place : place + len(ILLEGAL)] = ILLEGAL
    return bytes(patched), len(functions)


def clones_of(function: str, at: dict[str, int]) -> dict[str, int]:
    """Where each begins. A default that was written apart, not cloned, has the function's own name."""
    return {clone: at.get(f"{function}.{clone}", at[function]) for clone in CLONES}


def library() -> Path | None:
    spec = find_spec("smopd._C")
    return None if spec is None or spec.origin is None else Path(spec.origin)


def main(chosen: str, folder: str, *arguments: str) -> int:
    path = library()
    assert path is not None and chosen in CLONES
    elf, n_functions = with_clone(path.read_bytes(), chosen)
    assert n_functions > 0
    copy = Path(folder) / f"_C{EXTENSION_SUFFIXES[0]}"
    copy.write_bytes(elf)
    importlib.import_module("torch")
    spec = spec_from_file_location("smopd._C", copy, loader=ExtensionFileLoader("smopd._C", str(copy)))
    assert spec is not None and spec.loader is not None
    sys.modules["smopd._C"] = module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return pytest.main(list(arguments))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
