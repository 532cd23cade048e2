"""torch.compile: what a call costs beside ``jax.jit``, whole steps, and the way from an FX graph to an executable."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tools.bench.case import Case, Measurement, Plan, alternate, seconds_of
from tools.bench.compilation import Recorder
from tools.bench.launches import wait
from tools.bench.steps import ENVIRONMENT, NATIVE

__all__ = ["CASES"]

_PARAMETERS = 200
_WIDTH = 2048
_BATCH = 64


class _Sum(nn.Module):
    """Adds 200 small parameters to its input: nothing but the cost of a call."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.ones(8)) for _ in range(_PARAMETERS)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = x + weight
        return x


def _call(*, grad: bool) -> Callable[[], Any]:
    compiled: Any = torch.compile(_Sum().to("tpu"))
    x = torch.ones(8).to("tpu")

    def call() -> Any:
        with torch.set_grad_enabled(grad):
            return compiled(x)

    return call


def _jax_call() -> Callable[[], Any]:
    import jax

    def add(weights: list[Any], x: Any) -> Any:
        for weight in weights:
            x = x + weight
        return x

    compiled = jax.jit(add)
    weights, x = [jax.numpy.ones(8) for _ in range(_PARAMETERS)], jax.numpy.ones(8)
    return lambda: compiled(weights, x)


def _calls(plan: Plan, *, grad: bool) -> Measurement:
    ours, theirs = _call(grad=grad), _jax_call()
    return Measurement(alternate(lambda: seconds_of(ours, 10), lambda: seconds_of(theirs, 10), plan.rounds(200), 1e6))


# ------------------------------------------------------------------------------------------------------ steps


def _mlp(device: str) -> Callable[[], Any]:
    """One step: forward and backward compiled, SGD compiled, waiting for the weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.ReLU(), nn.Linear(_WIDTH, _WIDTH)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs, targets = (torch.randn(_BATCH, _WIDTH).to(device) for _ in range(2))

    def forward(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(model(x), y)

    def eager() -> None:
        optimizer.zero_grad()
        forward(inputs, targets).backward()
        optimizer.step()

    if device == "cpu":
        return eager
    loss_of, update = torch.compile(forward), torch.compile(optimizer.step)

    def step() -> None:
        optimizer.zero_grad()
        loss_of(inputs, targets).backward()
        update()
        for parameter in model.parameters():
            wait(parameter)

    return step


def _jax_mlp() -> Callable[[], Any]:
    import jax

    jnp = jax.numpy
    key = jax.random.PRNGKey(0)
    weights = [
        0.02 * jax.random.normal(key, shape) for shape in ((_WIDTH, _WIDTH), (_WIDTH,), (_WIDTH, _WIDTH), (_WIDTH,))
    ]
    x, y = jax.random.normal(key, (_BATCH, _WIDTH)), jax.random.normal(key, (_BATCH, _WIDTH))

    def product(a: Any, b: Any) -> Any:
        # One bf16 pass, as the device computes it at its default precision.
        return jnp.dot(a.astype(jnp.bfloat16), b.astype(jnp.bfloat16), preferred_element_type=jnp.float32)

    def loss(w: list[Any], x: Any, y: Any) -> Any:
        hidden = jnp.maximum(product(x, w[0].T) + w[1], 0)
        return ((product(hidden, w[2].T) + w[3] - y) ** 2).mean()

    def update(w: list[Any], x: Any, y: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(w, x, y)
        return value, [a - 1e-3 * g for a, g in zip(w, gradients, strict=True)]

    compiled = jax.jit(update, donate_argnums=0)
    state = [weights]

    def step() -> None:
        _, state[0] = compiled(state[0], x, y)
        jax.block_until_ready(state[0])

    return step


def _native_mlp() -> Callable[[], Any]:
    """The step in the CPU's arithmetic: float32 products, each in one."""
    step = _mlp("tpu")

    def native() -> None:
        tpu: Any = torch.tpu  # type: ignore[attr-defined]  # made at activation
        with tpu.compiler.custom_compiler_options(NATIVE):
            step()

    return native


def _mlp_steps(plan: Plan, *, jax: bool) -> Measurement:
    ours, theirs = (_mlp("tpu"), _jax_mlp()) if jax else (_native_mlp(), _mlp("cpu"))
    for step in (ours, ours, theirs):
        step()
    # Bursts that outlast OpenMP's spinning after the other side's last step (~20 ms).
    count = 10
    return Measurement(
        alternate(lambda: seconds_of(ours, count), lambda: seconds_of(theirs, count), plan.rounds(15), 1e3)
    )


# ------------------------------------------------------------------------------------------------- compiling


def _graph(depth: int) -> Any:
    """An ATen graph of a small transformer block, as AOTAutograd would hand it over."""
    from torch._dynamo.backends.common import aot_autograd

    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True).to("tpu").eval()

    def forward(x: torch.Tensor) -> torch.Tensor:
        for _ in range(depth):
            x = layer(x)
        return x

    captured: list[Any] = []

    def keep(module: Any, inputs: Any) -> Any:
        captured.append(module)
        return module.forward

    with torch.no_grad():
        compiled = torch.compile(forward, backend=aot_autograd(fw_compiler=keep))
        compiled(torch.zeros(2, 8, 32).to("tpu"))
    return captured[0]


def _to_executable(plan: Plan) -> Measurement:
    from emutpu.backend.compile.assembly import compile_graph
    from emutpu.backend.runtime import runtime

    recorder = Recorder(runtime().client)
    runtime().replace_client(recorder)
    graph = _graph(2)
    compile_graph(graph, "bench_fwd")

    def subject() -> float:
        runtime().forget_executables()
        started = time.perf_counter()
        compile_graph(graph, "bench_fwd")
        return time.perf_counter() - started

    return Measurement(alternate(subject, lambda: seconds_of(recorder.bare(), 1), plan.rounds(12), 1e3))


def _to_executable_subject() -> Callable[[], Any]:
    from emutpu.backend.compile.assembly import compile_graph
    from emutpu.backend.runtime import runtime

    graph = _graph(2)

    def subject() -> None:
        runtime().forget_executables()
        compile_graph(graph, "bench_fwd")

    return subject


CASES = (
    Case(
        "compiled_call_200",
        "compiled call with 200 parameters, no grad",
        "jax.jit with 200 arrays",
        "us",
        3.0,
        lambda plan: _calls(plan, grad=False),
        lambda: _call(grad=False),
    ),
    Case(
        "compiled_call_200_grad",
        "compiled call with 200 parameters that want gradients",
        "jax.jit with 200 arrays",
        "us",
        8.0,
        lambda plan: _calls(plan, grad=True),
        lambda: _call(grad=True),
    ),
    Case(
        "compiled_mlp_jax",
        f"compiled training step of a 2-layer MLP of width {_WIDTH}",
        "jax.jit, written by hand",
        "ms",
        1.25,
        lambda plan: _mlp_steps(plan, jax=True),
        lambda: _mlp("tpu"),
        calls=20,
    ),
    Case(
        "compiled_mlp",
        f"compiled training step of a 2-layer MLP of width {_WIDTH}",
        "CPU eager",
        "ms",
        1.0,
        lambda plan: _mlp_steps(plan, jax=False),
        _native_mlp,
        calls=20,
        environment=ENVIRONMENT,
    ),
    Case(
        "graph_to_executable",
        "from the ATen graph of two transformer blocks to an executable",
        "compile_and_load of the same module",
        "ms",
        1.3,
        _to_executable,
        _to_executable_subject,
        calls=5,
    ),
)
