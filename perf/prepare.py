"""Compiles what a run needs, several at a time, into the caches on disk: this project's kernels and the
peers' code."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from typing import Any

import peers

from cute_gemma import jit
from cute_gemma.kernels.registry import backward_kernels, forward_kernels
from cute_gemma.plans_backward import BackwardSizes
from cute_gemma.workloads import WORKLOADS, suite_cases, workload

SuiteCase = tuple[str, int, int]  # workload, batch, seq
_QUICK = {"047": ((1, 128), (2, 293), (4, 512), (1, 8192)), "051": ((1, 131), (4, 373), (1, 1024), (1, 8192))}


def choose_cases(number: str | None, sizes: str | None, quick: bool) -> list[SuiteCase]:
    """The suite's cases of the workloads asked for, in its order; `sizes` such as "1x128,2x293" may name
    others too."""
    chosen = []
    for known in (number,) if number else tuple(WORKLOADS):
        if sizes:
            wanted = [tuple(map(int, size.split("x"))) for size in sizes.split(",")]
        elif quick:
            wanted = _QUICK[known]
        else:
            wanted = [(case.batch_size, case.seq_len) for case in suite_cases(known)]
        chosen += [(known, batch, seq) for batch, seq in wanted]
    return chosen


def kernels_of(number: str, batch: int, seq: int, target: str) -> list[Any]:
    """The kernels that a case launches, with a causal mask and with a mask tensor, and attention without a
    softcap."""
    config, rows = workload(number).config, batch * seq
    if number == "051":
        kernels = backward_kernels(target)
        sizes = BackwardSizes(batch, seq, config.hidden, config.heads, config.kv_heads, config.head_dim)
        norm = kernels.norm_backward(sizes)
        return [norm, kernels.gradients(sizes, norm)]
    kernels = forward_kernels(target)
    return [
        kernels.qkv_projection(config, rows),
        *(kernels.mask_scan("bf16", early) for early in (False, True)),
        *(kernels.attention(config, mask, batch, seq) for mask in ("causal", "bf16")),
        kernels.attention(replace(config, softcap=None), "causal", batch, seq),
        kernels.output_projection(config, rows),
    ]


def pool() -> ProcessPoolExecutor:
    """Processes that compile, one thread each, as many as leave two cores to others."""
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    workers = max(1, min(16, (os.cpu_count() or 3) - 2))
    return ProcessPoolExecutor(workers, mp_context=get_context("spawn"))


def compile_kernel(kernel: Any, target: str) -> None:
    jit.compile(kernel, target)


def compile_kernels(kernels: Iterable[Any], target: str) -> None:
    """All of `kernels`, each once. Raises what a compilation raises."""
    with pool() as workers:
        for done in [workers.submit(compile_kernel, kernel, target) for kernel in set(kernels)]:
            done.result()


def compile_all(cases: Sequence[SuiteCase], target: str, peer_names: Sequence[str]) -> None:
    """Everything that the cases need, peers by name. What fails is printed, and left to its case to
    report."""
    start, cases = time.perf_counter(), list(dict.fromkeys(cases))
    kernels = {kernel for case in cases for kernel in kernels_of(*case, target)}
    with pool() as workers:
        started: dict[str, Future] = {
            str(kernel): workers.submit(compile_kernel, kernel, target) for kernel in kernels
        }
        started |= {
            f"{name} {case}": workers.submit(peers.warm, case[0], name, *case[1:])
            for case in cases
            for name in peers.COMPILED_BY_CASE[case[0]]
            if name in peer_names
        }
        if "fa4" in peer_names and any(number == "047" for number, *_ in cases):
            peers.warm("047", "fa4", 1, 128, whole=True)  # FlashAttention-4 compiles here, meanwhile
        for what, future in started.items():
            try:
                failure = future.result()
            except Exception as error:  # a process that died takes the pool with it
                failure = f"{type(error).__name__}: {error}"
            if failure:
                print(f"not compiled beforehand: {what}: {failure[:400]}", flush=True)
    seconds = time.perf_counter() - start
    print(
        f"compiled {len(kernels)} kernels and {len(started) - len(kernels)} cases of peers in {seconds:.0f} s"
    )
