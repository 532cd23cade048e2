"""Image networks become narrow and short without becoming other networks."""

import copy
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from emutpu.conformance import building, full_size, inputs, narrowing, weights
from emutpu.conformance.manifest import programs
from emutpu.conformance.torchvision_schemas import declare
from tools import image_shrinking

declare()


def network(width: int, depth: int, groups: int) -> nn.Sequential:
    """Images through a stem, ``depth`` blocks with groups and one that doubles the channels, to ten numbers."""

    def block(ins: int, outs: int) -> nn.Sequential:
        mixing = nn.Conv2d(ins, outs, 3, padding=1, groups=groups)
        each = nn.Conv2d(outs, outs, 5, padding=2, groups=outs)
        return nn.Sequential(mixing, nn.BatchNorm2d(outs), each, nn.ReLU())

    stem = nn.Conv2d(3, width, 3, stride=2, padding=1)
    blocks = nn.Sequential(*[block(width, width) for _ in range(depth)], block(width, 2 * width))
    return nn.Sequential(stem, blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, 10))


def convolutions(model: nn.Module) -> list[nn.Conv2d]:
    """In their order."""
    return [module for module in model.modules() if isinstance(module, nn.Conv2d)]


@settings(max_examples=25, deadline=None)
@given(width=st.sampled_from([16, 32, 64, 96, 160, 256]), depth=st.integers(1, 6), groups=st.sampled_from([1, 2, 4]))
def test_a_narrow_network_is_the_same_one(width, depth, groups):
    """Ratios of widths, kernels, and groups stay; depth is at most two; a narrow network answers and has gradients."""
    model = network(width, depth, groups)
    whole = copy.deepcopy(model)
    narrowing.shrink(model, narrowing.NARROW)
    by = narrowing.factor(whole)
    assert len(model[1]) == min(depth, 2) + 1
    assert model[0].in_channels == 3
    assert model[4].out_features == 10
    for small, large in ((model[0], whole[0]), (model[1][0][0], whole[1][0][0]), (model[1][-1][0], whole[1][-1][0])):
        assert small.out_channels * by == large.out_channels
        assert small.kernel_size == large.kernel_size
        assert small.groups == large.groups
    each = model[1][-1][2]
    assert each.groups == each.in_channels == each.out_channels > 1
    model(torch.randn(2, 3, 16, 16)).square().mean().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize(("width", "by"), [(16, 1), (32, 2), (64, 4), (96, 4), (256, 16), (1024, 16)])
def test_the_narrowest_keeps_sixteen(width, by):
    """A power of two, at most sixteen."""
    assert narrowing.factor(network(width, 1, 1)) == by


def test_groups_of_channels_are_no_single_channels():
    """32 groups of four channels, of which an eighth of the channels are left, become groups of two."""
    model = nn.Sequential(nn.Conv2d(3, 128, 1), nn.Conv2d(128, 128, 3, groups=32), nn.Conv2d(128, 128, 3, groups=128))
    narrowing.narrow(model, 8)
    assert [(c.in_channels, c.groups) for c in model] == [(3, 1), (16, 8), (16, 16)]


def test_other_kinds_change_nothing():
    """A program of another kind is built as the library has it."""
    model = network(64, 5, 1)
    before = copy.deepcopy(model).state_dict()
    narrowing.shrink(model, "image")
    assert {name: value.shape for name, value in model.state_dict().items()} == {n: v.shape for n, v in before.items()}


def test_short_keeps_the_channels():
    """Only what repeats goes."""
    model = network(64, 5, 1)
    narrowing.shrink(model, narrowing.SHORT)
    assert len(model[1]) == 3
    assert {c.out_channels for c in convolutions(model)} == {64, 128}


def test_patterns_of_blocks_stay():
    """Of blocks that alternate one of each is kept, whatever their settings are named that are no modules."""

    class Block(nn.Module):
        def __init__(self, shift: int) -> None:
            super().__init__()
            self.shift = shift
            self.proj = nn.Linear(4, 4)

    model = nn.ModuleList([Block(place % 2) for place in range(6)])
    narrowing.shorten(model)
    assert [block.shift for block in model] == [0, 1]


def test_what_counts_its_lists_keeps_them():
    """Its own lists only: those of its parts that are chains become short."""

    class HighResolutionNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.branches = nn.ModuleList([nn.Sequential(*[nn.Linear(4, 4) for _ in range(5)]) for _ in range(3)])

    model = HighResolutionNet()
    narrowing.shorten(model)
    assert [len(branch) for branch in model.branches] == [2, 2, 2]


def test_places_of_answers_move():
    """An encoder that gives the answers of some of its modules gives those of the last of each run."""

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            widths = (4, 8, 8, 8, 8, 12, 12, 12)
            self.blocks = nn.ModuleList(nn.Linear(ins, outs) for ins, outs in itertools.pairwise(widths))
            self._out_indexes = [3, 6]

    model = Encoder()
    narrowing.shorten(model)
    assert [(m.in_features, m.out_features) for m in model.blocks] == [(4, 8), (8, 8), (8, 12), (12, 12)]
    assert model._out_indexes == [1, 3]


def test_heads_divide_what_is_left():
    """The factor is smaller where heads would not divide the channels any more."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.num_heads = 12
            self.proj = nn.Linear(96, 96)

    model = nn.Sequential(nn.Linear(48, 96), Attention())
    assert narrowing.narrow(model) == 4  # eight would leave the heads a channel each
    assert (model[1].num_heads, model[1].proj.in_features) == (12, 24)


# An architecture of each way to be built: chains, growing channels, attention, splits, lists that are counted.
TIMM = ("resnet50", "densenet121", "swin_tiny_patch4_window7_224", "hrnet_w18_small", "maxvit_nano_rw_256", "dpn68")
OTHERS = (
    "torchvision/regnet_y_400mf", "torchvision/vit_b_16", "torchvision/shufflenet_v2_x2_0",
    "segmentation_models_pytorch/unet-efficientnet-b0", "segmentation_models_pytorch/unet-vgg16",
)  # fmt: skip


@pytest.mark.parametrize("name", [*(f"timm/{name}" for name in TIMM), *OTHERS])
def test_small_networks_learn(name):
    """Built twice alike, small, finite, and every parameter that a forward uses has a gradient."""
    program = programs()[name]
    pytest.importorskip(program.builder, reason="the library of this program is not installed")
    assert program.shrink in narrowing.KINDS
    first, second = building.build(program), building.build(program)
    assert all(
        torch.equal(one, other) for one, other in zip(first.model.parameters(), second.model.parameters(), strict=True)
    )
    assert sum(parameter.numel() for parameter in first.model.parameters()) < 12e6
    loss = building.loss_of(first.model(**first.inputs))
    assert loss is not None
    assert bool(loss.isfinite())
    loss.backward()
    assert sum(p.grad is not None for p in first.model.parameters()) > 0.9 * len(list(first.model.parameters()))


def test_full_size_is_the_whole_network():
    """The estimate of memory knows nothing of narrowing."""
    pytest.importorskip("timm", reason="the library is not installed")
    program = programs()["timm/resnet50"]
    with torch.device("meta"):
        whole = full_size._timm(program).model
    assert sum(parameter.numel() for parameter in whole.parameters()) == 25_557_032
    small = building.build(program, drawn=False).model
    assert len(convolutions(whole)) == 53
    assert len(convolutions(small)) == 1 + 4 * (2 * 3 + 1)


def test_large_weights_are_not_written():
    """What will not stay is left alone by the libraries' initialisation, also through ``data``; small ones are filled."""
    with weights.Undrawn(filled=False):
        layer = nn.Linear(512, 512)
        with torch.no_grad():
            layer.weight.zero_()
        nn.init.normal_(layer.weight)
        layer.weight.data.normal_()
        nn.init.trunc_normal_(layer.weight, std=0.02)
    assert not layer.weight.any()
    weights.fill(layer)
    assert layer.weight.unique().tolist() == pytest.approx([0.02])


def test_every_reason_is_of_a_program():
    """Tables name what there is, a side that differs from the usual one, and say why."""
    names = [
        f"{p.builder}/{(p.options.get('config') or {}).get('encoder_name') or p.architecture}"
        for p in programs().values()
    ]
    names += list(programs())
    for start in (*image_shrinking.SHORT, *image_shrinking.SIDES):
        assert any(name.startswith(start) for name in names), start
    for part in image_shrinking.SMALLER:
        assert any(part in name for name in names), part
    assert all(side != inputs.SIDE and why for side, why in image_shrinking.SIDES.values())
    assert all(image_shrinking.SHORT.values())


@pytest.mark.timeout(60)
@pytest.mark.parametrize("bound", [2.0, 0.001])
def test_what_is_drawn_until_it_fits_fits(bound: float) -> None:
    """``trunc_normal_`` draws large matrices again and again until they are within its bounds; nothing is drawn here."""
    weight = nn.Parameter(torch.full((512, 512), 100.0))
    with weights.Undrawn(filled=False), torch.no_grad():
        nn.init.trunc_normal_(weight, std=0.02, a=-bound, b=bound)
    assert weight.shape == (512, 512)
