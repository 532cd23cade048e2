"""Every patch of PyTorch, in one place, each with its reason. Nothing else in emutpu replaces a foreign attribute."""

from __future__ import annotations

import contextlib
import functools
import warnings
from typing import Any

import torch
import torch.utils.dlpack

from emutpu.backend.cell import layout_of
from emutpu.backend.memory import ACCELERATOR, check_index
from emutpu.backend.metadata import resize_storage
from emutpu.backend.options import EagerMode, Precision, carried_to_engine_threads, process_options, set_process
from emutpu.backend.rng import TpuGenerator
from emutpu.backend.runtime import runtime
from emutpu.backend.storage import DEVICE, new_storage
from emutpu.backend.streams import TpuEvent, TpuStream, current_stream, set_stream

__all__ = ["PATCHES", "apply"]


def _untyped_storage_new() -> None:
    """``UntypedStorage(n, device="tpu")``, deepcopy and ``storage.clone`` ask C++ for an allocator that is not there: SEGV."""
    storage_type: Any = torch.UntypedStorage
    original = storage_type.__new__

    def construct(cls: type[torch.UntypedStorage], *args: Any, **kwargs: Any) -> torch.UntypedStorage:
        device = kwargs.get("device")
        if device is None or torch.device(device).type != "tpu":
            made: torch.UntypedStorage = original(cls, *args, **kwargs)
            return made
        check_index(torch.device(device).index or 0)
        size = args[0] if args else kwargs.get("size", 0)
        if not isinstance(size, int):
            data = torch.tensor(list(size), dtype=torch.uint8)
            return data.to("tpu").untyped_storage()
        return new_storage(None, layout_of((size,), torch.uint8), size)

    storage_type.__new__ = construct


def _generator() -> None:
    """``torch.Generator(device="tpu")``: C++ cannot make one for a backend without C++ hooks."""
    metaclass: Any = type(torch.Generator)
    original = metaclass.__call__

    def call(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if cls is torch.Generator:
            device = kwargs.get("device", args[0] if args else None)
            if device is not None and torch.device(device).type == DEVICE.type:
                check_index(torch.device(device).index or 0)
                return original(TpuGenerator, device)
        return original(cls, *args, **kwargs)

    metaclass.__call__ = call


class _HandsOver(type):
    """The class of a stand-in for ``torch.Event`` or ``torch.Stream``: calls for the device make ours, the rest the original.

    Instances of the original, made in C++, count as instances of the stand-in.
    """

    original: Any
    ours: Any
    parameters: tuple[str, ...]

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if "original" not in cls.__dict__:
            return super().__call__(*args, **kwargs)  # a subclass
        device = args[0] if args else kwargs.get("device")
        kind = None if device is None or isinstance(device, int) else torch.device(device).type
        elsewhere = {"stream_id", "device_index", "device_type"} & kwargs.keys()
        if elsewhere or kind not in (None, DEVICE.type):
            return cls.original(*args, **kwargs)
        return cls.ours(**dict(zip(("device", *cls.parameters), args, strict=False)) | kwargs)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, cls.original) if "original" in cls.__dict__ else super().__instancecheck__(instance)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, cls.original) if "original" in cls.__dict__ else super().__subclasscheck__(subclass)


def _events_and_streams() -> None:
    """``torch.Event(device="tpu")``: C++ says that the backend does not support synchronizing events, nor times."""
    for name, ours, parameters in (
        ("Event", TpuEvent, ("enable_timing", "blocking", "interprocess")),
        ("Stream", TpuStream, ("priority",)),
    ):
        original = getattr(torch, name)
        namespace = {"original": original, "ours": ours, "parameters": parameters}
        described = {"__doc__": original.__doc__, "__module__": "torch", "__qualname__": name}
        setattr(torch, name, _HandsOver(name, (original,), namespace | described))


def _storage_sizes() -> None:
    """C++ cannot resize our storages: their size is the cell's. FSDP frees with ``resize_(0)`` and grows again."""
    storage_type: Any = torch.UntypedStorage
    base: Any = torch._C.StorageBase
    nbytes, resize = base.nbytes, base.resize_

    def sized(self: torch.UntypedStorage) -> int:
        cell = getattr(self, "cell", None)
        size: int = nbytes(self) if cell is None else cell.nbytes
        return size

    def resize_(self: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        if self.device.type == DEVICE.type:
            resize_storage(self, size)
        else:
            resize(self, size)
        return self

    storage_type.nbytes = storage_type.size = storage_type.__len__ = sized
    storage_type.resize_ = resize_


def _no_sharing_between_processes() -> None:
    """A tensor in a ``multiprocessing`` queue: the sender's device memory does not exist in the receiver."""
    storage_type: Any = torch.UntypedStorage

    def guarded(name: str) -> None:
        original = getattr(storage_type, name)

        @functools.wraps(original)
        def share(self: torch.UntypedStorage, *args: Any, **kwargs: Any) -> Any:
            if self.device.type == DEVICE.type:
                raise RuntimeError(
                    "a tpu tensor cannot be sent to another process: device memory belongs to the process that owns the "
                    "device. Send tensor.cpu(), and move it to the device in the receiver"
                )
            return original(self, *args, **kwargs)

        setattr(storage_type, name, share)

    guarded("_share_fd_cpu_")
    guarded("_share_filename_cpu_")


def _no_dlpack() -> None:
    """DLPack would hand out the address of memory that does not exist."""

    def refuse(tensor: object) -> None:
        if isinstance(tensor, torch.Tensor) and tensor.device.type == DEVICE.type:
            raise BufferError("tpu tensors cannot be exported through DLPack: export tensor.cpu() instead")

    original = torch.Tensor.__dlpack__

    @functools.wraps(original)
    def dlpack(self: torch.Tensor, **kwargs: Any) -> Any:
        refuse(self)
        return original(self, **kwargs)

    to_dlpack = torch._C._to_dlpack

    @functools.wraps(to_dlpack)
    def to_capsule(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        refuse(tensor)
        return to_dlpack(tensor, *args, **kwargs)

    torch.Tensor.__dlpack__ = dlpack  # type: ignore[method-assign]  # the patch
    for holder in (torch._C, torch.utils.dlpack):
        for name in ("_to_dlpack", "to_dlpack"):
            if hasattr(holder, name):
                setattr(holder, name, to_capsule)


_STREAMS = {"_accelerator_getStream": current_stream, "_accelerator_setStream": set_stream}


def _accelerator() -> None:
    """``torch.accelerator`` asks C++ for allocator, guard and hooks that a Python backend cannot give."""
    for name, function in (ACCELERATOR | _STREAMS).items():
        setattr(torch._C, name, function)


_BY_WORD = {"medium": Precision.DEFAULT, "high": Precision.HIGH, "highest": Precision.HIGHEST}


def _float32_matmul_precision() -> None:
    """The setters speak of the device's passes, and "medium" is the default, as TorchTPU has it; CPU numerics stay as they are."""
    words = {precision: word for word, precision in _BY_WORD.items()}

    def get_float32_matmul_precision() -> str:
        return words[process_options().precision or Precision.DEFAULT]

    def set_float32_matmul_precision(precision: str) -> None:
        chosen = _BY_WORD.get(precision)
        if chosen is None:
            raise ValueError(f"expected to be one of 'highest', 'high', or 'medium', got '{precision}'")
        set_process(precision=chosen)

    for replacement in (get_float32_matmul_precision, set_float32_matmul_precision):
        functools.update_wrapper(replacement, getattr(torch, replacement.__name__))
        setattr(torch, replacement.__name__, replacement)


def _backward_on_this_thread() -> None:
    """The engine's device thread aborts the interpreter at exit, and kernels must see the caller's options.

    Backward deeper than 60 re-entrant levels still runs on a thread of the engine's: the caller's options are carried over.
    An exception that had to be taken out while C++ unwound is raised here, where C++ would have raised it.
    """
    import torch.autograd.graph

    from emutpu.backend.unwinding import take

    original = torch.autograd.graph._engine_run_backward

    @functools.wraps(original)
    def run_backward(*args: Any, **kwargs: Any) -> Any:
        multithreaded = torch._C._is_multithreading_enabled()
        torch._C._set_multithreading_enabled(False)
        try:
            around = runtime().around_backward
            with carried_to_engine_threads(), contextlib.nullcontext() if around is None else around(args[0]):
                return original(*args, **kwargs)
        except SystemError as error:
            raised = take()
            if raised is None:
                raise
            raise raised from error.__cause__
        finally:
            torch._C._set_multithreading_enabled(multithreaded)

    torch.autograd.graph._engine_run_backward = run_backward
    torch.autograd._engine_run_backward = run_backward  # type: ignore[attr-defined]  # bound by import


def _print_from_the_host() -> None:
    """Printing computes widths with a dozen ops on the tensor's own device: a dozen compilations for one ``print``.

    DeferAndFuse shows them, because how a print cuts a program into regions is what its user wants to know.
    """
    from torch import _tensor_str

    original: Any = _tensor_str._tensor_str

    @functools.wraps(original)
    def tensor_str(self: torch.Tensor, indent: int) -> str:
        here = self.device.type == DEVICE.type and runtime().mode is not EagerMode.DEFER_AND_FUSE
        text: str = original(self.cpu() if here else self, indent)
        return text

    _tensor_str._tensor_str = tensor_str


def _moving_tied_weights() -> None:
    """A known bug of the device, told of or shown: a module that moves there loses the sharing of its parameters."""
    from emutpu.backend.quirks import QUIRKS, reproduces, tell

    quirk = next(quirk for quirk in QUIRKS if quirk.name == "tied-weights")
    untie = reproduces(quirk.release)
    module: Any = torch.nn.Module
    original = module.to

    def held(parent: torch.nn.Module) -> list[tuple[torch.nn.Module, str, torch.nn.Parameter]]:
        return [(m, name, p) for m in parent.modules() for name, p in m._parameters.items() if p is not None]

    @functools.wraps(original)
    def to(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        first = next(self.parameters(), None)
        moves = first is not None and first.device.type != DEVICE.type
        moved = original(self, *args, **kwargs)
        if not moves or next(self.parameters()).device.type != DEVICE.type:
            return moved
        seen: set[int] = set()
        for owner, name, parameter in held(self):
            if id(parameter) in seen:
                if not untie:
                    tell(quirk)
                    break
                owner._parameters[name] = torch.nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
            seen.add(id(parameter))
        return moved

    module.to = to


def _compile() -> None:
    """``torch.compile`` without a backend takes ours for work on the device, and Inductor refuses the device."""
    compile_alone: Any = torch.compile
    wrapper: Any = torch._TorchCompileInductorWrapper
    original = wrapper.__call__

    @functools.wraps(compile_alone)
    def compile_(*args: Any, **settings: Any) -> Any:
        from emutpu.backend.compile.entry import compile_function

        return compile_function(compile_alone)(*args, **settings)

    @functools.wraps(original)
    def call(self: Any, model_: Any, inputs_: Any, **kwargs: Any) -> Any:
        from emutpu.backend.compile.entry import INDUCTOR_REFUSED, uses_inductor_on_device

        if uses_inductor_on_device(self.config, model_, inputs_):
            raise RuntimeError(INDUCTOR_REFUSED)
        return original(self, model_, inputs_, **kwargs)

    torch.compile = compile_
    wrapper.__call__ = call


_meta_library: list[torch.library.Library] = []


def _grouped_mm_meta() -> None:
    """PyTorch's meta kernel of ``_grouped_mm`` takes CUDA's dtypes only; TorchTPU 0.2.0 replaces it, too."""

    def grouped_mm(
        self: torch.Tensor,
        mat2: torch.Tensor,
        offs: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        from emutpu.backend.lowering import LOWERINGS

        meta: Any = LOWERINGS["_grouped_mm"].meta
        made: torch.Tensor = meta(self=self, mat2=mat2, offs=offs, bias=bias, out_dtype=out_dtype)
        return made

    op: Any = torch.ops.aten._grouped_mm.default
    op.py_kernels[torch._C.DispatchKey.Meta] = grouped_mm
    op._dispatch_cache.clear()
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*", UserWarning)  # it says that a kernel is replaced
        library.impl("_grouped_mm", grouped_mm, "Meta")
    _meta_library.append(library)


def _profiler() -> None:
    """``torch.profiler``: Kineto takes a backend's device events from C++ only, so launches join its results here."""
    profile: Any = torch.autograd.profiler.profile
    begin, end = profile._start_trace, profile.__exit__
    parse, export = profile._parse_kineto_results, profile.export_chrome_trace

    @functools.wraps(begin)
    def _start_trace(self: Any) -> None:
        from emutpu.backend import profiling

        self._tpu_launches = profiling.start() if self.use_device == DEVICE.type else None
        begin(self)

    @functools.wraps(end)
    def __exit__(self: Any, *error: Any) -> Any:  # noqa: N807  # the method's own name
        try:
            return end(self, *error)
        finally:
            if self.enabled and self._tpu_launches is not None:
                self._tpu_launches.stop()

    @functools.wraps(parse)
    def _parse_kineto_results(self: Any, result: Any, *args: Any, **kwargs: Any) -> Any:
        events = parse(self, result, *args, **kwargs)
        launches = self._tpu_launches
        if launches is None:
            return events
        from emutpu.backend import profiling

        return profiling.device_events(launches, events, result.trace_start_ns())

    @functools.wraps(export)
    def export_chrome_trace(self: Any, path: str, *args: Any, **kwargs: Any) -> Any:
        done = export(self, path, *args, **kwargs)
        if self._tpu_launches is not None:
            from emutpu.backend import profiling

            profiling.add_device_rows(self._tpu_launches, path, self.kineto_results.trace_start_ns())
        return done

    profile._start_trace, profile.__exit__ = _start_trace, __exit__
    profile._parse_kineto_results, profile.export_chrome_trace = _parse_kineto_results, export_chrome_trace


PATCHES = (
    _profiler,
    _grouped_mm_meta,
    _compile,
    _untyped_storage_new,
    _storage_sizes,
    _generator,
    _events_and_streams,
    _no_sharing_between_processes,
    _no_dlpack,
    _accelerator,
    _float32_matmul_precision,
    _backward_on_this_thread,
    _print_from_the_host,
    _moving_tied_weights,
)


def apply() -> None:
    """Apply every patch, once, at activation."""
    for patch in PATCHES:
        patch()
