"""What users of TPU and other PrivateUse1 backends reported, as programs of a device: one row per report.

A program returns plain values that do not depend on the device. ``right`` is the answer that the report's own discussion
gives, an oracle beside CPU PyTorch; ``...`` where only the agreement of the two devices says something.
"""

from __future__ import annotations

import copy
import dataclasses
import io
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

__all__ = ["CASES", "LACKING", "FieldCase"]

Program = Callable[[str], Any]


@dataclasses.dataclass(frozen=True)
class FieldCase:
    """A reported program.

    ``lacks`` is the overload that TorchTPU 0.2.0 has no kernel for, if it fails for that reason.
    """

    name: str
    report: str
    program: Program
    right: Any = ...
    lacks: str | None = None


CASES: list[FieldCase] = []


def _case(report: str, right: Any = ..., *, lacks: str | None = None) -> Callable[[Program], Program]:
    def add(program: Program) -> Program:
        CASES.append(FieldCase(program.__name__.removeprefix("_"), report, program, right, lacks))
        return program

    return add


# ------------------------------------------------------------------------------------------------ modules, optimisers


@_case("torch_tpu#4161", (True, 1))
def _tied_weights(device: str) -> Any:
    embedding = nn.Embedding(6, 3)
    head = nn.Linear(3, 6, bias=False)
    head.weight = embedding.weight
    model = nn.ModuleDict({"embedding": embedding, "head": head}).to(device)
    return model["embedding"].weight is model["head"].weight, sum(1 for _ in model.parameters())


@_case("pytorch/xla#8841", [0, 0, 3, 3, 3, 3, 0, 0])
def _gradient_in_a_bucket(device: str) -> Any:
    bucket = torch.zeros(8, device=device)
    weight = nn.Parameter(torch.ones(4, device=device))
    weight.grad = bucket[2:6]
    (3 * weight).sum().backward()
    return bucket.tolist()


@_case("pytorch/xla#1929", ("torch.bfloat16", "torch.bfloat16"))
def _scaled_activations_stay_bfloat16(device: str) -> Any:
    layer = nn.Linear(3, 2, dtype=torch.bfloat16).to(device)
    y = layer(torch.ones(1, 3, dtype=torch.bfloat16, device=device))
    y *= 0.5
    y.sum().backward()
    return str(y.dtype), str(layer.weight.grad.dtype)


@_case("torch-spyre#1213, torch-rbln#157", ("torch.bfloat16", "torch.float32"))
def _autocast(device: str) -> Any:
    x = torch.eye(2, device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        return str((x @ x).dtype), str((x + x).dtype)


@_case("pytorch/xla#7090", "torch.bfloat16")
def _gelu_of_two_dtypes(device: str) -> Any:
    x = torch.linspace(-1, 1, 4, dtype=torch.bfloat16).to(device).requires_grad_()
    F.gelu(x).float().sum().backward()
    return str(x.grad.dtype)


@_case("pytorch/pytorch#98920, #99886", (True, [0.0, 1.0, 2.0]))
def _saved_and_loaded(device: str) -> Any:
    file = io.BytesIO()
    torch.save({"weight": torch.arange(3.0, device=device)}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)["weight"]
    return loaded.device.type == device, copy.deepcopy(loaded).tolist()


@_case("pytorch/pytorch#165455", ("cpu", [1.0, 1.0]))
def _loaded_elsewhere(device: str) -> Any:
    file = io.BytesIO()
    torch.save(torch.ones(2, device=device), file)
    file.seek(0)
    loaded = torch.load(file, map_location="cpu", weights_only=True)
    return loaded.device.type, loaded.tolist()


# --------------------------------------------------------------------------------------------- losses and attention


@_case("torch_tpu#4143", 1.6864)
def _ctc_with_flat_targets(device: str) -> Any:
    uniform = torch.full((4, 1, 3), 1 / 3).log().to(device)
    targets, lengths = torch.tensor([1, 2], device=device), (torch.tensor([4]), torch.tensor([2]))
    return round(F.ctc_loss(uniform, targets, *(n.to(device) for n in lengths), reduction="sum").item(), 4)


@_case("torch_tpu#4146", [[1.0, 2.0], [0.0, 0.0]])
def _fully_masked_row(device: str) -> Any:
    q = torch.ones(1, 1, 2, 2, device=device)
    v = torch.tensor([[1.0, 2.0], [1.0, 2.0]], device=device).view(1, 1, 2, 2)
    mask = torch.tensor([[True, True], [False, False]], device=device)
    return F.scaled_dot_product_attention(q, q, v, attn_mask=mask)[0, 0].tolist()


@_case("torch_tpu#4147", ((3, 3), True))
def _gradient_of_a_mask(device: str) -> Any:
    q = torch.arange(12.0).sin().view(1, 1, 3, 4).to(device)
    mask = torch.zeros(3, 3, device=device, requires_grad=True)
    F.scaled_dot_product_attention(q, q, q, attn_mask=mask).square().sum().backward()
    return tuple(mask.grad.shape), bool(mask.grad.abs().sum() > 0)


# ------------------------------------------------------------------------------------------------------ randomness


@_case("torch_tpu#4142", True)
def _multinomial_repeats(device: str) -> Any:
    weights, draws = torch.ones(50, device=device), []
    for _ in range(2):
        torch.manual_seed(11)
        draws.append(torch.multinomial(weights, 10).tolist())
    return draws[0] == draws[1]


@_case("pytorch/xla#2092", True)
def _uniform_repeats(device: str) -> Any:
    draws = []
    for _ in range(2):
        torch.manual_seed(5)
        draws.append(torch.empty(6, device=device).uniform_().tolist())
    return draws[0] == draws[1]


@_case("pytorch/xla#1932", (False, True))
def _dropout_masks(device: str) -> Any:
    drop, x, masks = nn.Dropout(0.5), torch.ones(256, device=device), []
    for seeded in (True, False, True):
        if seeded:
            torch.manual_seed(1)
        masks.append(drop(x).tolist())
    return masks[0] == masks[1], masks[0] == masks[2]


@_case("pytorch/xla#8861")
def _moved_random_numbers(device: str) -> Any:
    torch.manual_seed(2)
    return torch.rand(4).to(device).tolist()


# -------------------------------------------------------------------------------------------------------- indexing


@_case("torch_tpu#4160", ((2, 3, 2), [0.0, 3.0, 4.0, 7.0]))
def _trailing_mask(device: str) -> Any:
    x = torch.arange(24.0, device=device).view(2, 3, 2, 2)
    picked = x[:, :, torch.eye(2, dtype=torch.bool, device=device)]
    return tuple(picked.shape), picked.flatten()[:4].tolist()


@_case("torch_tpu#4159", [[0, 3], [1, 2]], lacks="unique_dim")
def _unique_rows(device: str) -> Any:
    return torch.tensor([[1, 2], [0, 3], [1, 2]], device=device).unique(dim=0).tolist()


@_case("pytorch/xla#592", ("torch.uint8", [3, 2]))
def _bytes_keep_their_type(device: str) -> Any:
    picked = torch.tensor([3, 1, 2], dtype=torch.uint8, device=device)[torch.tensor([0, 2], device=device)]
    return str(picked.dtype), picked.tolist()


@_case("pytorch/xla#606", (5, 3, 3))
def _list_in_the_middle(device: str) -> Any:
    return tuple(torch.zeros(5, 7, 3, device=device)[:, [0, 4, 2]].shape)


@_case("pytorch/xla#6508", "IndexError")
def _too_many_indices(device: str) -> Any:
    places = torch.tensor([0, 4, 2, 1], device=device)
    try:
        torch.zeros(5, 3, device=device).index_copy_(0, places, torch.ones(3, 3, device=device))
    except IndexError as error:
        return type(error).__name__
    return "nothing"


@_case("pytorch/xla#2602", [[0.0, 0.0, 3.0, 2.0]])
def _kept_boxes(device: str) -> Any:
    boxes = torch.tensor([[0.0, 0.0, 3.0, 2.0], [1.0, 1.0, 2.0, 2.0]], device=device)
    wide = (boxes[:, 2] - boxes[:, 0] >= 1.2).nonzero().squeeze(1)
    return boxes[wide].tolist()


@_case("pytorch/pytorch#61034", [2, 1, 3, 1, 3])
def _repeats_accumulate(device: str) -> Any:
    x = torch.ones(5, device=device)
    return x.index_put_((torch.tensor([0, 4, 2, 2, 4], device=device),), x.clone(), accumulate=True).tolist()


@_case("tinygrad#10464", [0, 3, 0, 0])
def _one_element(device: str) -> Any:
    weight = torch.zeros(2, 2, 1, 1, device=device)
    weight[0, 1, 0, 0] = 3
    return weight.flatten().tolist()


@_case("torch-spyre#2816", [1, 2, 1, 4])
def _copy_into_one_element(device: str) -> Any:
    x = torch.tensor([1.0, 2.0, 3.0, 4.0], device=device)
    x[2].copy_(torch.ones((), device=device))
    return x.tolist()


# ----------------------------------------------------------------------------------------------------------- views


@_case("pytorch/xla#3392", (0.0, 4.0))
def _rebound_data(device: str) -> Any:
    rebound, written = torch.zeros(4, device=device), torch.zeros(4, device=device)
    views = rebound.view(2, 2), written.view(2, 2)
    rebound.data = rebound.data + 1
    written.data.add_(1)
    return views[0].sum().item(), views[1].sum().item()


@_case("pytorch/xla#3291", [[1, 0, 0, 0]])
def _view_older_than_a_read(device: str) -> Any:
    x = torch.zeros(1, 4, device=device)
    column = x.view(4, 1)
    column.cpu()
    column[0, 0] = 1
    return x.tolist()


@_case("pytorch/xla#7859, tinygrad#17195", ([3, 4], [1, 2, 3, 4], [[3, 4, 5]]))
def _strides_over_a_slice(device: str) -> Any:
    tail = torch.arange(1, 6, device=device)[2:]
    windows = tail.as_strided((2,), (1,)), tail.as_strided((4,), (1,), 0), tail.unsqueeze(0)
    return tuple(w.tolist() for w in windows)


@_case("pytorch/xla#5835, #2238", [[1, 2, 3], [3, 4, 5]])
def _overlapping_windows(device: str) -> Any:
    return torch.arange(1, 6, device=device).as_strided((2, 3), (2, 1)).tolist()


@_case("pytorch/xla#3619", [5, 5, 5, 5, 0, 0, 0, 0, 0])
def _many_writes_through_views(device: str) -> Any:
    x = torch.zeros(3, 3, device=device)
    for _ in range(5):
        x.view(-1)[:4].add_(1)
    return x.flatten().tolist()


@_case("torch-spyre#1470", [[[1, 1, 1], [2, 2, 2]]])
def _expanded_to_the_host(device: str) -> Any:
    return torch.tensor([[[1.0], [2.0]]], device=device).expand(1, 2, 3).cpu().tolist()


@_case("torch-spyre#1861", (0, 64))
def _empty_moves(device: str) -> Any:
    return tuple(torch.empty(0, 64).to(device).shape)


# ------------------------------------------------------------------------------------------------ types and values


@_case("pytorch/xla#3608", "torch.float32")
def _cat_of_two_types(device: str) -> Any:
    return str(torch.cat([torch.ones(2, dtype=torch.int64, device=device), torch.ones(2, device=device)]).dtype)


@_case("pytorch/xla#2419", (1, 1, [3, 2]))
def _ties_and_nan(device: str) -> Any:
    ties, nan, four = ([1.0, 3.0, 3.0], [1.0, math.nan, 3.0], [1.0, 2.0, 3.0, math.nan])
    first, second = (torch.tensor(values, device=device).argmax().item() for values in (ties, nan))
    return first, second, torch.tensor(four, device=device).topk(2).indices.tolist()


@_case("pytorch/xla#8372", True)
def _divided_by_a_constant(device: str) -> Any:
    x = torch.arange(1, 257, dtype=torch.bfloat16, device=device)
    return torch.equal(x / math.sqrt(128), (x.float() / math.sqrt(128)).bfloat16())


# -------------------------------------------------------------------------------------------------------- compile


@_case("torch_tpu#4163", (1, [8.0, 10.0, 12.0, 14.0]))
def _one_graph_for_two_offsets(device: str) -> Any:
    graphs = []

    def backend(graph: torch.fx.GraphModule, example_inputs: list[torch.Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    double = torch.compile(lambda t: t * 2, backend=backend, dynamic=False)
    rows = torch.arange(8.0, device=device).view(2, 4)
    values = [double(row).tolist() for row in rows]
    return len(graphs), values[1]


@_case("torch_tpu#1912", "cpu")
def _compiled_on_the_cpu(device: str) -> Any:
    torch.ones(1, device=device)
    return torch.compile(lambda t: t + 1, backend="eager")(torch.ones(2)).device.type


@_case("inference mode and torch.compile, from CI notes", True)
def _inference_tensor(device: str) -> Any:
    layer = torch.compile(nn.Linear(2, 2).to(device), backend="eager")
    with torch.inference_mode():
        return layer(torch.ones(1, 2, device=device)).is_inference()


LACKING = [case for case in CASES if case.lacks is not None]
