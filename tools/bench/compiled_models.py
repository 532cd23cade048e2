"""A BERT-like encoder and ResNet-18, each written twice over the same parameters: for PyTorch, and by hand for ``jax.jit``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.nn import functional as F

from tools.bench.step_models import Arrays, Model, Random

__all__ = ["MODELS"]

# ------------------------------------------------------------------------------------------------------- BERT

_LAYERS, _HEADS, _WIDTH, _LENGTH, _BATCH, _WORDS = 2, 4, 256, 128, 8, 1024
_EPSILON = 1e-5


def _affine(r: Random, rows: int, columns: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    return r.normal(rows, columns), r.normal(rows)


def _norm(width: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    return np.ones(width, np.float32), np.zeros(width, np.float32)


def _bert(r: Random) -> tuple[Arrays, Arrays]:
    layers = [
        array
        for _ in range(_LAYERS)
        for array in (
            *_affine(r, 3 * _WIDTH, _WIDTH),
            *_affine(r, _WIDTH, _WIDTH),
            *_norm(_WIDTH),
            *_affine(r, 4 * _WIDTH, _WIDTH),
            *_affine(r, _WIDTH, 4 * _WIDTH),
            *_norm(_WIDTH),
        )
    ]
    words = r.integers(_WORDS, _BATCH, _LENGTH)
    parameters = (r.normal(_WORDS, _WIDTH), r.normal(_LENGTH, _WIDTH), *_norm(_WIDTH), *layers)
    return parameters, (words, r.integers(_WORDS, _BATCH * _LENGTH))


def _bert_torch(p: Sequence[torch.Tensor], d: Sequence[torch.Tensor]) -> torch.Tensor:
    given = iter(p)
    words, places = next(given), next(given)
    x = F.layer_norm(F.embedding(d[0], words) + places, (_WIDTH,), next(given), next(given))
    for _ in range(_LAYERS):
        q, k, v = (
            t.reshape(_BATCH, _LENGTH, _HEADS, -1).transpose(1, 2)
            for t in F.linear(x, next(given), next(given)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(_BATCH, _LENGTH, _WIDTH)
        x = F.layer_norm(x + F.linear(mixed, next(given), next(given)), (_WIDTH,), next(given), next(given))
        wide = F.gelu(F.linear(x, next(given), next(given)))
        x = F.layer_norm(x + F.linear(wide, next(given), next(given)), (_WIDTH,), next(given), next(given))
    return F.cross_entropy(F.linear(x, words).reshape(-1, _WORDS), d[1])


def _bert_jax(p: Sequence[jax.Array], d: Sequence[jax.Array]) -> jax.Array:
    given: Iterator[jax.Array] = iter(p)

    def norm(x: jax.Array) -> jax.Array:
        centred = x - x.mean(-1, keepdims=True)
        scaled = centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + _EPSILON)
        return scaled * next(given) + next(given)

    def linear(x: jax.Array) -> jax.Array:
        return x @ next(given).T + next(given)

    words, places = next(given), next(given)
    x = norm(words[d[0]] + places)
    for _ in range(_LAYERS):
        q, k, v = (t.reshape(_BATCH, _LENGTH, _HEADS, -1).transpose(0, 2, 1, 3) for t in jnp.split(linear(x), 3, -1))
        scores = jax.nn.softmax(q @ k.transpose(0, 1, 3, 2) * (_WIDTH // _HEADS) ** -0.5)
        x = norm(x + linear((scores @ v).transpose(0, 2, 1, 3).reshape(x.shape)))
        x = norm(x + linear(jax.nn.gelu(linear(x), approximate=False)))
    return _cross_entropy((x @ words.T).reshape(-1, _WORDS), d[1])


def _cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1))


# -------------------------------------------------------------------------------------------------- ResNet-18

_STAGES = (64, 128, 256, 512)
_IMAGES, _SIDE, _CLASSES = 2, 224, 1000


def _resnet(r: Random) -> tuple[Arrays, Arrays]:
    arrays = [r.normal(64, 3, 7, 7), *_norm(64)]
    before = 64
    for stage, width in enumerate(_STAGES):
        for block in range(2):
            arrays += [r.normal(width, before, 3, 3), *_norm(width), r.normal(width, width, 3, 3), *_norm(width)]
            if stage and not block:
                arrays += [r.normal(width, before, 1, 1), *_norm(width)]
            before = width
    arrays += [r.normal(_CLASSES, before), r.normal(_CLASSES)]
    return tuple(arrays), (r.data(_IMAGES, 3, _SIDE, _SIDE), r.integers(_CLASSES, _IMAGES))


def _resnet_torch(p: Sequence[torch.Tensor], d: Sequence[torch.Tensor]) -> torch.Tensor:
    given = iter(p)

    def layer(x: torch.Tensor, stride: int, padding: int) -> torch.Tensor:
        x = F.conv2d(x, next(given), stride=stride, padding=padding)
        return F.batch_norm(x, None, None, next(given), next(given), training=True)

    x = F.max_pool2d(layer(d[0], 2, 3).relu(), 3, 2, 1)
    for stage in range(len(_STAGES)):
        for block in range(2):
            stride = 2 if stage and not block else 1
            inner = layer(layer(x, stride, 1).relu(), 1, 1)
            x = (inner + (layer(x, 2, 0) if stride == 2 else x)).relu()
    return F.cross_entropy(F.linear(x.mean((2, 3)), next(given), next(given)), d[1])


def _resnet_jax(p: Sequence[jax.Array], d: Sequence[jax.Array]) -> jax.Array:
    given: Iterator[jax.Array] = iter(p)

    def layer(x: jax.Array, stride: int, padding: int) -> jax.Array:
        x = jax.lax.conv_general_dilated(x, next(given), (stride, stride), [(padding, padding)] * 2)
        centred = x - x.mean((0, 2, 3), keepdims=True)
        scaled = centred * jax.lax.rsqrt((centred**2).mean((0, 2, 3), keepdims=True) + _EPSILON)
        return scaled * next(given)[:, None, None] + next(given)[:, None, None]

    x = jax.nn.relu(layer(d[0], 2, 3))
    edges = [(0, 0), (0, 0), (1, 1), (1, 1)]
    x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 1, 3, 3), (1, 1, 2, 2), edges)
    for stage in range(len(_STAGES)):
        for block in range(2):
            stride = 2 if stage and not block else 1
            inner = layer(jax.nn.relu(layer(x, stride, 1)), 1, 1)
            x = jax.nn.relu(inner + (layer(x, 2, 0) if stride == 2 else x))
    return _cross_entropy(x.mean((2, 3)) @ next(given).T + next(given), d[1])


MODELS = (
    Model("bert", "a BERT-like encoder of 2 layers", _bert, _bert_torch, _bert_jax),
    Model("resnet18", "ResNet-18 over two images of 224x224", _resnet, _resnet_torch, _resnet_jax),
)
