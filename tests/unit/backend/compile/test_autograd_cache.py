"""Compiled graphs in PyTorch's AOTAutograd cache: a second process traces no backward and compiles nothing."""

from __future__ import annotations

import json

PROGRAM = """
    import json
    import torch
    from emutpu.backend.runtime import runtime

    torch.manual_seed(0)
    weight = torch.randn(4, 4).to("tpu").requires_grad_()
    x = torch.arange(12.0, device="tpu").reshape(3, 4)

    def f(x, weight):
        return torch.nn.functional.dropout(x @ weight, 0.5).sin().sum()

    loss = torch.compile(f)(x, weight)
    loss.backward()
    with torch.no_grad():
        shifted = torch.compile(lambda x: x.exp() - 1)(x)
    before = runtime().cache.misses
    counters = torch._dynamo.utils.counters["aot_autograd"]
    names = ("hit", "miss", "saved", "bypass")
    print(json.dumps({
        "numbers": [loss.item(), *weight.grad.flatten().tolist(), *shifted.flatten().tolist()],
        "counts": {name: counters[f"autograd_cache_{name}"] for name in names},
        "modules": [k for k in map(str, runtime().cache.entries())],
    }))
"""


def test_a_second_process_finds_it(passes, tmp_path) -> None:
    """Equal numbers, gradients and draws included; the graphs are saved once and hit then. Off by default."""
    settings = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "EMUTPU_AOT_CACHE": "1"}
    first, second = (json.loads(passes(PROGRAM, **settings).splitlines()[-1]) for _ in range(2))
    assert first["counts"] == {"hit": 0, "miss": 2, "saved": 2, "bypass": 0}
    assert second["counts"] == {"hit": 2, "miss": 0, "saved": 0, "bypass": 0}
    assert first["numbers"] == second["numbers"]
    assert len(second["modules"]) < len(first["modules"])
    del settings["EMUTPU_AOT_CACHE"]
    plain = json.loads(passes(PROGRAM, **settings).splitlines()[-1])
    assert plain["counts"] == {"hit": 0, "miss": 0, "saved": 0, "bypass": 0}
    assert plain["numbers"] == first["numbers"]


def test_options_are_in_the_key(passes, tmp_path) -> None:
    """Another matmul precision is another entry."""
    settings = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "EMUTPU_AOT_CACHE": "1"}
    passes(PROGRAM, **settings)
    other = json.loads(passes(PROGRAM, EMUTPU_PRECISION="highest", **settings).splitlines()[-1])
    assert other["counts"]["hit"] == 0
