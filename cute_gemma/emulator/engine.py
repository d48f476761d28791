"""Runs launches in the C engine: builds its structures, calls it, and raises what it reports."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import program as programs
from .build import build_library
from .capture import HostCode, capture_launches
from .errors import FAULTS, AsyncRegisterError, UninitialisedRead
from .launch import Launch
from .lowering import CSRC
from .report import LaunchReport, Report
from .timeline import TRACE_DTYPE

# The engine's target is the very machine: no library leaves it. Fused multiply-add stands only where PTX has
# one.
_FLAGS = (
    "-O3",
    "-march=native",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-strict-aliasing",
    "-w",
)
_POLICIES = {"eager": 0, "lazy": 1, "random": 2}
_HAZARDS = {False: 0, True: 1, "strict": 2, "scoreboard": 3}  # LaunchDesc.hazards of emu.h
_SM_COUNT = {100: 148, 90: 132}  # CUDA: B200 and H200


@dataclass(frozen=True)
class Region:
    """Global memory that a launch may touch: `size` bytes at address `base`."""

    base: int
    size: int
    writable: bool = True


@dataclass(frozen=True)
class Options:
    """How to run.

    schedule: when asynchronous operations complete: "lazy" (as late as legal), "eager", or "random:SEED"
    (which also interleaves warps at random). hazards: True checks ordering and races; "strict" makes advice
    an error; "scoreboard" is True without the error for results of tcgen05.ld used before tcgen05.wait::ld
    (the PTX ISA asks for the wait, but the assembler lets the hardware's scoreboard do it, and kernels are in
    use that rely on that); False is off. sm_count: CTAs resident at once; None takes the card of the kernel's
    target. approx_edge: approximate instructions sit at the edge of their documented error. progress: called
    with (CTAs done, CTAs); True draws a bar. memory: further tensors or Regions that the kernels may touch,
    beyond the tensor arguments. trace: events to record at most for `LaunchReport.write_trace`; 0 records
    none.
    """

    schedule: str = "lazy"
    hazards: bool | str = True
    sm_count: int | None = None
    approx_edge: bool = False
    progress: Callable[[int, int], object] | bool | None = None
    memory: tuple = ()
    trace: int = 0

    def __post_init__(self) -> None:
        self.policy()
        if self.hazards not in _HAZARDS:
            raise ValueError(f'hazards: got {self.hazards!r}, expected True, False, "strict" or "scoreboard"')
        if self.trace < 0:
            raise ValueError(f"trace: got {self.trace}, expected a number of events")
        if self.sm_count is not None and self.sm_count < 1:
            raise ValueError(f"sm_count: got {self.sm_count}, expected a positive count or None")

    def policy(self) -> tuple[int, int]:
        """Policy number and seed. Raises ValueError."""
        name, colon, seed = self.schedule.partition(":")
        if name not in _POLICIES or bool(colon) != (name == "random") or (colon and not seed.isdigit()):
            raise ValueError(f'schedule: got {self.schedule!r}, expected "lazy", "eager" or "random:SEED"')
        return _POLICIES[name], int(seed or 0)


_PROGRESS = ctypes.CFUNCTYPE(None, ctypes.c_uint64, ctypes.c_uint64)


class _CRegion(ctypes.Structure):
    _fields_ = [
        ("base", ctypes.c_uint64),
        ("size", ctypes.c_uint64),
        ("writable", ctypes.c_uint32),
        ("index", ctypes.c_uint32),
    ]


class _CLaunch(ctypes.Structure):
    """LaunchDesc of emu.h."""

    _fields_ = [
        ("program", ctypes.POINTER(programs.CProgram)), ("grid", ctypes.c_uint32 * 3), ("block",
        ctypes.c_uint32 * 3),
        ("cluster", ctypes.c_uint32 * 3), ("static_smem", ctypes.c_uint32), ("dynamic_smem", ctypes.c_uint32),
        ("dynamic_base", ctypes.c_uint32), ("params", ctypes.c_void_p), ("param_bytes", ctypes.c_uint32),
        ("regions", ctypes.POINTER(_CRegion)), ("nregions", ctypes.c_uint32), ("arch", ctypes.c_uint32),
        ("resident", ctypes.c_uint32), ("policy", ctypes.c_uint32), ("seed", ctypes.c_uint64),
        ("hazards", ctypes.c_uint32), ("programmatic", ctypes.c_uint32), ("approx_edge", ctypes.c_uint32),
        ("progress", _PROGRESS), ("stop", ctypes.POINTER(ctypes.c_uint32)),
        ("trace_limit", ctypes.c_uint64), ("previous", ctypes.c_void_p),
    ]  # fmt: skip


_FIGURES = (
    "tma_load_bytes", "tma_store_bytes", "mma_flops", "tmem_load_bytes", "tmem_store_bytes",
    "smem_wavefronts",
    "smem_ideal_wavefronts", "sectors_read", "sectors_written",
)  # fmt: skip


class _CResult(ctypes.Structure):
    """LaunchResult of emu.h."""

    _fields_ = [
        ("fault", ctypes.c_uint32), ("line", ctypes.c_uint32), ("warp", ctypes.c_uint32), ("cta",
        ctypes.c_uint32 * 3),
        ("message", ctypes.c_char * 4096), ("warp_instructions", ctypes.c_uint64), ("counts",
        ctypes.c_void_p),
        *((name, ctypes.c_uint64) for name in _FIGURES),
        ("trace", ctypes.c_void_p), ("trace_count", ctypes.c_uint64), ("footprint", ctypes.c_void_p),
        ("waited", ctypes.c_uint32),
    ]  # fmt: skip


@functools.lru_cache(maxsize=1)
def library() -> ctypes.CDLL:
    """The engine, compiled on first use. Raises what build_library raises."""
    sources = sorted(path for path in CSRC.glob("*.c") if path.name != "shim.c")
    headers = sorted((*CSRC.glob("*.h"), *CSRC.glob("*.def")))
    lib = ctypes.CDLL(str(build_library(sources, _FLAGS, headers=headers, libs=("-lm",))))
    lib.emu_run.argtypes = [ctypes.POINTER(_CLaunch), ctypes.POINTER(_CResult)]
    lib.emu_free_footprint.argtypes = [ctypes.c_void_p]
    lib.emu_free_footprint.restype = None
    lib.emu_free_trace.argtypes = [ctypes.c_void_p]
    lib.emu_free_trace.restype = None
    return lib


class Footprint:
    """What a launch read and wrote, for the checks of one that overlaps it. Freed with the object.

    before: that of the latest launch that may still run when this one has ended, which it refers to.
    """

    def __init__(self, pointer: int, before: Footprint | None = None) -> None:
        self.pointer, self.before, self._free = pointer, before, library().emu_free_footprint

    def __del__(self) -> None:
        if self.pointer:
            self._free(self.pointer)
            self.pointer = None


# ---------------------------------------------------------------- memory of the arguments
def region_of(argument: Any) -> Region | None:
    """The memory behind a tensor (torch's or the DSL's runtime tensor); None for anything else."""
    if isinstance(argument, Region):
        return argument
    pointer = getattr(argument, "data_ptr", None)
    shape = getattr(argument, "shape", None)
    if pointer is None or shape is None:
        return None
    base = int(pointer() if callable(pointer) else pointer)
    stride = argument.stride() if callable(argument.stride) else argument.stride
    if hasattr(argument, "element_size"):
        bits = 8 * argument.element_size()
    else:
        bits = argument.element_type.width
    extent = _extent(shape, stride)
    return Region(base, -(-extent * bits // 8)) if extent else None


def _extent(shape: Any, stride: Any) -> int:
    """Elements between the first and past the last of a strided tensor; modes may nest."""
    last = 0
    pairs = [(shape, stride)]
    while pairs:
        s, d = pairs.pop()
        if isinstance(s, (tuple, list)) or (hasattr(s, "__iter__") and not isinstance(s, int)):
            pairs.extend(zip(s, d))
            continue
        if int(s) == 0:
            return 0
        last += (int(s) - 1) * int(d)
    return last + 1


def _regions(arguments: Sequence[Any], options: Options) -> list[Region]:
    found = []
    for argument in (*arguments, *options.memory):
        region = region_of(argument)
        if region is not None:
            found.append(region)
    return found


# ---------------------------------------------------------------- running
_streams = threading.local()


@contextlib.contextmanager
def stream() -> Iterator[None]:
    """Launches of separate calls in this block follow one another as on one stream: one that may start early
    (programmatic dependent launch) is checked against the launch before it."""
    before = getattr(_streams, "previous", None), getattr(_streams, "open", False)
    _streams.previous, _streams.open = None, True
    try:
        yield
    finally:
        _streams.previous, _streams.open = before


def run_launch(
    launch: Launch,
    regions: Sequence[Region],
    options: Options = Options(),
    previous: LaunchReport | None = None,
) -> LaunchReport:
    """Executes one launch on the memory in `regions` and reports what it did.

    previous: the launch before it in the stream, for a programmatic one. Raises EmulationError's subclasses:
    at once for what is not implemented, else for the first fault met.
    """
    program = programs.load(launch.ptx, launch.kernel_name)
    if options.hazards == "strict":
        _check_registers(launch, program)
    arch = int(re.search(r"\d+", program.module.target)[0])
    if arch not in _SM_COUNT:
        arch = 100 if arch >= 100 else 90
    policy, seed = options.policy()
    params = programs.aligned(max(64, program.kernel.param_bytes))
    block = launch.param_block()
    params[: len(block)] = np.frombuffer(block, np.uint8)
    consts = program.constants(params, _launch_specials(launch, program, arch))
    c_program, keep = program.c_struct(consts, options.approx_edge)
    every = [*regions, *(Region(m.ctypes.data, len(m)) for m in program.variables.values())]
    c_regions = (_CRegion * max(1, len(every)))(
        *(_CRegion(r.base, r.size, r.writable, i) for i, r in enumerate(every))
    )
    warps = -(-launch.block[0] * launch.block[1] * launch.block[2] // 32)
    counts = np.zeros((warps, len(program.ops)), np.uint64)
    stop = ctypes.c_uint32(0)
    with _progress(options.progress, launch) as progress:
        desc = _CLaunch(
            ctypes.pointer(c_program), launch.grid, launch.block, launch.cluster, program.static_smem,
            launch.dynamic_smem, program.dynamic_base, params.ctypes.data, program.kernel.param_bytes,
            c_regions,
            len(every), arch, options.sm_count or _SM_COUNT[arch], policy, seed,
            _HAZARDS[options.hazards], launch.programmatic, options.approx_edge,
            progress, ctypes.pointer(stop), options.trace,
            previous.footprint.pointer if previous is not None else None,
        )  # fmt: skip
        result = _CResult(counts=counts.ctypes.data)
        start = time.perf_counter()
        _run_interruptibly(desc, result, stop)
        seconds = time.perf_counter() - start
    del keep
    before = previous.footprint if previous is not None else None
    footprint = Footprint(result.footprint, before.before if before and result.waited else before)
    events = _take_trace(result)
    if result.fault:
        raise _fault(launch, program, result)
    per_instruction = program.instruction_counts(counts)
    return LaunchReport(
        launch, program, per_instruction, seconds, int(per_instruction.sum()),
        *(getattr(result, name) for name in _FIGURES), footprint, events,
    )  # fmt: skip


def _run_interruptibly(desc: _CLaunch, result: _CResult, stop: ctypes.c_uint32) -> None:
    """Runs the engine in a thread of its own, so that Ctrl-C ends the launch with KeyboardInterrupt.

    Never returns or raises before the engine has ended: it works on memory that the caller frees.
    """
    emu_run, begun, ended, lock = library().emu_run, threading.Event(), threading.Event(), threading.Lock()

    def work() -> None:
        with lock:
            if stop.value:
                return
            begun.set()
        try:
            emu_run(ctypes.byref(desc), ctypes.byref(result))
        finally:
            ended.set()

    try:
        threading.Thread(target=work, name="emulator").start()
        _wait_for(ended)
    except BaseException:
        while True:
            with contextlib.suppress(BaseException):  # a second Ctrl-C
                stop.value = 1
                with lock:  # the thread may come to work later, or never
                    running = begun.is_set()
                if running:
                    _wait_for(ended)
                break
        Footprint(result.footprint)
        _take_trace(result)
        raise


def _wait_for(event: threading.Event) -> None:
    while not event.wait(0.2):  # with a limit, since a signal that another thread took does not end a wait
        pass


def _take_trace(result: _CResult) -> np.ndarray:
    if not result.trace:
        return np.empty(0, TRACE_DTYPE)
    raw = ctypes.string_at(result.trace, result.trace_count * TRACE_DTYPE.itemsize)
    library().emu_free_trace(result.trace)
    return np.frombuffer(raw, TRACE_DTYPE)


def _check_registers(launch: Launch, program: programs.Program) -> None:
    for found, kind, message in (
        (program.undefined, UninitialisedRead, "reads a register that some path to here has not written"),
        (
            program.unfenced,
            AsyncRegisterError,
            "advice: uses a register that some path to here has touched since the last wgmma.fence",
        ),
    ):
        if found:
            line = program.kernel.instructions[found[0]].line
            raise kind(
                message, kernel=launch.kernel_name, line=line, text=program.text(line),
                source=program.source_of(line),
            )  # fmt: skip


def _fault(launch: Launch, program: programs.Program, result: _CResult) -> Exception:
    line = result.line or None

    def located(match: re.Match) -> str:
        source = program.source_of(int(match[1]))
        return f"{match[0]} ({source})" if source else match[0]

    message = re.sub(r"PTX line (\d+)", located, result.message.decode(errors="replace"))
    return FAULTS[result.fault - 1](
        message, kernel=launch.kernel_name, line=line,
        text=program.text(line) if line else None, source=program.source_of(line) if line else None,
        cta=tuple(result.cta), warp=result.warp,
    )  # fmt: skip


def _launch_specials(launch: Launch, program: programs.Program, arch: int) -> dict[str, int]:
    clusters = [g // c for g, c in zip(launch.grid, launch.cluster)]
    values = {}
    for axis, name in enumerate("xyz"):
        values[f"%ntid.{name}"] = launch.block[axis]
        values[f"%nctaid.{name}"] = launch.grid[axis]
        values[f"%cluster_nctaid.{name}"] = launch.cluster[axis]
        values[f"%nclusterid.{name}"] = clusters[axis]
    values["%cluster_nctarank"] = launch.cluster[0] * launch.cluster[1] * launch.cluster[2]
    values["%dynamic_smem_size"] = launch.dynamic_smem
    values["%total_smem_size"] = program.static_smem + launch.dynamic_smem
    values["%nwarpid"] = 64
    values["%nsmid"] = _SM_COUNT[arch]
    values["%gridid"] = 0
    return values


@contextlib.contextmanager
def _progress(progress: Any, launch: Launch) -> Iterator[Any]:
    if not progress:
        yield _PROGRESS()
    elif progress is not True:
        yield _PROGRESS(lambda done, total: progress(done, total) and None)
    else:
        from tqdm import tqdm

        with tqdm(
            total=launch.grid[0] * launch.grid[1] * launch.grid[2], unit="CTA", desc=launch.kernel_name[:40]
        ) as bar:
            yield _PROGRESS(lambda done, total: bar.update(done - bar.n) and None)


class _Stream:
    """Runs the launches of one call, each after the one before."""

    def __init__(self, regions: list[Region], options: Options) -> None:
        self.regions, self.options, self.reports = regions, options, []
        self.previous = _streams.previous if getattr(_streams, "open", False) else None

    def __call__(self, launch: Launch) -> None:
        report = run_launch(
            launch, self.regions, self.options, self.previous if launch.programmatic else None
        )
        self.reports.append(report)
        self.previous = report
        if getattr(_streams, "open", False):
            _streams.previous = report


def run_host_code(
    host_code: HostCode, args: Sequence[Any], options: Options | None = None
) -> list[LaunchReport]:
    """Runs a compiled function's host code on CPU tensors, executing each launch it makes; one report a
    launch."""
    options = options or Options()
    run = _Stream(_regions(args, options), options)
    host_code(args, run)
    return run.reports


def emulate(compiled: Any, *args: Any, options: Options | None = None, **settings: Any) -> Report:
    """Calls a compiled CuTe DSL function with CPU tensors and executes the kernels it launches.

    compiled: what `cute_gemma.emulator.compile` (or `cute.compile` with PTX kept) returned, for sm_90a or
    sm_100a. args: what one would call it with, tensors in CPU memory; results appear in them. settings:
    fields of `Options`.

    Raises CaptureError when the function's host code cannot be run here, and EmulationError's subclasses for
    what the kernels do wrong.
    """
    if options is not None and settings:
        raise TypeError(f"options: given together with {', '.join(settings)}, expected one or the other")
    options = options or Options(**settings)
    run = _Stream(_regions(args, options), options)
    capture_launches(compiled, *args, on_launch=run)
    return Report(run.reports)
