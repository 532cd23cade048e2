"""Activation: what ``import torch`` calls through the ``torch.backends`` entry point.

Imports neither jax nor Dynamo, and nothing heavy: the lowerings and the client are loaded by the first op.
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from emutpu import _settings

if TYPE_CHECKING:
    from emutpu.backend.pjrt import Client

__all__ = ["attached_tpus", "is_emulated", "load"]

_PCI_DEVICES = Path("/sys/bus/pci/devices")
_GOOGLE = "0x1ae0"
_ACCELERATOR_CLASS = "0x1200"
_OLDEST_TORCH = (2, 13)


class _State:
    active = False


def is_emulated() -> bool:
    """True when ``tpu`` in this process is emutpu's."""
    return _State.active


def load() -> None:
    """Make ``tpu`` a PyTorch device, or step aside with one message.

    Raises RuntimeError when ``EMUTPU_FORBID=1``, SettingError for a variable with a bad value, ImportError for a torch
    that is too old.
    """
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
    _check_torch()
    obstacle = _obstacle()
    if obstacle is not None:
        _say(f"emutpu: stepping aside: {obstacle}")
        return
    _activate(settings)


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


def _is_tpu(folder: Path) -> bool:
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


def _activate(settings: _settings.Settings) -> None:
    from emutpu import _tpu
    from emutpu.backend import options, registration
    from emutpu.backend.runtime import Configuration, runtime
    from emutpu.simulator.chips import chip
    from emutpu.simulator.hbm import tiled_bytes

    def make_client() -> Client:
        from emutpu.simulator.clients import make_client
        from emutpu.simulator.topology import single_chip

        return make_client(settings.client, single_chip(settings.chip), seed=settings.dry_values)

    def banner() -> None:
        _say(f"emutpu: emulated {settings.chip}, not hardware")

    runtime().configure(
        Configuration(
            make_client=make_client,
            chip=settings.chip,
            banner=banner,
            allow_fallback=settings.allow_fallback,
            beyond=settings.beyond,
            donate=not settings.disable_inplace_buffer_donation,
            tiled=tiled_bytes,
            hbm_limit=_hbm_limit(settings, chip(settings.chip).hbm_bytes),
            host_issue=None if settings.host_issue is None else round(settings.host_issue * 1e6),
        )
    )
    mode = options.EagerMode.DEFER_NEVER
    if settings.launch_blocking:
        mode = options.EagerMode.DEFER_NEVER_AND_LAUNCH_BLOCKING
    elif settings.defer_and_fuse:
        raise RuntimeError(
            "TORCH_TPU_DEFER_AND_FUSE=1: DeferAndFuse is not available in this version of emutpu; unset it to run Strict"
        )
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
