"""Import layers, read from the sources with ast, and limits on the size of the project."""

import ast
import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("kernels", "engine", "smopd")
ENGINE_PACKAGES = {
    "numpy", "torch", "safetensors", "transformers", "httpx", "pydantic",
    "peft", "vllm", "deepspeed", "starlette", "uvicorn",
}  # fmt: skip
# Optional package -> files that may import it.
EXTRAS = {
    "vllm": r"engine/vllm/\w+\.py",
    "deepspeed": r"engine/student/deepspeed\.py",
    "peft": r"engine/(student/lora|weights/adapters)\.py",
    "starlette": r"engine/teacher_server\.py",
    "uvicorn": r"engine/teacher_server\.py",
    "openai": r"smopd/evals/api_bank/judge\.py",
    "trl": r"smopd/integrations/trl(_\w+)?\.py",
    "verl": r"smopd/integrations/verl(_\w+)?\.py",
}
# Allowed imports besides the standard library; a name includes its submodules.
ALLOWED = {
    "kernels": {"torch", "triton", "smopd._C", "smopd.kernels"},
    "engine": ENGINE_PACKAGES | {"smopd.kernels", "smopd.engine"},
}
# Layers of folders and files inside each package: a line may import only the lines above it.
LAYERS = {
    "kernels": """
        types dispatch
        tokens
        checks
        head
        reference triton cpp
        ops
    """,
    "engine": """
        types errors hub
        imports process files
        settings
        protocols models distributed
        student
        weights
        local
        vllm
        remote
        preference teacher_server
    """,
    "smopd": """
        names ops extra
        data
        config
        advantages gates rewards
        step
        objective
        record
        loop report worlds evals integrations merging
        run
        train evaluate merge export push
        __main__
    """,
}
BACKENDS = ("reference", "triton", "cpp")  # of kernels
# Modules that `import smopd.loop` must not load.
PARTS = ("evals", "merging", "report", "run", "engine.vllm", "engine.remote")
OPTIONAL = ("vllm", *(f"smopd.{part}" for part in PARTS))
# Lines of Python (of C++ in csrc), and words of README and docs: make room before you add.
LIMITS = {"library": 24_000, "bench": 3_500, "tests": 20_000, "csrc": 2_500, "words": 20_000}
DYNAMIC = {"import_module", "__import__"}
HEAVY = {"transformers", "vllm", "pydantic", "datasets", "tyro", "rich", "deepspeed", "peft", "smopd._C"}


def sources(room: str) -> list[Path]:
    """Return the Python files of a folder; rglob does not follow the links smopd/kernels and smopd/engine."""
    return sorted((ROOT / room).rglob("*.py"))


@cache
def imports(path: Path) -> list[tuple[int, str, bool]]:
    """Return line, dotted name and whether it is for type checkers of every import, by statement or call."""
    tree = ast.parse(path.read_text(), str(path))
    typed = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    found: list[tuple[int, str, bool]] = []
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in DYNAMIC:
            names = [str(arg.value) for arg in node.args[:1] if isinstance(arg, ast.Constant)]
        found += [(node.lineno, name, node in typed) for name in names]
    return found


def within(name: str, package: str) -> bool:
    return f"{name}.".startswith(f"{package}.")


def where_imported(room: str, *names: str) -> list[tuple[str, str]]:
    """Return file and place of all imports of these packages; without names, of those not in ALLOWED."""
    allowed = () if names else (*sys.stdlib_module_names, *ALLOWED[room])
    return [
        (str(path.relative_to(ROOT)), f"{path.relative_to(ROOT)}:{line} imports {name}")
        for path in sources(room)
        for line, name, _ in imports(path)
        if any(within(name, each) for each in names or allowed) == bool(names)
    ]


@pytest.mark.parametrize("room", ["kernels", "engine"])
def test_room_imports_only_what_it_may(room: str) -> None:
    assert sources(room) and not where_imported(room)


def module_names(room: str) -> dict[str, Path]:
    """Return the file of each module by dotted name."""
    found = {}
    for path in sources(room):
        parts = path.relative_to(ROOT).with_suffix("").parts
        parts = parts if room == "smopd" else ("smopd", *parts)
        found[".".join(parts).removesuffix(".__init__")] = path
    return found


@cache
def edges() -> list[tuple[str, str, str]]:
    """Return importing and imported module, and where, of all imports between our modules."""
    modules = {name: path for room in ROOMS for name, path in module_names(room).items()}
    found = []
    for module, path in modules.items():
        for line, name, typed in imports(path):
            known = [other for other in modules if within(name, other)]
            if known and not typed:
                imported = max(known, key=len)
                found.append((module, imported, f"{path.relative_to(ROOT)}:{line} imports {imported}"))
    return found


@pytest.mark.parametrize("room", ROOMS)
def test_who_may_import_whom(room: str) -> None:
    prefix = ["smopd"] if room == "smopd" else ["smopd", room]
    layers = [line.split() for line in LAYERS[room].strip().splitlines()]
    level = {name: number for number, names in enumerate(layers) for name in names}
    modules = module_names(room)

    def part(module: str) -> str:
        return module.split(".")[len(prefix)] if module.count(".") >= len(prefix) else ""

    assert {part(module) for module in modules} - {""} == level.keys()
    wrong = [
        where
        for module, imported, where in edges()
        if module in modules and imported in modules
        if part(module) != part(imported) and part(imported)
        if level[part(imported)] >= level[part(module)]
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_backend_is_reached_through_dispatch_alone(backend: str) -> None:
    """dispatch imports it by name; tests and bench may import it directly."""
    inside = f"smopd.kernels.{backend}"
    members = {name for name in module_names("kernels") if within(name, inside)}
    wrong = [where for module, imported, where in edges() if imported in members and module not in members]
    assert members and not wrong, "\n".join(wrong)


def lines(folder: str, *endings: str) -> int:
    files = [path for ending in endings for path in (ROOT / folder).rglob(ending)]
    assert files
    return sum(len(path.read_text().splitlines()) for path in files)


def test_the_project_stays_small() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    sizes = {
        "library": sum(lines(room, "*.py") for room in ROOMS),
        "bench": lines("bench", "*.py"),
        "tests": lines("tests", "*.py"),
        "csrc": lines("csrc", "*.cpp", "*.h"),
        "words": sum(len(page.read_text().split()) for page in pages),
    }
    grown = {name: size for name, size in sizes.items() if size > LIMITS[name]}
    assert not grown, f"{grown}, expected at most {LIMITS}"


def test_the_loop_loads_nothing_optional_and_cpus_need_no_triton() -> None:
    no_triton = "sys.modules['triton'] = None"
    serves = "assert topk_logprobs(torch.eye(3), 1).ids_NS.flatten().tolist() == [0, 1, 2]"
    serving = f"import torch, smopd.run.pipeline\nfrom smopd.ops import topk_logprobs\n{serves}"
    loaded = loaded_by(f"{no_triton}\nimport smopd.loop", serving)
    assert "smopd.loop" in loaded
    assert not {name for name in loaded for other in OPTIONAL if within(name, other)}
    modules = {name: path for room in ROOMS for name, path in module_names(room).items()}
    ours = [modules[name] for name in loaded & modules.keys()]
    assert not [path for path in ours for _, name, _ in imports(path) if within(name, "httpx")], (
        "it is transformers'"
    )


@pytest.mark.parametrize("package", EXTRAS)
def test_an_extra_is_imported_by_its_own_files_alone(package: str) -> None:
    found = [each for room in ROOMS for each in where_imported(room, package)]
    assert not [where for file, where in found if not re.fullmatch(EXTRAS[package], file)]


def loaded_by(statement: str, after: str = "") -> set[str]:
    """Return the modules that a new process has loaded after `statement`. It then runs `after`."""
    code = f"import json, sys\n{statement}\nprint(json.dumps(sorted(sys.modules)))\n{after}"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_import_of_ops_is_light() -> None:
    """smopd.ops loads no heavy package except torch, and the extension only when an operation needs it."""
    loaded = loaded_by("import smopd.ops")
    assert "torch" in loaded
    assert not HEAVY & loaded, HEAVY & loaded
    assert not {"torch", "transformers", "numpy"} & loaded_by("import smopd")
