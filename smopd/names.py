"""Text from users: suggestions for misspelled names, safe terminal output, and redaction of secrets."""

import difflib
import os
import re
from collections.abc import Iterable
from typing import Any

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")

_SECRET_NAME = re.compile(
    r".*(?:token|authorization|(?:cookie|secret|password|passwd|passphrase|credential)s?)"
    r"|(?:.*[._-])?(?:auth|pwd|pass|sig|signature|sas|jwt|bearer|webhook)"
    r"|.*(?:[_-]|api|access|account|private|secret)keys?|.*(?:api|auth|access)[_-]?tokens",
    re.IGNORECASE,
)
_SECRET_VALUE = re.compile(
    r"(\bBearer\s+)(?!tokens?\b)[^\s'\"]+"
    r"|()\b(?:sk-(?=[\w-]{0,200}\d)[\w-]{6,}|(?:hf_|gh[oprsu]_|AKIA)[^\W_]{12,})"
    r"|()\b(?:github_pat_|glpat-|xox[abp]-|AIza)[\w-]{12,}"
    r"|()\beyJ[\w-]{1,1000}\.[\w.-]+"  # a JSON web token
    r"|(-----BEGIN [\w ]{0,40}PRIVATE KEY-----)[^-]+"
    r"|(\b(?-i:Basic) )(?=[a-z]{0,99}[0-9=])[\w+/=]{8,}"
    # random letters of both cases with digits
    r"|()(?<![^\W_])(?-i:(?=[^\W_]{0,99}[a-z])(?=[^\W_]{0,99}[A-Z]))(?=(?:[a-z]*[0-9]){3})[a-z0-9]{32,}",
    re.IGNORECASE,
)
_ASSIGNED = re.compile(
    r"(?<![\w.-])(?:(?P<option>--[\w.-]+)\s+|(?P<name>[\w.-]+)"
    r"(?:=|\\*[\"']\s*[:=]\s*"
    r"|(?:(?<=authorization)|(?<=cookie)|(?<=-key)|(?<=-token)|(?<=password)|(?<=secret)):\s*))",
    re.IGNORECASE,
)
_VALUE = re.compile(
    r"(?P<quote>\\*[\"'])(?:(?!(?P=quote)).)*(?P=quote)|\[[^\]]*\]|\{[^}]*\}"
    r"|[\\\"']*(?:(?:bearer|basic|digest|token)\s+)?[^\s&\"'#;,\\]+",
    re.IGNORECASE,
)
_USER = re.compile(r"(\b\w+://)[^/\s'\"?#]+@")
_NOT_SECRET = ("PWD", "OLDPWD")  # the shell's working directories
_SECRET_LENGTH = 8  # our choice: a shorter value of an environment variable may be an ordinary word
_IMPORTED = re.compile("function|source|map|factory|environment|estimator|target|trackers|optimizer|schedule")
_PATH = re.compile(r"[\w.]+:[\w.]+")
REDACTED = "<redacted>"

STARTUP_SECONDS = 600.0
"""Time limit for importing a reward (our choice)."""
ENVIRONMENT_THREADS = 64
"""How many answers of a synchronous environment run at once (our choice)."""

STEP_COLUMN = "training_step"
"""Column with the training step, counted from 0. Rewards receive it during training."""
IDS_COLUMN = "completion_ids"  # column with the token ids of each response. TRL uses the same name
REWARD_ARGUMENTS = ("prompts", "completions", IDS_COLUMN, STEP_COLUMN)
"""Reserved names: no data column or keyword argument of a reward may use them."""
EVALUATION_VALUES = ("sum", "truncated")
"""Names that no reward may have, because evaluations use them for other values."""


def is_url(model: str) -> bool:
    """Return whether a model's name is a URL or several URLs, separated by commas."""
    return model.startswith(("http://", "https://"))


def nearest(name: str, names: Iterable[str]) -> str:
    """Return `; did you mean NAME?`, or an empty string if no name is close."""
    close = difflib.get_close_matches(name, list(names), 1, 0.6)
    return f"; did you mean {close[0]}?" if close else ""


def without_controls(text: str) -> str:
    """Replace control characters except tab and newline."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def printable(text: str) -> str:
    """Make text safe for a terminal: replace secrets, and control characters except tab and newline."""
    return without_controls(without_secrets(text))


def _of_environment() -> list[str]:
    named = [name for name in os.environ if name not in _NOT_SECRET and _SECRET_NAME.fullmatch(name)]
    return [value for name in named if len(value := os.environ[name].strip()) >= _SECRET_LENGTH]


def without_secrets(text: str, known: list[str] | None = None) -> str:
    """Redact URL credentials, assigned secrets, common key forms, and `known` (default: from os.environ)."""
    for value in _of_environment() if known is None else known:
        text = text.replace(value, REDACTED)
    text, pieces, at = _USER.sub(r"\1", text), [], 0
    while match := _ASSIGNED.search(text, at):  # the value of any other name may contain assignments
        pieces.append(text[at : match.end()])
        at = match.end()
        if _SECRET_NAME.fullmatch(match["option"] or match["name"]) and (found := _VALUE.match(text, at)):
            quote = found["quote"] or ""
            pieces.append(f"{quote}{REDACTED}{quote}")
            at = found.end()
    text = "".join([*pieces, text[at:]])
    return _SECRET_VALUE.sub(lambda match: f"{match[match.lastindex or 0]}{REDACTED}", text)


def redacted(value: Any, name: str = "", known: list[str] | None = None) -> Any:
    """Redact values of secret names and, except in an import path, whatever `without_secrets` redacts."""
    secret, known = _SECRET_NAME.fullmatch(name), _of_environment() if known is None else known
    if isinstance(value, dict):
        given = name.rpartition(".")[0] or name.endswith("kwargs")  # a user's names mean nothing to us
        mine = {key: name if secret else f"kwargs.{key}" if given else str(key) for key in value}
        if name == "runs":  # a run may be called token
            mine |= {key: "" for key, inner in value.items() if isinstance(inner, dict)}
        return {key: redacted(inner, mine[key], known) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        words = [str(each) if str(each).startswith("--") else name for each in value]  # options of a command
        return [redacted(inner, word, known) for inner, word in zip(value, [name, *words], strict=False)]
    if secret and value and not isinstance(value, bool):
        return REDACTED
    if _IMPORTED.fullmatch(name) and _PATH.fullmatch(str(value)):
        return value
    return without_secrets(value, known) if isinstance(value, str) else value
