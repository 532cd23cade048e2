"""What once ended the interpreter with a signal: each case runs in a process of its own and must end with 0."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable

import pytest

Run = Callable[..., "subprocess.CompletedProcess[str]"]
Passes = Callable[..., str]

COPIES = """
import copy, torch
x = torch.tensor([1.0, 2.0, 3.0], device="tpu")
s = torch.UntypedStorage(16, device="tpu")
assert (s.device.type, s.nbytes(), s.tolist()) == ("tpu", 16, [0] * 16)
assert torch.UntypedStorage([1, 2, 255], device="tpu").tolist() == [1, 2, 255]
for made in (copy.deepcopy(x), x.untyped_storage().clone(), copy.deepcopy(x.untyped_storage()), x.untyped_storage().cpu()):
    storage = made if isinstance(made, torch.UntypedStorage) else made.untyped_storage()
    assert storage.tolist() == x.untyped_storage().tolist()
    assert storage._cdata != x.untyped_storage()._cdata
p = torch.nn.Parameter(x.clone())
q = copy.deepcopy(p)
q.data.add_(1)
assert (type(q), q.requires_grad, p.tolist(), q.tolist()) == (torch.nn.Parameter, True, [1, 2, 3], [2, 3, 4])
m = torch.nn.Module()
m.a = p
m.b = p
n = copy.deepcopy(m)
assert n.a is n.b and n.a is not p and n.a.device.type == "tpu"
"""

LAZY_BITS = """
import torch
x = torch.tensor([1 + 2j, 3 - 4j], device="tpu")
assert x.conj().resolve_conj().tolist() == [1 - 2j, 3 + 4j]
assert x.conj().tolist() == [1 - 2j, 3 + 4j]
assert x.conj().cpu().tolist() == [1 - 2j, 3 + 4j]
assert x.conj().imag.resolve_neg().tolist() == [-2, 4]
assert torch._neg_view(x.real).tolist() == [-1, -3]
y = torch.zeros(2, dtype=torch.complex64, device="tpu")
y.conj().copy_(x)
assert y.tolist() == [1 - 2j, 3 + 4j]
y.copy_(torch.tensor([5j, 6j]).conj())
assert y.tolist() == [-5j, -6j]
"""

QUEUE = """
import multiprocessing.reduction, torch, torch.multiprocessing as mp
x = torch.ones(3, device="tpu")
for send in (lambda: mp.SimpleQueue().put(x), lambda: multiprocessing.reduction.ForkingPickler.dumps(x)):
    try:
        send()
    except RuntimeError as error:
        assert "cannot be sent to another process" in str(error) and ".cpu()" in str(error), error
    else:
        raise SystemExit("no error")
for export in (lambda: x.__dlpack__(), lambda: torch.utils.dlpack.to_dlpack(x)):
    try:
        export()
    except BufferError as error:
        assert "DLPack" in str(error), error
    else:
        raise SystemExit("no error")
import numpy
assert numpy.from_dlpack(torch.ones(2)).sum() == 2
"""

TRAINING = """
import torch
w = torch.nn.Parameter(torch.ones(4, device="tpu"))
o = torch.optim.SGD([w], lr=0.1, foreach=False)
for _ in range(3):
    (w * w).backward(torch.ones(4, device="tpu"))
    o.step()
    o.zero_grad()
print(f"{w.tolist()[0]:.6f}")
"""

FORK = """
import os, signal, sys, torch
x = torch.ones(3, device="tpu")
y = x + 1
child = os.fork()
if child == 0:
    signal.alarm(30)
    attempts = [
        lambda: x + 1,                                   # an executable that is loaded
        lambda: x * 3,                                   # one that is not
        lambda: y.cpu(),
        lambda: torch.ones(2, device="tpu"),
        lambda: torch.ones(2).to("tpu"),
        lambda: torch.accelerator.synchronize(),
    ]
    for number, attempt in enumerate(attempts):
        try:
            attempt()
        except RuntimeError as error:
            if "cannot access or re-initialize TPU in a forked subprocess" in str(error) and "'spawn'" in str(error):
                continue
            print(error, file=sys.stderr)
        os._exit(10 + number)
    os._exit(0 if torch.tpu._is_in_bad_fork() and torch.ones(3).add(1).sum() == 6 else 9)
_, status = os.waitpid(child, 0)
assert os.WIFEXITED(status), f"signal {os.WTERMSIG(status)}"
assert os.WEXITSTATUS(status) == 0, os.WEXITSTATUS(status)
assert (x + 1).tolist() == [2, 2, 2] and not torch.tpu._is_in_bad_fork()
"""

WORKERS = """
import torch
from torch.utils.data import DataLoader, TensorDataset
x = torch.ones(3, device="tpu") + 1
if __name__ == "__main__":
    data = TensorDataset(torch.arange(8.0))
    for pin in (False, True):
        loader = DataLoader(data, batch_size=4, num_workers=2, pin_memory=pin, multiprocessing_context="fork")
        batches = [batch for (batch,) in loader]
        assert [batch.is_pinned() for batch in batches] == [pin, pin]
        assert [v for batch in batches for v in batch.to("tpu", non_blocking=True).tolist()] == list(range(8))
"""

REENTRANT = """
import torch
from torch.utils.checkpoint import checkpoint
from emutpu.backend.options import LOCAL

seen = set()

class Probe(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        seen.add(LOCAL.state.options.precision.name)
        return g * 2

def nested(x, depth):
    if depth == 0:
        return Probe.apply(x)
    return checkpoint(lambda y: Probe.apply(nested(y, depth - 1)), x, use_reentrant=True)

DEPTH = 70
for name in ("HIGH", "HIGHEST", "DEFAULT"):
    seen.clear()
    x = torch.ones(2, device="tpu", requires_grad=True)
    with torch.tpu.precision(torch.tpu.Precision[name]):
        nested(x, DEPTH).backward(torch.full((2,), 2.0**-DEPTH, device="tpu"))
    assert seen == {name}, (name, seen)
    assert x.grad.tolist() == [2.0, 2.0], x.grad
"""


@pytest.mark.parametrize(
    "text",
    [COPIES, LAZY_BITS, QUEUE, FORK, WORKERS, REENTRANT],
    ids=["copies", "conj-and-neg", "queue-and-dlpack", "fork", "loader-workers", "reentrant-backward"],
)
def test_ends_well(passes: Passes, text: str) -> None:
    """The program, full of what used to crash or hang, checks its own results and exits with 0."""
    passes(text)


def test_exits_never_abort(run: Run) -> None:
    """Five exits right after a backward pass: none aborts (the engine's own thread used to take the GIL at exit)."""
    results = [run(TRAINING) for _ in range(5)]
    assert [(r.returncode, r.stdout) for r in results] == [(0, "0.512000\n")] * 5, results[0].stderr


@pytest.mark.skipif(sys.platform != "linux", reason="the address range is reserved with Linux's mmap")
def test_native_reads_fault(run: Run) -> None:
    """Native code that follows data_ptr dies at once instead of reading or corrupting something else."""
    for access in ("value = cell.value", "cell.value = 1"):
        result = run(f"""
            import ctypes, torch
            x = torch.ones(3, device="tpu")
            cell = ctypes.c_float.from_address(x.data_ptr())
            {access}
            print("survived")
        """)
        assert (result.returncode, result.stdout) == (-signal.SIGSEGV, ""), result.stderr
