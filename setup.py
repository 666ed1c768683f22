"""Maps kernels/ and engine/ to smopd.kernels and smopd.engine, and builds smopd._C.

The extension uses torch's stable ABI: one binary serves Python >= 3.10 (Py_LIMITED_API) and every torch that
pyproject.toml admits, from 2.11 (TORCH_TARGET_VERSION asks for the ABI of 2.10). Without torch in the build
environment or without a working compiler the package installs all the same, with one line that says so, and
the reference serves the operations.
SMOPD_BUILD_EXT=0 leaves the extension out; SMOPD_BUILD_EXT=1 makes a build without it an error.

smopd._C_cuda (csrc/cuda) is a second library; nothing in smopd._C needs it. SMOPD_BUILD_CUDA=auto builds it
where torch was built for CUDA and an nvcc of the same major version is found, 0 never, 1 demands it.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

MODE = os.environ.get("SMOPD_BUILD_EXT", "auto")
CUDA_MODE = os.environ.get("SMOPD_BUILD_CUDA", "auto")
CUDA_MODULE = "smopd._C_cuda"
CUDA_SOURCES = ["csrc/cuda/loss_rows.cu", "csrc/cuda/module.cpp"]
SOURCES = [
    "csrc/module.cpp",
    "csrc/cpu/advantages.cpp",
    "csrc/cpu/exponent.cpp",
    "csrc/cpu/forward_kl.cpp",
    "csrc/cpu/loss_rows.cpp",
    "csrc/cpu/loss_tiles.cpp",
    "csrc/cpu/pool.cpp",
    "csrc/cpu/target_rows.cpp",
    "csrc/cpu/teacher_mixture.cpp",
    "csrc/cpu/topk_logprobs.cpp",
    "csrc/cpu/union.cpp",
]
HEADERS = [
    "csrc/cpu/arguments.h",
    "csrc/cpu/exponent.h",
    "csrc/cpu/policy.h",
    "csrc/cpu/pool.h",
    "csrc/cpu/rows.h",
    "csrc/cpu/simd.h",
    "csrc/cpu/softmax.h",
    "csrc/cpu/support.h",
    "csrc/cpu/targets.h",
    "csrc/cpu/topk.h",
    "csrc/cpu/topk_row.h",
    "csrc/cpu/union.h",
]
# Never -ffast-math, at compile or link: it flushes denormals in every thread that loads the library.
COMPILE_FLAGS = [
    "-std=c++20",
    "-O3",
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
    """Report a build without the extension, or stop it where the extension was demanded."""
    if MODE == "1":
        sys.exit(f"smopd: smopd._C was not built: {reason}; SMOPD_BUILD_EXT=1 demands it")
    print(f"smopd: smopd._C was not built: {reason}; the reference backend will be used", file=sys.stderr)


def torch_folder() -> Path | None:
    """The installed torch that has the stable ABI's headers, found without importing it."""
    spec = find_spec("torch")
    for location in (spec.submodule_search_locations or []) if spec else []:
        if (Path(location) / "include/torch/csrc/stable/ops.h").is_file():
            return Path(location)
    return None


def extensions() -> list[Extension]:
    if MODE == "0":
        say("SMOPD_BUILD_EXT=0")
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


def nvcc_tools() -> Any:
    """csrc/cuda/nvcc.py, which the tests use too."""
    spec = spec_from_file_location("smopd_nvcc", Path(__file__).resolve().parent / "csrc/cuda/nvcc.py")
    assert spec is not None and spec.loader is not None  # it is a file
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def say_cuda(reason: str) -> None:
    """The same for smopd._C_cuda, which replaces nothing: other kernels serve without it."""
    if CUDA_MODE == "1":
        sys.exit(f"smopd: {CUDA_MODULE} was not built: {reason}; SMOPD_BUILD_CUDA=1 demands it")
    print(f"smopd: {CUDA_MODULE} was not built: {reason}; the Triton kernels do not need it", file=sys.stderr)


def cuda_extensions() -> list[Extension]:
    torch = torch_folder()
    if CUDA_MODE == "0" or (CUDA_MODE != "1" and torch is None):
        return []
    tools = nvcc_tools()
    torch_cuda = None if torch is None else tools.torch_cuda(torch)
    if CUDA_MODE != "1" and torch_cuda is None:
        return []
    nvcc = tools.find_nvcc()
    if torch is None:
        say_cuda("torch >= 2.11 is not in the build environment")
    elif nvcc is None:
        if CUDA_MODE == "1":
            say_cuda("nvcc was not found (SMOPD_NVCC or CUDA_HOME tells where it is)")
    elif torch_cuda is not None and tools.cuda_major(nvcc) != torch_cuda.split(".")[0]:
        say_cuda(f"{nvcc} is of CUDA {tools.cuda_major(nvcc)}, torch of CUDA {torch_cuda}")
    else:
        return [Extension(CUDA_MODULE, CUDA_SOURCES, py_limited_api=True, optional=True)]
    return []


def side_by_side(compile_all: Callable[..., list[str]]) -> Callable[..., list[str]]:
    """A compiler's `compile` that takes the sources at once, one a core, not one after the other."""

    def compile_each(sources: list[str], **options: Any) -> list[str]:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            made = pool.map(lambda source: compile_all([source], **options), sources)
            return [path for paths in made for path in paths]

    return compile_each


class BuildExtension(build_ext):
    """A failed build is reported in one line and leaves a package without the extension."""

    def build_extension(self, ext: Extension) -> None:
        if ext.name == CUDA_MODULE:
            self.build_cuda(ext)
            return
        self.compiler.compile = side_by_side(self.compiler.compile)
        try:
            super().build_extension(ext)
        except Exception as error:
            say(f"the C++ build failed ({error})")

    def build_cuda(self, ext: Extension) -> None:
        tools = nvcc_tools()
        output = Path(self.get_ext_fullpath(ext.name))
        output.parent.mkdir(parents=True, exist_ok=True)
        try:
            subprocess.run(tools.library_command(tools.find_nvcc(), torch_folder(), output), check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            say_cuda(f"nvcc failed ({error})")


found = extensions() + cuda_extensions()
setup(
    package_dir={"smopd.kernels": "kernels", "smopd.engine": "engine"},
    packages=[*find_packages(include=["smopd", "smopd.*"]), "smopd.kernels", "smopd.engine"],
    package_data={"smopd": ["py.typed", "recipes/*.yaml", "recipes/study/*.yaml"]},
    ext_modules=found,
    cmdclass={"build_ext": BuildExtension},
    options={"bdist_wheel": {"py_limited_api": "cp310"}} if found else {},
)
