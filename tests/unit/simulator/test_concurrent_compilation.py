"""Compilations on several threads at once."""

from __future__ import annotations

import threading
from typing import Any

from emutpu import _jaxlib

_MODULE = """
module @m {
  func.func public @main(%a: tensor<3xi1>) -> tensor<3xi1> {
    %t = stablehlo.constant dense<true> : tensor<3xi1>
    %r = stablehlo.and %a, %t : tensor<3xi1>
    return %r : tensor<3xi1>
  }
}
"""


class _Backend:
    """Keeps what it is asked to compile."""

    def __init__(self) -> None:
        self.modules: list[Any] = []

    def compile_and_load(self, module: Any, devices: Any, options: Any) -> None:
        self.modules.append(module)


def test_no_two_threads_compile_in_one_context() -> None:
    """XLA changes the MLIR context of what it compiles, without the GIL: each thread gives it one that nobody else uses."""
    backend = _Backend()
    module = _jaxlib.read_module(_MODULE)

    def compile_twice() -> None:
        for _ in range(2):
            _jaxlib.compile_module(backend, module, None, None)

    compile_twice()
    thread = threading.Thread(target=compile_twice)
    thread.start()
    thread.join(60)
    here, again, there, _ = (taken.context for taken in backend.modules)
    assert here is again
    assert len({id(context) for context in (_jaxlib.context(), here, there)}) == 3
    assert [str(taken) for taken in backend.modules] == [str(module)] * 4
