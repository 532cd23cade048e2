"""Every environment variable emutpu reads: one table, read once per process.

A leaf: imports nothing of emutpu, torch or jax. ``EMUTPU_*`` variables are the emulator's own and are parsed strictly;
TorchTPU's variables keep their names and its lenient parsing (an unparsable value counts as unset).
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import os
import re
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
    "chip_of",
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
BOUNDED = ("assume",)
HOST_COMPILES = ("full", "quick")
HOST_HIGHESTS = ("passes", "native")
CPU_TARGETS = ("native", "x86-64-v2", "x86-64-v3", "x86-64-v4")

_SLICE = re.compile(r"(?:\d+x)?[a-z][a-z0-9]*-\d+(?:x\d+){0,2}")
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

    A ``lenient`` variable falls back to ``default`` instead, as TorchTPU does. The empty string counts as unset. The value
    of a ``secret`` one is never shown.
    """

    name: str
    field: str
    parse: Callable[[str], Any]
    default: Any
    accepted: str
    meaning: str
    lenient: bool = False
    secret: bool = False

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
            raise SettingError(self.name, "***" if self.secret else text, self.accepted) from None

    def shown_in(self, environment: Mapping[str, str]) -> str | None:
        """The text in ``environment`` for a report, None where it is unset."""
        text = environment.get(self.name)
        return "***" if self.secret and text else text


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """The parsed values, one field per row of :data:`VARIABLES`."""

    chip: str
    forbid: bool
    client: str
    beyond: bool
    quirks: str | None
    bounded_dynamism: str | None
    precision: str | None
    allow_fallback: bool
    cpu_target: str | None
    host_compile: str
    host_highest: str
    cost_chips: tuple[str, ...] | None
    cache_dir: str | None
    cache_key: str | None
    cache_max_bytes: int
    aot_cache: bool
    cache_readonly: bool
    compile_threads: int | None
    binary_version: int
    pjrt_version: str
    report: str | None
    regions: str | None
    regions_inputs: bool
    fuzz: str | None
    hbm: int | str | None
    host_issue: float | None
    dry_values: int | None
    trace: str | None
    launch_blocking: bool
    defer_and_fuse: bool
    debug_checks: bool
    disable_inplace_buffer_donation: bool
    allow_legacy_device_apis: bool
    record_modules: str | None
    topology: str | None
    detect_repeated_ops: str
    visible_devices: tuple[int, ...] | None
    visible_chips: tuple[int, ...] | None
    chips_per_process_bounds: tuple[int, ...] | None
    chips_per_host_bounds: tuple[int, ...] | None
    process_bounds: tuple[int, ...] | None
    host_bounds: tuple[int, ...] | None
    process_addresses: tuple[str, ...] | None
    task_id: int | None
    tier2_cache: str | None
    tier3_cache_root: str | None
    tier3_local_backup: bool
    world_size: int
    nproc: int | None


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


def _repeats(text: str) -> str:
    word = text.lower()
    return word if word in ("safe", "aggressive") else "off"


def _path(text: str) -> str:
    return os.path.abspath(os.path.expanduser(text))


def _indices(text: str) -> tuple[int, ...]:
    found = tuple(int(part) for part in text.split(","))
    if min(found) < 0 or len(set(found)) != len(found):
        raise ValueError(text)
    return found


def _bounds(text: str) -> tuple[int, ...]:
    found = tuple(int(part) for part in text.split(","))
    if len(found) not in (3, 4) or min(found) < 1:
        raise ValueError(text)
    return found


def _natural(text: str) -> int:
    if int(text) < 0:
        raise ValueError(text)
    return int(text)


def _addresses(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(","))


def _slice_name(text: str) -> str:
    """A name of the right form; whether there is such a slice is the simulator's to say."""
    word = text.lower()
    if not _SLICE.fullmatch(word) or chip_of(word) not in CHIPS or chip_of(word) == NO_CHIP:
        raise ValueError(text)
    return word


def _chips(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(map(_one_of(CHIPS[:-1]), text.split(","))))


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


_UNITS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}


def _bytes(text: str) -> int:
    """``536870912``, ``512M``, ``512MiB`` …: powers of 1024."""
    found = re.fullmatch(r"(\d+)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if found is None or not int(found[1]):
        raise ValueError(text)
    return int(found[1]) << _UNITS[found[2].upper()]


def _cache_name(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}", text):
        raise ValueError(text)
    return text


def _root(text: str) -> str:
    """A URL as it is, a directory as an absolute path."""
    return text if re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", text) else _path(text)


def _memory(text: str) -> int | str:
    """Bytes: ``16GiB``, ``512M`` (both in powers of 1024), a plain number, or ``unlimited``."""
    word = text.lower().replace(" ", "")
    if word == UNLIMITED:
        return UNLIMITED
    return _bytes(word)


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


def _bounds_variable(name: str, meaning: str) -> Variable:
    field = name.removeprefix("TPU_").lower()
    return Variable(name, field, _bounds, None, "three or four positive numbers, such as 2,2,1", meaning)


def _torchtpu_flag(name: str, field: str, meaning: str) -> Variable:
    return Variable(name, field, _flag, False, "0 or 1", meaning, lenient=True)


VARIABLES: tuple[Variable, ...] = (
    _own_choice("CHIP", CHIPS, "v5e", "the emulated chip; 'none' behaves as a host without a TPU"),
    _own_flag("FORBID", "refuse to load, so that emulated results cannot be mistaken for hardware"),
    _own_choice("CLIENT", CLIENTS, "cpu", "what runs the executables: compiled on the CPU, interpreted, or cost only"),
    _own_flag("BEYOND", "also run ops that the emulated TorchTPU release does not implement"),
    _own_choice("QUIRKS", QUIRKS, None, "reproduce the known bugs of this TorchTPU release"),
    _own_choice(
        "BOUNDED_DYNAMISM",
        BOUNDED,
        None,
        "torch.compile bounds dimensions that it found to vary, instead of compiling each size",
    ),
    _own_choice("PRECISION", PRECISIONS, None, "float32 matmul precision at start, as torch.tpu.Precision names it"),
    _own_flag("ALLOW_FALLBACK", "run ops that are not implemented on the CPU, counted with their line"),
    _own_choice(
        "CPU_TARGET",
        CPU_TARGETS,
        None,
        "compile for this baseline instead of this host's CPU, for fleets that share a cache",
    ),
    _own_choice(
        "HOST_COMPILE",
        HOST_COMPILES,
        "full",
        "'quick' compiles in a fraction of the time to code that runs slower: for tests that launch an op a few times",
    ),
    _own_choice(
        "HOST_HIGHEST",
        HOST_HIGHESTS,
        "passes",
        "'native' computes precision HIGHEST by one float32 product instead of the chip's six passes: a sixth of the time",
    ),
    Variable(
        "EMUTPU_COST_CHIPS",
        "cost_chips",
        _chips,
        None,
        "names of chips and commas, such as v5p,v6e",
        "what a launch would cost on these is found with each executable, too, and cached with it",
    ),
    Variable(
        "EMUTPU_CACHE_DIR",
        "cache_dir",
        _path,
        None,
        "a directory",
        "where the shared-memory cache lives on a host without shared memory",
    ),
    Variable(
        "EMUTPU_CACHE_KEY",
        "cache_key",
        str,
        None,
        "a secret of at least 16 bytes, or '@' and the file that holds it",
        "signs the entries of the persistent cache; a remote one needs it",
        secret=True,
    ),
    Variable(
        "EMUTPU_CACHE_MAX_BYTES",
        "cache_max_bytes",
        _bytes,
        2 << 30,
        "bytes, such as 536870912 or 512M",
        "size of each directory of executables; beyond it the least recently used go",
    ),
    _own_flag("AOT_CACHE", "keep compiled graphs in PyTorch's AOTAutograd cache, too"),
    _own_flag("CACHE_READONLY", "load executables from shared caches, and write nothing to them"),
    Variable(
        "EMUTPU_COMPILE_THREADS",
        "compile_threads",
        _positive,
        None,
        "a positive number",
        "threads of the compile pool, as --torch_tpu_internal_num_compilation_threads",
    ),
    Variable(
        "EMUTPU_BINARY_VERSION",
        "binary_version",
        _positive,
        5,
        "a positive number",
        "TorchTPU's binary version in cache keys",
    ),
    Variable(
        "EMUTPU_PJRT_VERSION", "pjrt_version", str, "0.0.52", "a version", "the PJRT plugin's version in cache keys"
    ),
    Variable(
        "EMUTPU_REPORT",
        "report",
        _path,
        None,
        "a file; '{pid}' stands for the process id",
        "where the process writes its run report (JSON) when it exits",
    ),
    Variable(
        "EMUTPU_REGIONS",
        "regions",
        _path,
        None,
        "a directory",
        "where the process writes a recording of its regions when it exits; set by `emutpu regions`",
    ),
    _own_flag("REGIONS_INPUTS", "that recording also holds what each region took and gave"),
    Variable(
        "EMUTPU_FUZZ",
        "fuzz",
        _path,
        None,
        "a file",
        "perturbations of the schedule of this process; set by `emutpu fuzz`",
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
        "EMUTPU_RECORD_MODULES",
        "record_modules",
        _path,
        None,
        "a directory",
        "where every module that is compiled is written, with the line that made it",
    ),
    Variable(
        "EMUTPU_TOPOLOGY",
        "topology",
        _slice_name,
        None,
        "CHIP-SIZE, such as v5e-8",
        "the emulated slice, which implies the chip; one chip when unset",
    ),
    Variable(
        "TORCH_TPU_INTERNAL_DETECT_REPEATED_OPS",
        "detect_repeated_ops",
        _repeats,
        "safe",
        "safe, aggressive, or anything else for off",
        "what DEFER_AND_FUSE does when ops repeat themselves: cut as a read would, launch all as one region, nothing",
    ),
    Variable(
        "TPU_VISIBLE_DEVICES",
        "visible_devices",
        _indices,
        None,
        "distinct device numbers, separated by commas",
        "the devices of its host that this process may use; all when unset",
    ),
    Variable(
        "TPU_VISIBLE_CHIPS",
        "visible_chips",
        _indices,
        None,
        "distinct chip numbers, separated by commas",
        "the same in chips; TPU_VISIBLE_DEVICES wins",
    ),
    _bounds_variable("TPU_CHIPS_PER_PROCESS_BOUNDS", "the box of chips of this process"),
    _bounds_variable("TPU_CHIPS_PER_HOST_BOUNDS", "older name of TPU_CHIPS_PER_PROCESS_BOUNDS"),
    _bounds_variable("TPU_PROCESS_BOUNDS", "the grid of processes"),
    _bounds_variable("TPU_HOST_BOUNDS", "older name of TPU_PROCESS_BOUNDS"),
    Variable(
        "TPU_PROCESS_ADDRESSES",
        "process_addresses",
        _addresses,
        None,
        "host:port, separated by commas",
        "one address per process; only their number matters here",
    ),
    Variable("CLOUD_TPU_TASK_ID", "task_id", _natural, None, "a number from 0", "this process's place in the grid"),
    Variable(
        "TORCH_TPU_TIER2_COMPILATION_CACHE",
        "tier2_cache",
        _cache_name,
        None,
        "a name of letters, digits, '.', '_' and '-', or 'disabled'",
        "the shared-memory cache of executables; unset: 'default' with several processes or a persistent cache",
    ),
    Variable(
        "TORCH_TPU_TIER3_COMPILATION_CACHE_ROOT",
        "tier3_cache_root",
        _root,
        None,
        "a directory or a URL of fsspec",
        "the persistent cache of executables",
    ),
    Variable(
        "TORCH_TPU_INTERNAL_TIER3_COMPILATION_CACHE_LOCAL_BACKUP_TASK",
        "tier3_local_backup",
        _flag,
        True,
        "0 or 1",
        "compile locally when a remote persistent cache is slow to answer",
        lenient=True,
    ),
    Variable("WORLD_SIZE", "world_size", _positive, 1, "a positive number", "processes of the program", lenient=True),
    Variable(
        "NPROC",
        "nproc",
        _positive,
        None,
        "a positive number",
        "sizes the compile pool, four threads each",
        lenient=True,
    ),
)


def read(environment: Mapping[str, str]) -> Settings:
    """Parse ``environment`` (not cached). Raises SettingError for a bad value, and for a chip that is not the slice's."""
    values = {variable.field: variable.value_in(environment) for variable in VARIABLES}
    if values["topology"] is not None:
        chip = chip_of(values["topology"])
        given = environment.get("EMUTPU_CHIP", "").strip()
        if given and values["chip"] != chip:
            raise SettingError("EMUTPU_CHIP", given, f"{chip}, the chip of EMUTPU_TOPOLOGY={values['topology']}")
        values["chip"] = chip
    return Settings(**values)


def chip_of(topology: str) -> str:
    """The chip in the name of a slice: ``v5e`` of ``2xv5e-16``."""
    return topology.rpartition("-")[0].rpartition("x")[2]


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
