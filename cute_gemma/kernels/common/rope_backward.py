"""RoPE backward: the gradients of rotated query and key heads, rotated back.

Forward, on the halves t = (t1, t2) of a head: out = (t1 cos1 - t2 sin1, t2 cos2 + t1 sin2). Backward:

    grad_t = (g1 cos1 + g2 sin2, g2 cos2 - g1 sin1)

with cos = (cos1, cos2) and sin = (sin1, sin2) arbitrary inputs: their halves may differ. Computed in float32
and rounded to bf16 once. A thread owns VECTOR elements of each half at one position (b, s), holds their
cosines and sines, and walks over the heads: cos and sin are read once, and every access is a vector of 16
bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute

from ...jit.signature import Signature, TensorArg
from .norm_backward import VECTOR, load_vector, narrow, vector_at, widen

THREADS = 128


@dataclass(frozen=True)
class RopeBackward:
    """grad_query [B, H, S, D], grad_key [B, KV, S, D], cos, sin [B, S, D] -> out_query, out_key of the same
    shapes.

    head_dim: a multiple of 16. An output may be the very tensor it is computed from.
    """

    heads: int
    kv_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        if self.head_dim % (2 * VECTOR):
            raise ValueError(f"head_dim: got {self.head_dim}, want a multiple of {2 * VECTOR}")

    def signature(self) -> Signature:
        query = ("batch", self.heads, "seq", self.head_dim)
        key = ("batch", self.kv_heads, "seq", self.head_dim)
        table = ("batch", "seq", self.head_dim)
        return (
            TensorArg("grad_query", "bf16", query),
            TensorArg("grad_key", "bf16", key),
            TensorArg("cos", "bf16", table),
            TensorArg("sin", "bf16", table),
            TensorArg("out_query", "bf16", query),
            TensorArg("out_key", "bf16", key),
        )

    @cute.jit
    def __call__(
        self,
        grad_query: cute.Tensor,
        grad_key: cute.Tensor,
        cos: cute.Tensor,
        sin: cute.Tensor,
        out_query: cute.Tensor,
        out_key: cute.Tensor,
        stream: cuda.CUstream,
    ):
        batch, seq = cos.shape[0], cos.shape[1]
        threads = batch * seq * (self.head_dim // (2 * VECTOR))
        self.kernel(
            (grad_query.iterator, out_query.iterator, grad_key.iterator, out_key.iterator),
            (cos.iterator, sin.iterator),
            batch * seq,
            seq,
        ).launch(grid=(cute.ceil_div(threads, THREADS), 1, 1), block=(THREADS, 1, 1), stream=stream, min_blocks_per_mp=1)

    @cute.kernel
    def kernel(self, gradients: tuple, table: tuple, positions: cutlass.Int32, seq: cutlass.Int32):
        lanes = self.head_dim // (2 * VECTOR)
        index = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
        position, column = index // lanes, index % lanes * VECTOR
        grad_query, out_query, grad_key, out_key = gradients
        cos, sin = table
        if position < positions:
            row = cutlass.Int64(position) * self.head_dim + column
            half = self.head_dim // 2
            factors = tuple(widen(load_vector(p, row + offset)) for p in (cos, sin) for offset in (0, half))
            batch, step = position // seq, position % seq
            sides = ((grad_query, out_query, self.heads), (grad_key, out_key, self.kv_heads))
            for source, target, heads in sides:
                first = cutlass.Int64(batch) * heads * seq + step
                for head in cutlass.range(heads, unroll=4):
                    offset = (first + cutlass.Int64(head) * seq) * self.head_dim + column
                    self._rotate(source, target, offset, factors)

    @cute.jit
    def _rotate(self, source: cute.Pointer, target: cute.Pointer, offset: cutlass.Int64, factors: tuple):
        """Elements offset .. and offset + D / 2 .., VECTOR of each, from source to target."""
        cos1, cos2, sin1, sin2 = factors
        half = self.head_dim // 2
        first, second = widen(load_vector(source, offset)), widen(load_vector(source, offset + half))
        turned1, turned2 = (cute.make_rmem_tensor((VECTOR,), cutlass.Float32) for _ in range(2))
        turned1.store(first.load() * cos1.load() + second.load() * sin2.load())
        turned2.store(second.load() * cos2.load() - first.load() * sin1.load())
        cute.autovec_copy(narrow(turned1), vector_at(target, offset))
        cute.autovec_copy(narrow(turned2), vector_at(target, offset + half))
