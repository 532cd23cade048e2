"""API stages: what of ``torch.tpu`` is experimental or internal, and how a user is told.

One row per public name (:class:`Api`). Functions are wrapped once; attributes and properties are told about when they are
read. Every warning comes once per name and process, and none while ``torch.compile`` traces.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch

from emutpu import _settings

__all__ = ["Api", "Kind", "Stage", "announce", "caller_module", "staged"]

_EXPERIMENTAL = "<TorchTpu/ApiStage/ExperimentalApi/>"
_INTERNAL = "<TorchTpu/ApiStage/InternalApi/>"
_FRAMEWORK = ("torch", "torch_tpu", "emutpu")


class Stage(enum.Enum):
    """How far a name may be relied on."""

    INTERNAL = "Internal"
    EXPERIMENTAL = "Experimental"


class Kind(enum.Enum):
    """What a name is: called, read, or read and written."""

    FUNCTION = "function"
    ATTRIBUTE = "attribute"
    PROPERTY = "property"


@dataclasses.dataclass(frozen=True, slots=True)
class Api:
    """A public name of ``torch.tpu``.

    ``target`` is the function or object; for a property the getter, with ``setter`` beside it. ``shown`` is the name in
    messages, where it differs. ``prefer`` is the advice of an internal name.
    """

    name: str
    target: Any
    stage: Stage
    reason: str | None
    kind: Kind = Kind.FUNCTION
    prefer: str | None = None
    setter: Callable[[Any], None] | None = None
    shown: str | None = None

    @property
    def label(self) -> str:
        """The name as messages give it: attributes and properties are quoted."""
        name = self.shown or self.name
        return name if self.kind is Kind.FUNCTION else f"'{name}'"


_announced: set[str] = set()


def caller_module(depth: int = 1) -> str:
    """The name of the module whose code called the function that asks."""
    name: str = sys._getframe(depth + 1).f_globals.get("__name__", "")
    return name


def _warn_once(api: Api, text: str) -> None:
    if api.name not in _announced:
        _announced.add(api.name)
        warnings.warn(text, UserWarning, stacklevel=4)


def _from_framework(caller: str) -> bool:
    return caller.partition(".")[0] in _FRAMEWORK


def announce(api: Api, caller: str) -> None:
    """Warn of an experimental name, the first time that a module of the user's (``caller``) uses it."""
    if api.name not in _announced and not _from_framework(caller) and not torch.compiler.is_compiling():
        reason = f": {api.reason}" if api.reason else ""
        _warn_once(api, f"{_EXPERIMENTAL} {api.label} is experimental and subject to change{reason}")


def _guard(api: Api, caller: str) -> None:
    """Refuse an internal name to callers outside the framework, or warn where the old names were allowed."""
    if _from_framework(caller) or torch.compiler.is_compiling():
        return
    if _settings.settings().allow_legacy_device_apis:
        _warn_once(
            api,
            f"{_INTERNAL} {api.label} is internal to TorchTPU and may change or be removed without notice. "
            f"Use {api.prefer} instead.",
        )
        return
    raise RuntimeError(
        f"{api.label} is internal to TorchTPU and can only be called by the PyTorch framework (torch and torch_tpu). "
        f"Use {api.prefer} instead."
    )


def staged(api: Api) -> Any:
    """The function that users call: the target behind its stage, with the stage readable on it."""
    target = api.target
    if api.stage is Stage.INTERNAL:

        @functools.wraps(target, updated=())
        def function(*args: Any, **kwargs: Any) -> Any:
            _guard(api, caller_module())
            return target(*args, **kwargs)
    else:

        @functools.wraps(target, updated=())
        def function(*args: Any, **kwargs: Any) -> Any:
            announce(api, caller_module())
            return target(*args, **kwargs)

    function.__name__ = function.__qualname__ = api.name
    function.__module__ = "torch.tpu"
    described: Any = function
    described.__tt_api_stage__ = api.stage.value
    described.__tt_api_stage_reason__ = api.reason
    described.__tt_api_deprecated_version__ = None
    described.__tt_api_prefer__ = api.prefer
    return described
