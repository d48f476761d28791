"""Launching on a real GPU; skipped where there is none. The kernels here compile for every target."""

import time

import pytest
import torch
from tiny_kernels import Batched, Reverse, RowScale

from cute_gemma import jit
from cute_gemma.emulator.launch import parse_entry
from cute_gemma.jit.target import TARGETS

TARGET = None
if torch.cuda.is_available():
    capability = torch.cuda.get_device_capability()
    TARGET = next((name for name, target in TARGETS.items() if target.capability == capability), None)
pytestmark = pytest.mark.skipif(TARGET is None, reason="needs a GPU of a known target")


def rows(m=1000, device="cuda"):
    torch.manual_seed(0)
    x, bias = torch.randn(m, 8, device=device), torch.randn(8, device=device)
    return x, bias, torch.full((m, 24), float("nan"), device=device)[:, 8:16]


def test_a_kernel_computes_the_right_result_on_every_size():
    for m in (1, 63, 64, 65, 100_000):
        x, bias, y = rows(m)
        assert jit.launch(RowScale(), x, bias, y, 3.0, target=TARGET) is None
        torch.testing.assert_close(y, torch.addcmul(bias, x, torch.tensor(3.0, device="cuda")))


def test_dynamic_shared_memory_is_granted():
    for n in (1, 128, 300):
        x = torch.randn(n, device="cuda")
        y = torch.empty_like(x)
        jit.launch(Reverse(), x, y, target=TARGET)
        assert torch.equal(y, torch.cat([block.flip(0) for block in x.split(128)]))


def test_scalars_of_every_type_arrive():
    x = torch.randn(3, 5, 16, device="cuda").bfloat16()
    y, out = torch.empty_like(x), torch.zeros(4, dtype=torch.int32, device="cuda")
    jit.launch(Batched(), x, y, out, -3, 5 << 32, target=TARGET)
    assert torch.equal(y, (x.float() - 3).bfloat16()) and out[0].item() == 5


def test_work_goes_to_the_current_stream_or_the_one_given():
    x, bias, y = rows()
    jit.launch(RowScale(), x, bias, y, 1.0, target=TARGET)
    torch.cuda.synchronize()
    streams = torch.cuda.Stream(), torch.cuda.Stream()
    for way, stream in enumerate(streams):
        z = torch.zeros_like(x)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(200_000_000)
            if way == 0:
                jit.launch(RowScale(), x, bias, z, 1.0, target=TARGET)
        if way == 1:
            jit.launch(RowScale(), x, bias, z, 1.0, target=TARGET, stream=stream)
        done = torch.cuda.Event()
        done.record(stream)
        assert not done.query(), "launched behind the sleeping work, without waiting for it"
        torch.cuda.synchronize()
        assert torch.equal(z, y)


def test_launches_are_captured_in_a_cuda_graph():
    x, bias, y = rows()
    jit.launch(RowScale(), x, bias, y, 2.0, target=TARGET)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        jit.launch(RowScale(), x, bias, y, 2.0, target=TARGET)
        jit.launch(RowScale(), x, bias, y, 2.0, target=TARGET)
    x.fill_(1.0)
    y.fill_(0.0)
    graph.replay()
    torch.testing.assert_close(y, (bias + 2.0).expand_as(y))


def test_parameters_and_unused_strides_are_accepted():
    x, bias, y = rows(1)
    weight = torch.nn.Parameter(x.as_strided((1, 8), (3, 1)))
    jit.launch(RowScale(), weight, bias, y, 1.0, target=TARGET)
    torch.testing.assert_close(y, x + bias)


def test_wrong_arguments_are_named_on_warm_calls_too():
    x, bias, y = rows()
    jit.launch(RowScale(), x, bias, y, 1.0, target=TARGET)
    with pytest.raises(TypeError, match="bias: dtype torch.float64, expected torch.float32"):
        jit.launch(RowScale(), x, bias.double(), y, 1.0, target=TARGET)
    with pytest.raises(ValueError, match="x: strides"):
        jit.launch(RowScale(), x.T.contiguous().T, bias, y, 1.0, target=TARGET)
    with pytest.raises(ValueError, match="bias: on cpu, expected cuda:0 like x"):
        jit.launch(RowScale(), x, bias.cpu(), y, 1.0, target=TARGET)
    with pytest.raises(ValueError, match=r"y: shape \(999, 8\), expected m = 1000"):
        jit.launch(RowScale(), x, bias, y[:999], 1.0, target=TARGET)
    with pytest.raises(ValueError, match="y: address"):
        jit.launch(RowScale(), x, bias, torch.zeros(1000, 24, device="cuda")[:, 1:9], 1.0, target=TARGET)
    with pytest.raises(TypeError, match="got 3 arguments, expected 4"):
        jit.launch(RowScale(), x, bias, y, target=TARGET)


def test_a_warm_call_allocates_nothing_and_does_not_synchronise():
    x, bias, y = rows()
    jit.launch(RowScale(), x, bias, y, 1.0, target=TARGET)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        jit.launch(RowScale(), x, bias, y, 1.0, target=TARGET)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_a_gpu_whose_kernels_do_not_exist_is_refused_unless_asked_for():
    x, bias, y = rows()
    if TARGETS[TARGET].default:
        pytest.skip("this GPU's kernels exist")
    with pytest.raises(jit.UnsupportedTargetError, match="no kernels for cuda:0"):
        jit.launch(RowScale(), x, bias, y, 1.0)


def test_the_modelled_device_answers_as_the_real_one():
    import cuda.bindings.driver as driver

    from cute_gemma.emulator import capture

    for attribute, value in (capture._COMMON_DEVICE_ATTRIBUTES | capture._DEVICE_ATTRIBUTES[TARGET]).items():
        error, real = driver.cuDeviceGetAttribute(driver.CUdevice_attribute(attribute), 0)
        assert (attribute, error, real) == (attribute, 0, value)


@pytest.mark.parametrize("kernel", [RowScale(), Reverse()], ids=lambda kernel: type(kernel).__name__)
def test_shared_memory_besides_the_dynamic_part_is_what_the_driver_says(kernel):
    import cuda.bindings.driver as driver

    compiled = jit.compile(kernel, TARGET)
    torch.zeros(1, device="cuda")
    error, library = driver.cuLibraryLoadData(compiled.cubin, None, None, 0, None, None, 0)
    assert error == 0
    error, handle = driver.cuLibraryGetKernel(library, compiled.kernel_names[0].encode())
    assert error == 0
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES
    error, size = driver.cuKernelGetAttribute(attribute, handle, 0)
    assert (error, size) == (0, parse_entry(compiled.ptx, compiled.kernel_names[0]).static_smem)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_run_on_their_own_device_whatever_is_current():
    for device in ("cuda:1", "cuda:0"):
        x, bias, y = rows(device=device)
        jit.launch(RowScale(), x, bias, y, 1.0, target=TARGET)
        torch.testing.assert_close(y, x + bias)
        assert torch.cuda.current_device() == 0
    x, bias, y = rows(device="cuda:1")
    with pytest.raises(ValueError, match="bias: on cuda:0, expected cuda:1 like x"):
        jit.launch(RowScale(), x, bias.to("cuda:0"), y, 1.0, target=TARGET)


def test_emulated_and_real_launches_agree_in_one_process():
    from cute_gemma.emulator.capture import capture_launches

    x, bias, y = rows()
    jit.launch(RowScale(), x, bias, y, 2.0, target=TARGET)
    compiled = jit.compile(RowScale(), TARGET)
    launches = capture_launches(compiled, *(tensor.cpu() for tensor in (x, bias)), torch.zeros(1000, 8), 2.0)
    assert len(launches) == 1
    z = torch.zeros_like(x)
    jit.launch(RowScale(), x, bias, z, 2.0, target=TARGET)
    assert torch.equal(y, z)


def main() -> None:
    """Prints the CPU time of a warm call."""
    x, bias, y = rows()
    for _ in range(100):
        jit.launch(RowScale(), x, bias, y, 1.0, target=TARGET)
    torch.cuda.synchronize()
    for name, call in (
        ("jit.launch, 4 arguments", lambda: jit.launch(RowScale(), x, bias, y, 1.0, target=TARGET)),
        (
            "the compiled function alone",
            lambda f=jit.compile(RowScale(), TARGET).gpu_function: f(x, bias, y, 1.0),
        ),
    ):
        best = float("inf")
        for _ in range(20):
            start = time.perf_counter()
            for _ in range(200):
                call()
            best = min(best, (time.perf_counter() - start) / 200)
            torch.cuda.synchronize()
        print(f"{name}: {best * 1e6:.2f} us")


if __name__ == "__main__":
    main()
