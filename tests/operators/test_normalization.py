"""Softmax, normalisations, losses by class and elementwise losses with a reduction."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from harness import assert_same, check_backward, check_forward, highest
from torch import nn
from torch.nn import functional as F

from emutpu.backend.kernels import Kernel
from emutpu.backend.options import override
from emutpu.backend.registration import registered
from emutpu.backend.storage import cell_of

FORWARD = [
    "softmax",
    "log_softmax",
    "nn.functional.softmin",
    "torch.ops.aten._safe_softmax.default",
    "_softmax_backward_data",
    "nn.functional.nll_loss",
    "nn.functional.cross_entropy",
    "nn.functional.binary_cross_entropy",
    "nn.functional.binary_cross_entropy_with_logits",
    "nn.functional.batch_norm",
    "nn.functional.layer_norm",
    "nn.functional.group_norm",
    "nn.functional.instance_norm",
    "nn.functional.rms_norm",
]
BACKWARD = [name for name in FORWARD if name not in ("nn.functional.layer_norm", "nn.functional.binary_cross_entropy")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FORWARD)
def test_forward(name: str, dtype: torch.dtype) -> None:
    """Equals CPU."""
    check_forward(name, dtype)


@pytest.mark.parametrize("name", BACKWARD)
def test_backward(name: str) -> None:
    """Gradients equal CPU."""
    check_backward(name)


def _trained(module: nn.Module, batches: list[torch.Tensor]) -> tuple[nn.Module, list[torch.Tensor]]:
    outputs = []
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for batch in batches:
        optimizer.zero_grad()
        output = module(batch)
        (output * output.detach().roll(1, -1)).sum().backward()
        optimizer.step()
        outputs.append(output.detach())
    module.eval()
    return module, [*outputs, module(batches[0]).detach()]


NORMS = {
    "batch 1d": (lambda: nn.BatchNorm1d(6), (4, 6)),
    "batch 2d": (lambda: nn.BatchNorm2d(6), (4, 6, 3, 2)),
    "batch without statistics": (lambda: nn.BatchNorm1d(6, track_running_stats=False), (4, 6, 5)),
    "batch, cumulative": (lambda: nn.BatchNorm1d(6, momentum=None), (4, 6)),
    "batch, not affine": (lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6, affine=False)), (4, 6)),
    "layer": (lambda: nn.LayerNorm((3, 2)), (4, 6, 3, 2)),
    "group": (lambda: nn.GroupNorm(3, 6), (4, 6, 3, 2)),
    "instance": (lambda: nn.InstanceNorm1d(6, affine=True, track_running_stats=True), (4, 6, 5)),
}


@pytest.mark.parametrize("name", NORMS)
def test_training(name: str) -> None:
    """Three steps give CPU's outputs, weights, running statistics and counts; then evaluation does."""
    make, shape = NORMS[name]
    torch.manual_seed(0)
    module = make()
    batches = [torch.randn(shape) * 2 + 1 for _ in range(3)]
    with highest():
        actual, outputs = _trained(copy.deepcopy(module).to("tpu"), [b.to("tpu") for b in batches])
    expected, wanted = _trained(module, batches)
    assert_same(outputs, wanted, what=f"{name}: outputs")
    assert_same(dict(actual.state_dict()), dict(expected.state_dict()), what=f"{name}: state")


def test_second_step_compiles_nothing() -> None:
    """The running statistics and the count change, the executables do not."""
    module = nn.Sequential(nn.BatchNorm1d(6), nn.LayerNorm(6)).to("tpu")
    batch, target = torch.randn(4, 6).to("tpu"), torch.tensor([0, 1, 2, 3]).to("tpu")

    def step() -> int:
        F.cross_entropy(module(batch), target).backward()
        return sum(len(kernel.entries) for kernel in registered().values() if isinstance(kernel, Kernel))

    step()
    before = step()
    assert step() == before


def test_layer_norm_gradients() -> None:
    """Against float64 on CPU, with and without weights.

    Of a single element the gradient is a difference of equal numbers times a large one, hence no OpInfo samples.
    """
    torch.manual_seed(0)
    x, weight, bias = torch.randn(3, 4, 6), torch.randn(6), torch.randn(6)
    for parameters in ((weight, bias), (weight, None), (None, None)):
        inputs = [t.clone().requires_grad_() for t in (x, *parameters) if t is not None]
        on_device = [t.detach().to("tpu").requires_grad_() for t in inputs]
        results = []
        for given in (on_device, inputs):
            out = F.layer_norm(given[0], (6,), *given[1:])
            results.append(torch.autograd.grad((out * out * out).sum(), given))
        assert_same(results[0], results[1], what="layer norm", tolerance=(2e-5, 5e-5))


def test_saved_statistics_as_on_the_device() -> None:
    """The device saves float32 statistics for 16-bit inputs, and per-channel ones in evaluation (CPU: none)."""
    x = torch.randn(4, 3, 5, dtype=torch.bfloat16, device="tpu")
    assert torch.native_layer_norm(x, (5,), None, None, 1e-5)[1].dtype == torch.float32
    mean, var = torch.zeros(3, device="tpu"), torch.ones(3, device="tpu")
    _, saved, inverse = torch.native_batch_norm(x.float(), None, None, mean, var, False, 0.1, 1e-5)
    assert saved.shape == inverse.shape == (3,)


def test_evaluation_writes_no_statistics() -> None:
    """In evaluation the running statistics keep their very buffers."""
    module = nn.BatchNorm1d(3).to("tpu").eval()
    cell = cell_of(module.running_mean)
    assert cell is not None
    before = cell.value
    module(torch.randn(2, 3, device="tpu"))
    assert cell.value is before


def test_masked_rows_of_a_softmax() -> None:
    """A row of -inf is NaN in a softmax and zero in the safe one; an infinite score gives NaN."""
    x = torch.tensor([[-math.inf, -math.inf], [-math.inf, 1.0], [math.inf, 1.0]])
    for function in (lambda t: t.softmax(1), lambda t: t.log_softmax(1), lambda t: torch._safe_softmax(t, 1)):
        assert_same(function(x.to("tpu")), function(x), what="masked")
    assert_same(torch.tensor(3.0).to("tpu").softmax(0), torch.tensor(1.0), what="scalar")
    assert_same(torch.zeros(0, 3).to("tpu").softmax(1), torch.zeros(0, 3), what="empty")


def test_softmax_to_float() -> None:
    """softmax(dtype=float32) of half computes and returns float32, and its gradient is half."""
    x = torch.randn(3, 5, dtype=torch.float16)
    on_device, on_host = x.to("tpu").requires_grad_(), x.clone().requires_grad_()
    actual, expected = (t.softmax(-1, dtype=torch.float32) for t in (on_device, on_host))
    assert_same(actual, expected, what="half to float")
    actual[0, 0].backward()
    expected[0, 0].backward()
    assert_same(on_device.grad, on_host.grad, what="gradient")


CROSS_ENTROPIES = {
    "ignored": {"ignore_index": 1},
    "weighted": {"weight": torch.tensor([1.0, 2.0, 0.5, 3.0])},
    "smoothed": {"label_smoothing": 0.2},
    "smoothed, weighted, ignored": {
        "label_smoothing": 0.2,
        "weight": torch.tensor([1.0, 2.0, 0.5, 3.0]),
        "ignore_index": 1,
    },
}


@pytest.mark.parametrize("shape", [(5, 4), (4,), (2, 4, 3, 2)])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", CROSS_ENTROPIES)
def test_cross_entropy(name: str, reduction: str, shape: tuple[int, ...]) -> None:
    """Value and gradient equal CPU for vectors, single samples and images."""
    torch.manual_seed(0)
    options = CROSS_ENTROPIES[name]
    x = torch.randn(shape)
    target = torch.randint(0, 4, shape[:1] + shape[2:] if len(shape) > 1 else ())
    results = []
    for device in ("tpu", "cpu"):
        given = x.detach().to(device).requires_grad_()
        moved = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
        loss = F.cross_entropy(given, target.to(device), reduction=reduction, **moved)
        loss.sum().backward()
        results.append((loss, given.grad))
    assert_same(results[0], results[1], what=name)


def test_cross_entropy_with_probabilities() -> None:
    """Targets may be distributions."""
    torch.manual_seed(0)
    x, target = torch.randn(5, 4), torch.randn(5, 4).softmax(1)
    on_device, on_host = x.to("tpu").requires_grad_(), x.clone().requires_grad_()
    F.cross_entropy(on_device, target.to("tpu"), label_smoothing=0.1).backward()
    F.cross_entropy(on_host, target, label_smoothing=0.1).backward()
    assert_same(on_device.grad, on_host.grad, what="probabilities")


def test_everything_ignored() -> None:
    """Nothing left to average is NaN, as on CPU; summed it is zero; an empty batch likewise."""
    x, target = torch.randn(3, 4), torch.full((3,), -100)
    for reduction in ("mean", "sum"):
        actual = F.cross_entropy(x.to("tpu"), target.to("tpu"), reduction=reduction)
        assert_same(actual, F.cross_entropy(x, target, reduction=reduction), what=reduction)
        actual = F.nll_loss(x[:0].to("tpu"), target[:0].to("tpu"), reduction=reduction)
        assert_same(actual, F.nll_loss(x[:0], target[:0], reduction=reduction), what=f"empty {reduction}")


def test_targets_that_are_no_class() -> None:
    """Without checks the loss is NaN, never a plausible number; with them an IndexError."""
    x, target = torch.randn(3, 4, device="tpu"), torch.tensor([0, 4, 1], device="tpu")
    assert F.nll_loss(x, target).isnan().item()
    with override(bounds_checks=True), pytest.raises(IndexError, match="index 4 is out of bounds"):
        F.nll_loss(x, target)


def test_weight_norm() -> None:
    """A weight-normalised layer gives CPU's result. TorchTPU has no kernel for its gradient (test_every_overload: beyond)."""
    torch.manual_seed(0)
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(5, 3))
    on_device = copy.deepcopy(layer).to("tpu")
    x = torch.randn(4, 5)
    with highest():
        result = on_device(x.to("tpu"))
        assert_same(result, layer(x), what="weight norm")
        with pytest.raises(NotImplementedError, match="_weight_norm_interface_backward' is not implemented for TPU"):
            result.pow(2).sum().backward()


def test_dtypes_of_targets() -> None:
    """Bytes and int64 are class numbers; other dtypes and wrong weights are refused as on CPU."""
    x, target, weight = torch.randn(3, 300), torch.tensor([0, 255, 2]), torch.rand(300)
    on_device = x.to("tpu").requires_grad_()
    loss = F.nll_loss(on_device, target.byte().to("tpu"), weight.to("tpu"))
    assert_same(loss, F.nll_loss(x, target, weight), what="bytes")
    loss.backward()
    assert on_device.grad.count_nonzero().item() == 3
    with pytest.raises(RuntimeError, match="expected target dtype to be Long or Byte"):
        F.nll_loss(on_device, target.int().to("tpu"))
    with pytest.raises(RuntimeError, match="weight tensor should be defined either for all"):
        F.nll_loss(on_device, target.to("tpu"), weight[:5].to("tpu"))


def test_dimension_out_of_range() -> None:
    """Refused in PyTorch's words also where its meta kernel does not look."""
    x = torch.randn(2, 3, device="tpu")
    for call in (x.softmax, x.log_softmax, x.cumsum, x.sort, x.argmax, x.sum, x.logsumexp):
        with pytest.raises(IndexError, match=r"expected to be in range of \[-2, 1\], but got 2"):
            call(2)
