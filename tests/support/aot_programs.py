"""Modules that must fail on a chip, and one that must not: name, text, chip, and the compiler's words."""

from __future__ import annotations

_HBM_ARGUMENTS = """module { func.func public @main(%a: tensor<5000000000xf32>) -> tensor<5000000000xf32> {
  %0 = stablehlo.add %a, %a : tensor<5000000000xf32>
  return %0 : tensor<5000000000xf32> } }"""
_HBM_RESULT = """module { func.func public @main(%a: tensor<65536x16xf32>, %b: tensor<16x65536xf32>)
    -> tensor<65536x65536xf32> {
  %0 = stablehlo.dot_general %a, %b, contracting_dims = [1] x [0]
    : (tensor<65536x16xf32>, tensor<16x65536xf32>) -> tensor<65536x65536xf32>
  return %0 : tensor<65536x65536xf32> } }"""
# 0.8 GB of values; rows of two elements in (8, 128) tiles are 64 times as much.
_LAYOUT = """module { func.func public @main(%a: tensor<100000000x2xf32> {mhlo.layout_mode = "{1,0}"})
    -> tensor<100000000x2xf32> {
  %0 = stablehlo.exponential %a : tensor<100000000x2xf32>
  return %0 : tensor<100000000x2xf32> } }"""
_DTYPE = """module { func.func public @main(%a: tensor<64xcomplex<f64>>) -> tensor<64xcomplex<f64>> {
  %0 = "stablehlo.fft"(%a) {fft_type = #stablehlo<fft_type FFT>, fft_length = array<i64: 64>}
    : (tensor<64xcomplex<f64>>) -> tensor<64xcomplex<f64>>
  return %0 : tensor<64xcomplex<f64>> } }"""
_UNSUPPORTED = """module { func.func public @main(%a: tensor<8x8xf32>) -> tensor<8x8xf32> {
  %0 = stablehlo.custom_call @lapack_spotrf_ffi(%a) : (tensor<8x8xf32>) -> tensor<8x8xf32>
  return %0 : tensor<8x8xf32> } }"""
_DYNAMIC = """module { func.func public @main(%a: tensor<?xf32>) -> tensor<?xf32> {
  %0 = stablehlo.add %a, %a : tensor<?xf32>
  return %0 : tensor<?xf32> } }"""
FITS = """module { func.func public @main(%a: tensor<512x512xbf16>) -> tensor<512x512xbf16> {
  %0 = stablehlo.dot_general %a, %a, contracting_dims = [1] x [0]
    : (tensor<512x512xbf16>, tensor<512x512xbf16>) -> tensor<512x512xbf16>
  return %0 : tensor<512x512xbf16> } }"""

FAILING = {
    "hbm_arguments": (_HBM_ARGUMENTS, "RESOURCE_EXHAUSTED: Ran out of memory on HBM"),
    "hbm_result": (_HBM_RESULT, "RESOURCE_EXHAUSTED: Ran out of memory on HBM"),
    "layout": (_LAYOUT, "RESOURCE_EXHAUSTED: Ran out of memory on HBM"),
    "dtype": (_DTYPE, "Unexpected operand type for FFT: c128"),
    "unsupported_op": (_UNSUPPORTED, "Custom emitter for lapack_spotrf_ffi not found"),
    "dynamic_shape": (_DYNAMIC, "dimension >= 0"),
}

# A Pallas kernel whose window is larger than VMEM; it prints the module for a TPU.
VMEM_KERNEL = """
import jax, jax.numpy as jnp
from jax.experimental import pallas as pl
def kernel(x, o): o[...] = x[...] * 2
def double(x): return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)
shape = jax.ShapeDtypeStruct((8192, 8192), jnp.float32)
print(jax.jit(double).trace(shape).lower(lowering_platforms=("tpu",)).compiler_ir("stablehlo"))
"""
