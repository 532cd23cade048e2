"""Every environment variable emutpu reads: one table, read once per process.

A leaf: imports nothing of emutpu, torch or jax. ``EMUTPU_*`` variables are the emulator's own and are parsed strictly;
TorchTPU's variables keep their names and its lenient parsing (an unparsable value counts as unset).
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

__all__ = [
    "CHIPS",
    "NO_CHIP",
    "PREFIX",
    "UNLIMITED",
    "VARIABLES",
    "SettingError",
    "Settings",
    "Variable",
    "changed_since_read",
    "read",
    "reload",
    "settings",
    "unknown_variables",
]

PREFIX = "EMUTPU_"
NO_CHIP = "none"
UNLIMITED = "unlimited"
CHIPS = ("v4", "v5e", "v5p", "v6e", "v7", "v8i", "v8t", NO_CHIP)
CLIENTS = ("cpu", "interpreter", "dry_run")
PRECISIONS = ("default", "high", "highest")
QUIRKS = ("0.2.0",)

_TRUE = frozenset({"1", "true", "t", "yes", "y", "on"})
_FALSE = frozenset({"0", "false", "f", "no", "n", "off"})


class SettingError(ValueError):
    """An environment variable holds a value that it cannot have. Names the variable, the value and what is accepted."""

    def __init__(self, name: str, value: str, accepted: str) -> None:
        super().__init__(f"{name}={value!r} is not valid: expected {accepted}")
        self.name = name
        self.value = value
        self.accepted = accepted


@dataclasses.dataclass(frozen=True, slots=True)
class Variable:
    """One environment variable. ``parse`` raises ValueError for a value that is not ``accepted``.

    A ``lenient`` variable falls back to ``default`` instead, as TorchTPU does. The empty string counts as unset.
    """

    name: str
    field: str
    parse: Callable[[str], Any]
    default: Any
    accepted: str
    meaning: str
    lenient: bool = False

    def value_in(self, environment: Mapping[str, str]) -> Any:
        """The parsed value in ``environment``, or the default. Raises SettingError for a bad value."""
        text = environment.get(self.name, "").strip()
        if not text:
            return self.default
        try:
            return self.parse(text)
        except ValueError:
            if self.lenient:
                return self.default
            raise SettingError(self.name, text, self.accepted) from None


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """The parsed values, one field per row of :data:`VARIABLES`."""

    chip: str
    forbid: bool
    client: str
    beyond: bool
    quirks: str | None
    precision: str | None
    allow_fallback: bool
    cache_dir: str | None
    report: str | None
    hbm: int | str | None
    host_issue: float | None
    dry_values: int | None
    trace: str | None
    launch_blocking: bool
    defer_and_fuse: bool
    debug_checks: bool
    disable_inplace_buffer_donation: bool
    allow_legacy_device_apis: bool
    visible_devices: tuple[int, ...] | None


def _flag(text: str) -> bool:
    word = text.lower()
    if word in _TRUE:
        return True
    if word in _FALSE:
        return False
    raise ValueError(text)


def _one_of(accepted: tuple[str, ...]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        word = text.lower()
        if word not in accepted:
            raise ValueError(text)
        return word

    return parse


def _path(text: str) -> str:
    return os.path.abspath(os.path.expanduser(text))


def _indices(text: str) -> tuple[int, ...]:
    found = tuple(int(part) for part in text.split(","))
    if min(found) < 0 or len(set(found)) != len(found):
        raise ValueError(text)
    return found


_UNITS = {"": 1, "b": 1} | {
    prefix + ending: 1024**power
    for power, prefix in enumerate(("k", "m", "g", "t"), start=1)
    for ending in ("", "b", "ib")
}


def _memory(text: str) -> int | str:
    """Bytes: ``16GiB``, ``512M`` (both in powers of 1024), a plain number, or ``unlimited``."""
    word = text.lower().replace(" ", "")
    if word == UNLIMITED:
        return UNLIMITED
    digits = word.rstrip("kmgtib")
    nbytes = int(float(digits) * _UNITS[word[len(digits) :]]) if word[len(digits) :] in _UNITS else 0
    if nbytes <= 0:
        raise ValueError(text)
    return nbytes


def _microseconds(text: str) -> float | None:
    if text.lower() == "measured":
        return None
    value = float(text)
    if not 0 <= value < 1e9:
        raise ValueError(text)
    return value


def _own_flag(suffix: str, meaning: str) -> Variable:
    return Variable(PREFIX + suffix, suffix.lower(), _flag, False, "0 or 1", meaning)


def _own_choice(suffix: str, accepted: tuple[str, ...], default: str | None, meaning: str) -> Variable:
    return Variable(
        PREFIX + suffix, suffix.lower(), _one_of(accepted), default, "one of " + ", ".join(accepted), meaning
    )


def _torchtpu_flag(name: str, field: str, meaning: str) -> Variable:
    return Variable(name, field, _flag, False, "0 or 1", meaning, lenient=True)


VARIABLES: tuple[Variable, ...] = (
    _own_choice("CHIP", CHIPS, "v5e", "the emulated chip; 'none' behaves as a host without a TPU"),
    _own_flag("FORBID", "refuse to load, so that emulated results cannot be mistaken for hardware"),
    _own_choice("CLIENT", CLIENTS, "cpu", "what runs the executables: compiled on the CPU, interpreted, or cost only"),
    _own_flag("BEYOND", "also run ops that the emulated TorchTPU release does not implement"),
    _own_choice("QUIRKS", QUIRKS, None, "reproduce the known bugs of this TorchTPU release"),
    _own_choice("PRECISION", PRECISIONS, None, "float32 matmul precision at start, as torch.tpu.Precision names it"),
    _own_flag("ALLOW_FALLBACK", "run ops that are not implemented on the CPU, counted with their line"),
    Variable("EMUTPU_CACHE_DIR", "cache_dir", _path, None, "a directory", "directory of persistent caches"),
    Variable(
        "EMUTPU_REPORT",
        "report",
        _path,
        None,
        "a file; '{pid}' stands for the process id",
        "where the process writes its run report (JSON) when it exits",
    ),
    Variable(
        "EMUTPU_HBM",
        "hbm",
        _memory,
        None,
        "bytes such as 16GiB, or unlimited",
        "memory of the emulated device instead of the chip's; 'unlimited' reports what is missing",
    ),
    Variable(
        "EMUTPU_HOST_ISSUE",
        "host_issue",
        _microseconds,
        5.0,
        "microseconds, or measured",
        "modelled host time of one launch; 'measured' takes this host's time, and is then never twice the same",
    ),
    Variable(
        "EMUTPU_DRY_VALUES",
        "dry_values",
        int,
        None,
        "an integer",
        "seed of the made-up values that reads give in a dry run; unset, they raise",
    ),
    Variable(
        "EMUTPU_TRACE",
        "trace",
        _path,
        None,
        "a file; '{pid}' stands for the process id",
        "where the process writes a trace of the modelled device: Perfetto, or a directory for XProf with .xplane.pb",
    ),
    _torchtpu_flag("TORCH_TPU_LAUNCH_BLOCKING", "launch_blocking", "wait for every op (wins over the next)"),
    _torchtpu_flag("TORCH_TPU_DEFER_AND_FUSE", "defer_and_fuse", "start in DEFER_AND_FUSE instead of DEFER_NEVER"),
    _torchtpu_flag("TORCH_TPU_ENABLE_DEBUG_CHECKS", "debug_checks", "check index bounds, and other costly checks"),
    _torchtpu_flag(
        "TORCH_TPU_INTERNAL_DISABLE_INPLACE_BUFFER_DONATION",
        "disable_inplace_buffer_donation",
        "in-place ops do not reuse their input's buffer",
    ),
    _torchtpu_flag(
        "TORCH_TPU_ALLOW_LEGACY_DEVICE_APIS",
        "allow_legacy_device_apis",
        "internal functions of torch.tpu warn instead of raising",
    ),
    Variable(
        "TPU_VISIBLE_DEVICES",
        "visible_devices",
        _indices,
        None,
        "distinct device numbers, separated by commas",
        "the chips that this process may use; all when unset",
    ),
)


def read(environment: Mapping[str, str]) -> Settings:
    """Parse ``environment`` (not cached). Raises SettingError for a bad value."""
    return Settings(**{variable.field: variable.value_in(environment) for variable in VARIABLES})


@functools.cache
def _captured() -> tuple[Settings, dict[str, str]]:
    raw = {variable.name: os.environ[variable.name] for variable in VARIABLES if variable.name in os.environ}
    return read(raw), raw


def settings() -> Settings:
    """The settings of this process, read at the first call; later changes of ``os.environ`` have no effect."""
    return _captured()[0]


def reload() -> Settings:
    """Forget what was read and read again. For tests: whoever already took a value keeps it."""
    _captured.cache_clear()
    return settings()


def changed_since_read() -> list[str]:
    """Names of variables whose value in ``os.environ`` is no longer the one :func:`settings` read: set too late."""
    raw = _captured()[1]
    return [variable.name for variable in VARIABLES if os.environ.get(variable.name) != raw.get(variable.name)]


def unknown_variables(environment: Mapping[str, str] | None = None) -> list[tuple[str, str | None]]:
    """``EMUTPU_*`` names (of ``os.environ`` by default) that no row declares, each with the closest declared name."""
    known = [variable.name.removeprefix(PREFIX) for variable in VARIABLES if variable.name.startswith(PREFIX)]
    given = os.environ if environment is None else environment
    unknown = []
    for name in sorted(given):
        suffix = name.removeprefix(PREFIX)
        if suffix != name and suffix not in known:
            close = difflib.get_close_matches(suffix, known, n=1)  # the common prefix would make all names alike
            unknown.append((name, PREFIX + close[0] if close else None))
    return unknown
