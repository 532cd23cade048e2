"""What ``emutpu doctor`` looks at. Each check is a function of the environment; none imports torch or jax here."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import re
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from emutpu import _settings
from emutpu._activation import attached_tpus, emulated_tree, process_topology
from emutpu.cli._versions import Bounds, Requirement

__all__ = ["CHECKS", "FAIL", "OK", "WARN", "Check", "examine"]

OK, WARN, FAIL = "ok", "warn", "fail"

Environment = Mapping[str, str]

_MEMORY_NEEDED = 1 << 30
_MEMORY_WANTED = 4 << 30
_SMOKE_SECONDS = 120
_ERROR = re.compile(r"[\w.]+(Error|Exception|Unimplemented|Exhausted|Interrupt)\b")
_SMOKE = """
import json, time
start = time.perf_counter()
import torch
imported = time.perf_counter()
values = (torch.ones(2, device="tpu") + 1).tolist()
print(json.dumps({"values": values, "import": imported - start, "first_op": time.perf_counter() - imported}))
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Check:
    """One finding. ``fix`` says what to do, and is None when there is nothing to do."""

    name: str
    status: str
    message: str
    fix: str | None = None


def examine(environment: Environment) -> Iterator[Check]:
    """Run every check, cheap ones first. Gives results as they come (the last one starts a child process)."""
    for check in CHECKS:
        yield from check(environment)


# --------------------------------------------------------------------------------------------------- versions


def _versions(environment: Environment) -> Iterator[Check]:
    try:
        distribution = importlib.metadata.distribution("emutpu")
    except importlib.metadata.PackageNotFoundError:
        yield Check(
            "installation",
            FAIL,
            "emutpu runs from a checkout that is not installed",
            "pip install -e . in the checkout",
        )
        return
    yield Check("installation", OK, f"emutpu {distribution.version}")
    python = Bounds(distribution.metadata["Requires-Python"] or "")
    yield _paired("python", ".".join(map(str, sys.version_info[:3])), python, "emutpu")
    for requirement in _requirements("emutpu"):
        yield _paired(requirement.name, _version(requirement.name), requirement.bounds, "emutpu")
    for requirement in _requirements("jax"):
        if requirement.name == "jaxlib":
            check = _paired("jaxlib", _version("jaxlib"), requirement.bounds, "jax")
            yield dataclasses.replace(check, name="jax/jaxlib")


def _requirements(distribution: str) -> Iterator[Requirement]:
    if _version(distribution) is None:
        return
    for line in importlib.metadata.requires(distribution) or ():
        requirement = Requirement.parse(line)
        if not requirement.conditional:
            yield requirement


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _paired(name: str, version: str | None, bounds: Bounds, owner: str) -> Check:
    wanted = str(bounds)
    fix = f"use Python {wanted}" if name == "python" else f'pip install "{name}{wanted}"'
    if version is None:
        return Check(name, FAIL, f"{name} is not installed; {owner} needs {name}{wanted}", fix)
    if bounds.contains(version):
        return Check(name, OK, version)
    return Check(
        name, FAIL, f"{version} is too {'old' if bounds.too_old(version) else 'new'}: {owner} needs {name}{wanted}", fix
    )


# --------------------------------------------------------------------------------------------------- conflicts


def _entry_points(environment: Environment) -> Iterator[Check]:
    found = {entry.name: entry.dist.name if entry.dist else entry.value for entry in _backends()}
    if "emutpu" in found:
        yield Check("autoload.entry_point", OK, "torch finds emutpu")
    else:
        yield Check(
            "autoload.entry_point",
            FAIL,
            "torch does not find emutpu: there is no entry point of the group torch.backends",
            "pip install --force-reinstall --no-deps emutpu",
        )
    if "torch_tpu" in found or _version("torch_tpu") is not None:
        yield Check(
            "conflict.torch_tpu",
            FAIL,
            f"the real TorchTPU {_version('torch_tpu') or ''} is installed too, and only one can be the device 'tpu'",
            "pip uninstall torch_tpu, or keep emutpu in an environment of its own",
        )
    else:
        yield Check("conflict.torch_tpu", OK, "the real TorchTPU is not installed")
    others = sorted(dist for name, dist in found.items() if name not in ("emutpu", "torch_tpu"))
    if others:
        yield Check(
            "conflict.backends",
            WARN,
            f"{', '.join(others)} is loaded by torch as well; torch has one PrivateUse1 device only",
            "if the smoke check fails, uninstall it or keep emutpu in an environment of its own",
        )
    else:
        yield Check("conflict.backends", OK, "no other out-of-tree backend of torch")


def _backends() -> Iterable[importlib.metadata.EntryPoint]:
    return importlib.metadata.entry_points(group="torch.backends")


def _hardware(environment: Environment, root: Path = Path("/sys/bus/pci/devices")) -> Iterator[Check]:
    chips = attached_tpus(root)
    if chips:
        yield Check(
            "conflict.hardware",
            FAIL,
            f"this host has {len(chips)} real TPU chip(s) ({', '.join(chips)}), and emutpu steps aside for them",
            "use TorchTPU here, and emutpu on hosts without a TPU",
        )
    else:
        tree = emulated_tree(root)
        also = f"; an emulated PCI tree of {tree[0]}" if tree else ""
        yield Check("conflict.hardware", OK, f"no TPU hardware on this host{also}")


# --------------------------------------------------------------------------------------------------- environment


def _environment(environment: Environment) -> Iterator[Check]:
    bad = list(_bad_values(environment))
    yield from bad or [Check("environment.values", OK, "every variable that is set can be parsed")]
    for name, suggestion in _settings.unknown_variables(environment):
        fix = f"did you mean {suggestion}?" if suggestion else "emutpu doctor --env lists the variables"
        yield Check("environment.unknown", WARN, f"{name} means nothing to emutpu", fix)
    if environment.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "1":
        yield Check(
            "environment.autoload",
            FAIL,
            "TORCH_DEVICE_BACKEND_AUTOLOAD is not 1: `import torch` does not load emutpu",
            "unset TORCH_DEVICE_BACKEND_AUTOLOAD",
        )
    else:
        yield Check("environment.autoload", OK, "`import torch` loads emutpu")
    platforms = environment.get("JAX_PLATFORMS", "")
    if platforms and "cpu" not in platforms.split(","):
        yield Check(
            "environment.jax",
            FAIL,
            f"JAX_PLATFORMS={platforms} hides the CPU, which emutpu computes on",
            "add cpu to it",
        )
    yield from _switched_off(environment)


def _bad_values(environment: Environment) -> Iterator[Check]:
    for variable in _settings.VARIABLES:
        try:
            variable.value_in(environment)
        except _settings.SettingError as error:
            yield Check("environment.values", FAIL, str(error), f"set {variable.name} to {error.accepted}, or unset it")


def _switched_off(environment: Environment) -> Iterator[Check]:
    if _value("forbid", environment):
        yield Check("environment.forbid", FAIL, "EMUTPU_FORBID is set: emutpu refuses to load", "unset EMUTPU_FORBID")
    if _value("chip", environment) == _settings.NO_CHIP:
        yield Check("environment.chip", WARN, "EMUTPU_CHIP=none: a host without a TPU is emulated", "unset EMUTPU_CHIP")


def _late(environment: Environment) -> Iterator[Check]:
    try:
        late = _settings.changed_since_read()
    except _settings.SettingError:
        return  # reported by environment.values
    if late:
        yield Check(
            "environment.late",
            WARN,
            f"changed after emutpu read its settings, without effect: {', '.join(late)}",
            "set them before `import torch`",
        )
    else:
        yield Check("environment.late", OK, "no variable changed after it was read in this process")


def _value(field: str, environment: Environment) -> object:
    """The parsed value of one variable, or None for a bad one (which another check reports)."""
    variable = next(row for row in _settings.VARIABLES if row.field == field)
    try:
        return variable.value_in(environment)
    except _settings.SettingError:
        return None


# --------------------------------------------------------------------------------------------------- resources


def _topology(environment: Environment, root: Path = Path("/")) -> Iterator[Check]:
    from emutpu.backend.pjrt import DeviceUnavailable

    try:
        settings = _settings.read(environment)
        if settings.chip == _settings.NO_CHIP:
            yield Check("topology", OK, "none: EMUTPU_CHIP=none is a host without a TPU")
            return
        topology = process_topology(settings, root)
    except _settings.SettingError as error:
        if error.name in ("EMUTPU_TOPOLOGY", "EMUTPU_CHIP"):
            yield Check("topology", FAIL, str(error), f"unset {error.name}; emutpu topology NAME shows a slice")
        return  # other variables are reported by environment.values
    except DeviceUnavailable as error:
        yield Check("topology", FAIL, str(error), f"unset or repair {error.message.split('=')[0]}")
        return
    seen = ", ".join(str(device.id) for device in topology.devices)
    yield Check("topology", OK, f"{topology.name}; this process sees device {seen}")


def _cache(environment: Environment) -> Iterator[Check]:
    path = _value("cache_dir", environment)
    if not isinstance(path, str):
        yield Check("cache", OK, "EMUTPU_CACHE_DIR is not set")
    elif not os.path.isdir(path):
        yield Check("cache", FAIL, f"EMUTPU_CACHE_DIR={path} is not a directory", f"mkdir -m 700 -p {path}")
    else:
        yield from _cache_folder("cache", path)


def _persistent_cache(environment: Environment) -> Iterator[Check]:
    root = _value("tier3_cache_root", environment)
    if not isinstance(root, str):
        yield Check("cache.persistent", OK, "no persistent cache (TORCH_TPU_TIER3_COMPILATION_CACHE_ROOT is not set)")
    elif "://" in root and not root.startswith(("file://", "local://")):
        if _value("cache_key", environment) is None:
            yield Check(
                "cache.persistent",
                FAIL,
                f"{root} is remote, and its entries are native code: without a secret it is not used",
                "set EMUTPU_CACHE_KEY to the secret that signs them",
            )
        else:
            yield Check("cache.persistent", OK, f"{root} (signed)")
    elif os.path.isdir(root.partition("://")[2] or root):
        yield from _cache_folder("cache.persistent", root.partition("://")[2] or root)
    else:
        yield Check("cache.persistent", OK, f"{root} will be made")


def _cache_folder(name: str, path: str) -> Iterator[Check]:
    status = os.stat(path)
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid != os.getuid():
        yield Check(
            name,
            FAIL,
            f"{path} belongs to user {status.st_uid}, who could plant native code in it",
            "use a directory of your own",
        )
    elif mode & (stat.S_IWGRP | stat.S_IWOTH):
        yield Check(name, FAIL, f"others may write native code into {path} (mode {mode:04o})", f"chmod 700 {path}")
    elif not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        yield Check(name, FAIL, f"{path} cannot be written (mode {mode:04o})", f"chmod 700 {path}")
    elif mode != 0o700:
        yield Check(name, WARN, f"others may read {path} (mode {mode:04o})", f"chmod 700 {path}")
    else:
        yield Check(name, OK, path)


def _memory(environment: Environment) -> Iterator[Check]:
    free = _free_memory()
    if free is None:
        yield Check("memory", WARN, "the free memory of this host is not known")
        return
    message = f"{free / 2**30:.1f} GiB free"
    if free >= _MEMORY_WANTED:
        yield Check("memory", OK, message)
    else:
        status = WARN if free >= _MEMORY_NEEDED else FAIL
        yield Check("memory", status, message + "; device memory is host memory here", "free memory, or run smaller")


def _free_memory() -> int | None:
    """Bytes that this process may still use: of the host, and of its control group."""
    try:
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return None
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text().strip()
        used = int((group / "memory.current").read_text())
    except OSError:
        return free
    return free if limit == "max" else min(free, int(limit) - used)


# --------------------------------------------------------------------------------------------------- smoke


def _smoke(environment: Environment) -> Iterator[Check]:
    if _value("forbid", environment) or _value("chip", environment) == _settings.NO_CHIP:
        yield Check("smoke", WARN, "not run: the environment switches the device off")
        return
    variables = {**environment, "TORCH_DEVICE_BACKEND_AUTOLOAD": "1"}
    variables.pop("EMUTPU_REPORT", None)
    with tempfile.TemporaryDirectory(prefix="emutpu-doctor-") as folder:
        try:
            child = subprocess.run(
                [sys.executable, "-c", _SMOKE],
                check=False,
                env=variables,
                cwd=folder,
                capture_output=True,
                text=True,
                timeout=_SMOKE_SECONDS,
            )
        except subprocess.TimeoutExpired:
            yield Check("smoke", FAIL, f"one addition did not end in {_SMOKE_SECONDS} s", "report it with this output")
            return
    yield _judge_smoke(child.returncode, child.stdout, child.stderr)


def _judge_smoke(code: int, stdout: str, stderr: str) -> Check:
    if code != 0:
        errors = [line for line in stderr.splitlines() if _ERROR.match(line)] or ["no message"]
        cause = " <- ".join(dict.fromkeys((errors[-1], errors[0])))
        return Check(
            "smoke",
            FAIL,
            f"one addition on the device ended with exit code {code}: {cause}",
            "repair the checks above, then run: python -c 'import torch; print(torch.ones(2, device=\"tpu\") + 1)'",
        )
    result = json.loads(stdout.splitlines()[-1])
    if result["values"] != [2.0, 2.0]:
        return Check("smoke", FAIL, f"1 + 1 gave {result['values']} on the device", "report it with this output")
    seconds = f"import torch {result['import']:.1f} s, first op {result['first_op']:.1f} s"
    return Check("smoke", OK, f"1 + 1 = 2 on the device ({seconds})")


CHECKS: tuple[Callable[[Environment], Iterator[Check]], ...] = (
    _versions,
    _entry_points,
    _hardware,
    _environment,
    _late,
    _topology,
    _cache,
    _persistent_cache,
    _memory,
    _smoke,
)
