"""How verl loads smopd.integrations.verl, what it says of it, and what it refuses."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

if find_spec("verl") is None:
    pytest.skip(
        "verl is not installed: make test-verl runs these in its environment", allow_module_level=True
    )

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from verl.trainer.constants_ppo import get_ppo_ray_runtime_env
from verl.utils.config import omega_conf_to_dataclass

import smopd.integrations.verl
from smopd.integrations import verl_advantages, verl_host, verl_loss

ROOT = Path(__file__).resolve().parents[2]
# verl's own tests of what is replaced.
THEIR_TESTS = (
    "tests/workers/test_distillation_topk_symmetry_on_cpu.py",
    "tests/workers/test_chunked_topk_log_probs_on_cpu.py",
    "tests/workers/test_packed_pad_to_length_on_cpu.py",
    "tests/trainer/ppo/test_core_algos_on_cpu.py",
    "tests/trainer/ppo/v1/test_trainer_base_on_cpu.py",
    "tests/trainer/test_multi_trajectories_advantage_on_cpu.py",
)


def documented() -> tuple[list[str], list[str]]:
    """The overrides of docs/integrations.md: of its command, and of the mixture's settings."""
    chapter = (ROOT / "docs" / "integrations.md").read_text().split("\n## verl\n")[1].split("\n## ")[0]
    command, settings = re.findall(r"```bash\n(.*?)```", chapter.replace("\\\n", " "), re.DOTALL)
    variable, overrides = command.split("python -m verl.trainer.main_ppo ...")
    ((name, module),) = re.findall(r"^export (\w+)=(.*)$", variable, re.MULTILINE)
    return shlex.split(overrides.replace(f"${name}", module)), shlex.split(settings)


def composed(overrides: list[str]) -> Any:
    folder = str(Path(verl_host.core_algos.__file__).parents[1] / "config")
    with initialize_config_dir(folder, version_base=None):
        return compose("ppo_trainer", overrides)


def merged_runtime_env(config: Any) -> Any:
    """The variables of Ray's workers, put together as verl.trainer.main_ppo does."""
    default = get_ppo_ray_runtime_env(config)
    return OmegaConf.merge(default, config.ray_kwargs.ray_init.runtime_env).env_vars


def test_verls_configuration_takes_the_documented_command() -> None:
    config = composed(documented()[0])
    algorithm = omega_conf_to_dataclass(config.algorithm)
    assert algorithm.adv_estimator in verl_advantages.ESTIMATORS
    assert list(algorithm.gdpo_reward_keys) == ["accuracy", "format"]
    assert list(algorithm.gdpo_reward_weights) == [0.7, 0.3]
    distillation = omega_conf_to_dataclass(config.distillation)
    assert distillation.enabled and sorted(distillation.teacher_models) == ["code", "math"]
    verl_loss.require_unclamped(distillation.distillation_loss)
    assert distillation.distillation_loss.topk == 16
    assert merged_runtime_env(config)["VERL_USE_EXTERNAL_MODULES"] == "smopd.integrations.verl"


def test_verls_configuration_takes_the_documented_settings() -> None:
    command, settings = documented()
    config = composed([*command, *settings, "+algorithm.gd2po_snr_threshold=0.2"])
    loss = omega_conf_to_dataclass(config.distillation).distillation_loss
    assert isinstance(loss, smopd.integrations.verl.SmopdLossConfig)
    assert dict(loss.teacher_weights) == {"math": 0.6, "code": 0.4} and loss.merge and loss.tail
    assert config.algorithm.get("gd2po_snr_threshold") == 0.2


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)


def test_verl_loads_it_as_an_external_module_and_it_says_what_it_replaced() -> None:
    external = {"VERL_USE_EXTERNAL_MODULES": "smopd.integrations.verl"}
    done = python("import verl.trainer.ppo.v1.utils as u; print(u.compute_advantage.__module__)", **external)
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stdout.splitlines() if line.startswith("smopd ")]
    assert len(said) == 1
    for name in (verl_loss.LOSS_MODE, *verl_advantages.ESTIMATORS, *verl_host.ORIGINALS):
        assert name in said[0]
    assert done.stdout.splitlines()[-1] == "smopd.integrations.verl_advantages"


ANOTHER_VERSION = (
    "import importlib.metadata as m\n"
    "real = m.version\n"
    "m.version = lambda name: '0.10.0' if name == 'verl' else real(name)\n"
)


def test_without_the_variable_verl_is_as_it_was() -> None:
    """Whatever this environment has installed: its distributions may hold a smopd."""
    code = (
        "import sys, verl, verl.trainer.ppo.v1.utils as u\n"
        "assert not any(name.startswith('smopd') for name in sys.modules)\n"
        "print(u.compute_advantage.__module__)"
    )
    done = python(code, VERL_USE_EXTERNAL_MODULES="")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("verl.")


def test_a_refusal_is_heard() -> None:
    external = {"VERL_USE_EXTERNAL_MODULES": "smopd.integrations.verl"}
    done = python(ANOTHER_VERSION + "import verl", **external)
    assert done.returncode != 0
    assert "smopd.integrations.verl is not loaded: smopd.integrations knows" in done.stderr
    assert "verl>=0.9.1,<0.9.2; verl 0.10.0 is installed" in done.stderr


def test_a_changed_function_is_refused_by_name() -> None:
    def compute_advantage(data: Any, estimator: Any) -> None: ...

    owner = SimpleNamespace(compute_advantage=compute_advantage)
    with pytest.raises(
        ImportError, match=r"compute_advantage has no parameter adv_estimator, config; it has data"
    ):
        verl_host.replace(owner, verl_advantages.compute_advantage, "data", "adv_estimator", "config")
    assert owner.compute_advantage is compute_advantage


def example(*arguments: str) -> list[str]:
    """The lines that examples/verl_distillation.py prints."""
    command = [sys.executable, str(ROOT / "examples" / "verl_distillation.py"), *arguments]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_example_learns() -> None:
    steps = [line for line in example("--steps", "15") if line.startswith("step ")]
    first, last = (float(line.split("loss ")[1].split(",")[0]) for line in steps)
    assert last < 0.5 * first, steps


@pytest.mark.parametrize("theirs", THEIR_TESTS)
def test_verls_own_tests_still_pass(theirs: str) -> None:
    """make test-verl fetches verl's sources where it can."""
    sources = os.environ.get("VERL_SOURCE")
    if not sources or not Path(sources).is_dir():
        pytest.skip(f"VERL_SOURCE is {sources or 'not set'}, expected the folder of verl 0.9.1's sources")
    if not Path(sources, theirs).exists():
        pytest.skip(f"{Path(sources).name} has no {theirs}: verl's sdist leaves it out")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "VERL_USE_EXTERNAL_MODULES": "smopd.integrations.verl",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", theirs]
    done = subprocess.run(command, cwd=sources, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
