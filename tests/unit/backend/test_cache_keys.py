"""Keys: whatever decides generated code changes them, what does not leaves them alone."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from emutpu.backend import kernels
from emutpu.backend.keys import STEM, Key, Versions, binary_fingerprint, source_fingerprint
from emutpu.backend.options import EagerMode, Options, Precision
from emutpu.backend.pjrt import CompileOptions, Effort
from emutpu.backend.runtime import runtime
from emutpu.backend.strict import OpModule

PARTS = ("shapeless", "dimensions", "options")


@pytest.fixture(scope="module", autouse=True)
def _device() -> None:
    """The tables of kernels exist once the device has run something."""
    torch.ones(1, device="tpu")


def tensor(
    *size: int, dtype: torch.dtype = torch.float32, stride: tuple[int, ...] | None = None, offset: int = 0
) -> torch.Tensor:
    """A view of a storage of its own, which has room for it."""
    dense = torch.empty(size, device="meta").stride()
    room = offset + 1 + sum((n - 1) * s for n, s in zip(size, stride or dense, strict=True))
    return torch.empty(room + 64, dtype=dtype, device="tpu").as_strided(size, stride or dense, offset)


def key_of(op: str, *values: Any, options: Options | None = None, donate: bool = False, **named: Any) -> Key:
    """The logical key of a launch of ``op``."""
    signature = kernels._kernels[op].signature
    arguments = {a.name: a.default_value if a.has_default_value() else None for a in signature.schema.arguments}
    arguments |= dict(zip(arguments, values, strict=False)) | named
    return OpModule(signature, options or Options(), arguments, donate).key()


def changed(before: Key, after: Key) -> set[str]:
    """The parts that differ."""
    return {part for part in PARTS if getattr(before, part) != getattr(after, part)}


def test_form() -> None:
    """Three parts of sixteen hexadecimal digits, joined as in TorchTPU's file names, equal in every process."""
    assert STEM.fullmatch(str(key_of("add.Tensor", tensor(2), tensor(2))))
    parts = [hashlib.sha256(text).hexdigest()[:16] for text in (b"a", b"b", b"c;binary=5 pjrt=0.0.52")]
    assert str(Key.of("a", "b", "c", Versions(5, "0.0.52"))) == "_".join(parts)


SHAPES = st.lists(st.integers(1, 6), min_size=1, max_size=4).map(tuple)


@settings(max_examples=60, deadline=None)
@given(SHAPES, st.data())
def test_every_dim_stride_and_offset(shape: tuple[int, ...], data: st.DataObject) -> None:
    """A change of one extent, one stride or the offset of one operand changes the dimensions, and nothing else does."""
    base = key_of("add.Tensor", tensor(*shape), tensor(*shape))
    assert changed(base, key_of("add.Tensor", tensor(*shape), tensor(*shape))) == set()
    dim = data.draw(st.integers(0, len(shape) - 1))
    grown = tuple(n + (index == dim) for index, n in enumerate(shape))
    assert changed(base, key_of("add.Tensor", tensor(*grown), tensor(*grown))) == {"dimensions"}
    stride = tuple(s + 7 * (index == dim) for index, s in enumerate(torch.empty(shape, device="meta").stride()))
    for operands in ((tensor(*shape, stride=stride), tensor(*shape)), (tensor(*shape), tensor(*shape, stride=stride))):
        assert "dimensions" in changed(base, key_of("add.Tensor", *operands))
    offset = data.draw(st.integers(1, 9))
    for operands in ((tensor(*shape, offset=offset), tensor(*shape)), (tensor(*shape), tensor(*shape, offset=offset))):
        assert "dimensions" in changed(base, key_of("add.Tensor", *operands))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.bool])
def test_every_dtype(dtype: torch.dtype) -> None:
    """The dtype of each operand is in the shapeless part."""
    base = key_of("mul.Tensor", tensor(3), tensor(3))
    assert "shapeless" in changed(base, key_of("mul.Tensor", tensor(3, dtype=dtype), tensor(3)))
    assert "shapeless" in changed(base, key_of("mul.Tensor", tensor(3), tensor(3, dtype=dtype)))


def test_the_layout_beneath_a_view() -> None:
    """Equal views over storages that were written in different shapes are read differently."""
    wide, tall = torch.zeros(2, 6, device="tpu"), torch.zeros(3, 4, device="tpu")
    views = [base.as_strided((4,), (1,)) for base in (wide, tall)]
    assert changed(*(key_of("neg.default", view) for view in views)) == {"dimensions"}
    bits = torch.zeros(4, dtype=torch.int32, device="tpu").view(torch.float32)
    assert "shapeless" in changed(key_of("neg.default", torch.zeros(4, device="tpu")), key_of("neg.default", bits))


PARAMETERS = [
    ("sum.dim_IntList", (2, 3, 4), {"dim": [0]}, [{"dim": [1]}, {"dim": [0, 1]}, {"keepdim": True}, {"dtype": torch.float64}]),
    ("_softmax.default", (2, 3), {"dim": 0, "half_to_float": False}, [{"dim": 1}]),
    ("cumsum.default", (2, 2), {"dim": 0}, [{"dim": 1}, {"dtype": torch.float64}]),
    ("argmax.default", (2, 2), {"dim": 0}, [{"dim": 1}, {"dim": None}, {"keepdim": True}]),
    ("avg_pool2d.default", (1, 1, 8, 8), {"kernel_size": [2, 2]}, [{"kernel_size": [4, 4]}, {"stride": [1, 1]}, {"padding": [1, 1]}, {"ceil_mode": True}, {"count_include_pad": False, "padding": [1, 1]}]),
    ("gelu.default", (4,), {"approximate": "none"}, [{"approximate": "tanh"}]),
    ("topk.default", (4, 4), {"k": 1}, [{"k": 2}, {"dim": 0}, {"largest": False}, {"sorted": False}]),
]  # fmt: skip


@pytest.mark.parametrize(("op", "shape", "given_", "others"), PARAMETERS, ids=[row[0] for row in PARAMETERS])
def test_every_parameter(op: str, shape: tuple[int, ...], given_: dict[str, Any], others: list[dict[str, Any]]) -> None:
    """Each parameter of an op is in the key, and so is the absence of an optional one."""
    base = key_of(op, tensor(*shape), **given_)
    for other in others:
        assert changed(base, key_of(op, tensor(*shape), **given_ | other)), other
    assert changed(base, key_of(op, tensor(*shape), **given_)) == set()


def test_ops_differ() -> None:
    """The op itself is in the shapeless part, and donation of an argument too."""
    pair = tensor(3), tensor(3)
    assert changed(key_of("add.Tensor", *pair), key_of("sub.Tensor", *pair)) == {"shapeless"}
    plain, donated = (key_of("add_.Tensor", *pair, donate=donate) for donate in (False, True))
    assert changed(plain, donated) == {"shapeless"}


def test_lists() -> None:
    """How many tensors a list has and which tensor is where is in the key; so is which targets share a storage."""
    a, b = tensor(2, 2), tensor(3, 2)
    base = key_of("cat.default", [a, b])
    assert changed(base, key_of("cat.default", [b, a]))
    assert changed(base, key_of("cat.default", [a, b, a]))
    assert changed(base, key_of("cat.default", [a, b, a][:1]))
    storage = torch.zeros(8, device="tpu")
    shared = [storage[:4], storage[4:]]
    apart = [torch.zeros(8, device="tpu")[:4], torch.zeros(8, device="tpu")[4:]]
    first, second = (key_of("_foreach_add_.Scalar", tensors, 1.0) for tensors in (shared, apart))
    assert changed(first, second) == {"shapeless"}


def test_scalars() -> None:
    """Values of scalars are no part of the key, their kinds are."""
    x = tensor(3)
    op = "add.Tensor"  # PyTorch hands the 2.5 of x + 2.5 over as a number
    base = key_of(op, x, 2.5)
    for value in (3.5, -7.0, 1e30, float("nan"), float("inf"), 0.0):
        assert changed(base, key_of(op, x, value)) == set(), value
    for value in (2, True, 2j):
        assert changed(base, key_of(op, x, value)), value
    assert changed(key_of("clamp.default", x, 0.5, 1.5), key_of("clamp.default", x, 0.5, 2.5)) == set()
    assert changed(key_of("clamp.default", x, 0.5, 1.5), key_of("clamp.default", x, 0.5, None))
    before = runtime().cache.misses
    for value in (0.25, 0.75, 3.25):
        torch.ones(5, device="tpu") + value
    assert runtime().cache.misses <= before + 2


OPTIONS: dict[str, Any] = {
    "precision": Precision.HIGHEST,
    "excess_precision": True,
    "overrides": (("xla_cpu_enable_fast_math", "true"),),
    "bounds_checks": True,
    "flushes": True,
}


# Strict and Debug share their executables; deferring compiles with more effort, so it does not.
NOT_IN_THE_KEY = {"mode": EagerMode.DEFER_NEVER_AND_LAUNCH_BLOCKING}


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Options)])
def test_every_option(field: str) -> None:
    """Each option is in the third part, except whether the op is waited for."""
    base = key_of("mm.default", tensor(2, 2), tensor(2, 2))
    value = (OPTIONS | NOT_IN_THE_KEY)[field]
    after = key_of("mm.default", tensor(2, 2), tensor(2, 2), options=dataclasses.replace(Options(), **{field: value}))
    assert changed(base, after) == (set() if field in NOT_IN_THE_KEY else {"options"})


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(CompileOptions) if f.compare])
def test_every_compile_option(field: str) -> None:
    """Each compile option is in its canonical text, which is in the key."""
    others = {"effort": Effort.O3, "excess_precision": True, "replicas": 2, "device": 1, "overrides": (("a", "1"),)}
    assert CompileOptions(**{field: others[field]}).canonical() != CompileOptions().canonical()


@pytest.mark.parametrize("changes", [{"binary": 6}, {"pjrt": "0.0.53"}])
def test_versions(changes: dict[str, Any]) -> None:
    """The versions of the emulated TorchTPU are in the third part, and in the binary fingerprint."""
    before, after = Versions(), dataclasses.replace(Versions(), **changes)
    assert changed(Key.of("a", "b", "c", before), Key.of("a", "b", "c", after)) == {"options"}
    assert binary_fingerprint("client", before, "2.13", "s") != binary_fingerprint("client", after, "2.13", "s")


def test_settable_versions(passes: Any) -> None:
    """The environment sets the versions."""
    text = """
        import torch
        from emutpu.backend.runtime import runtime
        print(runtime().key("a", "b", "c"))
    """
    plain, other = passes(text), passes(text, EMUTPU_BINARY_VERSION="7", EMUTPU_PJRT_VERSION="0.1")
    assert plain.strip() == str(Key.of("a", "b", "c", Versions()))
    assert other.strip() == str(Key.of("a", "b", "c", Versions(7, "0.1")))


def test_binary_fingerprint(tmp_path: Path) -> None:
    """It stands for the client, torch and our own sources; sixteen digits."""
    base = binary_fingerprint("client", Versions(), "2.13", "s")
    assert len(base) == 16
    assert base == binary_fingerprint("client", Versions(), "2.13", "s")
    for other in (("another", "2.13", "s"), ("client", "2.14", "s"), ("client", "2.13", "t")):
        assert base != binary_fingerprint(other[0], Versions(), *other[1:])
    prints = []
    for text in ("x = 1", "x = 2"):
        folder = tmp_path / text[-1]
        folder.mkdir()
        (folder / "module.py").write_text(text)
        prints.append(source_fingerprint(folder))
    assert len({*prints, source_fingerprint(tmp_path)}) == 3
