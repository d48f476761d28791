"""Faults planted in the attention kernel as compiled: each piece of synchronisation taken out is reported."""

import re
from dataclasses import replace

import pytest
import torch

from cute_gemma import emulator, jit
from cute_gemma.emulator import engine
from cute_gemma.kernels.sm100.attention import Attention

SYNC = re.compile(
    r"mbarrier\.(try_wait|arrive|init)|fence\.proxy|tcgen05\.(wait|commit|dealloc)|bar\.sync|barrier\."
    r"|bulk\.(commit|wait)_group"
)


class Kernel:
    """One launch of attention over 384 keys with its memory, to be run again with other PTX or parameters."""

    def __init__(self, monkeypatch):
        torch.manual_seed(0)
        q, k, v = (torch.randn(1, 384, 2, 128).bfloat16() for _ in range(3))
        seen, original = [], engine.run_launch

        def record(launch, regions, *rest, **more):
            seen.append((launch, list(regions)))
            return original(launch, regions, *rest, **more)

        monkeypatch.setattr(engine, "run_launch", record)
        self.output = torch.empty_like(q)
        kernel = Attention(2, 2, 128, 128**-0.5, 50.0)
        jit.launch(kernel, q, k, v, self.output, target="sm_100a", backend="emulator")
        monkeypatch.undo()
        self.tensors = q, k, v
        self.launch, self.regions = seen[-1]
        self.expected = self.output.clone()
        report = self.run(self.launch)
        self.lines = self.launch.ptx.split("\n")
        counts = dict.fromkeys(range(len(self.lines) + 1), 0)
        for line, _, count in report.by_line():
            counts[line] += count
        self.executed = {line for line, count in counts.items() if count}

    def run(self, launch, **options):
        self.output.fill_(float("nan"))
        return emulator.run_launch(launch, self.regions, emulator.Options(**options))

    def altered(self, line, text):
        lines = self.lines.copy()
        lines[line - 1] = text
        return replace(self.launch, ptx="\n".join(lines))

    def found(self, pattern):
        return [n for n, text in enumerate(self.lines, 1) if n in self.executed and re.search(pattern, text)]

    def without(self, line):
        """The launch without the instruction of a line; a wait becomes one that passes."""
        text = self.lines[line - 1]
        wait = re.search(r"mbarrier\.try_wait\S*\s+([%\w]+),[^;]*;", text)
        if wait:
            return self.altered(line, text.replace(wait[0], f"setp.eq.u32 {wait[1]}, 0, 0;"))
        return self.altered(line, re.sub(r"(@!?\S+\s+)?[a-z][\w.:]+[^;]*;", "", text, count=1))

    def with_map(self, change):
        """Launches in each of which `change` has altered the bytes of one tensor map."""
        for i, value in enumerate(self.launch.params):
            if len(value) == 128:
                raw = bytearray(value)
                change(raw)
                params = (*self.launch.params[:i], bytes(raw), *self.launch.params[i + 1 :])
                yield replace(self.launch, params=params)


@pytest.fixture(scope="module")
def kernel():
    with pytest.MonkeyPatch.context() as patch:
        yield Kernel(patch)


def reported(kernel, launch, **options):
    """The error a launch ends with, or None; a wrong result without an error fails the test."""
    try:
        kernel.run(launch, **options)
    except emulator.EmulationError as error:
        return error
    assert torch.equal(kernel.output, kernel.expected), "a wrong result, and nothing was reported"
    return None


def test_unaltered_kernel_is_fine_under_many_schedules(kernel):
    for seed in range(10):
        kernel.run(kernel.launch, schedule=f"random:{seed}")
        assert torch.equal(kernel.output, kernel.expected)


@pytest.mark.parametrize(
    ("pattern", "share"),
    [
        (r"mbarrier\.try_wait", 0.6),          # some waits of the last tile are implied by others
        (r"mbarrier\.arrive\.expect_tx", 1),
        (r"mbarrier\.init", 0.8),              # not every stage comes into use
        (r"fence\.proxy\.async", 1),
        (r"tcgen05\.wait::ld", 1),
        (r"tcgen05\.wait::st", 0.5),           # two in a row: the second covers the first
        (r"tcgen05\.commit", 1),
        (r"bulk\.wait_group", 1),
    ],
)
def test_missing_instruction_is_reported(kernel, pattern, share):
    lines = kernel.found(pattern)
    errors = [reported(kernel, kernel.without(line)) for line in lines]
    assert lines and sum(error is not None for error in errors) >= share * len(lines)


@pytest.mark.parametrize("change", [-16, 16, 4096])
def test_other_transaction_count_is_reported(kernel, change):
    for line in kernel.found(r"expect_tx"):
        text = kernel.lines[line - 1]
        register = re.search(r", (%\w+);", text)[1]
        more, less = (f"{op}.u32 {register}, {register}, {change};" for op in ("add", "sub"))
        altered = f"{more} {text.strip()} {less}"
        assert reported(kernel, kernel.altered(line, altered)) is not None


def test_other_swizzle_of_a_load_is_reported(kernel):
    def change(raw):
        raw[9] = (raw[9] & ~0x60) | 0x40       # 64 bytes

    errors = [reported(kernel, launch) for launch in kernel.with_map(change)]
    assert sum(isinstance(error, emulator.DescriptorError) for error in errors) >= 3


def test_other_box_is_reported(kernel):
    def change(raw):
        raw[56] = (raw[56] + 1) // 2 - 1       # half the rows

    errors = [reported(kernel, launch) for launch in list(kernel.with_map(change))[:3]]
    assert all(error is not None for error in errors)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["lazy", "eager", "random:1", "random:2"])
def test_no_missing_instruction_changes_the_result_unreported(kernel, schedule):
    lines = kernel.found(SYNC.pattern)
    errors = [reported(kernel, kernel.without(line), schedule=schedule) for line in lines]
    assert sum(error is not None for error in errors) > 0.8 * len(lines)
