"""Why an output is live: every way to hold a tensor is named, and looking changes nothing."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from emutpu.backend.deferred.holders import explain
from emutpu.backend.options import EagerMode, override
from emutpu.backend.storage import cell_of

pytest_plugins = ["tests.support.region_programs"]

Recorded = Callable[[str], dict[str, Any]]

HOLDERS = """
import gc, torch
gc.disable()

class Box:
    pass

class Slots:
    __slots__ = ("held",)

GLOBAL = []

def main():
    x = torch.ones(4).to("tpu")
    local = x * 2
    GLOBAL.append({"deep": (x.sin(),)})
    box = Box(); box.attribute = x.cos()
    slots = Slots(); slots.held = x.tanh()
    closure = (lambda held: lambda: held)(x - 2)
    cycle = Box(); cycle.me = cycle; cycle.held = x * 3
    del cycle
    w = torch.ones(4, requires_grad=True)
    weight = torch.nn.Parameter(w.detach().to("tpu"))
    (weight.exp()).sum().backward()
    saved = weight.sigmoid().sum()
    x.abs().sum().item()

main()
"""


def _by_op(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    found = {}
    for region in document["regions"]:
        for value in region["outputs"]:
            found[region["ops"][value["op"]]["name"].split(".")[1]] = value
    return found


def test_every_kind_of_holder(recorded: Recorded) -> None:
    """Variables, containers, attributes, slots, closures, cycles, gradients, autograd, temporaries."""
    outputs = _by_op(recorded(HOLDERS))
    because = {name: value["live_because"] for name, value in outputs.items()}
    assert "`box.attribute`, in main()" in because["cos"]
    assert "`slots.held`, in main()" in because["tanh"]
    assert "GLOBAL[0]['deep'][0]`" in because["sin"]
    assert "in the closure of `closure`, in main()" in because["sub"]
    assert "saved by SigmoidBackward0 as result for backward" in because["sigmoid"]
    document_kinds = {name: {h["kind"] for h in value["held_by"]} for name, value in outputs.items()}
    assert document_kinds["cos"] == {"attribute"}
    assert document_kinds["sin"] == {"element"}
    assert document_kinds["sub"] == {"closure"}
    assert "saved" in document_kinds["sigmoid"]


def test_a_cycle_and_a_variable_are_told_apart(recorded: Recorded) -> None:
    """A value that only a cycle holds says so, one that a variable holds too names the variable."""
    document = recorded(HOLDERS)
    products = [
        value["held_by"]
        for region in document["regions"]
        for value in region["outputs"]
        if region["ops"][value["op"]]["name"] == "aten.mul.Tensor" and value["live"]
    ]
    kinds = [{h["kind"] for h in holders} for holders in products]
    assert {"variable"} in kinds
    assert {"cycle"} in kinds
    (cycle,) = [holders[0]["text"] for holders in products if holders[0]["kind"] == "cycle"]
    assert "Box" in cycle


def test_gradients_are_named_after_their_parameter(recorded: Recorded) -> None:
    """A gradient that no variable holds is the gradient of something that has a name."""
    document = recorded(HOLDERS)
    texts = [
        h["text"] for r in document["regions"] for o in r["outputs"] for h in o["held_by"] if h["kind"] == "gradient"
    ]
    assert texts == ["gradient of `weight`, in main()"]


def test_parameters_and_optimizer_state_have_their_path(recorded: Recorded) -> None:
    """At any depth of modules; a state of the optimizer says whose it is."""
    text = """
import torch
def main():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Linear(4, 2))).to("tpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        loss = model(torch.ones(3, 4).to("tpu")).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    loss.item()
main()
"""
    held = [o["live_because"] for r in recorded(text)["regions"] for o in r["outputs"] if o["live"]]
    assert "`model.1.1.weight`, in main()" in held
    assert "`optimizer.state[1.1.weight]['momentum_buffer']`, in main()" in held


def test_dead_outputs_name_who_reads_them(recorded: Recorded) -> None:
    """A cut's dead output says which op beyond the cut reads it, and where."""
    text = "import torch\nx = torch.ones(2).to('tpu')\nt = x * 3\na, b = t.sin(), t.cos()\ndel t\nb.cpu()\n"
    first = recorded(text)["regions"][0]["outputs"][0]
    assert not first["live"]
    assert first["live_because"].startswith("nobody holds it, but aten.sin.default at ")
    assert first["live_because"].split(" reads it")[0].endswith("program.py:4")


def test_looking_keeps_nothing_alive() -> None:
    """After a search the tensors of the frames that it read die as they would have."""
    with override(mode=EagerMode.DEFER_AND_FUSE):

        def held() -> weakref.ref[Any]:
            x = torch.ones(2).to("tpu") * 2
            value = cell_of(x).value
            explain({0: value})
            reference = weakref.ref(value)
            del x, value
            assert reference() is None  # while this frame is still running
            return reference

        gc.disable()
        try:
            assert held()() is None
        finally:
            gc.enable()


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="locals() gives a fresh dict from 3.13 on")
def test_looking_leaves_a_users_locals_alone() -> None:
    """A dict that the program got from locals() keeps its entries."""
    with override(mode=EagerMode.DEFER_AND_FUSE):
        x = torch.ones(2).to("tpu") * 2
        mine = locals()
        explain({0: cell_of(x).value})
        assert mine["x"] is x


def test_hooks_of_saved_tensors_are_not_run(recorded: Recorded) -> None:
    """Looking at what autograd saved must not recompute a checkpoint."""
    text = """
import torch
ran = []
def unpack(tensor):
    ran.append(tensor)
    return tensor
x = torch.ones(3, device="tpu", requires_grad=True)
with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
    y = x.exp().sum()
y.item()
assert not ran
"""
    assert recorded(text)["regions"]
