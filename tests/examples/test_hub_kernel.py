"""The kernel of the Hugging Face hub: loaded as the package `kernels` does, without an installed smopd."""

import json
from pathlib import Path

import torch

from examples import hub_kernel
from smopd.ops import topk_forward_kl, topk_logprobs
from tests.ranks import python

LOADED = """
import importlib.util, json, sys
from pathlib import Path
sys.modules["smopd"] = None  # an import of it fails
variant, values = Path(sys.argv[1]), sys.argv[2]
name = json.loads((variant / "metadata.json").read_text())["id"]
spec = importlib.util.spec_from_file_location(name, variant / "__init__.py")
ops = importlib.util.module_from_spec(spec)
sys.modules[name] = ops
spec.loader.exec_module(ops)
import torch
x, y, ids = torch.load(values)
top = ops.topk_logprobs(y, 4)
torch.save(ops.topk_forward_kl(x, ids, top.ids_NS, top.logps_NS), values)
"""


def test_it_computes_what_smopd_does(tmp_path: Path) -> None:
    hub_kernel.write(tmp_path / "repository")
    variants = sorted((tmp_path / "repository" / "build").iterdir())
    assert [path.name for path in variants] == ["torch-cpu", "torch-cuda"]
    facts = [json.loads((path / "metadata.json").read_text()) for path in variants]
    assert [each["backend"]["type"] for each in facts] == ["cpu", "cuda"]
    given = torch.randn(6, 50), torch.randn(6, 50), torch.arange(6)
    torch.save(given, tmp_path / "values")
    done = python("-c", LOADED, str(variants[0]), str(tmp_path / "values"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    x, y, ids = given
    top = topk_logprobs(y, 4)
    expected = topk_forward_kl(x, ids, top.ids_NS, top.logps_NS)
    torch.testing.assert_close(torch.load(tmp_path / "values"), expected)
