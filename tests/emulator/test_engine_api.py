"""The emulator's public functions: compiled functions run on CPU tensors, reports add up, faults say
where."""

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import cuda.bindings.driver as cuda
import cutlass.cute as cute
import numpy as np
import pytest
import torch
from cutlass import Float32, Int32
from cutlass.cute.runtime import from_dlpack
from ptx_runner import lanes, run

from cute_gemma import emulator
from cute_gemma.emulator import EmulationError, MemoryFault, Options, Region, UnsupportedInstruction
from cute_gemma.emulator.engine import region_of

STREAM = cuda.CUstream(0)


@dataclass(frozen=True)
class BlockSum:
    """out[b] = sum over a block's 128 elements of x, by warp shuffles and shared memory."""

    @cute.kernel
    def kernel(self, x: cute.Tensor, out: cute.Tensor):
        thread, block = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        value = x[block * 128 + thread]
        for step in range(5):
            value += cute.arch.shuffle_sync_bfly(value, offset=16 >> step)
        partial = cute.arch.alloc_smem(Float32, 4)
        shared = cute.make_tensor(partial, cute.make_layout(4))
        if thread % 32 == 0:
            shared[thread // 32] = value
        cute.arch.sync_threads()
        if thread == 0:
            out[block] = shared[0] + shared[1] + shared[2] + shared[3]

    @cute.jit
    def __call__(self, x: cute.Tensor, out: cute.Tensor, stream: cuda.CUstream):
        self.kernel(x, out).launch(grid=(out.shape[0], 1, 1), block=(128, 1, 1), stream=stream)


@dataclass(frozen=True)
class Shift:
    """x[i + by] = i: runs past the end when `by` is positive. Launched twice."""

    @cute.kernel
    def kernel(self, x: cute.Tensor, by: Int32):
        i = cute.arch.thread_idx()[0]
        x[i + by] = Float32(i)

    @cute.jit
    def __call__(self, x: cute.Tensor, by: Int32, stream: cuda.CUstream):
        self.kernel(x, by * 0).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)
        self.kernel(x, by).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)


def wrapped(*tensors):
    return [from_dlpack(t, assumed_align=16) for t in tensors]


@pytest.fixture(scope="module")
def block_sum():
    x, out = torch.zeros(512), torch.zeros(4)
    return emulator.compile(BlockSum(), *wrapped(x, out), STREAM)


@pytest.mark.parametrize("schedule", ["lazy", "eager", "random:1", "random:2"])
def test_a_compiled_function_runs_on_cpu_tensors(block_sum, schedule):
    x, out = torch.randn(512), torch.zeros(4)
    report = emulator.emulate(block_sum, *wrapped(x, out), STREAM, schedule=schedule)
    torch.testing.assert_close(out, x.view(4, 128).sum(1))
    (launch,) = report.launches
    assert launch.launch.grid == (4, 1, 1) and launch.by_opcode["bar.sync"] == 16
    assert sum(launch.by_opcode[op] for op in launch.by_opcode if op.startswith("shfl")) == 4 * 4 * 5
    assert launch.sectors_read == 512 * 4 // 32
    roles = launch.by_role({"first": [0], "rest": range(1, 4)})
    assert roles["first"] == launch.by_warp[0] and sum(roles.values()) == launch.warp_instructions
    assert "shfl.sync.bfly.b32" in report.summary() and str(report.warp_instructions) in report.summary()


def test_with_the_other_calling_convention_torch_tensors_pass_directly():
    x, out = torch.randn(256), torch.zeros(2)
    symbols = (cute.sym_int32(), cute.sym_int32())
    fakes = [cute.runtime.make_fake_compact_tensor(Float32, (n,), stride_order=(0,)) for n in symbols]
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    compiled = emulator.compile(BlockSum(), *fakes, stream, options="--enable-tvm-ffi")
    emulator.emulate(compiled, x, out)
    torch.testing.assert_close(out, x.view(2, 128).sum(1))


def test_sm_count_does_not_change_results(block_sum):
    x = torch.randn(512)
    results = []
    for count in (1, 3, 148):
        out = torch.zeros(4)
        emulator.emulate(block_sum, *wrapped(x, out), STREAM, sm_count=count)
        results.append(out)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_progress_is_reported(block_sum):
    seen = []
    out = torch.zeros(4)
    emulator.emulate(
        block_sum,
        *wrapped(torch.ones(512), out),
        STREAM,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen[-1] == (4, 4) and seen == sorted(seen)


def test_the_timeline_holds_every_warp_and_opens_as_chrome_trace(block_sum, tmp_path):
    out = torch.zeros(4)
    report = emulator.emulate(block_sum, *wrapped(torch.ones(512), out), STREAM, trace=1000)
    path = tmp_path / "trace.json"
    report.launches[0].write_trace(path, {"leader": [0]})
    events = json.loads(path.read_text())["traceEvents"]
    tracks = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert len(tracks) == 16 and tracks[0, 0] == "warp 0 leader" and tracks[3, 2] == "warp 2"
    spans = [e for e in events if e["ph"] == "X"]
    for track in tracks:  # a warp runs and waits in turn: no two spans of a track overlap
        own = sorted((e["ts"], e["ts"] + e["dur"]) for e in spans if (e["pid"], e["tid"]) == track)
        assert own and all(a[1] <= b[0] for a, b in zip(own, own[1:]))
    with pytest.raises(ValueError, match="trace"):
        emulator.emulate(block_sum, *wrapped(torch.ones(512), out), STREAM).launches[0].write_trace(path)


def test_the_timeline_shows_who_waits_for_whom():
    report = run(
        """mov.u32 %r1, %tid.x; setp.ge.u32 %p1, %r1, 32; @%p1 bra MEET; mov.u32 %r2, 0;
        LOOP: add.u32 %r2, %r2, 1; setp.lt.u32 %p2, %r2, 50; @%p2 bra LOOP;
        MEET: bar.sync 0;""",
        np.zeros(1, np.uint32),
        block=64,
        trace=100,
    )
    waits = report.trace[report.trace["kind"] == 1]
    assert waits["warp"].tolist() == [1] and waits["end"][0] - waits["start"][0] == 151
    assert report.program.text(int(waits["line"][0])).startswith("MEET: bar.sync")


def test_a_timeline_keeps_to_its_limit(block_sum):
    report = emulator.emulate(block_sum, *wrapped(torch.ones(512), torch.zeros(4)), STREAM, trace=5)
    assert len(report.launches[0].trace) == 5


def test_a_fault_names_instruction_place_and_kernel():
    x = torch.zeros(32)
    compiled = emulator.compile(Shift(), *wrapped(x), Int32(0), STREAM)
    emulator.emulate(compiled, *wrapped(x), Int32(0), STREAM)
    assert torch.equal(x, torch.arange(32.0))
    with pytest.raises(MemoryFault) as caught:
        emulator.emulate(compiled, *wrapped(x), Int32(1), STREAM)
    error = caught.value
    assert error.cta == (0, 0, 0) and error.warp == 0 and "Shift" in error.kernel
    assert re.search(r"PTX line \d+: st\.global", str(error))


def test_further_memory_can_be_declared():
    x = torch.zeros(64)
    compiled = emulator.compile(Shift(), *wrapped(x[:32]), Int32(0), STREAM)
    emulator.emulate(compiled, *wrapped(x[:32]), Int32(1), STREAM, memory=(x,))
    assert torch.equal(x[1:33], torch.arange(32.0))


@pytest.mark.parametrize(
    "settings",
    [dict(schedule="sometimes"), dict(schedule="random"), dict(schedule="lazy:1"), dict(hazards="maybe"),
     dict(sm_count=0), dict(trace=-1)],
)  # fmt: skip
def test_bad_settings_are_refused_by_name(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        Options(**settings)


def test_options_and_settings_exclude_each_other(block_sum):
    with pytest.raises(TypeError, match="options"):
        emulator.emulate(block_sum, options=Options(), schedule="eager")


def test_regions_span_strided_tensors():
    x = torch.zeros(8, 16)
    assert region_of(x) == Region(x.data_ptr(), 512)
    assert region_of(x[:, :4]) == Region(x.data_ptr(), 4 * (7 * 16 + 4))
    assert region_of(x[:0]) is None and region_of(3.5) is None
    assert region_of(from_dlpack(x)) == Region(x.data_ptr(), 512)


def test_writing_to_a_read_only_region_is_an_error():
    from ptx_runner import KERNEL

    out = np.zeros(1, np.uint32)
    body = "ld.param.u64 %d1, [p0]; st.global.u32 [%d1], 1;"
    text = KERNEL.format(params=".param .u64 p0", body=body, block=32, module="", target="sm_100a")
    launch = emulator.Launch(
        "k", text, (1, 1, 1), (32, 1, 1), (1, 1, 1), 0, (int(out.ctypes.data).to_bytes(8, "little"),)
    )
    with pytest.raises(MemoryFault):
        emulator.run_launch(launch, [Region(out.ctypes.data, 4, writable=False)])
    emulator.run_launch(launch, [Region(out.ctypes.data, 4)])
    assert out[0] == 1


def test_programs_are_kept_between_launches():
    values = np.arange(32, dtype=np.uint32)
    first = run("add.u32 %r1, %r2, 1;", values)
    second = run("add.u32 %r1, %r2, 1;", values)
    assert first.program is second.program


def test_unsupported_instructions_are_refused_before_anything_runs():
    out = np.zeros(32, np.uint32)
    with pytest.raises(UnsupportedInstruction, match="vset4"):
        run("ld.param.u64 %d1, [p0]; st.global.u32 [%d1], 1; vset4.u32.u32.eq %r1, %r2, %r3, %r4;", out)
    assert not out.any()


def test_every_fault_is_an_emulation_error():
    with pytest.raises(EmulationError):
        lanes("trap; mov.b32 {d}, {a};", np.zeros(32, np.uint32))


def test_ctrl_c_ends_a_long_launch():
    script = """
import signal, sys, threading, time
sys.path.insert(0, sys.argv[1])
import numpy as np
from ptx_runner import run
threading.Timer(0.5, lambda: signal.raise_signal(signal.SIGINT)).start()
try:
    run("LOOP: add.u32 %r1, %r1, 1; setp.ne.u32 %p1, %r2, 7; @%p1 bra LOOP;", np.zeros(1, np.uint32))
except KeyboardInterrupt:
    print("interrupted")
"""
    command = [sys.executable, "-c", script, str(Path(__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "interrupted", done.stderr


def test_no_engine_runs_on_after_an_interrupt_at_any_moment():
    script = """
import os, signal, sys, time
sys.path.insert(0, sys.argv[1])
import numpy as np
from ptx_runner import run
class Stop(Exception): pass
def stop(*_):
    raise Stop
signal.signal(signal.SIGALRM, stop)
threads = lambda: len(os.listdir("/proc/self/task"))
before = None
for i in range(60):
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.0001 * (i + 1))
        run("LOOP: add.u32 %r1, %r1, 1; setp.ne.u32 %p1, %r2, 7; @%p1 bra LOOP;", np.zeros(1, np.uint32))
    except Stop:
        before = before or threads()
time.sleep(0.1)
print("left", threads() - before)
"""
    command = [sys.executable, "-c", script, str(Path(__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "left 0", done.stderr
