"""Which instructions native code may need, and whether this host has them.

XLA:CPU compiles for the features LLVM finds on the host and writes them into the serialised executable; loading code for a
richer CPU would end in SIGILL. So a host loads code only if it has every feature the code was compiled for, with two
exceptions that keep a fleet of several makers together: features that LLVM uses for intrinsics only, which XLA does not
emit, and features whose few encodings do not occur in the code (a byte search that may err only towards refusing).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable

__all__ = ["LEVELS", "beyond_level", "lacking", "of_kernel"]

LEVELS: dict[str, str] = {"x86-64-v2": "SSE4_2", "x86-64-v3": "AVX2", "x86-64-v4": "AVX512"}
"""Baselines by the x86-64 psABI's names, as the value of ``xla_cpu_max_isa``."""

_ABOVE: dict[str, re.Pattern[str]] = {
    "x86-64-v2": re.compile(r"avx.*|fma|f16c|amx.*"),
    "x86-64-v3": re.compile(r"avx512.*|avx10.*|amx.*"),
    "x86-64-v4": re.compile(r"avx10.*|amx.*"),
}

# Instructions with no pattern in LLVM's selection for generic IR (system, cryptographic, cache control, random numbers,
# carry chains), and preferences that are no instructions.
_NEVER_SELECTED = frozenset(
    [
        "64bit",
        "adx",
        "aes",
        "cldemote",
        "clflushopt",
        "clwb",
        "clzero",
        "cx16",
        "cx8",
        "enqcmd",
        "fsgsbase",
        "fxsr",
        "hreset",
        "invpcid",
        "kl",
        "lwp",
        "mmx",
        "movdir64b",
        "movdiri",
        "mwaitx",
        "pclmul",
        "pconfig",
        "pku",
        "prefetchi",
        "prfchw",
        "ptwrite",
        "raoint",
        "rdpid",
        "rdpru",
        "rdrnd",
        "rdseed",
        "rtm",
        "sahf",
        "serialize",
        "sgx",
        "sha",
        "sha512",
        "shstk",
        "sm3",
        "sm4",
        "tsxldtrk",
        "uintr",
        "usermsr",
        "vaes",
        "vpclmulqdq",
        "waitpkg",
        "wbnoinvd",
        "widekl",
        "x87",
        "xsave",
        "xsavec",
        "xsaveopt",
        "xsaves",
    ]
)
_PREFERENCES = re.compile(r"prefer-.*|fast-.*|slow-.*|false-deps-.*|tuning.*")

_REX = rb"[\x40-\x4f]?"
_ENCODINGS: dict[str, re.Pattern[bytes]] = {
    # EXTRQ, INSERTQ, MOVNTSS, MOVNTSD
    "sse4a": re.compile(rb"[\x66\xf2]" + _REX + rb"\x0f[\x78\x79]|[\xf2\xf3]" + _REX + rb"\x0f\x2b", re.DOTALL),
    # GF2P8MULB, GF2P8AFFINEQB, GF2P8AFFINEINVQB: legacy, VEX (C4) and EVEX (62)
    "gfni": re.compile(
        rb"\x66" + _REX + rb"\x0f(?:\x38\xcf|\x3a[\xce\xcf])"
        rb"|\xc4(?:[\x02\x22\x42\x62\x82\xa2\xc2\xe2].\xcf|[\x03\x23\x43\x63\x83\xa3\xc3\xe3].[\xce\xcf])"
        rb"|\x62.{3}[\xce\xcf]",
        re.DOTALL,
    ),
}

# The kernel's names in /proc/cpuinfo that differ from LLVM's; one may stand for several.
_FROM_KERNEL: dict[str, tuple[str, ...]] = {
    "pni": ("sse3",),
    "sse4_1": ("sse4.1",),
    "sse4_2": ("sse4.2", "crc32"),
    "bmi1": ("bmi",),
    "abm": ("lzcnt",),
    "avx512_bf16": ("avx512bf16",),
    "avx512_vbmi2": ("avx512vbmi2",),
    "avx512_vnni": ("avx512vnni",),
    "avx512_bitalg": ("avx512bitalg",),
    "avx512_vpopcntdq": ("avx512vpopcntdq",),
    "avx512_fp16": ("avx512fp16",),
    "avx512_vp2intersect": ("avx512vp2intersect",),
    "avx_vnni": ("avxvnni",),
    "avx_vnni_int8": ("avxvnniint8",),
    "avx_vnni_int16": ("avxvnniint16",),
    "avx_ifma": ("avxifma",),
    "avx_ne_convert": ("avxneconvert",),
    "amx_tile": ("amx-tile",),
    "amx_int8": ("amx-int8",),
    "amx_bf16": ("amx-bf16",),
    "amx_fp16": ("amx-fp16",),
    "amx_complex": ("amx-complex",),
    "asimd": ("neon", "fp-armv8"),
    "asimddp": ("dotprod",),
    "asimdhp": ("fullfp16",),
    "atomics": ("lse",),
}


@functools.cache
def of_kernel() -> frozenset[str]:
    """LLVM's names of what the kernel says that the host has; empty where it does not say."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            line = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    except OSError:
        return frozenset()
    return frozenset(name for flag in line.partition(":")[2].split() for name in (flag, *_FROM_KERNEL.get(flag, ())))


def lacking(needed: Iterable[str], code: bytes, of_compiler: Callable[[], Iterable[str]]) -> set[str]:
    """The features of ``needed`` that ``code`` may use and this host does not have: code is safe to load if there are none.

    ``of_compiler`` gives what LLVM finds on this host; it is asked only about names that the kernel does not know.
    """
    unknown = {name for name in needed if name not in _NEVER_SELECTED and not _PREFERENCES.fullmatch(name)}
    unknown -= of_kernel()
    if unknown:
        unknown -= set(of_compiler())
    return {name for name in unknown if name not in _ENCODINGS or _ENCODINGS[name].search(code)}


def beyond_level(features: Iterable[str], level: str) -> set[str]:
    """The features above a baseline: the compiler was not limited to it."""
    return {name for name in features if _ABOVE[level].fullmatch(name)}
