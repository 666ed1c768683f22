"""Map kernels/ and engine/ to smopd.kernels and smopd.engine, and build smopd._C.

The extension uses torch's stable ABI. So one binary works with Python >= 3.10 (Py_LIMITED_API) and with every
torch that pyproject.toml allows, from 2.11 (TORCH_TARGET_VERSION selects the ABI of 2.10). In an isolated
build, build_backend.py requires torch. If torch or a working compiler is missing, the build prints one line,
and the package uses the reference backend. SMOPD_BUILD_EXT=0 skips the extension. With SMOPD_BUILD_EXT=1, a
build without the extension is an error.
"""

import os
import sys
import sysconfig
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.sdist import sdist

ROOMS = ("kernels", "engine")  # links in smopd/
MODE = os.environ.get("SMOPD_BUILD_EXT", "auto")
SOURCES = [
    "csrc/module.cpp",
    "csrc/cpu/exponent.cpp",
    "csrc/cpu/loss_rows.cpp",
    "csrc/cpu/teachers.cpp",
    "csrc/cpu/topk_logprobs.cpp",
    "csrc/cpu/union.cpp",
]
HEADERS = [f"csrc/cpu/{name}.h" for name in ("arguments", "exponent", "rows", "support", "topk", "union")]
# Never compile or link with -ffast-math: each thread that loads the library would flush denormals.
COMPILE_FLAGS = [
    "-std=c++20",
    "-O3",
    "-falign-loops=32",  # a short loop across two cache lines takes up to 1.4 times as long
    "-g0",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fassociative-math",
    "-fno-signed-zeros",
    "-freciprocal-math",
    "-fvisibility=hidden",
    "-Wall",
]


def say(reason: str) -> None:
    """Report a build without the extension. If SMOPD_BUILD_EXT=1, exit with an error."""
    if MODE == "1":
        sys.exit(f"smopd: smopd._C was not built: {reason}; SMOPD_BUILD_EXT=1 demands it")
    print(f"smopd: smopd._C was not built: {reason}; the reference backend will be used", file=sys.stderr)


def torch_folder() -> Path | None:
    """Return the folder of an installed torch with the stable ABI's headers, without importing torch."""
    spec = find_spec("torch")
    for location in (spec.submodule_search_locations or []) if spec else []:
        if (Path(location) / "include/torch/csrc/stable/ops.h").is_file():
            return Path(location)
    return None


def extensions() -> list[Extension]:
    if MODE == "0":
        say("SMOPD_BUILD_EXT=0")
        return []
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        say("a free-threaded Python has no limited API")
        return []
    torch = torch_folder()
    if torch is None:
        say("torch >= 2.11 is not in the build environment (install it first, then use --no-build-isolation)")
        return []
    return [
        Extension(
            "smopd._C",
            SOURCES,
            depends=HEADERS,
            include_dirs=[str(torch / "include")],
            library_dirs=[str(torch / "lib")],
            libraries=["torch_cpu", "c10"],
            define_macros=[("TORCH_TARGET_VERSION", "0x020a000000000000"), ("Py_LIMITED_API", "0x030A0000")],
            extra_compile_args=COMPILE_FLAGS,
            language="c++",
            py_limited_api=True,
            optional=True,
        )
    ]


def side_by_side(compile_all: Callable[..., list[str]]) -> Callable[..., list[str]]:
    """Return a replacement of a compiler's `compile` that compiles the sources in parallel, one per core."""

    def compile_each(sources: list[str], **options: Any) -> list[str]:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            made = pool.map(lambda source: compile_all([source], **options), sources)
            return [path for paths in made for path in paths]

    return compile_each


class BuildExtension(build_ext):
    """Build the extension. If that fails, print one line and continue without the extension."""

    def build_extension(self, ext: Extension) -> None:
        self.compiler.compile = side_by_side(self.compiler.compile)
        try:
            super().build_extension(ext)
        except Exception as error:
            say(f"the C++ build failed ({error})")


class SourceDistribution(sdist):
    """Add the links in smopd/ to the sdist, so that its tests run after it is unpacked."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        for room in ROOMS:
            (Path(base_dir) / "smopd" / room).symlink_to(f"../{room}")


def rooms() -> list[str]:
    """Return the import names of kernels/, engine/ and their subfolders."""
    files = [file for room in ROOMS for file in Path(room).rglob("*.py")]
    return sorted({".".join(["smopd", *file.parent.parts]) for file in files})


found = extensions()
setup(
    package_dir={f"smopd.{room}": room for room in ROOMS},
    packages=[*find_packages(include=["smopd", "smopd.*"]), *rooms()],
    package_data={
        "smopd": [
            "py.typed",
            "**/*.yaml",
            "report/page.html",
            "report/card.md",
            "evals/paper/*",
            "evals/bfcl/*.txt",
        ]
    },
    ext_modules=found,
    cmdclass={"build_ext": BuildExtension, "sdist": SourceDistribution},
    options={"bdist_wheel": {"py_limited_api": "cp310"}} if found else {},
)
