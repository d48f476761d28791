"""How things are timed on a GPU, and what is written down beside the times.

Two protocols, both with cold caches (before each call a buffer of twice the L2 cache is read and written),
random data and the contestants taking turns:

  graph  one replay of a CUDA graph of the call, between two events; the queue of the GPU never runs dry.
  span   no graph: the GPU is idle, the call is made, and the time runs from the start of its first kernel
         (copy, fill) to the end of its last, as CUPTI's activity records give them. Gaps between launches
         count, the way to the first does not. CUPTI adds about a microsecond of CPU time to every launch.
"""

from __future__ import annotations

import importlib.metadata
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

PACKAGES = ("torch", "triton", "nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-cu13", "flash-attn-4")
PROTOCOLS = {
    "graph": "CUDA graph replay between events, L2 flushed before each, contestants in turn",
    "span": "no graph, GPU idle and L2 flushed before each call, from first kernel's start to last's end",
}
_FEWEST, _MOST = 15, 200  # samples a contestant
_IN_A_ROW = 20  # calls, of which no more launches come than the GPU's queue holds
_SMI = (
    "name",
    "driver_version",
    "clocks.sm",
    "clocks.mem",
    "clocks.max.sm",
    "power.draw",
    "power.limit",
    "temperature.gpu",
)


@dataclass(frozen=True)
class HostTimes:
    """Microseconds of CPU time of a call: of one that finds the GPU idle, and of one in a row of them."""

    idle: float
    in_a_row: float


@dataclass(frozen=True)
class Times:
    """Microseconds of one contestant: median, tenth and ninetieth percentile of so many samples."""

    us: float
    p10: float
    p90: float
    samples: int

    @staticmethod
    def of(samples: Sequence[float]) -> Times:
        """Of at least one sample."""
        ordered = sorted(samples)
        last = len(ordered) - 1
        return Times(
            statistics.median(ordered), ordered[round(0.1 * last)], ordered[round(0.9 * last)], len(ordered)
        )


@dataclass(frozen=True)
class Replay:
    """A captured call: run() repeats it, into the same outputs."""

    run: Callable[[], None]
    outputs: tuple[Tensor, ...]


class Flush:
    """Displaces what the L2 cache holds."""

    def __init__(self) -> None:
        size = 2 * torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
        self.buffer = torch.zeros(size, dtype=torch.int8, device="cuda")

    def __call__(self) -> None:
        # A kernel that no contestant launches: its name separates the calls in a profile.
        self.buffer.bitwise_not_()


class GraphTimer:
    """The protocol "graph". seconds: of samples a case, warm-up aside."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.flush = Flush()

    def capture(self, call: Callable[[], tuple[Tensor, ...]]) -> Replay:
        """Calls twice, so that everything is compiled, and then captures a third call."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                call()
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                outputs = call()
        return Replay(graph.replay, outputs)

    def floor_us(self) -> float:
        """What this protocol reads for one kernel with next to nothing to do."""
        one = torch.zeros(1, device="cuda")
        times, _ = self.sample({"floor": self.capture(lambda: (one.add_(1),))})
        return times["floor"].us

    def sample(self, replays: Mapping[str, Replay]) -> tuple[dict[str, Times], str]:
        """Times by name, and the card's state while it was busy with them."""
        names = list(replays)

        def one_round(first: int) -> list[tuple[str, torch.cuda.Event, torch.cuda.Event]]:
            taken = []
            for name in names[first:] + names[:first]:
                start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                self.flush()
                start.record()
                replays[name].run()
                stop.record()
                taken.append((name, start, stop))
            return taken

        one_round(0)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        one_round(0)
        torch.cuda.synchronize()
        rounds = round(self.seconds / (time.perf_counter() - begin))
        rounds = max(_FEWEST, min(_MOST, rounds))
        for index in range(rounds // 3):  # the clocks settle under load
            one_round(index % len(names))
        events = [event for index in range(rounds) for event in one_round(index % len(names))]
        state = card_state()  # the queue is still full
        torch.cuda.synchronize()
        samples: dict[str, list[float]] = {name: [] for name in names}
        for name, start, stop in events:
            samples[name].append(start.elapsed_time(stop) * 1000)
        return {name: Times.of(values) for name, values in samples.items()}, state


class SpanTimer:
    """The protocol "span". reps: samples a contestant."""

    def __init__(self, reps: int) -> None:
        self.reps = reps
        self.flush = Flush()

    def sample(self, calls: Mapping[str, Callable[[], object]]) -> tuple[dict[str, Times], str]:
        """Times by name, and the card's state at the end. Raises RuntimeError if the calls cannot be told
        apart."""
        from torch.autograd import DeviceType
        from torch.profiler import ProfilerActivity, profile

        for call in calls.values():
            call()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            for _ in range(self.reps):
                for call in calls.values():
                    self.flush()
                    torch.cuda.synchronize()
                    call()
                    torch.cuda.synchronize()
        activities = [
            (event.name, event.time_range.start, event.time_range.end)
            for event in profiler.events()
            if event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False)
        ]
        spans = split_spans(activities, self.reps * len(calls))
        by_name = {name: spans[index :: len(calls)] for index, name in enumerate(calls)}
        return {name: Times.of(values) for name, values in by_name.items()}, card_state()


def split_spans(activities: Sequence[tuple[str, float, float]], calls: int) -> list[float]:
    """First start to last end of each call, in time order.

    activities: (name, start, end) of everything the GPU did, a flush before each call; the earliest is a
    flush. Raises RuntimeError where they do not make up `calls` calls.
    """
    ordered = sorted(activities, key=lambda activity: activity[1])
    groups: list[list[tuple[str, float, float]]] = []
    for activity in ordered:
        if activity[0] == ordered[0][0]:
            groups.append([])
        else:
            groups[-1].append(activity)
    if len(groups) != calls or not all(groups):
        empty = sum(not group for group in groups)
        raise RuntimeError(
            f"the profile holds {len(groups)} flushes, {empty} with nothing after, want {calls} calls"
        )
    return [max(end for *_, end in group) - group[0][1] for group in groups]


def host_us(calls: Mapping[str, Callable[[], object]], rounds: int = 100) -> dict[str, HostTimes]:
    """Median CPU time of calls, warm ones, taken in turns."""
    for call in calls.values():
        _cpu_us(call, 2)
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            taken[name].append((_cpu_us(call, 1), _cpu_us(call, _IN_A_ROW)))
    torch.cuda.synchronize()
    return {name: HostTimes(*map(statistics.median, zip(*times))) for name, times in taken.items()}


def _cpu_us(call: Callable[[], object], times: int) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - begin) * 1e6 / times


def measure_peaks() -> dict[str, float]:
    """What the card reaches: a copy of 2 GiB (bytes read and written) and a bfloat16 product of 8192^3 on
    normal data."""
    size, n = 2 << 30, 8192
    source = torch.empty(size, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    a, b = (torch.randn(n, n, device="cuda").bfloat16() for _ in range(2))
    c = torch.empty_like(a)
    copy_us = _median_us(lambda: target.copy_(source))
    gemm_us = _median_us(lambda: torch.mm(a, b, out=c))
    return {"copy_tbps": 2 * size / copy_us * 1e-6, "gemm_tflops": 2 * n**3 / gemm_us * 1e-6}


def _median_us(call: Callable[[], object], warm: int = 60, reps: int = 60) -> float:
    for _ in range(warm):
        call()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(reps + 1)]
    for event in events[:-1]:
        event.record()
        call()
    events[-1].record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) * 1000 for a, b in zip(events, events[1:]))


def card_state() -> str:
    """nvidia-smi's reading of _SMI for the current GPU, or why there is none."""
    command = ["nvidia-smi", f"--query-gpu={','.join(_SMI)}", "--format=csv,noheader"]
    try:
        uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
        done = subprocess.run([*command, f"--id=GPU-{uuid}"], capture_output=True, text=True, timeout=10)
    except (OSError, AttributeError, AssertionError, RuntimeError, subprocess.SubprocessError) as error:
        return f"no reading: {type(error).__name__}: {error}"
    return done.stdout.strip() if done.returncode == 0 else f"no reading: {done.stdout}{done.stderr}".strip()


def facts() -> dict:
    """The card, its state by nvidia-smi, and the versions that a result is for."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "gpu": properties.name,
        "sms": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
        "capability": f"{properties.major}.{properties.minor}",
        "nvidia_smi": dict(zip(_SMI, map(str.strip, card_state().split(",")))),
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "packages": versions(),
    }


def versions() -> dict[str, str | None]:
    """Of the packages that shape a result; None where one is not installed."""
    found: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found
