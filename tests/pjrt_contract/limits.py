"""Where a client genuinely cannot: (client, what) -> reason. Each entry is checked to be still true."""

from __future__ import annotations

LIMITS: dict[tuple[str, str], str] = {
    ("interpreter", "cholesky"): "StableHLO's interpreter has no matrix decompositions",
    ("interpreter", "fft"): "StableHLO's interpreter aborts the process on real transforms, so it is refused",
}
