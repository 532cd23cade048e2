"""Modelled step times of five models in Strict and in DeferAndFuse, in dry runs: ``python -m tools.modes``.

``--write`` puts the table into ``docs/modelled-device.md``, between its markers.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

from tools.fit_cost import write_page
from tools.layout import ROOT

__all__ = ["MODELS", "main"]

PAGE = ROOT / "docs" / "modelled-device.md"
_STEPS = """
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
BUILD
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(6):
    loss = forward()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
torch.accelerator.synchronize()
from emutpu.backend.runtime import runtime
print(runtime().statistics().modelled.step_seconds)
"""
_IMAGES = """
x = torch.zeros(16, 3, 64, 64, device="tpu")
y = torch.zeros(16, dtype=torch.int64, device="tpu")
forward = lambda: F.cross_entropy(model(x), y)
"""
_TOKENS = """
x = torch.zeros(8, 256, dtype=torch.int64, device="tpu")
forward = lambda: F.cross_entropy(model(x).flatten(0, 1), x.flatten())
"""
_BLOCK = (
    "nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True, norm_first=True, activation=ACTIVATION)"
)
MODELS = {
    "mlp": "model = nn.Sequential(nn.Flatten(), nn.Linear(12288, 512), nn.ReLU(), nn.Linear(512, 10)).to('tpu')"
    + _IMAGES,
    "cnn": """model = nn.Sequential(
    *[nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(), nn.MaxPool2d(2)) for a, b in
      ((3, 32), (32, 64), (64, 128))], nn.Flatten(), nn.Linear(128 * 64, 10)).to("tpu")"""
    + _IMAGES,
    "mixer": """model = nn.Sequential(nn.Conv2d(3, 128, 8, 8), nn.Flatten(2), nn.Linear(64, 64), nn.GELU(),
    nn.LayerNorm(64), nn.Flatten(), nn.Linear(8192, 10)).to("tpu")"""
    + _IMAGES,
    "transformer": f"model = nn.Sequential(nn.Embedding(1000, 256), "
    f"*[{_BLOCK.replace('ACTIVATION', repr('gelu'))} for _ in range(4)], nn.Linear(256, 1000)).to('tpu')" + _TOKENS,
    "lstm": """class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.lstm, self.head = nn.Embedding(1000, 128), nn.LSTM(128, 128), nn.Linear(128, 1000)
    def forward(self, x):
        return self.head(self.lstm(self.embedding(x))[0])
model = Model().to("tpu")
"""
    + _TOKENS,
}
"""Name and program text of each model."""


def _step_seconds(text: str, *, defer: bool) -> float:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _STEPS.replace("BUILD", text)],
        cwd=ROOT,
        env=os.environ | {"EMUTPU_CLIENT": "dry_run", "TORCH_TPU_DEFER_AND_FUSE": f"{defer:d}"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    return float(done.stdout)


def main() -> None:
    """Print the table, and write it where that is asked for."""
    parser = argparse.ArgumentParser(prog="python -m tools.modes", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the table into the page")
    options = parser.parse_args()
    rows = ["| model, v5e | Strict, ms a step | DeferAndFuse, ms a step | ratio |", "|---|---|---|---|"]
    print("\n".join(rows))
    for name, text in MODELS.items():
        strict, deferred = (_step_seconds(text, defer=defer) for defer in (False, True))
        rows.append(f"| {name} | {strict * 1e3:.3f} | {deferred * 1e3:.3f} | {strict / deferred:.2f} |")
        print(rows[-1], flush=True)
    if options.write:
        write_page("\n".join(rows), "modes", PAGE)


if __name__ == "__main__":
    main()
