"""One call, or more, of every overload that traced models use: taken from PyTorch's op database, or written here.

The database is about public functions. What they call is recorded beneath autograd, the backward pass included.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from harness import opinfo
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from emutpu import _facts

__all__ = ["CALLS", "ELSEWHERE", "ENTRIES", "Call", "calls", "needed", "with_dtype", "without_elements"]

ELSEWHERE = {
    "_scaled_dot_product_flash_attention_for_cpu": "the device's is the fused kernel: test_attention",
    "_scaled_dot_product_flash_attention_for_cpu_backward": "as its forward",
    "mkldnn_rnn_layer": "the device's is beneath nn.LSTM and nn.GRU: test_recurrent",
    "mkldnn_rnn_layer_backward": "as its forward",
    "torchvision.nms": "no op of PyTorch: torchvision's own package is needed",
}
"""Overloads that the device has under other names, and where those are tested."""


_REFUSALS = (RuntimeError, TypeError, ValueError, IndexError)


@dataclasses.dataclass(frozen=True)
class Call:
    """An overload with CPU arguments."""

    op: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def on(self, device: str) -> tuple[Any, Any]:
        """What it returns there, and its arguments afterwards."""

        def move(leaf: Any) -> Any:
            if isinstance(leaf, torch.device):
                return torch.device(device)
            if not isinstance(leaf, Tensor):
                return leaf
            return _strided(leaf, leaf.dtype).copy_(leaf).to(device)

        args, kwargs = tree_map(move, (self.args, self.kwargs))
        return self.op(*args, **kwargs), args


def needed() -> list[str]:
    """Overloads in the histograms of forward passes and of training steps (``add.Tensor``, ``relu``)."""
    names = {*_facts.histogram("model_op_histogram_forward.json"), *_facts.histogram("model_op_histogram_train.json")}
    return sorted(name.removeprefix("aten.").removesuffix(".default") for name in names)


class _Recorder(TorchDispatchMode):
    def __init__(self, wanted: str) -> None:
        super().__init__()
        self.wanted = wanted
        self.found: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func).removeprefix("aten.").removesuffix(".default") != self.wanted:
            return func(*args, **(kwargs or {}))
        kept = tree_map(_kept, (args, kwargs or {}))  # before it writes into them
        result = func(*args, **(kwargs or {}))
        self.found.append(Call(func, tuple(kept[0]), kept[1]))
        return result


def _kept(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return _strided(leaf, leaf.dtype).copy_(leaf.detach())


def _strided(like: Tensor, dtype: torch.dtype) -> Tensor:
    """Memory that lies as ``like`` does, unless its elements share some."""
    dense = 0 not in like.stride() or like.numel() < 2
    return torch.empty_strided(like.shape, like.stride() if dense else torch.empty(like.shape).stride(), dtype=dtype)


@functools.cache
def calls(name: str, limit: int = 4) -> tuple[Call, ...]:
    """The first calls of an overload, all different in their shapes."""
    with _Recorder(name) as recorder:
        for run in _runs(name):
            with contextlib.suppress(*_REFUSALS):  # samples of in-place forms, which do not all broadcast
                run()
            if len(recorder.found) >= 4 * limit:
                break
    distinct = {str(tree_map(_shape, (call.args, call.kwargs))): call for call in reversed(recorder.found)}
    return tuple(itertools.islice(reversed(distinct.values()), limit))


def _shape(leaf: Any) -> Any:
    return (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else leaf


def _runs(name: str) -> Iterator[Callable[[], Any]]:
    torch.manual_seed(0)
    if name in CALLS:
        yield CALLS[name]
        return
    op = opinfo(ENTRIES[name])
    for dtype in (torch.float32, torch.int64):
        if dtype not in op.supported_dtypes("cpu"):
            continue
        differentiable = op.supports_autograd and dtype == torch.float32
        for sample in itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=differentiable), 8):
            yield functools.partial(_forward_and_back, op, sample)
            if op.inplace_variant is not None and not differentiable:
                yield functools.partial(op.inplace_variant, sample.input.clone(), *sample.args, **sample.kwargs)


def _forward_and_back(op: Any, sample: Any) -> None:
    result = op(sample.input, *sample.args, **sample.kwargs)
    results = [t for t in tree_flatten(result)[0] if isinstance(t, Tensor) and t.requires_grad]
    if results:
        torch.autograd.backward(results, [torch.ones_like(t) for t in results])


def with_dtype(call: Call, dtype: torch.dtype) -> Call | None:
    """The same call with another dtype in place of float32 (where it has none: int64); None where it has neither."""
    leaves = [t for t in tree_flatten((call.args, call.kwargs))[0] if isinstance(t, Tensor)]
    present = {t.dtype for t in leaves}
    # An index stays an index: only calls without any float are about their integers.
    old = next((d for d in (torch.float32, torch.int64, torch.bool) if d in present), None)
    if old is None:
        return None

    def cast(leaf: Any) -> Any:
        if leaf is torch.float32 and old == torch.float32:
            return dtype
        if not isinstance(leaf, Tensor) or leaf.dtype != old:
            return leaf
        values = leaf if dtype.is_signed or leaf.dtype == torch.bool else leaf.abs()
        return _strided(leaf, dtype).copy_(values)

    args, kwargs = tree_map(cast, (call.args, call.kwargs))
    return Call(call.op, args, kwargs)


def without_elements(call: Call) -> Iterator[Call]:
    """The same call with one extent taken to 0: wherever it stands, or in one place of all tensors; a number, without tensors."""
    leaves = [t for t in tree_flatten((call.args, call.kwargs))[0] if isinstance(t, Tensor)]
    for place in range(max((t.dim() for t in leaves), default=0)):
        extents = {t.shape[place] for t in leaves if t.dim() > place}
        if len(extents) == 1:
            yield _changed(call, lambda shape, place=place: [0 if at == place else n for at, n in enumerate(shape)])
    for extent in sorted({n for t in leaves for n in t.shape if n}):
        emptied = _changed(call, lambda shape, extent=extent: [0 if n == extent else n for n in shape])
        yield emptied
        sizes = [[0 if n == extent else n for n in a] if _is_sizes(a) else a for a in emptied.args]
        yield Call(call.op, tuple(sizes), emptied.kwargs)
    for index, argument in enumerate(call.args):
        if not leaves and _is_sizes(argument) and argument:
            yield Call(call.op, (*call.args[:index], [0, *argument[1:]], *call.args[index + 1 :]), call.kwargs)
        elif not leaves and type(argument) is int:
            yield Call(call.op, (*call.args[:index], 0, *call.args[index + 1 :]), call.kwargs)


def _changed(call: Call, shape: Callable[[torch.Size], list[int]]) -> Call:
    def empty(leaf: Any) -> Any:
        return leaf.new_empty(shape(leaf.shape)) if isinstance(leaf, Tensor) and leaf.dim() else leaf

    args, kwargs = tree_map(empty, (call.args, call.kwargs))
    return Call(call.op, args, kwargs)


def _is_sizes(argument: Any) -> bool:
    return isinstance(argument, list | tuple) and all(type(n) is int for n in argument)


def _grad(function: Callable[..., Tensor], *tensors: Tensor) -> Callable[[], None]:
    def run() -> None:
        given = [t.clone().requires_grad_() for t in tensors]
        function(*given).sum().backward()

    return run


_ENTRIES = """
H: detach
_softmax_backward_data: _softmax_backward_data
_upsample_bilinear2d_aa: _upsample_bilinear2d_aa _upsample_bilinear2d_aa_backward
abs: abs abs_
acos: acos
add: add.Tensor add_.Tensor
addcdiv: div.Tensor div_.Tensor
addcmul: addcmul mul.Scalar
addmm: addmm
alias_copy: copy_
all: all all.dim
amax: amax
aminmax: aminmax
any: any any.dim
arange: arange.start_step
argmax: argmax
argmin: argmin
as_strided: as_strided as_strided_
baddbmm: baddbmm
bernoulli: bernoulli
bincount: bincount
bitwise_and: bitwise_and.Tensor
bitwise_not: bitwise_not
bitwise_or: bitwise_or.Tensor bitwise_or_.Tensor
bmm: bmm
bucketize: bucketize.Tensor
cat: cat
ceil: ceil
clamp: clamp.Tensor
clone: clone
combinations: arange
constant_pad_nd: constant_pad_nd
corrcoef: clamp
cos: cos
cov: le.Scalar ne.Scalar
cummax: cummax
cummin: cummin
cumprod: relu_ scatter_.value
cumsum: cumsum
div.floor_rounding: div.Tensor_mode
empty: empty.memory_format
empty_like: empty_like
eq: eq.Tensor
erf: erf pow.Tensor_Scalar
exp: exp
expand: expand
expm1: expm1
exponential: exponential_
eye: eye eye.m
fft.hfft: _fft_c2r
fill: fill_.Scalar
flip: flip
floor: floor
floor_divide: floor_divide floor_divide_.Tensor
full: full
full_like: full_like
gather: gather
ge: ge.Tensor
grid_sampler_2d: grid_sampler_2d grid_sampler_2d_backward
gt: gt.Tensor
histc: histc
index_add: index_add index_add_
index_copy: index_copy_
index_put: index.Tensor index_put index_put_
index_select: index_select
isin: isin.Tensor_Tensor
isnan: isnan
item: _local_scalar_dense
kron: _unsafe_view
ldexp: pow.Scalar
le: le.Tensor
linspace: linspace
log: log
log1p: log1p
log2: log2
log_softmax: _log_softmax _log_softmax_backward_data
logaddexp: add.Scalar
logical_and: logical_and logical_and_
logical_not: logical_not
logical_or: logical_or logical_or_
logit: logit
logsumexp: logsumexp
lt: lt.Tensor
lu: linalg_solve_triangular
masked.std: lift_fresh
masked_fill: masked_fill.Scalar masked_fill.Tensor masked_fill_.Scalar
masked_scatter: masked_scatter masked_scatter_backward
max.reduction_no_dim: max
max.reduction_with_dim: max.dim
max_pool2d_with_indices_backward: max_pool2d_with_indices max_pool2d_with_indices_backward
maximum: maximum
mean: mean mean.dim
min.reduction_no_dim: min
min.reduction_with_dim: min.dim
minimum: minimum
mm: mm
mul: mul.Tensor mul_.Tensor
multinomial: multinomial
nan_to_num: nan_to_num
nanquantile: lt.Scalar
native_batch_norm: native_batch_norm native_batch_norm_backward
native_group_norm: clamp_min native_group_norm
native_layer_norm: native_layer_norm native_layer_norm_backward
ne: ne.Tensor
neg: neg
new_empty: new_empty
new_empty_strided: new_empty_strided
new_full: new_full
new_ones: new_ones
new_zeros: new_zeros
nn.functional.adaptive_max_pool2d: adaptive_max_pool2d
nn.functional.avg_pool2d: avg_pool2d avg_pool2d_backward
nn.functional.avg_pool3d: avg_pool3d
nn.functional.binary_cross_entropy_with_logits: binary_cross_entropy_with_logits
nn.functional.conv1d: convolution convolution_backward
nn.functional.dropout: bernoulli_.float div_.Scalar
nn.functional.elu: elu elu_backward
nn.functional.embedding: embedding embedding_dense_backward
nn.functional.fractional_max_pool2d: rand
nn.functional.gaussian_nll_loss: clamp_
nn.functional.gelu: gelu gelu_backward
nn.functional.glu: glu glu_backward
nn.functional.group_norm: native_group_norm_backward
nn.functional.hardsigmoid: hardsigmoid hardsigmoid_backward
nn.functional.hardswish: hardswish hardswish_backward
nn.functional.hardtanh: hardtanh hardtanh_backward
nn.functional.hinge_embedding_loss: ge.Scalar
nn.functional.instance_norm: alias
nn.functional.interpolate.area: _adaptive_avg_pool2d
nn.functional.interpolate.bicubic: upsample_bicubic2d upsample_bicubic2d_backward
nn.functional.interpolate.linear: upsample_linear1d upsample_linear1d_backward
nn.functional.kl_div: div.Scalar
nn.functional.leaky_relu: leaky_relu leaky_relu_backward
nn.functional.logsigmoid: log_sigmoid_backward log_sigmoid_forward
nn.functional.mse_loss: mse_loss mse_loss_backward
nn.functional.pad.replicate: replication_pad1d replication_pad1d_backward
nn.functional.pixel_shuffle: pixel_shuffle
nn.functional.pixel_unshuffle: pixel_unshuffle
nn.functional.prelu: _prelu_kernel _prelu_kernel_backward
nn.functional.relu: relu
nn.functional.rms_norm: add_.Scalar
nn.functional.silu: silu silu_backward
nn.functional.softplus: softplus softplus_backward
nn.functional.threshold: threshold_backward
nn.functional.unfold: col2im im2col
nn.functional.upsample_bilinear: upsample_bilinear2d upsample_bilinear2d_backward
nn.functional.upsample_nearest: upsample_nearest2d upsample_nearest2d_backward
nonzero: nonzero
norm: linalg_vector_norm
ones: ones
ones_like: ones_like
permute: permute
polar: _conj polar
pow: eq.Scalar pow.Tensor_Tensor
prod: prod.dim_int
qr: mul_.Scalar
randint: randint.low
randn: randn
randn_like: randn_like
reciprocal: reciprocal
remainder: remainder.Tensor
renorm: gt.Scalar
repeat: repeat
repeat_interleave: repeat_interleave.Tensor
roll: roll
round: round round_
rsqrt: rsqrt
scalar_tensor: scalar_tensor
scatter: scatter.src scatter.value scatter_.src
scatter_add: scatter_add scatter_add_
scatter_reduce.sum: scatter_reduce.two
searchsorted: searchsorted.Tensor
select: select.int select_backward
sgn: sgn
sigmoid: sigmoid sigmoid_ sigmoid_backward
sign: sign
signal.windows.bartlett: rsub.Scalar
sin: sin
slice: slice.Tensor slice_backward
softmax: _softmax
sort: sort
split: split.Tensor
split_with_sizes: split_with_sizes
sqrt: sqrt
squeeze: squeeze squeeze.dim
stack: stack
std: std.correction
stft: _fft_c2c _fft_r2c arange.start reflection_pad1d reflection_pad1d_backward squeeze_.dim view_as_real
sub: sub.Tensor sub_.Tensor
sum: sum sum.dim_IntList
t: t
take_along_dim: remainder.Scalar
tanh: tanh tanh_ tanh_backward
to: _to_copy
topk: topk
torch.ops.aten._safe_softmax.default: _safe_softmax
transpose: transpose.int
tril: tril
triu: triu
unbind: unbind.int
unfold: unfold unfold_backward
uniform: uniform_
unique: _unique2
unique_consecutive: unique_consecutive
unsafe_split: unsafe_split.Tensor
unsqueeze: unsqueeze unsqueeze_
var: var.correction
view: view
view_as_complex: view_as_complex
where: where.self
xlogy: xlogy.Tensor
zero_: zero_
zeros: zeros
zeros_like: zeros_like
"""
ENTRIES = {
    name: entry for entry, _, names in (line.partition(": ") for line in _ENTRIES.split("\n")) for name in names.split()
}
"""Overload -> the entry of the database whose samples call it."""


def _image(*shape: int) -> Tensor:
    return torch.linspace(-1, 1, torch.Size(shape).numel()).reshape(shape)


aten = torch.ops.aten
CALLS: dict[str, Callable[[], Any]] = {
    "_euclidean_dist": lambda: torch.cdist(_image(30, 4), _image(28, 4)),
    "_grouped_mm": lambda: torch._grouped_mm(
        _image(32, 16).bfloat16(), _image(2, 16, 16).bfloat16(), offs=torch.tensor([16, 32], dtype=torch.int32)
    ),
    "_is_all_true": lambda: aten._is_all_true(torch.tensor([True, False])),
    "_native_multi_head_attention": lambda: aten._native_multi_head_attention(
        *[_image(2, 3, 8)] * 3, 8, 2, _image(24, 8), _image(24), _image(8, 8), _image(8)
    ),
    "_upsample_nearest_exact2d": lambda: F.interpolate(_image(1, 2, 3, 4), scale_factor=2, mode="nearest-exact"),
    "_upsample_bicubic2d_aa": lambda: F.interpolate(_image(1, 2, 6, 8), size=(3, 4), mode="bicubic", antialias=True),
    "_upsample_bicubic2d_aa_backward": _grad(
        lambda x: F.interpolate(x, size=(3, 4), mode="bicubic", antialias=True), _image(1, 2, 6, 8)
    ),
    "_weight_norm_interface_backward": _grad(lambda v, g: torch._weight_norm(v, g, 0), _image(3, 4) + 3, _image(3, 1)),
    "_weight_norm_interface": _grad(lambda v, g: torch._weight_norm(v, g, 0), _image(3, 4) + 3, _image(3, 1)),
    "_unique2": lambda: torch.unique(_image(3, 4), return_inverse=True, return_counts=True),
    "amax": lambda: torch.amax(_image(3, 4), 1),
    "argmax": lambda: torch.argmax(_image(3, 4), 1),
    "argmin": lambda: torch.argmin(_image(3, 4), 1),
    "histc": lambda: torch.histc(_image(3, 4), 4, -1, 1),
    "le.Scalar": lambda: _image(3, 4) <= 0.5,
    "native_group_norm": lambda: F.group_norm(_image(2, 4, 3), 2),
    "ne.Scalar": lambda: _image(3, 4) != 1,
    "unique_consecutive": lambda: torch.unique_consecutive(torch.tensor([1.0, 1, 2, 1])),
    "bernoulli.p": lambda: aten.bernoulli.p(_image(3, 4), 0.5),
    "fill_.Tensor": lambda: _image(3, 4).fill_(torch.tensor(2.0)),
    "fmod.Scalar": lambda: torch.fmod(_image(3, 4) * 9, 2.5),
    "hardswish_": lambda: F.hardswish(_image(3, 4), inplace=True),
    "hardtanh_": lambda: F.hardtanh(_image(3, 4), inplace=True),
    "leaky_relu_": lambda: F.leaky_relu(_image(3, 4), 0.1, inplace=True),
    "sigmoid_": lambda: _image(3, 4).sigmoid_(),
    "tanh_": lambda: _image(3, 4).tanh_(),
    "silu_": lambda: F.silu(_image(3, 4), inplace=True),
    "rand_like": lambda: torch.rand_like(_image(3, 4)),
    "randn.generator": lambda: torch.randn(3, 4, generator=None),
    "reflection_pad2d": lambda: F.pad(_image(1, 2, 3, 4), (1, 2, 0, 1), mode="reflect"),
    "reflection_pad2d_backward": _grad(lambda x: F.pad(x, (1, 2, 0, 1), mode="reflect"), _image(1, 2, 3, 4)),
    "reflection_pad3d": lambda: F.pad(_image(1, 2, 3, 4, 5), (1, 2, 0, 1, 1, 1), mode="reflect"),
    "replication_pad3d": lambda: F.pad(_image(1, 2, 3, 4, 5), (1, 2, 0, 1, 1, 1), mode="replicate"),
    "upsample_nearest3d": lambda: F.interpolate(_image(1, 2, 3, 4, 5), scale_factor=2),
}
