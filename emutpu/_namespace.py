"""Start a program that sees a fake PCI tree: ``python -I _namespace.py TREE [COMMAND ARGS]``, which becomes COMMAND.

A program of its own, without imports of emutpu: it unshares the mount namespace (and, for an ordinary user, the user
namespace), lays the tree over ``/sys/bus/pci/devices``, ``/sys/kernel/iommu_groups`` and ``/dev``, and replaces itself.
Nothing outside the namespace changes. Other PCI devices and nodes of ``/dev`` stay; real TPUs disappear from sight.
Without COMMAND it only tries, and exits with 0 or, after one line on standard error, with 1.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
import tempfile
from collections.abc import Callable

__all__ = ["main"]

_NEWNS, _NEWUSER = 0x00020000, 0x10000000
_BIND, _REC, _SLAVE = 4096, 16384, 1 << 19
_GOOGLE = "0x1ae0"


def main(arguments: list[str]) -> int:
    """Enter the namespace and become the command. Gives an exit code only when it could not, or had only to try."""
    tree, command = os.path.abspath(arguments[0]), arguments[1:]
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        _unshare(libc)
        _lay_over(libc, tree)
    except OSError as error:
        print(f"{error.strerror or error} ({error.filename or 'unshare'})", file=sys.stderr)
        return 1
    if command:
        os.execvp(command[0], command)  # noqa: S606 (the user's own interpreter and program)
    return 0


def _unshare(libc: ctypes.CDLL) -> None:
    if libc.unshare(_NEWNS) != 0:
        user, group = os.geteuid(), os.getegid()
        if libc.unshare(_NEWNS | _NEWUSER) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), "unshare")
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{user} {user} 1")
        _write("/proc/self/gid_map", f"{group} {group} 1")
    _mount(libc, "none", "/", None, _REC | _SLAVE)


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="ascii") as stream:
        stream.write(text)


def _mount(libc: ctypes.CDLL, source: str, target: str, kind: str | None, flags: int) -> None:
    encoded = (text.encode() if text is not None else None for text in (source, target, kind))
    if libc.mount(*encoded, ctypes.c_ulong(flags), None) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), target)


def _lay_over(libc: ctypes.CDLL, tree: str) -> None:
    scratch = f"{tree}/scratch"
    os.makedirs(scratch, exist_ok=True)
    _mount(libc, "tmpfs", scratch, "tmpfs", 0)  # what is made below it vanishes with the namespace
    _replace(libc, "/sys/bus/pci/devices", tree, scratch, _is_other)
    if os.path.isdir("/sys/kernel/iommu_groups"):
        _replace(libc, "/sys/kernel/iommu_groups", tree, scratch, _nothing)
    _replace(libc, "/dev", tree, scratch, _is_no_tpu_node)


def _replace(libc: ctypes.CDLL, target: str, tree: str, scratch: str, keep: Callable[[str], bool]) -> None:
    """Mount a new directory over ``target``: its entries that ``keep`` accepts, and those of the same path in ``tree``."""
    source = tree + target
    while not os.path.isdir(target):  # a host without a PCI bus: lay over the lowest directory that is there
        target, name = os.path.split(target)
        nested = tempfile.mkdtemp(dir=scratch)
        _copy(source, os.path.join(nested, name))
        source, keep = nested, _everything
    kept = [name for name in os.listdir(target) if keep(os.path.join(target, name))]
    old = tempfile.mkdtemp(dir=scratch)
    _mount(libc, target, old, None, _BIND | _REC)
    _mount(libc, "tmpfs", target, "tmpfs", 0)
    os.chmod(target, 0o755)  # noqa: S103 (as /dev and /sys are)
    for name in kept:
        _graft(libc, os.path.join(old, name), os.path.join(target, name))
    for name in os.listdir(source):
        if name not in kept:
            _copy(os.path.join(source, name), os.path.join(target, name))


def _everything(path: str) -> bool:
    return True


def _nothing(path: str) -> bool:
    return False


def _is_no_tpu_node(path: str) -> bool:
    name = os.path.basename(path)
    return name != "vfio" and not name.startswith("accel")


def _is_other(folder: str) -> bool:
    """Whether a PCI function is not Google's: real TPUs would be counted beside the emulated ones."""
    try:
        with open(os.path.join(folder, "vendor"), encoding="ascii") as stream:
            return stream.read().strip() != _GOOGLE
    except OSError:
        return True


def _graft(libc: ctypes.CDLL, old: str, new: str) -> None:
    """Make ``new`` the same object as ``old``. An entry that may not be bound (a stale node) is left out."""
    if os.path.islink(old):
        os.symlink(os.readlink(old), new)
        return
    if os.path.isdir(old):
        os.mkdir(new)
    else:
        with open(new, "wb"):
            pass
    try:
        _mount(libc, old, new, None, _BIND | _REC)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EINVAL):
            raise


def _copy(source: str, target: str) -> None:
    if os.path.islink(source):
        os.symlink(os.readlink(source), target)
    elif os.path.isdir(source):
        os.mkdir(target)
        for name in os.listdir(source):
            _copy(os.path.join(source, name), os.path.join(target, name))
    else:
        with open(source, "rb") as reader, open(target, "wb") as writer:
            writer.write(reader.read())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
