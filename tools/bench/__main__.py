"""``python -m tools.bench``."""

from __future__ import annotations

import sys

from tools.bench.command import main

if __name__ == "__main__":
    sys.exit(main())
