"""Five networks, each written twice over the same parameters: for PyTorch, and by hand for ``jax.jit``."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.nn import functional as F

__all__ = ["MODELS", "Model"]

Arrays = tuple[np.ndarray[Any, Any], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Model:
    """``draw`` gives parameters and data; the losses take (parameters, data) of their framework."""

    name: str
    what: str
    draw: Callable[[Random], tuple[Arrays, Arrays]]
    torch_loss: Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], torch.Tensor]
    jax_loss: Callable[[Sequence[jax.Array], Sequence[jax.Array]], jax.Array]

    def make(self) -> tuple[Arrays, Arrays]:
        """The same parameters and data every time."""
        return self.draw(Random())


class Random:
    """Random numbers from a fixed seed."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(0)

    def normal(self, *shape: int) -> np.ndarray[Any, Any]:
        """Scaled by the second dimension and those after it (a weight's fan-in)."""
        scale = math.sqrt(math.prod(shape[1:])) if len(shape) > 1 else 10.0
        return (self.generator.standard_normal(shape) / scale).astype(np.float32)

    def data(self, *shape: int) -> np.ndarray[Any, Any]:
        return self.generator.standard_normal(shape).astype(np.float32)

    def integers(self, below: int, *shape: int) -> np.ndarray[Any, Any]:
        return self.generator.integers(0, below, shape)


# ------------------------------------------------------------------------------------------------- a plain MLP


def _mlp(r: Random) -> tuple[Arrays, Arrays]:
    width = 1024
    return (r.normal(width, width), r.normal(width), r.normal(width, width), r.normal(width)), (
        r.data(1024, width),
        r.data(1024, width),
    )


def _mlp_torch(p: Sequence[torch.Tensor], d: Sequence[torch.Tensor]) -> torch.Tensor:
    return F.mse_loss(F.linear(F.linear(d[0], p[0], p[1]).relu(), p[2], p[3]), d[1])


def _mlp_jax(p: Sequence[jax.Array], d: Sequence[jax.Array]) -> jax.Array:
    hidden = jax.nn.relu(d[0] @ p[0].T + p[1])
    return jnp.mean((hidden @ p[2].T + p[3] - d[1]) ** 2)


# --------------------------------------------------------------------------------- residual blocks with norms

_BLOCKS = 6


def _residual(r: Random) -> tuple[Arrays, Arrays]:
    width = 256
    block = [np.ones(width, np.float32), r.normal(width), r.normal(4 * width, width), r.normal(width, 4 * width)]
    return tuple(np.array(p) for _ in range(_BLOCKS) for p in block), (r.data(512, width), r.data(512, width))


def _residual_torch(p: Sequence[torch.Tensor], d: Sequence[torch.Tensor]) -> torch.Tensor:
    x = d[0]
    for k in range(0, 4 * _BLOCKS, 4):
        h = F.layer_norm(x, x.shape[-1:], p[k], p[k + 1])
        x = x + F.linear(F.gelu(F.linear(h, p[k + 2]), approximate="tanh"), p[k + 3])
    return F.mse_loss(x, d[1])


def _norm_jax(x: jax.Array, weight: jax.Array, bias: jax.Array) -> jax.Array:
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * weight + bias


def _residual_jax(p: Sequence[jax.Array], d: Sequence[jax.Array]) -> jax.Array:
    x = d[0]
    for k in range(0, 4 * _BLOCKS, 4):
        x = x + jax.nn.gelu(_norm_jax(x, p[k], p[k + 1]) @ p[k + 2].T, approximate=True) @ p[k + 3].T
    return jnp.mean((x - d[1]) ** 2)


# ------------------------------------------------------------------------------------------------- convolutions


def _convolutional(r: Random) -> tuple[Arrays, Arrays]:
    labels = r.integers(10, 96)
    return (r.normal(32, 3, 3, 3), r.normal(64, 32, 3, 3), r.normal(64, 64, 3, 3), r.normal(10, 64)), (
        r.data(96, 3, 32, 32),
        labels,
    )


def _convolutional_torch(p: Sequence[torch.Tensor], d: Sequence[torch.Tensor]) -> torch.Tensor:
    x = F.conv2d(d[0], p[0], padding=1).relu()
    x = F.conv2d(x, p[1], stride=2, padding=1).relu()
    x = F.conv2d(x, p[2], stride=2, padding=1).relu()
    return F.cross_entropy(F.linear(x.mean((2, 3)), p[3]), d[1])


def _conv_jax(x: jax.Array, weight: jax.Array, stride: int) -> jax.Array:
    return jax.lax.conv_general_dilated(x, weight, (stride, stride), [(1, 1), (1, 1)])


def _convolutional_jax(p: Sequence[jax.Array], d: Sequence[jax.Array]) -> jax.Array:
    x = jax.nn.relu(_conv_jax(d[0], p[0], 1))
    x = jax.nn.relu(_conv_jax(x, p[1], 2))
    x = jax.nn.relu(_conv_jax(x, p[2], 2))
    return _cross_entropy_jax(x.mean((2, 3)) @ p[3].T, d[1])


def _cross_entropy_jax(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1))


# --------------------------------------------------------------------------------------------------- attention

_LAYERS, _HEADS, _WIDTH, _LENGTH, _BATCH, _WORDS = 2, 4, 256, 128, 8, 512


def _transformer(r: Random) -> tuple[Arrays, Arrays]:
    layer = (3 * _WIDTH, _WIDTH), (_WIDTH, _WIDTH), (4 * _WIDTH, _WIDTH), (_WIDTH, 4 * _WIDTH)
    weights = [r.normal(*shape) for _ in range(_LAYERS) for shape in layer]
    words = r.integers(_WORDS, _BATCH, _LENGTH + 1)
    return (r.normal(_WORDS, _WIDTH), *weights), (words[:, :-1].copy(), words[:, 1:].reshape(-1).copy())


def _transformer_torch(p: Sequence[torch.Tensor], d: Sequence[torch.Tensor]) -> torch.Tensor:
    x = F.embedding(d[0], p[0])
    shape = (_BATCH, _LENGTH, _HEADS, _WIDTH // _HEADS)
    for k in range(1, 4 * _LAYERS + 1, 4):
        q, key, v = (t.reshape(shape).transpose(1, 2) for t in F.linear(x, p[k]).chunk(3, -1))
        scores = (q @ key.transpose(-1, -2)) * shape[-1] ** -0.5
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(_BATCH, _LENGTH, _WIDTH)
        x = x + F.linear(mixed, p[k + 1])
        x = x + F.linear(F.linear(x, p[k + 2]).relu(), p[k + 3])
    return F.cross_entropy(F.linear(x, p[0]).reshape(-1, _WORDS), d[1])


def _transformer_jax(p: Sequence[jax.Array], d: Sequence[jax.Array]) -> jax.Array:
    x = p[0][d[0]]
    shape = (_BATCH, _LENGTH, _HEADS, _WIDTH // _HEADS)
    for k in range(1, 4 * _LAYERS + 1, 4):
        q, key, v = (t.reshape(shape).transpose(0, 2, 1, 3) for t in jnp.split(x @ p[k].T, 3, -1))
        scores = jax.nn.softmax(q @ key.transpose(0, 1, 3, 2) * shape[-1] ** -0.5)
        x = x + (scores @ v).transpose(0, 2, 1, 3).reshape(x.shape) @ p[k + 1].T
        x = x + jax.nn.relu(x @ p[k + 2].T) @ p[k + 3].T
    return _cross_entropy_jax((x @ p[0].T).reshape(-1, _WORDS), d[1])


# --------------------------------------------------------------------------------------------------- recurrence

_STEPS = 24


def _recurrent(r: Random) -> tuple[Arrays, Arrays]:
    width = 512
    return (r.normal(width, width), r.normal(width, width), r.normal(width)), (
        r.data(_STEPS, 128, width),
        r.data(128, width),
    )


def _recurrent_torch(p: Sequence[torch.Tensor], d: Sequence[torch.Tensor]) -> torch.Tensor:
    h = torch.zeros_like(d[1])
    for t in range(_STEPS):
        h = (F.linear(d[0][t], p[0]) + F.linear(h, p[1], p[2])).tanh()
    return F.mse_loss(h, d[1])


def _recurrent_jax(p: Sequence[jax.Array], d: Sequence[jax.Array]) -> jax.Array:
    h = jnp.zeros_like(d[1])
    for t in range(_STEPS):
        h = jnp.tanh(d[0][t] @ p[0].T + h @ p[1].T + p[2])
    return jnp.mean((h - d[1]) ** 2)


MODELS = (
    Model("mlp", "a two-layer MLP", _mlp, _mlp_torch, _mlp_jax),
    Model("residual", "six residual blocks with layer norms", _residual, _residual_torch, _residual_jax),
    Model("convnet", "three convolutions", _convolutional, _convolutional_torch, _convolutional_jax),
    Model("transformer", "a two-layer transformer", _transformer, _transformer_torch, _transformer_jax),
    Model("rnn", "24 steps of a recurrent network", _recurrent, _recurrent_torch, _recurrent_jax),
)
