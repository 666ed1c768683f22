"""Write smopd.ops as a kernel for the Hugging Face hub, in the layout that the package `kernels` loads.

    python -m examples.hub_kernel FOLDER
    python -c "import kernels, pathlib; print(kernels.get_local_kernel(pathlib.Path('FOLDER')).smopd_loss)"

`hf upload OWNER/smopd-ops FOLDER --repo-type kernel` publishes the kernel. It uses Triton on GPUs and PyTorch
on CPUs, without the C++ backend. Its operators are torch.ops.smopd_DIGEST, apart from an installed smopd's.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from pathlib import Path

from smopd import ops

KERNELS = Path(ops.__file__).with_name("kernels")
NAME = "smopd-ops"
BACKENDS = ("cpu", "cuda")


def sources() -> tuple[str, dict[str, str]]:
    """Return a digest, and each file's text with relative imports and the digest in the NAMESPACE."""
    found = {"__init__.py": Path(ops.__file__).read_text()}
    for path in sorted(KERNELS.rglob("*.py")):
        found[path.relative_to(KERNELS).as_posix()] = path.read_text()
    digest = hashlib.sha256(json.dumps(found).encode()).hexdigest()[:12]
    for name, text in found.items():
        here = "." * (name.count("/") + 1)
        text = re.sub(r"(?m)^(\s*)from smopd\.kernels import", rf"\1from {here} import", text)
        text = re.sub(r"(?m)^(\s*)from smopd\.kernels\.", rf"\1from {here}", text)
        found[name] = re.sub(r'(?m)^NAMESPACE = "smopd"$', f'NAMESPACE = "smopd_{digest}"', text)
    return digest, found


def write(folder: Path, version: int = 1) -> None:
    """Write the kernel's repository, with one variant for each backend."""
    digest, files = sources()
    identifier = f"{NAME.replace('-', '_')}_{digest}"
    for backend in BACKENDS:
        variant = folder / "build" / f"torch-{backend}"
        for name, text in files.items():
            path = variant / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        facts = {"id": identifier, "name": NAME, "version": version, "license": "Apache-2.0"}
        facts |= {"python-depends": [], "backend": {"type": backend}}
        (variant / "metadata.json").write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(f"usage: python -m examples.hub_kernel FOLDER; got {sys.argv[1:]}")
    write(Path(sys.argv[1]))
