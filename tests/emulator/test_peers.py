"""Public kernels that nobody wrote for this emulator run in it and match torch: FlashAttention-4's forward
and quack's GEMM, both for sm_100a.

The packages are optional. Without their dependencies, so that the DSL stays as it is:
    pip install --no-deps --target PEERS flash-attn-4==4.0.0b36 quack-kernels==0.6.5 einops==0.8.2
    CUTE_GEMMA_PEERS=PEERS scripts/test --slow tests/emulator/test_peers.py
CUTE_GEMMA_SCHEDULES=50 runs them under 50 random schedules instead of 3. Each runs in a process of its own, in
which torch claims a GPU and `cute.compile` yields emulated functions.
"""

import importlib
import importlib.util
import json
import math
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

PEERS = os.environ.get("CUTE_GEMMA_PEERS")
SEEDS = range(1, int(os.environ.get("CUTE_GEMMA_SCHEDULES", 3)) + 1)
SCHEDULES = ("lazy", "eager", *(f"random:{seed}" for seed in SEEDS))


def installed(package):
    return bool(PEERS and (Path(PEERS) / package).is_dir()) or importlib.util.find_spec(package) is not None


def emulated(*case, schedules=SCHEDULES):
    """Relative error against float64 by schedule, from this file run as a script."""
    path = os.pathsep.join(filter(None, (PEERS, os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, "QUACK_CACHE_ENABLED": "0", "QUACK_ARCH": "100"}
    environment["CUTE_DSL_ARCH"] = "sm_100a"
    done = subprocess.run(
        [sys.executable, __file__, json.dumps([*case, list(schedules)])],
        capture_output=True, text=True, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.skipif(
    not installed("flash_attn"), reason="flash-attn-4 is not installed, see CUTE_GEMMA_PEERS above"
)
@pytest.mark.parametrize("seq, head_dim, causal", [(300, 128, True), (256, 64, False)])
@pytest.mark.parametrize("softcap", [None, 30.0])
def test_flash_attention_4_matches_torch(seq, head_dim, causal, softcap):
    errors = emulated("flash_attention", seq, head_dim, causal, softcap)
    assert set(errors) == set(SCHEDULES)
    assert max(errors.values()) < 0.006
    assert len(set(errors.values())) == 1, "the same bits under every schedule"


@pytest.mark.slow
@pytest.mark.skipif(
    not installed("quack"), reason="quack-kernels is not installed, see CUTE_GEMMA_PEERS above"
)
@pytest.mark.parametrize("tile, cluster", [((128, 128), (1, 1)), ((256, 256), (2, 1))])
def test_quack_gemm_matches_torch(tile, cluster):
    errors = emulated("gemm", 300, 520, 328, tile, cluster)
    assert max(errors.values()) < 0.003
    assert len(set(errors.values())) == 1, "the same bits under every schedule"


# ---------------------------------------------------------------- in the child process
def pretend_gpu():
    """A torch with one B200, as far as the peers ask."""
    import cutlass.utils
    import torch

    # The package's own __init__ imports an autotuner, and with it triton.
    quack = types.ModuleType("quack")
    quack.__path__ = list(importlib.util.find_spec("quack").submodule_search_locations)
    sys.modules["quack"] = quack
    importlib.import_module("quack.dsl")  # which that __init__ would have: it extends the DSL's tensors

    class Stream:
        cuda_stream = 0

    class Properties:
        major, minor, multi_processor_count = 10, 0, 148

    class HardwareInfo:
        def __init__(self, *args):
            pass

        def get_max_active_clusters(self, *args, **kwargs):
            return 148

        def get_device_multiprocessor_count(self):
            return 148

    torch.cuda.is_available = lambda: True
    torch.cuda.get_device_capability = lambda *args: (10, 0)
    torch.cuda.current_stream = lambda *args: Stream()
    torch.cuda.get_device_properties = lambda *args: Properties()
    torch.cuda.current_device = lambda: 0
    torch.Tensor.is_cuda = True
    cutlass.utils.HardwareInfo = HardwareInfo


def tensors_in(value):
    """Tensors of nested arguments."""
    import torch

    if isinstance(value, torch.Tensor):
        return [value]
    return [t for item in value for t in tensors_in(item)] if isinstance(value, (tuple, list)) else []


def plain(value):
    """The DSL's numbers in nested tuples as Python's."""
    if isinstance(value, tuple):
        items = [plain(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return getattr(value, "value", value) if type(value).__module__.startswith("cutlass") else value


class Compile:
    """Stands for cute.compile: what it returns runs in the emulator, under `schedule`."""

    schedule = "lazy"

    def __init__(self):
        import cutlass.cute as cute

        self.original, cute.compile = cute.compile, self

    def __getitem__(self, options):
        return self

    def __call__(self, function, *args, options="", **kwargs):
        import cutlass.cute as cute

        from cute_gemma import emulator

        cute.compile = self.original
        try:
            compiled = emulator.compile(function, *args, options=options, **kwargs)
        finally:
            cute.compile = self

        def run(*arguments):
            # These kernels leave tcgen05.wait::ld to the assembler's scoreboard.
            settings = {"hazards": "scoreboard", "schedule": self.schedule}
            emulator.emulate(
                compiled, *map(plain, arguments), memory=tuple(tensors_in(arguments)), **settings
            )

        return run


def symbolic_tensor(t, assumed_align=16, leading_dim=-1, fully_dynamic=False, enable_tvm_ffi=True):
    """A compile-time stand-in for a tensor of a GPU; FlashAttention's own helper wants one that is there."""
    import cutlass
    import cutlass.cute as cute
    import torch

    if t is None:
        return None
    names = {
        torch.bfloat16: "BFloat16",
        torch.float16: "Float16",
        torch.float32: "Float32",
        torch.int32: "Int32",
    }
    dtype = getattr(cutlass, names[t.dtype])
    compact = None if fully_dynamic else leading_dim % t.ndim
    divisibility = max(1, 8 * assumed_align // dtype.width)
    stride = tuple(1 if i == compact else cute.sym_int64(divisibility=divisibility) for i in range(t.ndim))
    shape = tuple(cute.sym_int32() for _ in range(t.ndim))
    return cute.runtime.make_fake_tensor(dtype, shape, stride=stride, assumed_align=assumed_align)


def flash_attention(seq, head_dim, causal, softcap):
    """Makes inputs; returns how to run them and the exact result."""
    import flash_attn.cute.interface as interface
    import torch

    interface.to_cute_tensor = symbolic_tensor
    _flash_attn_fwd = interface._flash_attn_fwd
    batch, heads, kv_heads = 1, 4, 2
    q, k, v = (torch.randn(batch, seq, n, head_dim).bfloat16() for n in (heads, kv_heads, kv_heads))
    wide_k, wide_v = (t.double().repeat_interleave(heads // kv_heads, 2) for t in (k, v))
    logits = torch.einsum("bqhd,bkhd->bhqk", q.double(), wide_k) / math.sqrt(head_dim)
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    if causal:
        logits = logits.masked_fill(torch.ones(seq, seq).triu(1).bool(), -math.inf)
    exact = torch.einsum("bhqk,bkhd->bqhd", logits.softmax(-1), wide_v)
    return lambda: _flash_attn_fwd(q, k, v, causal=causal, softcap=softcap, _arch=100)[0], exact


def gemm(m, n, k, tile, cluster):
    import torch
    from quack.gemm import gemm as quack_gemm

    a, b = torch.randn(1, m, k).bfloat16(), torch.randn(1, n, k).bfloat16()

    def run():
        d = torch.full((1, m, n), math.nan, dtype=torch.bfloat16)
        quack_gemm(a, b, d, None, None, *tile, *cluster)
        return d

    return run, a.double() @ b.double().mT


def main():
    name, *case, schedules = json.loads(sys.argv[1])
    compile_ = Compile()
    pretend_gpu()
    import torch

    torch.manual_seed(0)
    run, exact = {"flash_attention": flash_attention, "gemm": gemm}[name](*case)
    errors = {}
    for schedule in schedules:
        compile_.schedule = schedule
        errors[schedule] = ((run().double() - exact).norm() / exact.norm()).item()
    print(json.dumps(errors))


if __name__ == "__main__":
    main()
