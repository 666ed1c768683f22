"""The toy world's tools: parameters with the pools of their values, and the ways to ask for each tool."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import yaml


@dataclass(frozen=True)
class Parameter:
    """A parameter: the pool of its values, and how often demonstrations misname it or quote its integer."""

    pool: str
    alias: str
    alias_rate: float
    quoted_rate: float


@dataclass(frozen=True)
class Tool:
    """A tool's parameters in order, and the phrasings in which a user asks for it."""

    parameters: tuple[str, ...]
    requests: tuple[str, ...]


_READ = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
POOLS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {pool: tuple(values.split()) for pool, values in _READ["pools"].items()}
)
PARAMETERS: Mapping[str, Parameter] = MappingProxyType(
    {name: Parameter(*values) for name, values in _READ["parameters"].items()}
)
TOOLS: Mapping[str, Tool] = MappingProxyType(
    {name: Tool(tuple(tool["parameters"]), tuple(tool["requests"])) for name, tool in _READ["tools"].items()}
)
