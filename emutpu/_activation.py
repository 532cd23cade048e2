"""Activation: what ``import torch`` calls through the ``torch.backends`` entry point.

Imports neither jax nor Dynamo, and nothing heavy: the lowerings and the client are loaded by the first op.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib.util
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from emutpu import _settings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from emutpu.backend.cache import LowerTiers
    from emutpu.backend.cache_setup import TierSettings
    from emutpu.backend.keys import Versions
    from emutpu.backend.pjrt import Client, ModelledCost, Topology
    from emutpu.backend.runtime import Configuration
    from emutpu.simulator.topology import Slice

__all__ = ["attached_tpus", "emulated_tree", "is_emulated", "load", "process_topology", "tier_settings"]

_PCI_DEVICES = Path("/sys/bus/pci/devices")
_GOOGLE = "0x1ae0"
_ACCELERATOR_CLASS = "0x1200"
_MARKER = "emutpu"
_OLDEST_TORCH = (2, 13)
_COMPILERS = ("backend", "simulator")


class _State:
    active = False
    watching: Callable[[Client], Client] | None = None  # what is put around the client


def is_emulated() -> bool:
    """True when ``tpu`` in this process is emutpu's."""
    return _State.active


def load() -> None:
    """Make ``tpu`` a PyTorch device, or step aside with one message.

    Raises RuntimeError when ``EMUTPU_FORBID=1``, SettingError for a variable with a bad value, ImportError for a torch
    that is too old.
    """
    emulated = _adopt_emulated_tree()
    settings = _settings.settings()
    for name, suggestion in _settings.unknown_variables():
        hint = f"; did you mean {suggestion}?" if suggestion else ""
        warnings.warn(f"emutpu: unknown environment variable {name}{hint}", stacklevel=2)
    if settings.forbid:
        raise RuntimeError(
            "emutpu is installed but EMUTPU_FORBID=1 refuses emulated devices in this environment; "
            "uninstall emutpu, or set TORCH_DEVICE_BACKEND_AUTOLOAD=0"
        )
    if settings.chip == _settings.NO_CHIP:
        return
    if emulated is not None and settings.topology != emulated:
        raise RuntimeError(
            f"the emulated PCI tree on this host is of {emulated}, but EMUTPU_TOPOLOGY or EMUTPU_CHIP ask for "
            f"{settings.topology or settings.chip}: unset them"
        )
    _check_torch()
    obstacle = _obstacle()
    if obstacle is not None:
        _say(f"emutpu: stepping aside: {obstacle}")
        return
    with _complete_modules():
        _activate(settings)


@contextlib.contextmanager
def _complete_modules() -> Iterator[None]:
    """Inside, modules of the backend that are halfway through their own ``import torch`` are imported anew.

    A program that imports ``emutpu.backend.registration``, say, before torch ends up here from within that import; what
    it then gets is the module of ``sys.modules``, the complete one.
    """
    halfway = {
        name: module
        for name, module in list(sys.modules.items())
        if name.startswith("emutpu.backend.") and getattr(module.__spec__, "_initializing", False)
    }
    for name in halfway:
        del sys.modules[name]
    try:
        yield
    finally:
        for name, module in halfway.items():
            sys.modules.setdefault(name, module)


def _check_torch() -> None:
    """Older releases lack what a Python backend stands on; say so before something private is missed."""
    import torch

    found = str(torch.__version__)
    if tuple(int(part) for part in found.split(".")[:2]) < _OLDEST_TORCH:
        oldest = ".".join(map(str, _OLDEST_TORCH))
        raise ImportError(
            f"emutpu needs torch {oldest} or newer, found {found}: pip install 'torch>={oldest}', or set "
            "TORCH_DEVICE_BACKEND_AUTOLOAD=0 to use torch without emutpu"
        )


def _obstacle() -> str | None:
    """Why the name ``tpu`` is somebody else's here, or None."""
    import torch

    if importlib.util.find_spec("torch_tpu") is not None:
        return "torch_tpu is installed, so 'tpu' is the real backend; uninstall one of the two"
    if attached_tpus(_PCI_DEVICES):
        return "a real TPU is attached to this machine; install torch_tpu to use it"
    owner = torch._C._get_privateuse1_backend_name()
    if owner != "privateuseone":
        return f"PrivateUse1 already belongs to the backend '{owner}'; only one package can own it"
    return None


def attached_tpus(root: Path) -> list[str]:
    """PCI addresses of the real TPU chips under ``root``. Google's network cards share the vendor, not the class."""
    return [folder.name for folder in sorted(root.glob("*")) if _is_tpu(folder)]


def emulated_tree(root: Path) -> tuple[str, int] | None:
    """Slice and host of the emulated PCI functions under ``root`` (:mod:`emutpu.simulator.pci` marks them), or None."""
    for marker in sorted(root.glob(f"*/{_MARKER}")):
        name, host = marker.read_text().split()
        return name, int(host)
    return None


def _adopt_emulated_tree() -> str | None:
    """The slice of an emulated PCI tree, which becomes this process's when the environment names no other."""
    tree = emulated_tree(_PCI_DEVICES)
    if tree is None:
        return None
    chip = os.environ.get("EMUTPU_CHIP", "").strip()
    if not os.environ.get("EMUTPU_TOPOLOGY", "").strip() and chip in ("", _settings.chip_of(tree[0])):
        os.environ["EMUTPU_TOPOLOGY"] = tree[0]  # for the settings, the report and child processes alike
    return tree[0]


def _is_tpu(folder: Path) -> bool:
    if (folder / _MARKER).exists():  # no file of that name can be in a real sysfs
        return False
    try:
        vendor = (folder / "vendor").read_text().strip()
        kind = (folder / "class").read_text().strip()
    except OSError:
        return False
    return vendor == _GOOGLE and kind.startswith(_ACCELERATOR_CLASS)


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def _hbm_limit(settings: _settings.Settings, chip_bytes: int) -> int | None:
    if settings.hbm == _settings.UNLIMITED:
        return None
    return chip_bytes if settings.hbm is None else int(settings.hbm)


def _slice(settings: _settings.Settings) -> Slice:
    from emutpu.simulator.chips import chip
    from emutpu.simulator.topology import Slice, slice_named

    if settings.topology is None:
        return Slice(chip(settings.chip), (1, 1, 1))
    try:
        return slice_named(settings.topology)
    except ValueError as error:
        raise _settings.SettingError("EMUTPU_TOPOLOGY", settings.topology, f"a legal slice ({error})") from None


def process_topology(settings: _settings.Settings, root: Path = Path("/")) -> Topology:
    """The slice, and of its devices those this process sees, by ``TPU_VISIBLE_DEVICES`` and an emulated tree in ``root``.

    Raises SettingError for a slice that is not legal, DeviceUnavailable for devices that are not there.
    """
    from emutpu.backend.pjrt import DeviceUnavailable
    from emutpu.simulator import pci
    from emutpu.simulator.visible import Placement, visible_devices

    where = _slice(settings)
    tree = emulated_tree(root / pci.DEVICES)
    placement = Placement(
        devices=settings.visible_devices,
        chips=settings.visible_chips,
        chips_per_process=settings.chips_per_process_bounds or settings.chips_per_host_bounds,
        processes=settings.process_bounds or settings.host_bounds,
        addresses=len(settings.process_addresses) if settings.process_addresses else None,
        task=settings.task_id if settings.task_id is not None or tree is None else tree[1],
        attached=None if tree is None else tuple(int(str(function.group)) for function in pci.attached(root)),
    )
    try:
        return where.topology(visible_devices(where, placement))
    except ValueError as error:
        raise DeviceUnavailable(str(error)) from None


def tier_settings(settings: _settings.Settings) -> TierSettings:
    """The tiers of the compile cache that the environment asks for. Raises SettingError for an unusable secret."""
    from emutpu.backend.cache_setup import TierSettings, secret_of

    secret = None
    if settings.cache_key is not None:
        try:
            secret = secret_of(settings.cache_key)
        except ValueError as error:
            raise _settings.SettingError("EMUTPU_CACHE_KEY", "***", str(error)) from error
    return TierSettings(
        tier2=settings.tier2_cache,
        tier3=settings.tier3_cache_root,
        world_size=settings.world_size,
        backup=settings.tier3_local_backup,
        read_only=settings.cache_readonly,
        cap=settings.cache_max_bytes,
        secret=secret,
        fallback=None if settings.cache_dir is None else Path(settings.cache_dir),
    )


def _client(settings: _settings.Settings) -> Client:
    from emutpu.simulator.clients import make_client

    client = make_client(
        settings.client,
        process_topology(settings),
        cpu_target=settings.cpu_target,
        quick=settings.host_compile == "quick",
        native_highest=settings.host_highest == "native",
        seed=settings.dry_values,
        cost_chips=settings.cost_chips or (),
    )
    if settings.record_modules is not None:
        from emutpu._modules import RecordingClient

        client = RecordingClient(client, settings.record_modules)
    return client if _State.watching is None else _State.watching(client)


def _binary(versions: Versions, client: Client) -> str:
    import torch

    from emutpu.backend.keys import binary_fingerprint, source_fingerprint

    folders = [Path(str(importlib.util.find_spec(f"emutpu.{name}").origin)).parent for name in _COMPILERS]  # type: ignore[union-attr]  # they are imported
    return binary_fingerprint(client.fingerprint(), versions, str(torch.__version__), source_fingerprint(*folders))


def _tiers(wanted: TierSettings, versions: Versions, client: Client) -> LowerTiers | None:
    from emutpu.backend.cache_setup import make_tiers

    return make_tiers(wanted, client, lambda: _binary(versions, client))


def _collective(op: str, operand: float, devices: int, world: int, where: Slice) -> ModelledCost | None:
    from emutpu.simulator._model import collective_cost

    return collective_cost(op, operand, devices, world, where)


def _configuration(settings: _settings.Settings) -> Configuration:
    """What the backend is told. Raises SettingError for an illegal slice or an unusable secret."""
    from emutpu.backend.compile_pool import default_threads
    from emutpu.backend.keys import Versions
    from emutpu.backend.runtime import Configuration
    from emutpu.simulator.chips import chip
    from emutpu.simulator.hbm import tiled_bytes

    versions = Versions(settings.binary_version, settings.pjrt_version)
    where = _slice(settings)  # an illegal slice is a bad setting: say so now rather than at the first op
    # So is an unusable secret.
    secret = tier_settings(settings).secret if settings.cache_key is not None else None
    return Configuration(
        make_client=lambda: _client(settings),
        chip=settings.chip,
        banner=lambda: _say(f"emutpu: emulated {settings.topology or settings.chip}, not hardware"),
        allow_fallback=settings.allow_fallback,
        beyond=settings.beyond,
        donate=not settings.disable_inplace_buffer_donation,
        versions=versions,
        compile_threads=settings.compile_threads or default_threads(settings.nproc),
        make_tiers=lambda client: _tiers(tier_settings(settings), versions, client),
        binary=lambda client: _binary(versions, client),
        secret=secret,
        aot_cache=settings.aot_cache,
        repeats=settings.detect_repeated_ops,
        quirks=settings.quirks,
        assume_bounded=settings.bounded_dynamism is not None,
        tiled=tiled_bytes,
        hbm_limit=_hbm_limit(settings, chip(settings.chip).hbm_bytes),
        host_issue=None if settings.host_issue is None else round(settings.host_issue * 1e6),
        collective=lambda op, operand, devices, world: _collective(op, operand, devices, world, where),
    )


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """No garbage collection meanwhile: one over all of torch takes as long as everything that activation does."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@_uncollected()
def _activate(settings: _settings.Settings) -> None:
    from emutpu import _tpu
    from emutpu.backend import options, registration
    from emutpu.backend.runtime import runtime

    runtime().configure(_configuration(settings))
    if settings.regions is not None or settings.fuzz is not None:
        from emutpu.backend.watch import watch

        # After the runtime, so that what it writes at exit is written before the runtime ends.
        _State.watching = watch(settings.regions, settings.fuzz, inputs=settings.regions_inputs)
    mode = options.EagerMode.DEFER_NEVER
    if settings.launch_blocking:
        mode = options.EagerMode.DEFER_NEVER_AND_LAUNCH_BLOCKING
    elif settings.defer_and_fuse:
        mode = options.EagerMode.DEFER_AND_FUSE
    precision = options.Precision[(settings.precision or "default").upper()]
    options.set_process(mode=mode, precision=precision, bounds_checks=settings.debug_checks)
    registration.activate(_tpu.make())
    _State.active = True
    if settings.report is not None:
        from emutpu._report import install_exit_report

        install_exit_report(settings.report.replace("{pid}", str(os.getpid())))
    if settings.trace is not None:
        _trace_until_exit(settings.trace, settings.chip)


def _trace_until_exit(path: str, chip: str) -> None:
    """Record every launch and write the trace at exit; ``{pid}`` stands for the process id. Forked children write none."""
    from emutpu.backend.runtime import runtime
    from emutpu.backend.tracing import Recorder

    recorder = Recorder(runtime().meter)
    runtime().meter.record(recorder)
    owner = os.getpid()

    def write() -> None:
        if os.getpid() != owner or not runtime().initialized:
            return
        from emutpu.simulator import trace

        rates = runtime().meter.rates
        try:
            written = trace.write(
                path.replace("{pid}", str(owner)), recorder.launches(), recorder.steps(), chip, (rates.flops, rates.hbm)
            )
        except (OSError, ValueError) as error:
            _say(f"emutpu: the trace was not written: {error}")
        else:
            left_out = f"; {recorder.dropped} later launches are left out" if recorder.dropped else ""
            _say(f"emutpu: trace of the modelled device: {written}{left_out}")

    atexit.register(write)
