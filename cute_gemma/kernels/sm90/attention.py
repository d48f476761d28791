"""GQA attention for sm_90a: out = softmax(logits + mask) v, logits = cap * tanh(q k^T * scale / cap) or q k^T
* scale.

q (B, S, H, D), k and v (B, S, KV, D), out (B, S, H, D), all bf16; query head h reads kv head h // (H / KV).

A CTA walks a static list of work units, each 128 query rows of one head, longest first; a unit walks over
128-key tiles in two blocks of 64 keys. Roles, in the order data meets them:
  load      one warp: q, k and v by TMA into 128-byte-swizzled shared memory
  consumer  2 warpgroups of 64 rows: S = q k^T (wgmma, both operands in shared memory) into registers, weights
            P from S in registers, O += P v (wgmma, P from registers); then O through shared memory to global
            memory by TMA
While a warpgroup computes weights of one block, the tensor core has its scores of the next block, its O of the
one before, and the other warpgroup's products to work on: S has two register buffers where D <= 128, P always
has.
"""

from dataclasses import dataclass, fields

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90_utils
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.cute.typing import BFloat16, Float32, Int32, Int64
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from cute_gemma.kernels.common.attention import AttentionBase, MaskTensor, reorder
from cute_gemma.kernels.sm90.attention_consumer import consumer_role
from cute_gemma.kernels.sm90.attention_load import load_role

CONSUMERS = 2  # warpgroups
ROWS = 64  # query rows a warpgroup: M of wgmma
TILE = CONSUMERS * ROWS  # query rows of a unit, and keys of a tile: what a mask class speaks of
BLOCK = 64  # keys of a block: N of the first product, K of the second
WARP = 32
WARPGROUP = 128
ALIGN = 1024  # the 128-byte swizzle repeats every 1024 bytes
_ROWS = (1, 3, 2, 0)  # (B, S, heads, D) to (S, D, (heads, B))
# Registers a thread: (consumer, load warpgroup). 2 * 128 * 240 + 128 * 24 of the SM's 65,536.
CONSUMER_REGISTERS, LOAD_REGISTERS = 240, 24
# Below this first blocks are skipped: on an H200 5% off attention's time at 613, nothing at 1024, 4% more at 2053.
SHORT_SEQUENCE = 1024


@dataclass(frozen=True)
class AttentionTuning:
    """What may change without changing what is computed.

    sm_count: CTAs in flight. stages: blocks of keys, and as many of values, in flight; a power of two.
    skips_empty: whether no weights are computed for a unit's first block if no row of a warpgroup reads any of it, as
    of a diagonal tile's upper half. Longer sequences lose by it, see SHORT_SEQUENCE.
    """

    sm_count: int = 132
    stages: int = 4
    skips_empty: bool = False


def default_tuning(head_dim: int, seq: int | None = None) -> AttentionTuning:
    """All of an H100's or H200's SMs, and as many stages as shared memory holds. seq: S, if it is known."""
    if head_dim > 128:
        return AttentionTuning(stages=2)
    return AttentionTuning(skips_empty=seq is not None and seq < SHORT_SEQUENCE)


@dataclass(frozen=True)
class Barriers:
    """First mbarrier of each kind: q_full, q_empty one a consumer; the others one a stage. A plain record of
    pointers: the tracer takes a method call on a value for a change of it, so that the storage struct cannot
    be read within a loop."""

    q_full: cute.Pointer
    q_empty: cute.Pointer
    k_full: cute.Pointer
    k_empty: cute.Pointer
    v_full: cute.Pointer
    v_empty: cute.Pointer


@dataclass(frozen=True)
class Smem:
    """q and out (64, D, consumers), k and v (64, D, stages). Under a mask tensor, with each part of q counts
    (consumers): how many key tiles the unit has; with the first keys of key tile j words (stages): 4 j + its
    class."""

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    out: cute.Tensor
    counts: cute.Tensor
    words: cute.Tensor


@dataclass(frozen=True)
class Attention(AttentionBase):
    """See AttentionBase. tuning: see `default_tuning`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tuning is None:
            object.__setattr__(self, "tuning", default_tuning(self.head_dim))
        if self.tuning.stages < 2 or self.tuning.stages & (self.tuning.stages - 1):
            raise ValueError(f"stages: got {self.tuning.stages}, want a power of two, at least 2")

    # ---- sizes ---------------------------------------------------------------------------------------------

    @property
    def threads(self) -> int:
        return (CONSUMERS + 1) * WARPGROUP

    @property
    def lead(self) -> int:
        """Blocks whose scores are issued before the weights of the first of them are computed: buffers of
        S."""
        return 2 if self.head_dim <= 128 else 1

    @property
    def skips(self) -> bool:
        """Whether `skips_empty` applies: at D > 128 and under a mask tensor registers are too short for the choice."""
        return self.tuning.skips_empty and self.lead == 2 and self.mask != "tensor"

    @property
    def shares_q(self) -> bool:
        """Whether out is staged in q's shared memory, because both together leave too little for keys and
        values."""
        return self.head_dim > 128

    # ---- host entry ----------------------------------------------------------------------------------------

    def launch(self, q, k, v, out, mask, stream):
        """TMA descriptors, grid and launch. mask: None, or (mask, row maxima, tile classes)."""
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        box = (ROWS, self.head_dim)
        layout = self.smem_layout()
        tma = [cpasync.make_tiled_tma_atom(load, reorder(t, _ROWS), layout, box) for t in (q, k, v)]
        tma.append(cpasync.make_tiled_tma_atom(store, reorder(out, _ROWS), layout, box))
        b, s = Int32(q.shape[0]), Int32(q.shape[1])
        blocks = cutlass.min(self.heads * b * cute.ceil_div(s, TILE), self.tuning.sm_count)
        self.kernel(tuple(t[0] for t in tma), tuple(t[1] for t in tma), mask, b, s).launch(
            grid=(blocks, 1, 1), block=(self.threads, 1, 1), stream=stream, min_blocks_per_mp=1, use_pdl=True
        )

    def smem_layout(self, stages=None):
        """(64, D[, stages]): 64 rows, D contiguous in swizzled atoms of 64 columns."""
        atom = warpgroup.make_smem_layout_atom(
            sm90_utils.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, BFloat16, self.head_dim), BFloat16
        )
        shape = (ROWS, self.head_dim) if stages is None else (ROWS, self.head_dim, stages)
        return cute.tile_to_shape(atom, shape, order=tuple(range(len(shape))))

    def mmas(self):
        """Tiled MMAs of one warpgroup: S = q k^T (both K-major) and O = P v (P from registers, v as it lies:
        N-major)."""
        k_major, n_major = OperandMajorMode.K, OperandMajorMode.MN
        make = sm90_utils.make_trivial_tiled_mma
        qk = make(BFloat16, BFloat16, k_major, k_major, Float32, (1, 1, 1), (ROWS, BLOCK))
        o_tile, registers = (ROWS, self.head_dim), warpgroup.OperandSource.RMEM
        pv = make(BFloat16, BFloat16, k_major, n_major, Float32, (1, 1, 1), o_tile, registers)
        return qk, pv

    def _storage(self):
        stages, block = self.tuning.stages, BLOCK * self.head_dim
        rows = TILE * self.head_dim

        @cute.struct
        class Storage:
            q_full: cute.struct.MemRange[Int64, CONSUMERS]
            q_empty: cute.struct.MemRange[Int64, CONSUMERS]
            k_full: cute.struct.MemRange[Int64, stages]
            k_empty: cute.struct.MemRange[Int64, stages]
            v_full: cute.struct.MemRange[Int64, stages]
            v_empty: cute.struct.MemRange[Int64, stages]
            counts: cute.struct.MemRange[Int32, CONSUMERS]
            words: cute.struct.MemRange[Int32, stages]
            q: cute.struct.Align[cute.struct.MemRange[BFloat16, rows], ALIGN]
            k: cute.struct.Align[cute.struct.MemRange[BFloat16, stages * block], ALIGN]
            v: cute.struct.Align[cute.struct.MemRange[BFloat16, stages * block], ALIGN]
            out: cute.struct.Align[cute.struct.MemRange[BFloat16, 0 if self.shares_q else rows], ALIGN]

        return Storage

    # ---- device entry --------------------------------------------------------------------------------------

    @cute.kernel
    def kernel(self, atoms: tuple, tensors: tuple, mask: tuple | None, b: Int32, s: Int32):
        """Barriers, then one call for each role."""
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        storage = SmemAllocator().allocate(self._storage())
        bars = Barriers(*(getattr(storage, f.name).data_ptr() for f in fields(Barriers)))
        smem = self._smem(storage)
        if warp_index == 0:
            for atom in atoms:
                cpasync.prefetch_descriptor(atom)
            self._init_barriers(bars)
        cute.arch.sync_threads()
        if warp_index < WARPGROUP // WARP:
            cute.arch.setmaxregister_decrease(LOAD_REGISTERS)
            if warp_index == 0:
                load_role(self, bars, smem, atoms, tensors, mask, b, s)
        else:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            consumer_role(self, bars, smem, (atoms[3], tensors[3]), mask, b, s)

    def _init_barriers(self, bars):
        warps = WARPGROUP // WARP
        with cute.arch.elect_one():
            for g in range(CONSUMERS):
                cute.arch.mbarrier_init(bars.q_full + g, 1)
                cute.arch.mbarrier_init(bars.q_empty + g, warps)
            for i in range(self.tuning.stages):
                for full, empty in ((bars.k_full, bars.k_empty), (bars.v_full, bars.v_empty)):
                    cute.arch.mbarrier_init(full + i, 1)
                    cute.arch.mbarrier_init(empty + i, CONSUMERS * warps)
        cute.arch.mbarrier_init_fence()

    def _smem(self, storage):
        rows, blocks = self.smem_layout(CONSUMERS), self.smem_layout(self.tuning.stages)
        out = storage.q if self.shares_q else storage.out
        pairs = ((storage.q, rows), (storage.k, blocks), (storage.v, blocks), (out, rows))
        tensors = (buffer.get_tensor(layout.outer, swizzle=layout.inner) for buffer, layout in pairs)
        counts = storage.counts.get_tensor(cute.make_layout(CONSUMERS))
        return Smem(*tensors, counts, storage.words.get_tensor(cute.make_layout(self.tuning.stages)))

    # ---- work units ----------------------------------------------------------------------------------------

    def unit_count(self, b, s):
        """How many units this CTA has. Round i gives CTA c unit i * CTAs + c, every other round in reverse
        order, so that the longer units of one round meet the shorter ones of the next."""
        units = self.heads * b * cute.ceil_div(s, TILE)
        ctas, cta = cute.arch.grid_dim()[0], cute.arch.block_idx()[0]
        rounds, rest = units // ctas, units % ctas
        place = cutlass.select_(rounds % 2 == 0, cta, ctas - 1 - cta)
        return rounds + Int32(place < rest)

    def unit(self, index, b, s):
        """(query tile, head, batch) of this CTA's unit `index`: longest query tiles first; then heads, so
        that those that share a kv head run together and find k and v in L2."""
        ctas, cta = cute.arch.grid_dim()[0], cute.arch.block_idx()[0]
        unit = index * ctas + cutlass.select_(index % 2 == 0, cta, ctas - 1 - cta)
        batches = unit // self.heads
        from_last = batches // b
        return cute.ceil_div(s, TILE) - 1 - from_last, unit % self.heads, batches - from_last * b

    def key_tiles(self, tile, s):
        """(first, end) of the key tiles that query tile `tile` reads, by position."""
        end = tile + 1 if self.mask == "causal" else cute.ceil_div(s, TILE)
        if self.window is None:
            return Int32(0), end
        return cutlass.max(tile * TILE - (self.window - 1), Int32(0)) // TILE, end


@dataclass(frozen=True)
class MaskedAttention(MaskTensor, Attention):
    """See MaskTensor."""
