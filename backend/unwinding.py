"""An exception that C++ unwinds with while it asks Python for something.

Autograd leaves the exception of a hook, or of a tensor subclass's ``__torch_dispatch__``, set in the interpreter while it
leaves the backward's stream guard, which asks the device's guard for its type, and aborts the process if it does not get
it. Whatever is called with an exception set fails, so the exception is taken out here and raised when the backward is left.
"""

from __future__ import annotations

import threading

__all__ = ["notice", "take"]


class _Unwinding(threading.local):
    error: BaseException | None = None


_UNWINDING = _Unwinding()
# The interpreter checks after every call of a slot's wrapper whether an exception is set, and gives it as the cause of a
# SystemError. Calls of other built-in functions it may specialise to ones without a check.
_check = ().__len__


def notice() -> None:
    """Take out an exception that is set, if one is. About 25 ns."""
    try:
        _check()
    except SystemError as error:
        _UNWINDING.error = error.__cause__


def take() -> BaseException | None:
    """The exception that was noticed last on this thread, which is forgotten."""
    error, _UNWINDING.error = _UNWINDING.error, None
    return error
