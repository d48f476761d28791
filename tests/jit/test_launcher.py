"""Which way a call runs, and what it refuses before anything runs."""

import pytest
import torch
from tiny_kernels import Reverse, RowScale

from cute_gemma import emulator, jit
from cute_gemma.jit import launcher
from cute_gemma.jit.launcher import GpuLauncher


def arguments(m=5, device="cpu"):
    return [
        torch.zeros(m, 8, device=device),
        torch.zeros(8, device=device),
        torch.zeros(m, 8, device=device),
        2.0,
    ]


@pytest.mark.parametrize(
    "keywords, error, message",
    [
        (dict(backend="gpu"), ValueError, "backend: got 'gpu', expected one of cuda, emulator or None"),
        (dict(backend="cuda"), ValueError, "backend 'cuda' runs on CUDA tensors, got cpu"),
        (dict(stream=3), ValueError, "stream: given for backend 'emulator'"),
        (dict(target="sm_80"), jit.UnsupportedTargetError, "target: got 'sm_80'"),
    ],
)
def test_wrong_ways_to_run_are_refused(keywords, error, message):
    with pytest.raises(error, match=message):
        jit.launch(RowScale(), *arguments(), **keywords)


def test_tensors_elsewhere_are_refused_by_the_emulator():
    with pytest.raises(ValueError, match="backend 'emulator' runs on CPU tensors, got tensors on meta"):
        jit.launch(RowScale(), *arguments(device="meta"))


def test_wrong_arguments_are_refused_before_emulation():
    x, bias, y, factor = arguments()
    with pytest.raises(ValueError, match=r"y: shape \(4, 8\), expected m = 5"):
        jit.launch(RowScale(), x, bias, y[:4], factor)
    with pytest.raises(TypeError, match="got 3 arguments, expected 4: x, bias, y, factor"):
        jit.launch(RowScale(), x, bias, y)


@pytest.mark.parametrize(
    "capability, wanted",
    [((10, 0), "sm_100a"), ((9, 0), "sm_90a"), ((10, 3), None), ((12, 0), None), ((8, 0), None)],
)
def test_a_gpu_selects_its_target_or_is_refused_by_name(monkeypatch, capability, wanted):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    device = torch.device("cuda", 0)
    if wanted:
        assert jit.resolve_target(None, device).name == wanted
        return
    with pytest.raises(
        jit.UnsupportedTargetError,
        match=rf"cuda:0 \(Some GPU.*{capability[0]}\.{capability[1]}.*10.0 \(sm_100a\)",
    ):
        jit.resolve_target(None, device)
    with pytest.raises(
        jit.UnsupportedTargetError, match="target sm_100a needs a GPU of compute capability 10.0"
    ):
        jit.resolve_target("sm_100a", device)


class Recorder:
    """Stands for a compiled kernel on a GPU: refuses once what its host code would refuse."""

    def __init__(self, refuse=None):
        self.signature = RowScale().signature()
        self.calls, self.refuse = [], refuse

    def gpu_function(self, *args):
        refusal, self.refuse = self.refuse, None
        if refusal is not None:
            raise refusal
        self.calls.append(args)


def test_right_arguments_go_straight_to_the_gpu():
    recorder, args = Recorder(), arguments()
    GpuLauncher(recorder)(tuple(args))
    ((x, bias, y, factor),) = recorder.calls
    assert x is args[0] and bias is args[1] and y is args[2] and factor == 2.0


def test_what_the_host_code_cannot_see_is_checked_before():
    recorder, (_, bias, y, factor) = Recorder(), arguments()
    with pytest.raises(ValueError, match=r"x: strides \(1, 5\), expected a contiguous tensor"):
        GpuLauncher(recorder)((torch.zeros(8, 5).T, bias, y, factor))
    assert not recorder.calls


def test_a_refusal_of_the_host_code_becomes_an_error_that_names_the_argument():
    recorder, (x, bias, y, factor) = Recorder(ValueError("Mismatched")), arguments()
    with pytest.raises(TypeError, match="bias: dtype torch.float64, expected torch.float32"):
        GpuLauncher(recorder)((x, bias.double(), y, factor))


def test_what_can_be_mended_is_mended_after_a_refusal():
    recorder, (x, bias, y, factor) = Recorder(ValueError("Mismatched")), arguments(m=1)
    GpuLauncher(recorder)((torch.nn.Parameter(x), bias, y.as_strided((1, 8), (3, 1)), factor))
    ((passed, _, strided, _),) = recorder.calls
    assert not passed.requires_grad and strided.stride() == (8, 1)


def test_cuda_errors_are_not_retried():
    recorder = Recorder(RuntimeError("CUDA Error Code: 700"))
    with pytest.raises(RuntimeError, match="700"):
        GpuLauncher(recorder)(tuple(arguments()))
    assert not recorder.calls


def test_emulation_options_do_not_go_to_a_gpu():
    with pytest.raises(ValueError, match="emulation: given for backend 'cuda'"):
        jit.launch(RowScale(), *arguments(), backend="cuda", emulation=object())


def test_calls_without_tensors_are_refused_on_a_gpu():
    with pytest.raises(ValueError, match="backend 'cuda' runs on CUDA tensors, got no tensor"):
        launcher.launch(RowScale(), 1, 2, backend="cuda")


def test_cpu_tensors_run_in_the_emulator():
    torch.manual_seed(0)
    for m in (1, 64, 65):
        x, bias, wide = torch.randn(m, 8), torch.randn(8), torch.full((m, 24), float("nan"))
        (report,) = jit.launch(RowScale(), x, bias, wide[:, 8:16], 3.0)
        torch.testing.assert_close(wide[:, 8:16], torch.addcmul(bias, x, torch.tensor(3.0)))
        assert wide[:, :8].isnan().all() and wide[:, 16:].isnan().all()
        assert report.launch.grid == (-(-m // 64), 1, 1) and report.launch.programmatic


def test_shared_memory_runs_in_the_emulator_under_every_schedule():
    x = torch.randn(300)
    for schedule in ("lazy", "eager", "random:1"):
        y = torch.empty(300)
        jit.launch(Reverse(), x, y, emulation=emulator.Options(schedule=schedule))
        assert torch.equal(y, torch.cat([block.flip(0) for block in x.split(128)]))


def test_parameters_and_unused_strides_are_accepted_in_the_emulator():
    x, y = torch.nn.Parameter(torch.randn(8).as_strided((1, 8), (3, 1))), torch.empty(1, 8)
    jit.launch(RowScale(), x, torch.zeros(8), y, 1.0)
    assert torch.equal(y, x)


def test_an_access_outside_the_given_tensors_is_a_fault():
    """The kernel's extent is made to disagree with the memory: the second block has no rows to read."""
    compiled = jit.compile(RowScale())
    x, y = torch.zeros(65, 8), torch.zeros(65, 8)
    launches = emulator.capture_launches(compiled, x, torch.zeros(8), y, 1.0)
    regions = [emulator.Region(tensor.data_ptr(), 64 * 32) for tensor in (x, y)]
    with pytest.raises(emulator.MemoryFault):
        emulator.run_launch(launches[0], regions)


def test_both_entries_to_the_emulator_give_the_same_result():
    x = torch.randn(200)
    y, z = torch.empty(200), torch.empty(200)
    jit.launch(Reverse(), x, y)
    report = emulator.emulate(jit.compile(Reverse()), x, z)
    assert torch.equal(y, z) and report.warp_instructions > 0
