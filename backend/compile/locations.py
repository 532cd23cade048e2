"""The user's line of each node, as origins that errors and modules name."""

from __future__ import annotations

import re
import types

from torch import fx

from emutpu.backend.location import KNOWN_FILES, Origin, is_library

__all__ = ["node_origin"]

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)')


def _template() -> None: ...


def node_origin(node: fx.Node) -> Origin | None:
    """Who issued a node: the innermost line of its stack trace that is neither PyTorch's nor ours; None if it has none."""
    trace = node.meta.get("stack_trace")
    if not trace:
        return None
    for match in reversed(list(_FRAME.finditer(trace))):
        file = match["file"]
        known = KNOWN_FILES.get(file)
        if known is None:
            known = is_library(file)
        if not known:
            return str(node.target), _code(file, int(match["line"]), match["function"]), 0
    return None


_codes: dict[tuple[str, int, str], types.CodeType] = {}


def _code(file: str, line: int, function: str) -> types.CodeType:
    """A code object whose first instruction lies at this line: an origin holds no other kind of place."""
    key = (file, line, function)
    found = _codes.get(key)
    if found is None:
        name = function.rpartition(".")[2]
        found = _codes[key] = _template.__code__.replace(
            co_filename=file, co_firstlineno=line, co_name=name, co_qualname=function
        )
    return found
