"""Programs that meet the known bugs of TorchTPU 0.2.0, one per bug that can be met here: device → plain values."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

__all__ = ["PROGRAMS", "outcome"]

PROGRAMS: dict[str, Callable[[str], Any]] = {}
Program = Callable[[str], Any]


def _meets(quirk: str) -> Callable[[Program], Program]:
    def add(program: Program) -> Program:
        PROGRAMS[quirk] = program
        return program

    return add


def outcome(quirk: str, device: str) -> Any:
    """What the program returns, or the text of the error it raises."""
    try:
        return PROGRAMS[quirk](device)
    except RuntimeError as error:
        return f"raised: {error}"


@_meets("tied-weights")
def _tied(device: str) -> Any:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    model.to(device)
    return model[1].weight is model[0].weight


@_meets("attention-masked-row")
def _masked(device: str) -> Any:
    q = torch.ones(1, 1, 2, 2, device=device)
    v = torch.tensor([[1.0, 2.0], [3.0, 6.0]], device=device).view(1, 1, 2, 2)
    mask = torch.tensor([[True, False], [False, False]], device=device)
    return F.scaled_dot_product_attention(q, q, v, attn_mask=mask)[0, 0].tolist()


@_meets("attention-mask-gradient")
def _trained_mask(device: str) -> Any:
    q = torch.ones(1, 1, 2, 2, device=device)
    v = torch.tensor([[1.0, 0.0], [0.0, 0.0]], device=device).view(1, 1, 2, 2)
    mask = torch.zeros(2, 2, device=device, requires_grad=True)
    F.scaled_dot_product_attention(q, q, v, attn_mask=mask).sum().backward()
    return mask.grad.tolist()


@_meets("ctc-flat-targets")
def _flat_targets(device: str) -> Any:
    scores = torch.full((4, 1, 3), 1 / 3).log().to(device)
    return F.ctc_loss(scores, torch.tensor([1, 2], device=device), [4], [2], reduction="sum").item()


@_meets("pdist-gradient-one-row")
def _one_row(device: str) -> Any:
    row = torch.ones(1, 3, device=device, requires_grad=True)
    F.pdist(row).sum().backward()
    return row.grad.isnan().any().item()


@_meets("multinomial-seed")
def _draws(device: str) -> Any:
    weights, draws = torch.ones(1000, device=device), []
    for _ in range(2):
        torch.manual_seed(4)
        draws.append(torch.multinomial(weights, 20).tolist())
    return draws[0] == draws[1]


@_meets("index-gradient-apart")
def _apart(device: str) -> Any:
    x = torch.zeros(2, 3, 2, 3, device=device, requires_grad=True)
    i = torch.tensor([0, 2], device=device)
    (x[:, i, :, i] * torch.arange(8.0, device=device).view(2, 2, 2)).sum().backward()
    return x.grad.flatten().tolist()


@_meets("grid-gradient")
def _grid(device: str) -> Any:
    image = torch.arange(9.0, device=device).view(1, 1, 3, 3)
    grid = torch.full((1, 1, 1, 2), 0.25, device=device, requires_grad=True)
    F.grid_sample(image, grid, align_corners=True).sum().backward()
    return grid.grad.flatten().tolist()


@_meets("avg-pool1d-gradient")
def _pool(device: str) -> Any:
    x = torch.ones(1, 1, 4, device=device, requires_grad=True)
    y = F.avg_pool1d(x, 2)
    return y.requires_grad, *y.flatten().tolist()


@_meets("replicate-pad-crop-gradient")
def _crop(device: str) -> Any:
    x = torch.ones(1, 1, 2, 4, device=device, requires_grad=True)
    F.pad(x, (-1, 1, 0, 0), mode="replicate").sum().backward()
    return x.grad.flatten().tolist()


@_meets("index-reduce")
def _reduce(device: str) -> Any:
    index = torch.tensor([0, 0], device=device)
    return torch.ones(2, device=device).index_reduce_(0, index, torch.full((2,), 4.0, device=device), "mean").tolist()


@_meets("batch-norm-out-bfloat16")
def _norm_out(device: str) -> Any:
    x, c = torch.tensor([[1.0], [3.0]]).to(device, torch.bfloat16), {"dtype": torch.bfloat16, "device": device}
    out = torch.empty(2, 1, **c), torch.empty(1, **c), torch.empty(1, **c)
    torch.ops.aten.native_batch_norm.out(
        x, None, None, None, None, True, 0.1, 0.0, out=out[0], save_mean=out[1], save_invstd=out[2]
    )
    return out[0].flatten().tolist()


@_meets("scatter-mean-integers")
def _mean(device: str) -> Any:
    index, source = torch.tensor([0, 0, 1], device=device), torch.tensor([-3, -4, 5], device=device)
    return (
        torch.zeros(3, dtype=torch.int64, device=device)
        .scatter_reduce_(0, index, source, "mean", include_self=False)
        .tolist()
    )


@_meets("index-select-scalar-index")
def _select(device: str) -> Any:
    return torch.arange(3.0, device=device).index_select(0, torch.tensor(2, device=device)).tolist()


@_meets("foreach-norm-nan")
def _norms(device: str) -> Any:
    return str(torch._foreach_norm([torch.tensor([2.0, math.nan], device=device)], -math.inf)[0].item())


@_meets("argmax-nan")
def _extremes(device: str) -> Any:
    x = torch.tensor([1.0, math.nan, 3.0], device=device)
    return x.argmax().item(), x.argmin().item()


@_meets("bfloat16-floor")
def _floors(device: str) -> Any:
    x, y = (torch.tensor([v], dtype=torch.bfloat16, device=device) for v in (1015.0, 59.75))
    return (x // y).item(), torch.div(x, y, rounding_mode="floor").item(), torch.remainder(x, y).item()
