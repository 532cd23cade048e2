"""Endurance: ``python -m tools.soak --steps 10000 --exits 50``.

``steps`` identical training steps must leave live buffers, device memory and the cache as they were and resident memory
flat; ``exits`` interpreters that trained must all end with exit code 0 (XLA's and autograd's threads outlive careless
shutdowns).
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import subprocess
import sys
from pathlib import Path

__all__ = ["Growth", "exits", "growth", "main"]

ROOT = Path(__file__).resolve().parent.parent
_WARM_UP = 20
_TRAINING = "import sys; from emutpu.examples.digits_cnn import train; assert len(train('tpu', 3, 0)) == 3"


@dataclasses.dataclass(frozen=True, slots=True)
class Growth:
    """What ``steps`` identical steps left behind: buffers, bytes of device memory, compilations, bytes resident."""

    steps: int
    buffers: int
    hbm_bytes: int
    compilations: int
    resident_bytes: int


def _resident() -> int:
    """Bytes of this process in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def growth(steps: int) -> Growth:
    """Train a small model for ``steps`` identical steps after a warm-up, and say what grew."""
    import torch
    from rich.progress import track

    from emutpu.backend.runtime import runtime

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)).to("tpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    images, labels = torch.randn(32, 64).to("tpu"), torch.arange(32).remainder(10).to("tpu")

    def step() -> None:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        loss.item()

    for _ in range(_WARM_UP):
        step()
    # The allocator's arenas fill during the first few hundred steps; after those nothing may grow.
    for _ in range(min(500, steps)):
        step()
    gc.collect()
    before, resident = runtime().statistics(), _resident()
    for _ in track(range(steps), description=f"{steps} steps"):
        step()
    gc.collect()
    after = runtime().statistics()
    return Growth(
        steps,
        after.live_buffers - before.live_buffers,
        after.live_hbm_bytes - before.live_hbm_bytes,
        after.compiles.misses - before.compiles.misses,
        _resident() - resident,
    )


def exits(count: int) -> list[int]:
    """Exit codes of ``count`` interpreters that train and end."""
    from rich.progress import track

    command = [sys.executable, "-c", _TRAINING]
    return [
        subprocess.run(command, cwd=ROOT, check=False, capture_output=True).returncode
        for _ in track(range(count), description=f"{count} exits")
    ]


def main() -> int:
    """Exit code 1 when something grew or an interpreter did not end well."""
    parser = argparse.ArgumentParser(description="Endurance of training loops and of interpreter exits.")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--exits", type=int, default=50)
    arguments = parser.parse_args()
    grown = growth(arguments.steps)
    print(
        f"{grown.steps} steps: {grown.buffers:+d} buffers, {grown.hbm_bytes:+d} bytes of device memory, "
        f"{grown.compilations:+d} compilations, {grown.resident_bytes / 2**20:+.1f} MiB resident"
    )
    codes = exits(arguments.exits)
    print(f"{len(codes)} exits: {sum(code != 0 for code in codes)} bad {sorted(set(codes) - {0})}")
    steady = not (grown.buffers or grown.hbm_bytes or grown.compilations) and grown.resident_bytes < 16 * 2**20
    return 0 if steady and not any(codes) else 1


if __name__ == "__main__":
    sys.exit(main())
