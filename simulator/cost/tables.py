"""What kind of operation each name is: one row per operation of StableHLO and CHLO."""

from __future__ import annotations

__all__ = ["COLLECTIVES", "ELEMENTWISE", "FREE", "HEAVY", "LIBRARY", "MOVEMENT", "TRANSCENDENTAL", "TRANSPARENT"]

# Operations XLA's cost analysis counts as transcendental, not as flops.
TRANSCENDENTAL = frozenset(
    [
        "atan2",
        "cbrt",
        "cosine",
        "exponential",
        "exponential_minus_one",
        "log",
        "log_plus_one",
        "logistic",
        "power",
        "rsqrt",
        "sine",
        "sqrt",
        "tan",
        "tanh",
        "erf",
    ]
)
_ARITHMETIC = frozenset(
    [
        "abs",
        "add",
        "and",
        "bitcast_convert",
        "ceil",
        "clamp",
        "compare",
        "complex",
        "conj",
        "convert",
        "count_leading_zeros",
        "divide",
        "floor",
        "imag",
        "is_finite",
        "maximum",
        "minimum",
        "multiply",
        "negate",
        "not",
        "or",
        "popcnt",
        "real",
        "reduce_precision",
        "remainder",
        "round_nearest_afz",
        "round_nearest_even",
        "row_shift",
        "select",
        "shift_left",
        "shift_right_arithmetic",
        "shift_right_logical",
        "sign",
        "subtract",
        "xor",
        "square",
        "is_inf",
        "is_neg_inf",
        "is_pos_inf",
        "next_after",
        "_asin_acos_kernel",
        "constant_like",
    ]
)
# CHLO and StableHLO functions that the compiler expands: flops and transcendentals per element.
LIBRARY: dict[str, tuple[int, int]] = {
    "acos": (5, 2), "acosh": (6, 3), "asin": (5, 2), "asinh": (12, 4), "atan": (12, 0), "atanh": (6, 2),
    "bessel_i1e": (60, 2), "cosh": (4, 2), "digamma": (60, 4), "erf_inv": (40, 2), "erfc": (30, 1), "lgamma": (60, 5),
    "polygamma": (300, 20), "sinh": (6, 3), "zeta": (200, 20),
}  # fmt: skip
ELEMENTWISE = TRANSCENDENTAL | _ARITHMETIC | LIBRARY.keys()
# No arithmetic, but addresses change: fused into loops.
MOVEMENT = frozenset({"concatenate", "copy", "dynamic_slice", "pad", "reverse", "slice", "transpose", "reshape"})
# Cost nothing wherever they stand.
FREE = frozenset(
    {
        "broadcast_in_dim",
        "constant",
        "iota",
        "create_token",
        "after_all",
        "partition_id",
        "replica_id",
        "broadcast",
        "tuple",
        "get_tuple_element",
    }
)
# Dots and convolutions read through these by their dimension numbers.
TRANSPARENT = frozenset({"reshape", "transpose", "slice", "reverse"})
HEAVY = frozenset({"dot_general", "dot", "convolution"})
COLLECTIVES = frozenset(
    {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "collective_permute", "collective_broadcast"}
)
