"""Launch capture: a compiled function's own host code runs on the CPU and every launch it makes is handed
over."""

import ctypes
import dataclasses
import gc
import os
import struct
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import pytest
import torch
from cutlass import BFloat16, Float32, Int32
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from cute_gemma.emulator import capture
from cute_gemma.emulator.build import BuildError
from cute_gemma.emulator.capture import CaptureError, capture_launches, host_code
from cute_gemma.emulator.launch import Launch, LaunchError

TVM_FFI = "--enable-tvm-ffi"


@dataclass(frozen=True)
class Scale:
    """y[i] = x[i] * factor."""

    threads: int = 128

    @cute.kernel
    def kernel(self, x: cute.Tensor, y: cute.Tensor, factor: Float32):
        i = cute.arch.block_idx()[0] * self.threads + cute.arch.thread_idx()[0]
        if i < x.shape[0]:
            y[i] = x[i] * factor

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, factor: Float32, stream: cuda.CUstream):
        grid = (cute.ceil_div(x.shape[0], self.threads), 1, 1)
        self.kernel(x, y, factor).launch(grid=grid, block=(self.threads, 1, 1), stream=stream)


@dataclass(frozen=True)
class Chain:
    """Two kernels in a row: the first on clusters of two with `smem` bytes, the second programmatically
    dependent."""

    smem: int = 0
    block: int = 64

    @cute.kernel
    def first(self, x: cute.Tensor):
        cute.arch.griddepcontrol_launch_dependents()
        x[cute.arch.block_idx()[0]] = Float32(1.0)

    @cute.kernel
    def second(self, x: cute.Tensor, n: Int32):
        cute.arch.griddepcontrol_wait()
        if n > 0:
            x[cute.arch.block_idx()[0]] = Float32(2.0)

    @cute.jit
    def __call__(self, x: cute.Tensor, n: Int32, stream: cuda.CUstream):
        self.first(x).launch(
            grid=(4, 3, 1), block=(self.block, 1, 1), cluster=(2, 1, 1), smem=self.smem, stream=stream
        )
        self.second(x, n).launch(grid=(x.shape[0], 1, 1), block=(32, 2, 1), stream=stream, use_pdl=True)


@dataclass(frozen=True)
class TmaLoad:
    """Names a TMA load of one 64x32 box of x, so that a tensor map is among the kernel's parameters."""

    @cute.kernel
    def kernel(self, atom: cute.CopyAtom, tiles: cute.Tensor, layout: cute.Layout):
        smem = SmemAllocator()
        barrier = smem.allocate_array(cutlass.Int64, 1)
        box = smem.allocate_tensor(BFloat16, layout, 128)
        shared, boxes = cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(box, 0, 2), cute.group_modes(tiles, 0, 2)
        )
        if cute.arch.thread_idx()[0] == 0:
            cute.copy(atom, boxes[None, 0, 0], shared, tma_bar_ptr=barrier)

    @cute.jit
    def __call__(self, x: cute.Tensor, stream: cuda.CUstream):
        layout = cute.make_layout((64, 32), stride=(32, 1))
        atom, tensor = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), x, layout, (64, 32))
        tiles = cute.local_tile(tensor, (64, 32), (None, None))
        self.kernel(atom, tiles, layout).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)


def fake_vector(dtype=Float32):
    return cute.runtime.make_fake_compact_tensor(
        dtype, (cute.sym_int32(),), stride_order=(0,), assumed_align=16
    )


def fake_stream(options=TVM_FFI):
    return cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=options == TVM_FFI)


@pytest.fixture(scope="module")
def scale():
    n = cute.sym_int32()
    x, y = (cute.runtime.make_fake_compact_tensor(Float32, (n,), stride_order=(0,)) for _ in range(2))
    return capture.compile(Scale(), x, y, Float32(0), fake_stream(), options=TVM_FFI)


@pytest.fixture(scope="module")
def chain():
    return capture.compile(Chain(smem=70000), fake_vector(), Int32(0), fake_stream(), options=TVM_FFI)


def run_scale_in_python(launch: Launch) -> None:
    """What the kernel does, from the bytes of the launch alone."""
    (x, n, _), (y, m, _) = (struct.unpack("<QiI", param) for param in launch.params[:2])
    (factor,) = struct.unpack("<f", launch.params[2])
    assert n == m
    source, sink = ((ctypes.c_float * n).from_address(address) for address in (x, y))
    for i in range(n):
        sink[i] = source[i] * factor


def test_a_launch_carries_grid_block_and_parameters(scale):
    x, y = torch.arange(300, dtype=torch.float32), torch.full((300,), float("nan"))
    (launch,) = capture_launches(scale, x, y, 2.5, on_launch=run_scale_in_python)
    assert (launch.grid, launch.block, launch.cluster) == ((3, 1, 1), (128, 1, 1), (1, 1, 1))
    assert not launch.programmatic and launch.dynamic_smem == 0
    assert f".entry {launch.kernel_name}(" in launch.ptx
    assert torch.equal(y, x * 2.5)


def test_one_compiled_function_serves_every_size(scale):
    for n in (1, 128, 129, 4097):
        x, y = torch.randn(n), torch.empty(n)
        (launch,) = capture_launches(scale, x, y, -1.0, on_launch=run_scale_in_python)
        assert launch.grid == (-(-n // 128), 1, 1)
        assert torch.equal(y, -x)


def test_the_default_calling_convention_is_captured_too():
    n = cute.sym_int32()
    x, y = (cute.runtime.make_fake_compact_tensor(Float32, (n,), stride_order=(0,)) for _ in range(2))
    compiled = capture.compile(Scale(), x, y, Float32(0), fake_stream(""))
    x, y = torch.randn(70), torch.empty(70)
    for factor in (0.5, 4.0):
        launches = capture_launches(
            compiled, x, y, Float32(factor), cuda.CUstream(7), on_launch=run_scale_in_python
        )
        assert [launch.stream for launch in launches] == [7]
        assert torch.equal(y, x * factor)


def test_cross_compiled_functions_are_captured(tmp_path):
    """In a process of its own: nothing else has loaded the DSL's runtime there."""
    script = tmp_path / "script.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "import torch, cuda.bindings.driver as cuda\nfrom cutlass import Float32\n"
        "from cute_gemma.emulator.capture import capture_launches, compile\n"
        "from test_capture import Scale, fake_stream, fake_vector\n"
        "for target in ('sm_90a', 'sm_100a'):\n"
        "    fakes = fake_vector(), fake_vector(), Float32(0), fake_stream('')\n"
        "    compiled = compile(Scale(), *fakes, target=target)\n"
        "    x = torch.zeros(5)\n"
        "    (launch,) = capture_launches(compiled, x, x, Float32(1), cuda.CUstream(0))\n"
        "    assert f'.target {target}' in launch.ptx\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def test_launches_come_in_order_with_clusters_shared_memory_and_pdl(chain):
    first, second = capture_launches(chain, torch.zeros(8), 5)
    assert (first.grid, first.block, first.cluster) == ((4, 3, 1), (64, 1, 1), (2, 1, 1))
    assert first.dynamic_smem == 70000 and not first.programmatic
    assert (second.grid, second.block, second.cluster) == ((8, 1, 1), (32, 2, 1), (1, 1, 1))
    assert second.programmatic
    assert second.params[-1] == struct.pack("<i", 5)


def test_an_exception_of_the_callback_ends_the_call_and_leaves_the_host_code_usable(chain):
    class Stop(Exception):
        pass

    seen = []

    def stop(launch):
        seen.append(launch.kernel_name)
        raise Stop("here")

    for _ in range(2):
        with pytest.raises(Stop, match="here"):
            capture_launches(chain, torch.zeros(8), 1, on_launch=stop)
    assert len(seen) == 2, "the second kernel must not be launched after the first one failed"
    assert len(capture_launches(chain, torch.zeros(8), 1)) == 2


def test_a_call_from_within_a_callback_does_not_disturb_the_outer_one(chain):
    inner = []

    def nested(launch):
        inner.append(capture_launches(chain, torch.zeros(2), 7))

    outer = capture_launches(chain, torch.zeros(8), 1, on_launch=nested)
    assert [launch.grid for launch in outer] == [(4, 3, 1), (8, 1, 1)]
    assert [[launch.grid for launch in launches] for launches in inner] == [[(4, 3, 1), (2, 1, 1)]] * 2


def test_threads_capture_their_own_launches(scale):
    seen = {}

    def work(n):
        x = torch.zeros(n)
        seen[n] = [capture_launches(scale, x, x, 1.0)[0].grid[0] for _ in range(50)]

    threads = [threading.Thread(target=work, args=(128 * k,)) for k in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == {128 * k: [k] * 50 for k in range(1, 5)}


def test_keyboard_interrupts_propagate(scale):
    def interrupt(launch):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        capture_launches(scale, torch.zeros(1), torch.zeros(1), 1.0, on_launch=interrupt)


def test_a_tensor_map_is_a_parameter_with_the_tensors_address():
    stride = cute.sym_int64(divisibility=8)
    x = cute.runtime.make_fake_tensor(BFloat16, (cute.sym_int32(), 64), (stride, 1), assumed_align=16)
    compiled = capture.compile(TmaLoad(), x, fake_stream(), options=TVM_FFI)
    tensor = torch.zeros(100, 96, dtype=torch.bfloat16)[:, :64]
    (launch,) = capture_launches(compiled, tensor)
    (descriptor,) = (
        value
        for param, value in zip(launch.entry.params, launch.params)
        if param.size == 128 and param.align >= 64
    )
    assert int.from_bytes(descriptor[:8], "little") == tensor.data_ptr()
    assert int.from_bytes(descriptor[12:16], "little") * 16 == 96 * 2, "row stride in bytes"
    assert [int.from_bytes(descriptor[i : i + 4], "little") + 1 for i in (32, 36)] == [64, 100]


def test_parameters_are_packed_at_their_ptx_offsets(chain):
    launch = capture_launches(chain, torch.zeros(8), 9)[1]
    block = launch.param_block()
    last = launch.entry.params[-1]
    assert len(block) == last.offset + last.size
    assert block[last.offset :] == struct.pack("<i", 9)


def test_the_runtime_refuses_more_shared_memory_than_the_device_has():
    compiled = capture.compile(
        Chain(smem=228 * 1024), fake_vector(), Int32(0), fake_stream(), options=TVM_FFI
    )
    with pytest.raises(LaunchError, match="233472 bytes of dynamic shared memory"):
        capture_launches(compiled, torch.zeros(8), 1)


def test_an_empty_grid_is_refused(chain):
    with pytest.raises(LaunchError, match="a dimension is zero"):
        capture_launches(chain, torch.zeros(0), 1)


def test_a_block_that_the_kernel_was_not_made_for_is_refused(scale):
    (launch,) = capture_launches(scale, torch.zeros(1), torch.zeros(1), 1.0)
    with pytest.raises(LaunchError, match=r"requires blocks of \(128, 1, 1\)"):
        dataclasses.replace(launch, block=(64, 1, 1)).check()
    with pytest.raises(LaunchError, match="no multiple of the cluster"):
        dataclasses.replace(launch, cluster=(2, 1, 1)).check()


def test_the_host_codes_own_argument_checks_raise(scale):
    with pytest.raises(ValueError, match="expected to match x.shape"):
        capture_launches(scale, torch.zeros(3), torch.zeros(4), 1.0)
    with pytest.raises(TypeError, match="Expects 3 parameters"):
        capture_launches(scale, torch.zeros(3), torch.zeros(3))
    with pytest.raises(TypeError, match="argument 2: got str"):
        capture_launches(scale, torch.zeros(3), torch.zeros(3), "2")
    with pytest.raises(ValueError, match="argument 0: tensor on meta"):
        capture_launches(scale, torch.zeros(3, device="meta"), torch.zeros(3), 1.0)


def test_a_function_without_ptx_says_how_to_keep_it():
    compiled = cute.compile(
        Scale(), fake_vector(), fake_vector(), Float32(0), fake_stream(""), options="--gpu-arch sm_100a"
    )
    with pytest.raises(CaptureError, match="--keep-ptx"):
        capture_launches(compiled, torch.zeros(1), torch.zeros(1), Float32(1), cuda.CUstream(0))
    with pytest.raises(CaptureError, match="what cute.compile returned"):
        capture_launches(lambda: None)


def test_host_code_that_needs_more_of_the_runtime_is_a_build_error_naming_it(tmp_path, scale):
    source = tmp_path / "host.c"
    source.write_text(
        "int _cudaMallocAsync(void **, unsigned long);\n"
        "int entry(void) { void *p; return _cudaMallocAsync(&p, 4); }\n"
    )
    subprocess.run(["cc", "-c", "-fPIC", str(source), "-o", str(tmp_path / "host.o")], check=True)
    with pytest.raises(BuildError, match="_cudaMallocAsync"):
        capture.HostCode((tmp_path / "host.o").read_bytes(), scale.artifacts.PTX, entry="entry")


def test_the_linked_host_code_loads_the_very_cubin_of_the_compiled_function(scale):
    capture_launches(scale, torch.zeros(1), torch.zeros(1), 1.0)
    image = host_code(scale)._lib.shim_image()
    magic, _, header, size = struct.unpack("<IHHQ", ctypes.string_at(image, 16))
    assert magic == 0xBA55ED50, "a fatbin"
    fatbin = ctypes.string_at(image, header + size)
    assert fatbin.count(b"\x7fELF") == 1 and scale.artifacts.CUBIN in fatbin


def test_capture_leaves_no_trace_in_the_environment_or_the_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = dict(os.environ)
    compiled = capture.compile(
        Scale(), fake_vector(), fake_vector(), Float32(0), fake_stream(), options=TVM_FFI
    )
    capture_launches(compiled, torch.zeros(4), torch.zeros(4), 1.0)
    assert dict(os.environ) == before
    assert not list(tmp_path.iterdir())


def test_linked_host_code_is_reused_and_dropped_with_its_function(scale):
    assert host_code(scale) is host_code(scale)
    compiled = capture.compile(
        Scale(32), fake_vector(), fake_vector(), Float32(0), fake_stream(), options=TVM_FFI
    )
    host_code(compiled)
    count = len(capture._host_codes)
    del compiled
    gc.collect()
    assert len(capture._host_codes) == count - 1


@pytest.mark.parametrize(
    "first, second", [("cutlass", "cute_gemma.emulator.capture"), ("cute_gemma.emulator.capture", "cutlass")]
)
def test_import_order_does_not_matter_and_the_dsl_keeps_its_own_runtime(first, second, tmp_path):
    """After a capture, the DSL still launches through the real runtime: without a driver that fails with a
    CUDA error."""
    script = tmp_path / "script.py"
    script.write_text(
        f"import os; before = dict(os.environ)\nimport {first}, {second}\n"
        "import torch, cutlass, cutlass.cute as cute, cuda.bindings.driver as cuda\n"
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from cute_gemma.emulator.capture import capture_launches, compile\n"
        "from test_capture import Scale, fake_stream, fake_vector\n"
        "compiled = compile(Scale(), fake_vector(), fake_vector(), cutlass.Float32(0), fake_stream(''))\n"
        "x, y = torch.zeros(5), torch.zeros(5)\n"
        "args = (x, y, cutlass.Float32(1), cuda.CUstream(0))\n"
        "assert len(capture_launches(compiled, *args)) == 1\n"
        "if not torch.cuda.is_available():\n"
        "    try: compiled(*args)\n"
        "    except Exception as error: assert 'CUDA' in str(error) or 'cuda' in str(error), error\n"
        "    else: raise SystemExit('a launch without a GPU went through')\n"
        "assert len(capture_launches(compiled, *args)) == 1\n"
        "assert dict(os.environ) == before, set(os.environ.items()) ^ set(before.items())\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
