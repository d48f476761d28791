"""Launches whose arguments are laid out beforehand. The emulator runs what they would launch on a GPU."""

import pytest
import torch
import tvm_ffi
from tiny_kernels import Reverse, RowScale

from cute_gemma import emulator, jit
from cute_gemma.emulator import tvm_abi
from cute_gemma.jit import prepared

F32 = torch.float32
GPU = tvm_ffi.device("cuda", 0)


def reverse_twice(n=300):
    """x reversed to y, and y to z."""
    compiled = jit.compile(Reverse())
    launches = jit.PreparedLaunches([(F32, (n,))] * 3, [(compiled, (0, 1)), (compiled, (1, 2))], 0)
    tensors = torch.randn(n), torch.full((n,), float("nan")), torch.full((n,), float("nan"))
    place(launches, tensors)
    return launches, tensors


def place(launches, tensors):
    for number, tensor in enumerate(tensors):
        launches.addresses[number].value = tensor.data_ptr()


def blocks_reversed(x):
    return torch.cat([block.flip(0) for block in x.split(128)])


@pytest.fixture
def emulated(monkeypatch):
    """Calls run in the emulator; holds the environment's stream at each."""
    streams = []

    def gpu_call(compiled, tensors):
        def call():
            streams.append(tvm_ffi.get_raw_stream(GPU))
            regions = [emulator.Region(t.data, 4 * t.shape[0]) for t in given]
            compiled.host_code.call_prepared(tensors, lambda launch: emulator.run_launch(launch, regions))

        given = list(map(tvm_abi.dltensor, tensors))
        return call

    monkeypatch.setattr(prepared, "gpu_call", gpu_call)
    return streams


def test_launches_run_in_order_on_the_addresses_of_each_run(emulated):
    launches, (x, y, z) = reverse_twice()
    for _ in range(2):
        launches.run(0)
        assert torch.equal(y, blocks_reversed(x)) and torch.equal(z, x)
        x, y, z = torch.randn(300), torch.empty(300), torch.empty(300)
        place(launches, (x, y, z))


def test_the_stream_is_the_one_given_and_the_one_before_afterwards(emulated):
    launches, _ = reverse_twice()
    launches.run(0)
    launches.run(5)
    assert emulated == [0, 0, 5, 5]
    with tvm_ffi.use_raw_stream(GPU, 7):
        launches.run(5)
        launches.run(7)
        assert tvm_ffi.get_raw_stream(GPU) == 7
    assert tvm_ffi.get_raw_stream(GPU) == 0
    assert emulated[4:] == [5, 5, 7, 7]


def test_what_the_host_code_refuses_is_raised_and_nothing_follows():
    """The compiled function itself, through TVM-FFI: it checks its arguments before it asks for a GPU."""
    compiled = jit.compile(Reverse())
    wrong = {
        "Misaligned Tensor data on argument #1": ([(F32, (300,))] * 2, 1),
        "Mismatched Tensor on argument #1": ([(F32, (300,)), (torch.bfloat16, (300,))], 0),
        r"Mismatched .*argument #1": ([(F32, (300,)), (F32, (299,))], 0),
    }
    for message, (tensors, shift) in wrong.items():
        launches = jit.PreparedLaunches(tensors, [(compiled, (0, 1))], 0)
        reached = []
        launches._calls.append(lambda: reached.append(True))
        x, y = torch.zeros(304), torch.zeros(304)
        launches.addresses[0].value = x.data_ptr()
        launches.addresses[1].value = y.data_ptr() + shift
        with pytest.raises((ValueError, TypeError), match=message):
            launches.run(5)
        assert tvm_ffi.get_raw_stream(GPU) == 0
        assert not reached and (y == 0).all()


def test_binding_checks_the_arguments():
    x, bias, y = torch.zeros(5, 8), torch.zeros(8), torch.zeros(5, 8)
    with pytest.raises(TypeError, match="bias: dtype torch.float64, expected torch.float32"):
        jit.bind(RowScale(), x, bias.double(), y, 1.0)
    with pytest.raises(ValueError, match=r"y: shape \(4, 8\), expected m = 5"):
        jit.bind(RowScale(), x, bias, y[:4], 1.0)
    with pytest.raises(jit.UnsupportedTargetError, match="target: got 'sm_80'"):
        jit.bind(RowScale(), x, bias, y, 1.0, target="sm_80")
    with pytest.raises(ValueError, match="backend 'cuda' runs on CUDA tensors, got cpu"):
        jit.bind(RowScale(), x, bias, y, 1.0)


def test_a_bound_launch_takes_strides_and_scalars_and_leaves_the_device_to_the_host_code():
    x, bias, y = torch.zeros(5, 8), torch.zeros(8), torch.zeros(5, 24)[:, 8:16]
    launches = jit.PreparedLaunches.bound(jit.compile(RowScale()), (x, bias, y, 1.0), 0)
    with pytest.raises(ValueError, match="device_type=cuda"):
        launches.run(0)
