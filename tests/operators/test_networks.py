"""Two small networks trained beside the CPU."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from harness import assert_same, highest
from torch import nn


class _Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 16)
        self.layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.embed(x))


def _convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 4, 3, stride=2, groups=4),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 5),
    )


@pytest.mark.parametrize(("make", "shape"), [(_convolutional, (2, 3, 12, 12)), (_Attends, (2, 5, 6))])
def test_networks_train_as_on_cpu_and_compile_once(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    """Three steps of SGD by hand follow the CPU; from the second on nothing compiles."""
    from emutpu.backend.runtime import runtime

    torch.manual_seed(0)
    module = make()
    twin = copy.deepcopy(module).to("tpu")
    x = torch.randn(shape)
    device_x = x.to("tpu")
    misses = []
    with highest():
        for _ in range(3):
            losses = []
            for network, data in ((module, x), (twin, device_x)):
                network.zero_grad()
                loss = network(data).square().mean()
                loss.backward()
                with torch.no_grad():
                    for p in network.parameters():
                        p.sub_(p.grad, alpha=0.1)
                losses.append(loss.detach())
            assert_same(losses[1], losses[0], what="loss", tolerance=(1e-4, 1e-5))
            misses.append(runtime().cache.misses)
    assert misses[1] == misses[2]
    for (name, p), q in zip(module.named_parameters(), twin.parameters(), strict=True):
        assert_same(q, p, what=name, tolerance=(1e-4, 1e-5))
