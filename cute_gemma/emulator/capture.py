"""Runs the host code of a compiled CuTe DSL function and hands over each kernel launch it makes.

The compiled function's object code, as the DSL exports it, is linked into a library of its own with
csrc/shim.c in place of the CUDA runtime. The DSL's own copy is not touched: the same compiled function can
run on a GPU and be captured, in any order, in one process, and no environment variable or import order
matters.
"""

from __future__ import annotations

import builtins
import ctypes
import functools
import re
import tempfile
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cute_gemma.emulator import tvm_abi
from cute_gemma.emulator.build import build_library
from cute_gemma.emulator.launch import Launch, LaunchError, entry_names, parse_entry

_SHIM = Path(__file__).parent / "csrc" / "shim.c"

# cudaLaunchAttributeID (CUDA runtime API, "Data types used by CUDA Runtime").
_ATTRIBUTE_CLUSTER_DIMENSION = 4
_ATTRIBUTE_PROGRAMMATIC_SERIALIZATION = 6
_CUDA_ERROR_UNKNOWN = 999

# cudaDeviceAttr -> value, for every target (CUDA C++ Programming Guide, "Technical Specifications per
# Compute Capability").
_COMMON_DEVICE_ATTRIBUTES = {
    1: 1024,  # threads per block
    2: 1024, 3: 1024, 4: 64,  # block dimensions
    5: 2**31 - 1, 6: 65535, 7: 65535,  # grid dimensions
    8: 49152,  # shared memory per block without opt-in
    10: 32,  # warp size
    12: 65536,  # registers per block
    39: 2048,  # threads per multiprocessor
    81: 233472,  # shared memory per multiprocessor
    97: 232448,  # shared memory per block with opt-in
    111: 1024,  # shared memory reserved per block
    120: 1,  # cluster launch
}  # fmt: skip
_DEVICE_ATTRIBUTES = {
    "sm_100a": {16: 148, 75: 10, 76: 0},  # multiprocessors, compute capability
    "sm_103a": {16: 148, 75: 10, 76: 3},
    "sm_90a": {16: 132, 75: 9, 76: 0},
}

OnLaunch = Callable[[Launch], object]


class CaptureError(RuntimeError):
    """A compiled function cannot be captured; the message says why and what to do."""


class _LaunchConfig(ctypes.Structure):
    """cudaLaunchConfig_t."""

    _fields_ = [
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("dynamic_smem", ctypes.c_size_t),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("num_attributes", ctypes.c_uint32),
    ]


class _LaunchAttribute(ctypes.Structure):
    """cudaLaunchAttribute: the value is a union of 64 bytes."""

    _fields_ = [("id", ctypes.c_int32), ("padding", ctypes.c_int32), ("value", ctypes.c_uint8 * 64)]


_LAUNCH_CALLBACK = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_char_p,
    ctypes.c_int,
    ctypes.POINTER(_LaunchConfig),
    ctypes.POINTER(ctypes.c_void_p),
)


class HostCode:
    """Host code linked with the shim, callable on the CPU.

    object_code: the object file the DSL exported. ptx: the module its kernels come from, which gives the
    parameters' sizes. entry: name of the function to call. packed: the entry takes an array of pointers to
    its arguments (the DSL's default); otherwise it is a TVM-FFI function.

    Raises CompilerNotFoundError without a C compiler, and BuildError, naming the missing symbol, for host
    code that needs a runtime function the shim lacks.
    """

    def __init__(self, object_code: bytes, ptx: str, *, entry: str, packed: bool = False) -> None:
        with tempfile.TemporaryDirectory() as scratch:
            host = Path(scratch) / "host.o"
            host.write_bytes(object_code)
            flags = ("-O1", "-fvisibility=hidden")
            self.library = build_library([_SHIM, host], flags, libs=("-Wl,-z,defs",))
        self.ptx = ptx
        self.entry = entry
        self.packed = packed
        self._lib = _load(self.library, ptx)
        self._function = getattr(self._lib, entry)

    def __call__(self, args: Sequence[Any], on_launch: OnLaunch) -> None:
        """Runs the host code; on_launch is called for each launch as it is made, and may raise to end it.

        args: for a TVM-FFI entry tensors (anything with torch.Tensor's data_ptr, shape, stride and dtype, in
        CPU memory), ints, floats, bools and None; for a packed entry the addresses of its arguments. One call
        at a time: the library holds the callback.
        """
        call = self._call_packed if self.packed else self._call_tvm_ffi
        self._run(lambda: call(args), on_launch)

    def call_prepared(self, tensors: Sequence[Any], on_launch: OnLaunch) -> None:
        """Runs a TVM-FFI entry on tvm_ffi.Tensors, whose memory is the CPU's whatever they say, as a call does."""
        pointers = [ctypes.addressof(tvm_abi.dltensor(tensor)) for tensor in tensors]
        packed = (tvm_abi.Any * len(pointers))(
            *(tvm_abi.Any(tvm_abi.ANY_DLTENSOR, 0, tvm_abi.AnyValue(v_ptr=pointer)) for pointer in pointers)
        )
        self._run(lambda: self._function(None, packed, len(packed), ctypes.byref(tvm_abi.Any())), on_launch)

    def _run(self, call: Callable[[], int], on_launch: OnLaunch) -> None:
        raised: list[BaseException] = []

        @_LAUNCH_CALLBACK
        def callback(kernel: bytes, max_dynamic_smem: int, config: Any, params: Any) -> int:
            try:
                launch = _read_launch(self.ptx, kernel.decode(), max_dynamic_smem, config.contents, params)
                on_launch(launch)
            except BaseException as error:  # a ctypes callback must not raise: the caller below does
                raised.append(error)
                return _CUDA_ERROR_UNKNOWN
            return 0

        with self._lib.lock:
            self._lib.shim_clear_error()
            self._lib.callbacks.append(callback)
            self._lib.shim_set_callback(callback)
            try:
                failed = call()
            finally:
                self._lib.callbacks.pop()
                self._lib.shim_set_callback(self._lib.callbacks[-1])
            if raised:
                raise raised[0]
            if failed:
                self._raise_recorded(failed)

    def _call_tvm_ffi(self, args: Sequence[Any]) -> int:
        keep_alive: list[Any] = []
        packed = (tvm_abi.Any * max(1, len(args)))(*(_to_any(i, arg, keep_alive) for i, arg in enumerate(args)))
        return self._function(None, packed, len(args), ctypes.byref(tvm_abi.Any()))

    def _call_packed(self, args: Sequence[Any]) -> int:
        self._load_packed()
        status = ctypes.c_int32(0)
        pointers = [a.value if isinstance(a, ctypes.c_void_p) else int(a) for a in args]
        pointers.append(ctypes.addressof(status))
        self._function((ctypes.c_void_p * len(pointers))(*pointers), len(pointers))
        return status.value

    def _load_packed(self) -> None:
        """What the DSL's loader does once: the entry itself expects its kernels to be resolved."""
        if getattr(self._lib, "kernels_resolved", False):
            return
        prefix = self.entry.partition("__mlir_ciface_")[0]
        library, device, status = ctypes.c_void_p(), ctypes.c_int32(0), ctypes.c_int32(0)
        to_library = ctypes.pointer(library)
        for name, operands in (
            ("cuda_init", (to_library, status)),
            ("cuda_load_to_device", (to_library, device, status)),
        ):
            getattr(self._lib, f"{prefix}_{name}")(
                (ctypes.c_void_p * len(operands))(*(ctypes.addressof(operand) for operand in operands))
            )
            if status.value:
                self._raise_recorded(status.value)
        self._lib.kernels_resolved = True

    def _raise_recorded(self, code: int) -> None:
        kind, message = self._lib.shim_error_kind().decode(), self._lib.shim_error_message().decode()
        error = getattr(builtins, kind, None)
        if not (isinstance(error, type) and issubclass(error, Exception)):
            error = RuntimeError
        raise error(message or f"host code failed with CUDA error {code}")


def capture_launches(
    compiled: Any, *args: Any, on_launch: OnLaunch | None = None, **kwargs: Any
) -> list[Launch]:
    """Calls a compiled CuTe DSL function on the CPU and returns the launches it makes.

    compiled: what `cute.compile` returned for a supported target, with its PTX kept (see
    `cute_gemma.emulator.compile`), for either calling convention. Tensors are in CPU memory. on_launch, when
    given, is called with each Launch at the moment the host code makes it, and may raise to stop it.

    Raises CaptureError for a function without PTX or without exportable host code.
    """
    launches: list[Launch] = []

    def record(launch: Launch) -> None:
        launches.append(launch)
        if on_launch is not None:
            on_launch(launch)

    host = host_code(compiled)
    if host.packed:
        addresses, adapted = compiled.execution_args.generate_execution_args(args, kwargs)
        host(addresses, record)
        del adapted  # it owned what the addresses point to
    else:
        if kwargs:
            raise TypeError(
                f"a function compiled with TVM-FFI takes positional arguments here, got {sorted(kwargs)}"
            )
        host(args, record)
    return launches


def compile(function: Callable[..., Any], *args: Any, target: str = "sm_100a", options: str = "") -> Any:
    """`cute.compile` with or without a GPU, keeping the PTX and cubin that capture and inspection need.

    args are what `cute.compile` takes (real or fake tensors, scalars, a stream); options are
    further command-line style options, such as "--enable-tvm-ffi". Sets no environment variable and leaves no
    file behind.
    """
    import cutlass.cute as cute

    with tempfile.TemporaryDirectory() as scratch:
        kept = f"--gpu-arch {target} --keep-ptx --keep-cubin --dump-dir {scratch}"
        return cute.compile(function, *args, options=f"{kept} {options}".strip())


_host_codes: weakref.WeakKeyDictionary[Any, HostCode] = weakref.WeakKeyDictionary()


def host_code(compiled: Any) -> HostCode:
    """The linked host code of what `cute.compile` returned, or of an object that has it in `host_code`."""
    own = getattr(compiled, "host_code", None)
    if isinstance(own, HostCode):
        return own
    found = _host_codes.get(compiled)
    if found is None:
        found = _host_codes[compiled] = _export(compiled)
    return found


def _export(compiled: Any) -> HostCode:
    if getattr(compiled, "ir_module", None) is None or not hasattr(compiled, "export_to_c"):
        raise CaptureError(
            f"{type(compiled).__name__} has no host code to export; expected what cute.compile returned "
            "in this process"
        )
    ptx = getattr(getattr(compiled, "artifacts", None), "PTX", None)
    if not ptx:
        raise CaptureError(
            "the compiled function did not keep its PTX; compile with cute_gemma.emulator.compile, or pass "
            'options="--keep-ptx --dump-dir FOLDER" to cute.compile'
        )
    object_code, entry, packed = export_object(compiled, "captured")
    return HostCode(object_code, ptx, entry=entry, packed=packed)


def export_object(compiled: Any, name: str) -> tuple[bytes, str, bool]:
    """The object file of a compiled function under the symbol prefix `name`, its entry's symbol, and whether
    that entry takes packed arguments; else it is a TVM-FFI function."""
    if any(base.__name__.startswith("TVMFFI") for base in type(compiled).__mro__):
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch) / "host.o"
            compiled.export_to_c(str(path), function_name=name)
            return path.read_bytes(), f"__tvm_ffi_{name}", False
    _load_dsl_runtime()
    return compiled.dump_to_object(name), f"_mlir_{name}__mlir_ciface_{compiled.function_name}", True


@functools.lru_cache(maxsize=1)
def _load_dsl_runtime() -> None:
    """Makes the DSL's runtime known to its exporter, which resolves symbols although it only writes a file.
    Compiling for this machine's GPU does so in passing; cross-compiling does not."""
    from cutlass._mlir import execution_engine, ir
    from cutlass.cute.runtime import find_runtime_libraries

    with ir.Context(), ir.Location.unknown():
        module = ir.Module.parse("module {}")
        execution_engine.ExecutionEngine(
            module, opt_level=0, shared_libs=find_runtime_libraries(enable_tvm_ffi=False)
        )


_libraries: dict[Path, ctypes.CDLL] = {}
_libraries_lock = threading.Lock()


def _load(path: Path, ptx: str) -> ctypes.CDLL:
    """Opens a linked library and describes to it the modelled device and the kernels, once."""
    with _libraries_lock:
        if path in _libraries:
            return _libraries[path]
        lib = ctypes.CDLL(str(path))
        for text in (lib.shim_error_kind, lib.shim_error_message):
            text.restype = ctypes.c_char_p
        lib.lock = threading.RLock()  # the callback is the library's, whoever calls it
        lib.callbacks = [_LAUNCH_CALLBACK()]
        lib.shim_image.restype = ctypes.c_void_p
        lib.shim_set_callback.argtypes = [_LAUNCH_CALLBACK]
        lib.shim_add_kernel.argtypes = [ctypes.c_char_p, ctypes.c_int]
        target = _target_of(ptx)
        if target not in _DEVICE_ATTRIBUTES:
            raise CaptureError(
                f"target {target} is not supported, expected one of {', '.join(_DEVICE_ATTRIBUTES)}"
            )
        for attribute, value in (_COMMON_DEVICE_ATTRIBUTES | _DEVICE_ATTRIBUTES[target]).items():
            lib.shim_set_device_attribute(attribute, value)
        lib.kernel_names = [name.encode() for name in entry_names(ptx)]  # the library keeps pointers to these
        for name in lib.kernel_names:
            if lib.shim_add_kernel(name, parse_entry(ptx, name.decode()).static_smem):
                raise CaptureError(
                    f"the module has more kernels than capture has room for: {len(lib.kernel_names)}"
                )
        _libraries[path] = lib
        return lib


def _target_of(ptx: str) -> str:
    match = re.search(r"^\.target\s+(sm_\w+)", ptx, re.MULTILINE)
    if match is None:
        raise CaptureError("the PTX has no .target directive")
    return match[1]


def _read_launch(ptx: str, kernel: str, max_dynamic_smem: int, config: _LaunchConfig, params: Any) -> Launch:
    """Copies a launch out of the host code's memory, refusing what the CUDA runtime would refuse."""
    entry = parse_entry(ptx, kernel)
    count = config.num_attributes
    attributes = (_LaunchAttribute * count).from_address(config.attributes) if count else ()
    values = {a.id: bytes(a.value) for a in attributes}
    cluster = entry.reqnctapercluster or (1, 1, 1)
    if (given := values.get(_ATTRIBUTE_CLUSTER_DIMENSION)) is not None:
        cluster = tuple(int.from_bytes(given[4 * i : 4 * i + 4], "little") for i in range(3))
    programmatic = values.get(_ATTRIBUTE_PROGRAMMATIC_SERIALIZATION, bytes(4))[:4]
    launch = Launch(
        kernel_name=kernel,
        ptx=ptx,
        grid=tuple(config.grid),
        block=tuple(config.block),
        cluster=cluster,
        dynamic_smem=config.dynamic_smem,
        params=tuple(ctypes.string_at(params[i], param.size) for i, param in enumerate(entry.params)),
        programmatic=any(programmatic),
        stream=config.stream or 0,
        attributes=tuple(values.items()),
    )
    if launch.dynamic_smem > max_dynamic_smem:
        raise LaunchError(
            f"launch of {kernel} refused: {launch.dynamic_smem} bytes of dynamic shared memory, and the "
            f"function allows {max_dynamic_smem}"
        )
    launch.check()
    return launch


def _to_any(index: int, arg: Any, keep_alive: list[Any]) -> tvm_abi.Any:
    if arg is None:
        return tvm_abi.Any(tvm_abi.ANY_NONE, 0, tvm_abi.AnyValue(v_int64=0))
    if isinstance(arg, bool):
        return tvm_abi.Any(tvm_abi.ANY_BOOL, 0, tvm_abi.AnyValue(v_int64=int(arg)))
    if isinstance(arg, int):
        return tvm_abi.Any(tvm_abi.ANY_INT, 0, tvm_abi.AnyValue(v_int64=arg))
    if isinstance(arg, float):
        return tvm_abi.Any(tvm_abi.ANY_FLOAT, 0, tvm_abi.AnyValue(v_float64=arg))
    if isinstance(arg, tuple):
        return _to_array(index, arg, keep_alive)
    if not hasattr(arg, "data_ptr"):
        raise TypeError(
            f"argument {index}: got {type(arg).__name__}, expected a tensor, int, float, bool, None or tuple"
        )
    if getattr(getattr(arg, "device", None), "type", "cpu") != "cpu":
        raise ValueError(f"argument {index}: tensor on {arg.device}, expected one in CPU memory")
    dtype = str(arg.dtype).removeprefix("torch.")
    if dtype not in tvm_abi.DLPACK_DTYPES:
        raise TypeError(f"argument {index}: dtype {arg.dtype}, expected one of {', '.join(tvm_abi.DLPACK_DTYPES)}")
    code, bits = tvm_abi.DLPACK_DTYPES[dtype]
    ndim = len(arg.shape)
    shape = (ctypes.c_int64 * ndim)(*arg.shape)
    strides = (ctypes.c_int64 * ndim)(*arg.stride())
    # The host code checks that its tensors are on a CUDA device; to it, CPU memory is device memory here.
    tensor = tvm_abi.DLTensor(arg.data_ptr(), tvm_abi.DEVICE_CUDA, 0, ndim, code, bits, 1, shape, strides, 0)
    keep_alive.extend((shape, strides, tensor, arg))
    return tvm_abi.Any(tvm_abi.ANY_DLTENSOR, 0, tvm_abi.AnyValue(v_ptr=ctypes.addressof(tensor)))


def _to_array(index: int, arg: tuple, keep_alive: list[Any]) -> tvm_abi.Any:
    """A tuple, named or not, of anything but tensors: those in it would keep the device they are on."""
    import tvm_ffi

    def plain(value: Any) -> bool:
        if isinstance(value, tuple):
            return all(map(plain, value))
        return value is None or type(value) in (bool, int, float)

    if not plain(arg):
        raise TypeError(f"argument {index}: got {arg!r}, expected ints, floats, bools, None and tuples in it")
    array = tvm_ffi.convert(arg)
    keep_alive.append(array)
    return tvm_abi.Any(tvm_abi.ANY_ARRAY, 0, tvm_abi.AnyValue(v_ptr=array.__chandle__()))
