"""Random state: a seed and an offset, both host integers, so that reading the state never waits for the device.

A draw of n 32-bit numbers advances the offset by n·32/128, rounded up (Philox makes 128 bits a step), as TorchTPU does.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self
from weakref import WeakValueDictionary

import numpy as np
import torch

from emutpu.backend.deferred.values import Pending
from emutpu.backend.options import LOCAL
from emutpu.backend.runtime import runtime
from emutpu.backend.storage import DEVICE

if TYPE_CHECKING:
    from emutpu.backend.hlo import Builder, Value
    from emutpu.backend.pjrt import Buffer

__all__ = ["DEFAULT_GENERATOR", "TpuGenerator", "advanced", "draw", "forget_values"]

_MASK = (1 << 64) - 1
# Pending updates of the state, its seed among them, after which TorchTPU 0.2.0 materialises it (docs/regions.md).
_UPDATES = 3


def _address(generator: Any) -> int:
    """The address of the C++ generator beneath."""
    address: int = generator._cdata
    return address


class TpuGenerator(torch.Generator):
    """``torch.Generator(device="tpu")``. The C++ object beneath is a CPU generator that nobody draws from."""

    _seed: int
    _offset: int
    seeded: bool
    """Whether the program chose the seed."""

    def __new__(cls, device: Any = None) -> Self:  # noqa: ARG004  # __init__ takes it
        return super().__new__(cls, "cpu")  # type: ignore[call-arg]  # the stub has no __new__

    def __init__(self, device: Any = None) -> None:
        self._seed = secrets.randbits(63)
        self._offset = 0
        self._updates = 0
        self._value: tuple[int, int, Buffer] | None = None
        self.seeded = False
        _by_address[_address(self)] = self

    @property
    def device(self) -> torch.device:  # type: ignore[override]  # a data member in the stub
        return DEVICE

    def manual_seed(self, seed: int) -> TpuGenerator:
        self._seed = seed & _MASK
        self._offset = 0
        self._updates = 1
        self.seeded = True
        return self

    def seed(self) -> int:
        self.manual_seed(secrets.randbits(63))
        self.seeded = False
        return self._seed

    def initial_seed(self) -> int:
        return self._seed

    def get_offset(self) -> int:
        return self._offset

    def set_offset(self, offset: int) -> None:  # type: ignore[override]  # the stub is wrong: None comes back
        self._offset = offset & _MASK

    def get_state(self) -> torch.Tensor:
        """16 bytes on the CPU: seed, then offset."""
        state = np.array([self._seed, self._offset], np.uint64)
        return torch.from_numpy(state.view(np.uint8).copy())

    def set_state(self, new_state: torch.Tensor) -> TpuGenerator:
        if new_state.numel() != 16 or new_state.dtype != torch.uint8:
            raise RuntimeError(
                "set_rng_state(): expected a uint8 tensor of 16 bytes (seed, offset), got "
                f"{new_state.dtype} of {new_state.numel()} elements"
            )
        seed, offset = new_state.cpu().contiguous().numpy().view(np.uint64)
        self._seed, self._offset = int(seed), int(offset)
        return self

    def graphsafe_get_state(self) -> TpuGenerator:
        return self

    def graphsafe_set_state(self, state: TpuGenerator) -> TpuGenerator:  # type: ignore[override]  # upstream returns None
        self._seed, self._offset = state._seed, state._offset
        return self

    def clone_state(self) -> TpuGenerator:
        made = TpuGenerator(self.device)
        made._seed, made._offset = self._seed, self._offset
        return made

    def advance(self, numbers: int) -> tuple[int, int]:
        """Take ``numbers`` 32-bit draws; gives (seed, offset) to draw from."""
        state = self._seed, self._offset
        self._offset = (self._offset + -(-numbers // 4)) & _MASK
        return state

    def take(self, numbers: Sequence[int]) -> Buffer:
        """The state for a program that takes these draws one after the other, which are taken."""
        states = [self.advance(count) for count in numbers]
        return _buffer(*states[0])

    # The state as a value of the device, for draws that are recorded.

    def value(self, numbers: int) -> Buffer:
        """Take ``numbers`` draws; gives the state on the device: what the draw before left there, or a new buffer."""
        seed, offset = self.advance(numbers)
        kept = self._value
        if kept is None or kept[:2] != (seed, offset):
            return _buffer(seed, offset)
        value = kept[2]
        if value.__class__ is not Pending:
            return value
        pending: Any = value
        if pending.buffer is None and pending.failure is None and pending.batch.queue is LOCAL.state.queue:
            return value
        self._updates = 0
        if pending.failure is not None:
            return _buffer(seed, offset)
        made: Buffer = pending.materialize("debug_mode")
        return made

    def keep(self, value: Buffer) -> None:
        """Remember the state that the last draw left on the device."""
        self._value = (self._seed, self._offset, value)

    def forget(self) -> None:
        """The device is another: what the last draw left there is of no use."""
        self._value = None

    def updated(self) -> bool:
        """Count an update; True when so many are pending that the state is materialised."""
        self._updates += 1
        if self._updates < _UPDATES:
            return False
        self._updates = 0
        return True


# A kernel receives another Python object for the same C++ generator.
_by_address: WeakValueDictionary[int, TpuGenerator] = WeakValueDictionary()
DEFAULT_GENERATOR = TpuGenerator()


def forget_values() -> None:
    """Let every generator give its state anew, for the client is another."""
    for generator in list(_by_address.values()):
        generator.forget()


def draw(generator: torch.Generator | None, numbers: int) -> Buffer:
    """The state, ui64[3] = (seed, offset, 0), for one launch that takes ``numbers`` 32-bit draws."""
    if generator is None:
        owner: TpuGenerator | None = DEFAULT_GENERATOR
    else:
        owner = _by_address.get(_address(generator))
    if owner is None:
        raise RuntimeError(f"Expected a 'tpu' device type for generator but found '{generator.device.type}'")  # type: ignore[union-attr]  # not None here
    if LOCAL.state.defers:
        from emutpu.backend.deferred.queue import current_queue

        LOCAL.state.drawer = owner
        return current_queue().state_of(owner, numbers)
    return _buffer(*owner.advance(numbers))


def _buffer(seed: int, offset: int) -> Buffer:
    return runtime().client.from_host(np.array([seed, offset, 0], np.uint64))


def advanced(builder: Builder, state: Value, steps: int) -> Value:
    """The state after ``steps`` steps of 128 bits."""
    by = np.array([0, steps, 0], np.uint64)
    return state + builder.constant(by, torch.uint64)
