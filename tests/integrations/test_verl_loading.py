"""Loading smopd.integrations.verl in verl: its configuration, replaced functions, and refusals."""

import os
import re
import runpy
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl", reason="verl is not installed: make test-verl runs these in its environment")

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from verl.trainer.constants_ppo import get_ppo_ray_runtime_env
from verl.utils.config import omega_conf_to_dataclass

from smopd.integrations import verl as smopd_verl
from tests.ranks import ROOT, python

# verl's own tests of the functions that are replaced.
THEIR_TESTS = (
    "tests/workers/test_distillation_topk_symmetry_on_cpu.py",
    "tests/workers/test_chunked_topk_log_probs_on_cpu.py",
    "tests/workers/test_packed_pad_to_length_on_cpu.py",
    "tests/trainer/ppo/test_core_algos_on_cpu.py",
    "tests/trainer/ppo/v1/test_trainer_base_on_cpu.py",
    "tests/trainer/test_multi_trajectories_advantage_on_cpu.py",
)


def documented() -> tuple[list[str], list[str]]:
    """Return the overrides in docs/integrations.md: of the command, and of the mixture."""
    chapter = (ROOT / "docs" / "integrations.md").read_text().split("\n## verl\n")[1].split("\n## ")[0]
    command, settings = re.findall(r"```bash\n(.*?)```", chapter.replace("\\\n", " "), re.DOTALL)
    variable, overrides = command.split("python -m verl.trainer.main_ppo ...")
    ((name, module),) = re.findall(r"^export (\w+)=(.*)$", variable, re.MULTILINE)
    return shlex.split(overrides.replace(f"${name}", module)), shlex.split(settings)


def composed(overrides: list[str]) -> Any:
    folder = str(Path(smopd_verl.core_algos.__file__).parents[1] / "config")
    with initialize_config_dir(folder, version_base=None):
        return compose("ppo_trainer", overrides)


def merged_runtime_env(config: Any) -> Any:
    """Return the environment variables of Ray's workers, merged as in verl.trainer.main_ppo."""
    default = get_ppo_ray_runtime_env(config)
    return OmegaConf.merge(default, config.ray_kwargs.ray_init.runtime_env).env_vars


def test_verls_configuration_takes_what_is_documented() -> None:
    command, settings = documented()
    config = composed([*command, *settings])
    algorithm = omega_conf_to_dataclass(config.algorithm)
    assert algorithm.adv_estimator in smopd_verl.ESTIMATORS
    assert list(algorithm.gdpo_reward_keys) == ["accuracy", "format"]
    assert list(algorithm.gdpo_reward_weights) == [0.7, 0.3]
    distillation = omega_conf_to_dataclass(config.distillation)
    assert distillation.enabled and sorted(distillation.teacher_models) == ["code", "math"]
    loss = distillation.distillation_loss
    assert isinstance(loss, smopd_verl.SmopdLossConfig) and loss.topk == 16
    assert dict(loss.teacher_weights) == {"math": 0.6, "code": 0.4} and loss.merge and loss.tail
    plain = omega_conf_to_dataclass(composed(command).distillation).distillation_loss
    smopd_verl.require_unclamped(plain)  # without the mixture's settings
    assert merged_runtime_env(config)["VERL_USE_EXTERNAL_MODULES"] == "smopd.integrations.verl"


def test_verl_loads_it_as_an_external_module_and_it_says_what_it_replaced() -> None:
    external = {"VERL_USE_EXTERNAL_MODULES": "smopd.integrations.verl"}
    done = python(
        "-c", "import verl.trainer.ppo.v1.utils as u; print(u.compute_advantage.__module__)", **external
    )
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stdout.splitlines() if line.startswith("smopd ")]
    assert len(said) == 1
    for name in (smopd_verl.LOSS_MODE, *smopd_verl.ESTIMATORS, *smopd_verl.ORIGINALS):
        assert name in said[0]
    assert done.stdout.splitlines()[-1] == "smopd.integrations.verl"


ANOTHER_VERSION = (
    "import importlib.metadata as m\n"
    "real = m.version\n"
    "m.version = lambda name: '0.10.0' if name == 'verl' else real(name)\n"
)


def test_a_refusal_is_heard() -> None:
    external = {"VERL_USE_EXTERNAL_MODULES": "smopd.integrations.verl"}
    done = python("-c", ANOTHER_VERSION + "import verl", **external)
    assert done.returncode != 0
    assert "smopd.integrations.verl is not loaded: smopd.integrations supports" in done.stderr
    assert "verl>=0.9.1,<0.9.2; verl 0.10.0 is installed" in done.stderr


def test_the_example_learns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["verl_distillation.py", "--steps", "15"])
    runpy.run_path(str(ROOT / "examples" / "verl_distillation.py"), run_name="__main__")
    steps = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    first, last = (float(line.split("loss ")[1].split(",")[0]) for line in steps)
    assert last < 0.5 * first, steps


def test_verls_own_tests_still_pass() -> None:
    """make test-verl fetches verl's sources if it can; its sdist lacks some of the tests."""
    sources = Path(os.environ.get("VERL_SOURCE") or "VERL_SOURCE is not set")
    theirs = [name for name in THEIR_TESTS if (sources / name).exists()]
    if not theirs:
        pytest.skip(f"{sources}: expected the folder of verl 0.9.1's sources, with its tests")
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", *theirs]
    done = python(*words, cwd=sources, VERL_USE_EXTERNAL_MODULES="smopd.integrations.verl")
    assert done.returncode == 0, done.stdout + done.stderr
