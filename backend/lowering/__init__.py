"""ATen lowerings, a module per family. Importing this package fills the table: every module whose name has no leading
underscore registers its rows.
"""

import importlib
import pkgutil

from emutpu.backend.lowering._registry import LOWERINGS

__all__ = ["LOWERINGS"]

for _module in pkgutil.iter_modules(__path__):
    if not _module.name.startswith("_"):
        importlib.import_module(f"{__name__}.{_module.name}")
