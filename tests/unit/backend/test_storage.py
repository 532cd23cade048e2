"""Storages: sizes, sharing, saving and loading, moving between devices, one device per process."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from emutpu.backend.cell import MEMORY
from emutpu.backend.storage import cell_of

GIB = 2**30


def _saved(value: object, **options: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(value, file, **options)
    file.seek(0)
    return file


# ------------------------------------------------------------------------------------------------ resizing


def test_freeing_and_growing_again_as_fsdp_does() -> None:
    """``resize_(0)`` gives the memory back and keeps every alias; after growing, writes reach all of them."""
    x = torch.arange(8.0).to("tpu")
    half = x[4:]
    storage = x.untyped_storage()
    before = MEMORY.live
    assert storage.resize_(0) is storage
    assert (storage.nbytes(), storage.size(), len(storage)) == (0, 0, 0)
    assert MEMORY.live == before - 512  # one tile
    assert x.shape == (8,)
    storage.resize_(32)
    assert MEMORY.live == before
    x.copy_(torch.arange(8.0) + 1)
    assert half.tolist() == [5, 6, 7, 8]
    assert x.untyped_storage() is storage


@pytest.mark.parametrize("size", [0, 8, 12, 13])
def test_reading_past_a_shrunk_storage(size: int) -> None:
    """An IndexError names bytes, elements, dtype and offset; what still lies inside reads on."""
    x = torch.arange(4.0).to("tpu")
    x.untyped_storage().resize_(size)
    with pytest.raises(IndexError, match=rf"storage of {size} bytes, got 4 elements of float32 at offset 0"):
        x.cpu()
    with pytest.raises(IndexError, match="add"):
        x + 1
    for count in range(size // 4 + 1):
        assert x[:count].tolist() == list(range(count))


def test_growing_keeps_what_was_there() -> None:
    """Old bytes stay in front, zeros come behind; an alias made before sees writes made after."""
    x = torch.arange(3, dtype=torch.int16).to("tpu")
    alias = x.view(3)
    x.untyped_storage().resize_(12)
    assert x.untyped_storage().nbytes() == 12
    whole = torch.empty(0, dtype=torch.int16, device="tpu").set_(x.untyped_storage(), 0, (6,), (1,))
    assert whole.tolist() == [0, 1, 2, 0, 0, 0]
    whole.add_(7)
    assert alias.tolist() == [7, 8, 9]


def test_tensor_resize_shares_with_old_views() -> None:
    """``resize_`` beyond the storage grows the memory itself: views of before still share it."""
    x = torch.arange(3.0).to("tpu")
    view = x[1:]
    x.resize_(2, 3)
    assert x.flatten()[:3].tolist() == [0, 1, 2]
    x.fill_(5)
    assert view.tolist() == [5, 5]
    x.resize_(2)
    assert (x.shape, x.untyped_storage().nbytes()) == ((2,), 24)


def test_negative_size_is_refused() -> None:
    """A negative size raises."""
    with pytest.raises(RuntimeError):
        torch.ones(2, device="tpu").untyped_storage().resize_(-1)


def test_cpu_storages_resize_as_before() -> None:
    """The patched methods leave CPU storages alone."""
    x = torch.arange(4.0)
    x.untyped_storage().resize_(32)
    assert (x.untyped_storage().nbytes(), len(x.untyped_storage()), x.tolist()) == (32, 32, [0, 1, 2, 3])


# ------------------------------------------------------------------------------------------------ sharing


def test_aliases_share_one_storage() -> None:
    """Views, ``detach`` and ``.data`` share storage and version counter; ``_base`` is the root."""
    x = torch.zeros(2, 3, device="tpu")
    views = [x.t(), x[1], x.view(6), x.detach(), x[:, 1:]]
    assert {v.untyped_storage()._cdata for v in (*views, x.data)} == {x.untyped_storage()._cdata}
    assert all(v._base is x for v in (x.t(), x[1], x.view(6)))
    before = x._version
    views[1].fill_(1)
    assert {v._version for v in (x, *views)} == {before + 1}
    assert x.data._version == 0
    assert x.tolist() == [[0, 0, 0], [1, 1, 1]]


def test_rebinding_data_leaves_old_views() -> None:
    """``x.data = x.data + 1`` gives x new memory; ``x.data.add_(1)`` writes the old (a trap of other backends)."""
    x = torch.zeros(4, device="tpu")
    y = x.view(2, 2)
    x.data = x.data + 1.0
    assert (y.tolist(), x.tolist()) == ([[0, 0], [0, 0]], [1, 1, 1, 1])
    y.data.add_(3.0)
    assert (y.tolist(), x.tolist()) == ([[3, 3], [3, 3]], [1, 1, 1, 1])


def test_set_and_data_between_devices() -> None:
    """``param.data = tensor`` moves a parameter both ways; ``set_`` across devices is refused."""
    p = torch.nn.Parameter(torch.zeros(2))
    p.data = torch.ones(3, device="tpu")
    assert (p.device.type, p.tolist(), p.requires_grad) == ("tpu", [1, 1, 1], True)
    p.data = torch.zeros(1)
    assert (p.device.type, p.tolist()) == ("cpu", [0])
    with pytest.raises(RuntimeError, match="device"):
        torch.zeros(2, device="tpu").set_(torch.zeros(2).untyped_storage())


def test_moving_a_module_keeps_tied_weights() -> None:
    """``Module.to`` keeps Parameters, so what was tied stays tied; the way back too."""
    embedding, head = torch.nn.Embedding(5, 4), torch.nn.Linear(4, 5, bias=False)
    head.weight = embedding.weight
    weight = embedding.weight
    expected = weight.tolist()
    model = torch.nn.Sequential(embedding, head).to("tpu")
    assert model[0].weight is model[1].weight is weight
    assert (weight.device.type, len(list(model.parameters()))) == ("tpu", 1)
    assert weight.tolist() == expected
    model.to("cpu")
    assert model[0].weight is model[1].weight is weight
    assert weight.device.type == "cpu"


def test_kernels_never_return_their_input() -> None:
    """A result is another tensor with memory of its own, also where nothing changes."""
    x = torch.ones(3, device="tpu", requires_grad=True)
    for y in (x.clone(), x + 0, x * 1, x.neg().neg(), x.to(torch.float32, copy=True)):
        assert y is not x
        assert y.untyped_storage()._cdata != x.untyped_storage()._cdata
        (gradient,) = torch.autograd.grad(y, x, torch.full((3,), 2.0, device="tpu"))
        assert gradient.tolist() == [2, 2, 2]


# ------------------------------------------------------------------------------------------------ saving and loading


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("weights_only", [True, False])
def test_save_and_load(zipped: bool, weights_only: bool) -> None:
    """Round trip to the same device, and ``map_location`` both ways; views that shared storage share it again."""
    x = torch.arange(6.0).to("tpu")
    pair = {"tail": x[2:], "head": x[:4], "turned": x.view(2, 3).t()}
    options = {"_use_new_zipfile_serialization": zipped}
    for location, device in (
        (None, "tpu"),
        ("cpu", "cpu"),
        ("tpu", "tpu"),
        ("tpu:0", "tpu"),
        (torch.device("tpu"), "tpu"),
    ):
        loaded = torch.load(_saved(pair, **options), map_location=location, weights_only=weights_only)
        assert {t.device.type for t in loaded.values()} == {device}
        assert {name: t.tolist() for name, t in loaded.items()} == {name: t.tolist() for name, t in pair.items()}
        loaded["tail"].fill_(-1)
        assert loaded["head"].tolist() == [0, 1, -1, -1]
    assert x.tolist() == [0, 1, 2, 3, 4, 5]
    from_cpu = torch.load(
        _saved({"w": torch.arange(3.0)}, **options), map_location={"cpu": "tpu"}, weights_only=weights_only
    )
    assert (from_cpu["w"].device.type, from_cpu["w"].tolist()) == ("tpu", [0, 1, 2])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, torch.int64, torch.complex64])
def test_pickle_and_deepcopy(dtype: torch.dtype) -> None:
    """Both give equal tensors on the device, with memory of their own."""
    x = torch.tensor([0, 1, 2, 3]).to(dtype).to("tpu")
    for y in (pickle.loads(pickle.dumps(x)), copy.deepcopy(x)):
        assert (y.device, y.dtype) == (x.device, dtype)
        assert y.untyped_storage().tolist() == x.untyped_storage().tolist()
        assert cell_of(y) is not cell_of(x)


def test_deepcopy_of_a_module_keeps_sharing() -> None:
    """Tied parameters are tied in the copy, and not with the original."""
    module = torch.nn.Module()
    module.a = torch.nn.Parameter(torch.ones(3, device="tpu"))
    module.b = module.a
    twin = copy.deepcopy(module)
    assert twin.a is twin.b
    with torch.no_grad():
        twin.a.fill_(4)
    assert (twin.b.tolist(), module.a.tolist()) == ([4, 4, 4], [1, 1, 1])


# ------------------------------------------------------------------------------------------------ host memory


def test_pinned_memory() -> None:
    """``pin_memory`` marks a copy and its views, on the CPU only."""
    x = torch.arange(4.0)
    pinned = x.pin_memory()
    assert (x.is_pinned(), pinned.is_pinned(), pinned[1:].is_pinned()) == (False, True, True)
    assert pinned.to("tpu", non_blocking=True).tolist() == [0, 1, 2, 3]
    with pytest.raises(RuntimeError, match="only dense CPU tensors can be pinned"):
        x.to("tpu").pin_memory()


def test_loader_that_pins() -> None:
    """``DataLoader(pin_memory=True)`` pins every batch."""
    loader = DataLoader(TensorDataset(torch.arange(4.0)), batch_size=2, pin_memory=True)
    assert [(batch.is_pinned(), batch.to("tpu").tolist()) for (batch,) in loader] == [(True, [0, 1]), (True, [2, 3])]


def test_copies_in_both_directions_are_copies() -> None:
    """Writing either end never shows at the other."""
    host = torch.arange(64.0)
    device = host.to("tpu", non_blocking=True)
    back = device.to("cpu", non_blocking=True)
    host.fill_(-1)
    back.fill_(-2)
    assert device.tolist() == list(range(64))
    device.fill_(7)
    assert (host[0].item(), back[0].item()) == (-1, -2)


# ------------------------------------------------------------------------------------------------ one device


@pytest.mark.parametrize(
    "use",
    [
        lambda: torch.empty(2, device="tpu:1"),
        lambda: torch.ones(2, device="tpu:1"),
        lambda: torch.tensor([1.0], device="tpu:1"),
        lambda: torch.ones(2).to("tpu:1"),
        lambda: torch.ones(2, device="tpu").to("tpu:1"),
        lambda: torch.UntypedStorage(4, device="tpu:1"),
        lambda: torch.Generator("tpu:1"),
        lambda: torch.accelerator.set_device_index(1),
        lambda: torch.accelerator.device_index(1).__enter__(),
        lambda: torch.accelerator.memory_allocated(1),
    ],
)
def test_other_indices_are_refused(use: Any) -> None:
    """``tpu:1`` can be named but not used."""
    assert torch.device("tpu:1").index == 1
    with pytest.raises((RuntimeError, ValueError), match="index"):
        use()


def test_accelerator_functions() -> None:
    """``torch.accelerator`` names the device and counts its memory."""
    accelerator = torch.accelerator
    assert accelerator.current_accelerator() == torch.device("tpu")
    assert (accelerator.device_count(), accelerator.current_device_index(), accelerator.is_available()) == (1, 0, True)
    accelerator.reset_peak_memory_stats()
    before = accelerator.memory_allocated()
    x = torch.empty(1 << 20, dtype=torch.uint8, device="tpu")
    assert accelerator.memory_allocated() == before + x.numel()
    del x
    assert accelerator.memory_allocated() == before
    assert accelerator.max_memory_allocated() >= before + (1 << 20)
    accelerator.reset_peak_memory_stats()
    assert accelerator.max_memory_allocated() == before
    stats = accelerator.memory_stats()
    assert {f"{kind}_bytes.all.{when}" for kind in ("active", "reserved") for when in ("current", "peak")} <= set(stats)
    free, total = accelerator.get_memory_info()
    assert (total, free) == (16 * GIB, 16 * GIB - before)
    accelerator.empty_cache()
    accelerator.synchronize()
    with accelerator.device_index(0):
        pass
    with pytest.raises(RuntimeError, match="reset_accumulated_memory_stats is not implemented for TPU"):
        accelerator.memory.reset_accumulated_memory_stats()
