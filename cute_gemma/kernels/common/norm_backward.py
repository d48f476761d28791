"""RMSNorm backward of the query and key heads, the first launch of the QKV backward.

Forward, for one row t of one head: normed = t * rstd, rstd = rsqrt(mean(t^2) + eps), out = normed * (1 + w).
Backward, with grad the gradient of out (all sums in float32, over the D elements of a row unless said
otherwise):

    g         = bf16(grad * (1 + w))
    grad_t    = bf16(rstd * (g - mean(g * normed) * normed))
    grad_w[d] = sum over every row of grad[d] * normed[d]

A row lies in D / 8 lanes, 16 bytes a lane, so each access is one vector and the mean is a few shuffles. Every
CTA takes one contiguous chunk of rows and writes one float32 partial sum of grad_w; `fold_partials`, called
by the next launch, adds the partials in a fixed order. No atomics: equal inputs give equal bits under any
schedule.
"""

from __future__ import annotations

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass.memory import SmemAllocator

from ...jit.signature import Signature, TensorArg
from . import f32x2

VECTOR = 8  # bf16 elements in 16 bytes, the widest access of one thread


@dataclass(frozen=True)
class NormBackwardTuning:
    """warps of a CTA; rows (pairs of rows at D=128) a warp has in flight; CTAs at most, one a
    multiprocessor."""

    warps: int = 16
    unroll: int = 2
    ctas: int = 148


def chunk_rows(rows_q, rows_k, tuning: NormBackwardTuning):
    """Rows of a CTA's chunk. Works on Python ints and, in host entries and kernels, on Int32.

    A chunk holds rows of q only or of k only, so ceil(rows_q / chunk) + ceil(rows_k / chunk) <= tuning.ctas
    has to hold: each division rounds up by less than one. At least one row a warp.
    """
    chunk = (rows_q + rows_k + tuning.ctas - 3) // (tuning.ctas - 2)
    return max(chunk, tuning.warps) if isinstance(chunk, int) else cutlass.max(chunk, tuning.warps)


@dataclass(frozen=True)
class NormBackward:
    """grad_query, q_normed [RQ, D], q_rstd [RQ] -> grad_q [RQ, D]; the same for k; partials [ctas, D].

    RQ = B*H*S rows of q, RK = B*KV*S rows of k, in any order as long as all of a side's tensors share it.
    Partials of q come first, one a CTA, then those of k. head_dim: 128 or 256.
    """

    head_dim: int
    tuning: NormBackwardTuning = NormBackwardTuning()

    def __post_init__(self) -> None:
        if self.head_dim not in (128, 256):
            raise ValueError(f"head_dim: got {self.head_dim}, want 128 or 256")

    def signature(self) -> Signature:
        def side(name: str, initial: str, rows: str) -> tuple[TensorArg, ...]:
            return (
                TensorArg(f"grad_{name}", "bf16", (rows, self.head_dim)),
                TensorArg(f"{initial}_normed", "bf16", (rows, self.head_dim)),
                TensorArg(f"{initial}_rstd", "f32", (rows,), align=4),
                TensorArg(f"{initial}_norm_weight", "bf16", (self.head_dim,)),
                TensorArg(f"grad_{initial}", "bf16", (rows, self.head_dim)),
            )

        partials = TensorArg("norm_partials", "f32", self.partials_shape)
        return (*side("query", "q", "rows_q"), *side("key", "k", "rows_k"), partials)

    @property
    def partials_shape(self) -> tuple[int, int]:
        """One row a CTA."""
        return self.tuning.ctas, self.head_dim

    @cute.jit
    def __call__(
        self,
        grad_q: cute.Tensor,
        q_normed: cute.Tensor,
        q_rstd: cute.Tensor,
        q_weight: cute.Tensor,
        out_q: cute.Tensor,
        grad_k: cute.Tensor,
        k_normed: cute.Tensor,
        k_rstd: cute.Tensor,
        k_weight: cute.Tensor,
        out_k: cute.Tensor,
        partials: cute.Tensor,
        stream: cuda.CUstream,
    ):
        rows_q, rows_k = grad_q.shape[0], grad_k.shape[0]
        chunk = chunk_rows(rows_q, rows_k, self.tuning)
        ctas_q = cute.ceil_div(rows_q, chunk)
        self.kernel(
            (grad_q, q_normed, q_rstd, q_weight, out_q),
            (grad_k, k_normed, k_rstd, k_weight, out_k),
            partials,
            chunk,
            ctas_q,
        ).launch(
            grid=(ctas_q + cute.ceil_div(rows_k, chunk), 1, 1),
            block=(32 * self.tuning.warps, 1, 1),
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        q_side: tuple,
        k_side: tuple,
        partials: cute.Tensor,
        chunk: cutlass.Int32,
        ctas_q: cutlass.Int32,
    ):
        # The next launch's prologue (barriers, descriptors, weights) may overlap with all of this one.
        cute.arch.griddepcontrol_launch_dependents()
        cta = cute.arch.block_idx()[0]
        grad_w = cute.make_rmem_tensor((VECTOR,), cutlass.Float32)
        grad_w.fill(0.0)
        if cta < ctas_q:
            self._chunk(q_side, cta * chunk, chunk, grad_w)
        else:
            self._chunk(k_side, (cta - ctas_q) * chunk, chunk, grad_w)
        self._write_partial(grad_w, partials, cta)

    @cute.jit
    def _chunk(self, side: tuple, first: cutlass.Int32, chunk: cutlass.Int32, grad_w: cute.Tensor):
        """Rows first .. first + chunk of one side; grad_w (VECTOR,) gathers this thread's columns."""
        weight = side[3]
        lanes = self.head_dim // VECTOR
        rows_per_warp = 32 // lanes
        step = self.tuning.warps * rows_per_warp
        thread = cute.arch.thread_idx()[0]
        column = thread % lanes
        end = cutlass.min(first + chunk, side[0].shape[0])
        scale = widen(load_vector(weight.iterator, column * VECTOR))
        for i in cutlass.range_constexpr(VECTOR):
            scale[i] = 1.0 + scale[i]
        # The trip count is the same for every lane of a warp, for the shuffles' sake.
        warp_row = thread // 32 * rows_per_warp
        for base in range(first + warp_row, end, step * self.tuning.unroll):
            self._rows(side, base + thread // lanes - warp_row, end, column, scale, grad_w)

    @cute.jit
    def _rows(self, side: tuple, base, end, column, scale, grad_w: cute.Tensor):
        """The `unroll` rows base, base + step, ...: all loads first, so that they are in flight together."""
        grad, normed, rstd, _, out = side
        lanes = self.head_dim // VECTOR
        step = self.tuning.warps * (32 // lanes)
        loaded = []
        for u in cutlass.range_constexpr(self.tuning.unroll):
            row = base + u * step
            valid = row < end
            # Past the end the last row is read again and its results are dropped: no branch around the loads.
            row = cutlass.min(row, end - 1)
            offset = cutlass.Int64(row) * self.head_dim + column * VECTOR
            vectors = load_vector(grad.iterator, offset), load_vector(normed.iterator, offset)
            loaded.append((offset, valid, *vectors, rstd[row]))
        for offset, valid, grad_raw, normed_raw, rstd_row in loaded:
            grad_row, normed_row = widen(grad_raw), widen(normed_raw)
            g = cute.make_rmem_tensor((VECTOR,), cutlass.Float32)
            for i in cutlass.range_constexpr(0, VECTOR, 2):
                g[i], g[i + 1] = f32x2.mul(_pair(grad_row, i), _pair(scale, i))
            g = widen(narrow(g))
            total = (cutlass.Float32(0.0), cutlass.Float32(0.0))
            for i in cutlass.range_constexpr(0, VECTOR, 2):
                total = f32x2.fma(_pair(g, i), _pair(normed_row, i), total)
            row_sum = cute.arch.warp_reduction_sum(total[0] + total[1], threads_in_group=lanes)
            mean = row_sum * (1.0 / self.head_dim)
            for i in cutlass.range_constexpr(0, VECTOR, 2):
                centred = f32x2.fma(_pair(normed_row, i), (-mean, -mean), _pair(g, i))
                g[i], g[i + 1] = f32x2.mul(centred, (rstd_row, rstd_row))
            if valid:
                cute.autovec_copy(narrow(g), vector_at(out.iterator, offset))
                for i in cutlass.range_constexpr(0, VECTOR, 2):
                    grad_w[i], grad_w[i + 1] = f32x2.fma(
                        _pair(grad_row, i), _pair(normed_row, i), _pair(grad_w, i)
                    )

    @cute.jit
    def _write_partial(self, grad_w: cute.Tensor, partials: cute.Tensor, cta: cutlass.Int32):
        """Adds the threads' grad_w that share a column, in a fixed order, and writes partials[cta]."""
        lanes = self.head_dim // VECTOR
        groups = 32 * self.tuning.warps // lanes
        smem = SmemAllocator()
        sums = smem.allocate_tensor(
            cutlass.Float32, cute.make_layout((groups, self.head_dim), stride=(self.head_dim, 1)), 16
        )
        thread = cute.arch.thread_idx()[0]
        cute.autovec_copy(grad_w, cute.local_tile(sums[thread // lanes, None], (VECTOR,), (thread % lanes,)))
        cute.arch.sync_threads()
        if thread < self.head_dim:
            partials[cta, thread] = pairwise_sum([sums[group, thread] for group in range(groups)])


def pairwise_sum(terms: list):
    """The sum of some terms as a balanced tree: a sum's error grows with its depth."""
    half = len(terms) // 2
    return terms[0] if half == 0 else pairwise_sum(terms[:half]) + pairwise_sum(terms[half:])


def vector_at(pointer: cute.Pointer, offset) -> cute.Tensor:
    """The 16 bytes at pointer + offset elements, (VECTOR,) bf16; offset is a multiple of VECTOR."""
    return cute.make_tensor((pointer + offset).align(16), cute.make_layout((VECTOR,)))


def load_vector(pointer: cute.Pointer, offset) -> cute.Tensor:
    """The 16 bytes at pointer + offset elements, in registers."""
    registers = cute.make_rmem_tensor((VECTOR,), cutlass.BFloat16)
    cute.autovec_copy(vector_at(pointer, offset), registers)
    return registers


def widen(vector: cute.Tensor) -> cute.Tensor:
    """bf16 registers as float32."""
    wide = cute.make_rmem_tensor((VECTOR,), cutlass.Float32)
    wide.store(vector.load().to(cutlass.Float32))
    return wide


def narrow(vector: cute.Tensor) -> cute.Tensor:
    """float32 registers rounded to bf16, to nearest even."""
    narrow = cute.make_rmem_tensor((VECTOR,), cutlass.BFloat16)
    narrow.store(vector.load().to(cutlass.BFloat16))
    return narrow


def _pair(vector: cute.Tensor, index: int) -> tuple:
    """Two neighbours, the operand of the packed float32 instructions."""
    return vector[index], vector[index + 1]
