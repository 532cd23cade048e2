"""Which XLA flags a module is compiled with on the CPU, and the legalisation that goes with them.

Every figure is from a 2-core machine, jaxlib 0.10.2, in ms to compile / us to run.

=================================  =============  ==============  ================  =================
flags                              add f32[1M]    rsqrt f32[1M]   dot 32x256x256    2-layer train step
=================================  =============  ==============  ================  =================
none                               30 / 290       46 / 1560       57 / 66           1107 / 5810
optimization level 1               29 / 320       36 / 1710       37 / 66           923 / 6020
level 1, no fusion emitters        17 / 330       21 / 260        42 / 57           704 / 6170
the same, library elementwise      7 / 350        (not safe)      8 / 52            (not safe)
level 0                            22 / 530       28 / 2090       30 / 82           369 / 10970
=================================  =============  ==============  ================  =================

(the dot is the one-pass f32 dot of :mod:`simulator.legalize`; torch takes 46 us on one thread). So eager modules (O0,
O1) drop the fusion emitters, fused ones (O2) keep them: on 1336 operations dropping them doubles the time to compile.

*Quick* is level 0 without fusion emitters, without LLVM's expensive passes and in one piece, for every effort. Processor
time to compile the modules of small models: 120 Strict ones of resnet18, Llama and BERT 48.6 ms on average, quick
12.5; nine modules that DeferAndFuse makes of Llama and resnet18 747, quick 46. The code is two to three times slower
(a 32x64x512 linear at HIGHEST 280 us, quick 910; attention of 16 tokens 260, quick 530): after some hundred launches of
a module the full effort has paid for itself. Modules with a tensor of more than 2**22 elements are left at full effort
(with 2**18 the 337 modules of a training step of edgenext_base took 9.1 s, with 2**22 5.3, and all of it 17.4 and 14.5).
"""

from __future__ import annotations

from typing import Any

from emutpu import _jaxlib
from emutpu._jaxlib import ir
from emutpu.backend.pjrt import CompileOptions, Effort, InvalidArgument

from ._modules import WIDEST, ModuleInfo, walk
from ._tpu_flags import tpu_flags
from .convolutions import OWN_THREADS, group_features, on_own_threads, separate_operands, write_padding
from .legalize import Rounding, legalize_precision, passes, plain_dot, widen_bf16_dots
from .rng import unsign_rng

__all__ = ["NATIVE_HIGHEST", "XlaFlags", "prepare"]

XlaFlags = tuple[tuple[str, str], ...]

NATIVE_HIGHEST = "emutpu_native_highest"
"""A compile option of this client: "true" computes HIGHEST by one f32 operation in place of six bf16 passes."""

_LEVEL_1 = ("xla_backend_optimization_level", "1")
_NO_EMITTERS = ("xla_cpu_use_fusion_emitters", "false")
_FLAGS: dict[Effort, XlaFlags] = {
    Effort.O0: (_LEVEL_1, _NO_EMITTERS),
    Effort.O1: (_LEVEL_1, _NO_EMITTERS),
    Effort.O2: (_LEVEL_1,),
    Effort.O3: (),
}
_QUICK: XlaFlags = (
    ("xla_backend_optimization_level", "0"),
    ("xla_llvm_disable_expensive_passes", "true"),
    ("xla_cpu_parallel_codegen_split_count", "1"),
    _NO_EMITTERS,
)
_QUICK_ELEMENTS = 2**22
_LIBRARY: XlaFlags = (
    (
        "xla_cpu_experimental_ynn_fusion_type",
        ",".join(f"LIBRARY_FUSION_TYPE_{kind}" for kind in ("INDIVIDUAL_DOT", "INDIVIDUAL_CONVOLUTION", "ELTWISE")),
    ),
)
_NO_LIBRARY: XlaFlags = (("xla_cpu_experimental_ynn_fusion_type", ""),)
_LIBRARY_RANK = 6
"""Beyond it XLA's matrix library is not asked. Its buffers have eight dimensions, it divides two of them where it sums products
with what was broadcast, and does not look whether there are so many: with seven the process dies of a segmentation fault
(jaxlib 0.10.2), with nine a product raises."""
# The library's max drops NaN, its tanh and rsqrt are approximations, its conversion to u8 saturates otherwise, and it
# elides rounding where a dot becomes multiplications: so it gets single operations that it computes bit for bit like
# XLA's own code, and dots in its own layout.
_LIBRARY_ARITHMETIC = frozenset(f"stablehlo.{op}" for op in ("add", "subtract", "multiply", "divide", "abs"))
_DOT = "stablehlo.dot_general"
_MOVES = frozenset(f"stablehlo.{op}" for op in ("broadcast_in_dim", "constant", "reshape", "transpose"))
_LIBRARY_OPS = _LIBRARY_ARITHMETIC | _MOVES | {_DOT, "func.func", "func.return"}


def prepare(
    module: Any, info: ModuleInfo, options: CompileOptions, *, quick: bool = False, native_highest: bool = False
) -> XlaFlags:
    """Legalise ``module`` in place and choose its flags.

    Excess precision is forbidden unless ``options`` ask for it: XLA would elide roundings that a chip makes. ``quick``
    compiles what is small with little effort whatever ``options`` say; roundings and the order of passes stay as they are.
    ``native_highest`` is for options that do not say it themselves.
    """
    overrides = dict(options.overrides)
    native_highest = _boolean(NATIVE_HIGHEST, overrides.pop(NATIVE_HIGHEST, str(native_highest).lower()))
    unsign_rng(module, info)
    small = info.largest <= WIDEST * _QUICK_ELEMENTS
    flags = _QUICK if quick and small else _FLAGS[options.effort]
    if not _jaxlib.light_emitters():
        flags = tuple(flag for flag in flags if flag != _NO_EMITTERS)
    eager = options.effort in (Effort.O0, Effort.O1)
    if eager and not options.excess_precision and _library_safe(module, info, native_highest):
        legalize_precision(module, info, Rounding.CONVERT, native_highest=native_highest)
        flags += _LIBRARY
    else:
        group_features(module, info)
        write_padding(module, info)
        if info.rank > _LIBRARY_RANK:  # whatever an older jaxlib gives to it by default
            flags += _NO_LIBRARY
        elif on_own_threads(module, info):
            flags += OWN_THREADS
        if not eager:
            separate_operands(module, info)
        widen_bf16_dots(module, info)
        legalize_precision(module, info, Rounding.REDUCE, native_highest=native_highest)
    excess = ("xla_allow_excess_precision", str(options.excess_precision).lower())
    return (*_jaxlib.known_flags((*flags, excess)), *_without_tpu_flags(overrides))


def _without_tpu_flags(overrides: dict[str, str]) -> XlaFlags:
    """What the program set, less what only the TPU compiler has: that decides nothing on a CPU, though it is in the key."""
    given = tuple(overrides.items())
    return tuple(flag for flag in given if flag[0] not in tpu_flags() or _jaxlib.known_flags((flag,)))


def _library_safe(module: Any, info: ModuleInfo, native_highest: bool) -> bool:
    """True for a module of one f32 arithmetic operation, or of one plain one-pass dot with f32 arithmetic around it."""
    single = (None, 1, 6) if native_highest else (None, 1)
    if not _jaxlib.matrix_library() or info.rank > _LIBRARY_RANK or not info.ops <= _LIBRARY_OPS:
        return False
    operations = list(walk(module.operation))
    arithmetic = [operation for operation in operations if operation.name in _LIBRARY_ARITHMETIC]
    dots = [operation for operation in operations if operation.name == _DOT]
    if any(not isinstance(operation.results[0].type.element_type, ir.F32Type) for operation in arithmetic):
        return False
    if dots:
        return len(dots) == 1 and plain_dot(dots[0]) and passes(dots[0]) in single
    return len(arithmetic) == 1


def _boolean(name: str, value: str) -> bool:
    if value not in ("true", "false"):
        raise InvalidArgument(f"{name} is 'true' or 'false', not {value!r}")
    return value == "true"
