"""Modelled costs that are kept with a serialised executable."""

from __future__ import annotations

import hashlib
import json
import struct

import pytest

from emutpu.backend.pjrt import CompileOptions, Effort, InvalidArgument
from emutpu.simulator import _base, _model
from emutpu.simulator.chips import CHIPS, chip
from emutpu.simulator.clients import make_client
from emutpu.simulator.cost import estimate

MODULE = b"""
func.func public @main(%x: tensor<512x256xf32>, %w: tensor<256x256xf32>) -> tensor<512x256xf32> {
  %zero = stablehlo.constant dense<0.0> : tensor<f32>
  %y = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0] : (tensor<512x256xf32>, tensor<256x256xf32>) -> tensor<512x256xf32>
  %sum = stablehlo.reduce(%y init: %zero) applies stablehlo.add across dimensions = [1] : (tensor<512x256xf32>, tensor<f32>) -> tensor<512xf32>
  %wide = stablehlo.broadcast_in_dim %sum, dims = [0] : (tensor<512xf32>) -> tensor<512x256xf32>
  %out = stablehlo.divide %y, %wide : tensor<512x256xf32>
  return %out : tensor<512x256xf32>
}
"""
OPTIONS = CompileOptions(effort=Effort.O1)
EMULATED, BESIDE, LATER = "v5e", ("v5p", "v6e"), "v7"


def _client():
    return make_client("dry_run", cost_chips=BESIDE)


def _refused(*_: object) -> dict[str, _model.Modelled]:
    raise AssertionError("modelled again")


def test_a_loaded_executable_is_not_modelled_again(monkeypatch):
    """It tells the memory and the costs that the compiled one told, of the emulated chip and of those beside."""
    compiled = _client().compile(MODULE, OPTIONS)
    blob = compiled.serialize()
    monkeypatch.setattr(_base, "modelled", _refused)
    loaded = _client().deserialize(blob, OPTIONS)
    assert loaded.memory() == compiled.memory()
    assert loaded.cost() == compiled.cost()
    for name in BESIDE:
        assert loaded.cost_on(name) == compiled.cost_on(name)
    with pytest.raises(AssertionError, match="modelled again"):
        loaded.cost_on(LATER)


@pytest.mark.parametrize("effort", [Effort.O1, Effort.O2])
def test_one_reading_serves_all_chips(effort):
    """What several chips are modelled from is as each would find it alone."""
    level = "eager" if effort is Effort.O1 else "compiled"
    compiled = make_client("dry_run", cost_chips=tuple(CHIPS)).compile(MODULE, CompileOptions(effort=effort))
    for name in (EMULATED, *BESIDE, LATER, "v4"):
        alone = estimate(MODULE, chip(name), level)
        assert compiled.cost_on(name).seconds == alone.expected_seconds
        assert compiled.cost_on(name).flops == alone.executed_flops


def test_a_name_that_is_no_chips():
    """It is refused with the names that are."""
    with pytest.raises(ValueError, match="unknown TPU chip 'v99'"):
        _client().compile(MODULE, OPTIONS).cost_on("v99")


def _with_header(blob: bytes, **changed: object) -> bytes:
    body = blob[40:]
    (length,) = struct.unpack_from("<I", body)
    header = json.dumps(json.loads(body[4 : 4 + length]) | changed).encode()
    body = struct.pack("<I", len(header)) + header + body[4 + length :]
    return blob[:8] + hashlib.sha256(body).digest() + body


def test_another_version_of_the_model(monkeypatch):
    """Its figures are not taken: the module is modelled anew."""
    compiled = _client().compile(MODULE, OPTIONS)
    blob = _with_header(compiled.serialize(), model="another", modelled={EMULATED: [12345, None]})
    assert _client().deserialize(blob, OPTIONS).memory() == compiled.memory()


@pytest.mark.parametrize(
    "bad", [7, [], {EMULATED: 7}, {EMULATED: [1, [1]]}, {EMULATED: [1, ["x"] * 9]}, {EMULATED: [None, None]}]
)
def test_malformed_figures(bad):
    """A blob whose figures have another form is refused as corrupt."""
    blob = _client().compile(MODULE, OPTIONS).serialize()
    with pytest.raises(InvalidArgument, match="malformed"):
        _client().deserialize(_with_header(blob, modelled=bad), OPTIONS)
