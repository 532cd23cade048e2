"""emutpu: run and test PyTorch-on-TPU programs without a TPU.

Importing this package imports neither torch nor jax; ``torch`` itself activates it through the ``torch.backends``
entry point (:mod:`emutpu._activation`).
"""

from __future__ import annotations

import os

__version__ = "0.1.0"

# In a checkout ./emutpu shadows an installed copy, and the subpackages live beside it rather than inside it.
_root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
if os.path.isfile(os.path.join(_root, "backend", "pjrt.py")):
    __path__.append(_root)
