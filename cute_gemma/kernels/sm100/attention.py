"""Softcapped GQA attention for sm_100a: out = softmax(cap * tanh(q k^T * scale / cap) + mask) v.

q (B, S, H, D), k and v (B, S, KV, D), out (B, S, H, D), all bf16; query head h reads kv head h // (H / KV).

A CTA owns one or two 128-row query tiles of one head and walks over 128-row key tiles. Warp roles, in the order data
meets them:
  load     one warp: q, k and v tiles by TMA into 128-byte-swizzled shared memory
  mma      one warp: S_g = q k^T and O += P_g v, all accumulators in TMEM
  softmax  two warpgroups g = 0, 1: S_g to P_g in registers, one row a thread; then O to global memory
P_g overwrites S_g as bf16 and is the second product's A operand straight from TMEM. While one warpgroup computes its
P, the tensor core works for the other:
  two query tiles  warpgroup g has query tile g, every key tile, and an O of its own (head_dim <= 128);
  one query tile   the warpgroups take key tiles in turn and add to one O of up to 256 TMEM columns.
"""

from dataclasses import dataclass, field, fields
from functools import partial

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as sm100_utils
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05
from cutlass.cute.typing import BFloat16, Boolean, Float32, Int32, Int64
from cutlass.memory import SmemAllocator

from cute_gemma.jit.signature import Signature, TensorArg
from cute_gemma.kernels.common.mask import ALL_MASKED, ALL_ZERO, DIAGONAL
from cute_gemma.kernels.common.softcap import FIXED_SHIFT_CAP
from cute_gemma.kernels.sm100 import attention_softmax as softmax
from cute_gemma.kernels.sm100.mask_scan import mask_arguments, mask_entries
from cute_gemma.kernels.sm100.tmem import fence_after_sync

# MMA tile: M = 128 rows fill the 128 TMEM lanes, so that a softmax thread owns a whole row.
TILE = 128
TMEM_COLUMNS = 512  # PTX ISA, tcgen05.alloc: columns of an SM's tensor memory
MMA_K = 16  # bf16 elements of K in one tcgen05.mma
WARP = 32
WARPGROUP = 128
GROUPS = 2
ALIGN = 1024  # bytes the 128-byte swizzle repeats after
# Registers a thread. A kernel of 384 threads starts with 168 (65536 / 384, in eights); two warpgroups at 208 and one at
# 88 take as many.
SOFTMAX_REGISTERS = 208
OTHER_REGISTERS = 88
SCAN_BLOCK = 32  # tile classes a warp reads at once


@dataclass(frozen=True)
class AttentionTuning:
    """What may change without changing what is computed.

    query_tiles: 128-row query tiles a CTA owns, 1 or 2.
    kv_stages: 32 KB stages of keys and values in flight.
    fma_exp2_pairs: of the 64 pairs of weights a thread computes a tile, how many take the FMA pipe for 2^x.
    """

    query_tiles: int = 2
    kv_stages: int = 4
    fma_exp2_pairs: int = 8


@dataclass(frozen=True)
class Barriers:
    """First mbarrier of each kind. A plain record of pointers: the tracer takes a method call on a value for a change of
    it, so that the storage struct itself cannot be read within a loop.

    q_full, o_full: one a query tile; kv_full, kv_empty: one a stage; s_full: one a warpgroup; p_full: one a warpgroup
    and part of P; done: one.
    """

    q_full: cute.Pointer
    kv_full: cute.Pointer
    kv_empty: cute.Pointer
    s_full: cute.Pointer
    p_full: cute.Pointer
    o_full: cute.Pointer
    done: cute.Pointer


@dataclass(frozen=True)
class Work:
    """A CTA's share: query tiles from `tile` on, of one head and batch, over sequences of s rows, `tiles` tiles long.
    classes: None, or this batch's mask classes (query tile, key tile)."""

    tile: Int32
    head: Int32
    batch: Int32
    s: Int32
    tiles: Int32
    classes: cute.Tensor | None


@dataclass(frozen=True)
class Attention:
    """heads, kv_heads, head_dim: H, KV, D (64, 128 or 256). scale: factor of q k^T. softcap: cap of the logits, None for
    none. mask: "causal", "none", or "tensor" for `MaskedAttention`."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    softcap: float | None
    mask: str = "causal"
    tuning: AttentionTuning = field(default_factory=AttentionTuning)

    def __post_init__(self) -> None:
        if self.head_dim not in (64, 128, 256):
            raise ValueError(f"head_dim: got {self.head_dim}, want 64, 128 or 256")
        if self.head_dim > 128 and self.tuning.query_tiles != 1:
            raise ValueError(f"query_tiles: got {self.tuning.query_tiles}, want 1 for head_dim {self.head_dim}")
        if self.mask not in ("causal", "none", "tensor"):
            raise ValueError(f'mask: got {self.mask!r}, want "causal", "none" or "tensor"')

    def signature(self) -> Signature:
        """q, k, v, out; every batch and length shares one compilation."""
        q = ("b", "s", self.heads, self.head_dim)
        kv = ("b", "s", self.kv_heads, self.head_dim)
        return (
            TensorArg("q", "bf16", q),
            TensorArg("k", "bf16", kv),
            TensorArg("v", "bf16", kv),
            TensorArg("out", "bf16", q),
        )

    # ---- sizes -------------------------------------------------------------------------------------------------------

    @property
    def fixed_shift(self) -> bool:
        """Whether the cap alone bounds the exponents, so that no running maximum is needed."""
        return self.softcap is not None and self.softcap <= FIXED_SHIFT_CAP

    @property
    def mma_warp(self) -> int:
        return GROUPS * WARPGROUP // WARP

    @property
    def load_warp(self) -> int:
        return self.mma_warp + 1

    @property
    def threads(self) -> int:
        """Three whole warpgroups, since setmaxnreg takes effect by the warpgroup; the last two warps only take part in
        that."""
        return (GROUPS + 1) * WARPGROUP

    @property
    def kv_parts(self) -> int:
        """Stages a key or value tile takes: keys are cut along D, values along the keys."""
        return max(1, self.head_dim // 128)

    @property
    def lag(self) -> int:
        """Key tiles whose scores are issued before the product of the first of them with its values."""
        return GROUPS // self.tuning.query_tiles

    @property
    def p_parts(self) -> int:
        """Parts of P handed to the MMA warp on their own, so that the product starts before the last weight is known."""
        return 2

    @property
    def o_columns(self) -> int:
        """Columns of O a warpgroup writes."""
        return self.head_dim * self.tuning.query_tiles // GROUPS

    def s_column(self, g):
        """First TMEM column of S_g; P_g takes the first half of the same columns."""
        return g * TILE

    def o_column(self, g):
        """First TMEM column of the O that warpgroup g writes."""
        return GROUPS * TILE + g * self.o_columns

    # ---- host entry --------------------------------------------------------------------------------------------------

    @cute.jit
    def __call__(self, q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, out: cute.Tensor, stream: cuda.CUstream):
        self.launch(q, k, v, out, None, stream)

    def launch(self, q, k, v, out, mask, stream):
        """TMA descriptors, grid and launch. mask: None, or (mask, row maxima, tile classes)."""
        qk_mma, pv_mma = self._mmas()
        layouts = self._smem_layouts()
        load, store = cpasync.CopyBulkTensorTileG2SOp(tcgen05.CtaGroup.ONE), cpasync.CopyBulkTensorTileS2GOp()
        cluster = (1, 1, 1, 1)
        q_one, k_one, v_one = (cute.select(layout, mode=[0, 1, 2]) for layout in layouts[:3])
        qk_tile, pv_tile = self._mma_tiles()
        part = (TILE, TILE, qk_tile[2] // self.kv_parts)
        tma = (
            cute.nvgpu.make_tiled_tma_atom_A(load, _rows(q), q_one, qk_tile, qk_mma, cluster),
            cute.nvgpu.make_tiled_tma_atom_B(load, _rows(k), k_one, part, qk_mma, cluster),
            cute.nvgpu.make_tiled_tma_atom_B(load, _columns(v), v_one, pv_tile, pv_mma, cluster),
            cpasync.make_tiled_tma_atom(store, _rows(out), cute.select(layouts[3], mode=[0, 1]), (WARP, self.o_columns)),
        )
        b, s = Int32(q.shape[0]), Int32(q.shape[1])
        grid = (self.heads, b, cute.ceil_div(s, TILE * self.tuning.query_tiles))
        self.kernel(tuple(t[0] for t in tma), tuple(t[1] for t in tma), mask, s).launch(
            grid=grid, block=(self.threads, 1, 1), stream=stream, min_blocks_per_mp=1, use_pdl=True
        )

    def _mma_tiles(self):
        """(M, N, K) of q k^T, and of the part of P v that one stage of values takes part in."""
        return (TILE, TILE, self.head_dim), (TILE, self.head_dim, TILE // self.kv_parts)

    def _mmas(self):
        """Tiled MMAs of S = q k^T (both K-major) and O = P v (P from TMEM, v as it lies: N-major)."""
        k_major, one = OperandMajorMode.K, tcgen05.CtaGroup.ONE
        qk = sm100_utils.make_trivial_tiled_mma(BFloat16, BFloat16, k_major, k_major, Float32, one, (TILE, TILE))
        pv = sm100_utils.make_trivial_tiled_mma(
            BFloat16, BFloat16, k_major, OperandMajorMode.MN, Float32, one, (TILE, self.head_dim),
            tcgen05.OperandSource.TMEM,
        )  # fmt: skip
        return qk, pv

    def _smem_layouts(self):
        """q (MMA, M, K, query tile), k and v (MMA, N, K, stage), and out, staged by warp: (32, columns, warp)."""
        qk_mma, pv_mma = self._mmas()
        qk_tile, pv_tile = self._mma_tiles()
        stages = self.tuning.kv_stages
        part = (TILE, TILE, self.head_dim // self.kv_parts)
        row_major = cutlass.utils.LayoutEnum.ROW_MAJOR
        return (
            sm100_utils.make_smem_layout_a(qk_mma, qk_tile, BFloat16, self.tuning.query_tiles),
            sm100_utils.make_smem_layout_b(qk_mma, part, BFloat16, stages),
            sm100_utils.make_smem_layout_b(pv_mma, pv_tile, BFloat16, stages),
            sm100_utils.make_smem_layout_epi(
                BFloat16, row_major, (WARP, self.o_columns), GROUPS * WARPGROUP // WARP
            ),
        )

    def _storage(self):
        tiles, stages = self.tuning.query_tiles, self.tuning.kv_stages
        part = TILE * self.head_dim // self.kv_parts
        bias_words = GROUPS * TILE * softmax.BIAS_PITCH if self.mask == "tensor" else 1

        @cute.struct
        class Storage:
            q_full: cute.struct.MemRange[Int64, tiles]
            kv_full: cute.struct.MemRange[Int64, stages]
            kv_empty: cute.struct.MemRange[Int64, stages]
            s_full: cute.struct.MemRange[Int64, GROUPS]
            p_full: cute.struct.MemRange[Int64, GROUPS * self.p_parts]
            o_full: cute.struct.MemRange[Int64, tiles]
            done: cute.struct.MemRange[Int64, 1]
            tmem: Int32
            sums: cute.struct.MemRange[Float32, GROUPS * TILE]
            bias: cute.struct.MemRange[Float32, bias_words]
            q: cute.struct.Align[cute.struct.MemRange[BFloat16, tiles * TILE * self.head_dim], ALIGN]
            kv: cute.struct.Align[cute.struct.MemRange[BFloat16, stages * part], ALIGN]

        return Storage

    # ---- device entry ------------------------------------------------------------------------------------------------

    @cute.kernel
    def kernel(self, atoms: tuple, tensors: tuple, mask: tuple | None, s: Int32):
        """Barriers and TMEM, then one call for each warp role."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        storage = SmemAllocator().allocate(self._storage())
        bars = Barriers(*(getattr(storage, f.name).data_ptr() for f in fields(Barriers)))
        # k and v share the stages; out reuses q's memory.
        buffers = zip((storage.q, storage.kv, storage.kv, storage.q), self._smem_layouts())
        smem = tuple(x.get_tensor(layout.outer, swizzle=layout.inner) for x, layout in buffers)
        scratch = (storage.sums.data_ptr(), storage.bias.data_ptr())
        if warp == self.load_warp:
            for atom in atoms:
                cpasync.prefetch_descriptor(atom)
            self._init_barriers(bars)
        if warp == self.mma_warp:
            cute.arch.alloc_tmem(TMEM_COLUMNS, storage.tmem)
            cute.arch.relinquish_tmem_alloc_permit()
        cute.arch.sync_threads()
        tmem = cute.arch.retrieve_tmem_ptr(Float32, 16, storage.tmem)
        if warp >= self.mma_warp:
            cute.arch.setmaxregister_decrease(OTHER_REGISTERS)
            if warp == self.load_warp:
                self._load(bars, smem, atoms, tensors, self._work(mask, s))
            if warp == self.mma_warp:
                self._mma(bars, smem, tmem, self._work(mask, s))
        else:
            cute.arch.setmaxregister_increase(SOFTMAX_REGISTERS)
            self._softmax(bars, smem[3], scratch, tmem, (atoms[3], tensors[3]), mask, self._work(mask, s))

    def _init_barriers(self, bars):
        with cute.arch.elect_one():
            for i in range(self.tuning.query_tiles):
                cute.arch.mbarrier_init(bars.q_full + i, 1)
                cute.arch.mbarrier_init(bars.o_full + i, 1)
            for i in range(self.tuning.kv_stages):
                cute.arch.mbarrier_init(bars.kv_full + i, 1)
                cute.arch.mbarrier_init(bars.kv_empty + i, 1)
            for g in range(GROUPS):
                cute.arch.mbarrier_init(bars.s_full + g, 1)
            for i in range(GROUPS * self.p_parts):
                cute.arch.mbarrier_init(bars.p_full + i, WARPGROUP // WARP)
            cute.arch.mbarrier_init(bars.done, self.mma_warp)
        cute.arch.mbarrier_init_fence()

    # ---- which key tiles ---------------------------------------------------------------------------------------------

    def _work(self, mask, s):
        """This CTA's share. Blocks start in order of x, y, z: heads first, so that those that share a kv head run together
        and find k and v in L2; the longest query tiles before short ones, so that these fill the last wave."""
        head, batch, z = cute.arch.block_idx()
        tile = (cute.arch.grid_dim()[2] - 1 - z) * self.tuning.query_tiles
        tiles = cute.ceil_div(s, TILE)
        classes = None
        if self.mask == "tensor":
            # A mask shared by all batches has one set of classes.
            base = cutlass.min(batch, Int32(mask[2].shape[0]) - 1) * tiles * tiles
            classes = cute.make_tensor(mask[2].iterator + base, cute.make_layout((tiles, tiles), stride=(tiles, 1)))
        return Work(tile, head, batch, s, tiles, classes)

    def _ends(self, work):
        """For each query tile of the CTA, the key tiles it reads from the first on; 0 beyond the sequence."""
        ends = []
        for i in range(self.tuning.query_tiles):
            tile = work.tile + i
            end = tile + 1 if self.mask == "causal" else work.tiles
            ends.append(cutlass.select_(tile < work.tiles, end, Int32(0)))
        return ends

    @cute.jit
    def _walk(self, visit, state, work):
        """Calls state = visit(state, j, kinds) for each key tile j that some query tile of the CTA reads, in order.
        kinds: the mask class of the tile for each query tile; ALL_MASKED where it does not read it."""
        if cutlass.const_expr(self.mask == "tensor"):
            for block in cutlass.range(cute.ceil_div(work.tiles, SCAN_BLOCK), unroll=1):
                mine, bits = self._scan(work, block)
                while bits != 0:
                    lane = cute.arch.popc((bits & -bits) - 1)
                    bits = bits & (bits - 1)
                    kinds = [cute.arch.shuffle_sync(k, lane) for k in mine]
                    state = visit(state, block * SCAN_BLOCK + lane, kinds)
        else:
            ends = self._ends(work)
            for j in cutlass.range(_largest(ends), unroll=1):
                kinds = []
                for i, end in enumerate(ends):
                    inside = Int32(ALL_ZERO)
                    if cutlass.const_expr(self.mask == "causal"):
                        inside = cutlass.select_(j == work.tile + i, Int32(DIAGONAL), inside)
                    kinds.append(cutlass.select_(j < end, inside, Int32(ALL_MASKED)))
                state = visit(state, j, kinds)
        return state

    def _scan(self, work, block):
        """Classes of 32 key tiles, one a lane, for each query tile; and a bit for each key tile some of them reads."""
        j = block * SCAN_BLOCK + cute.arch.lane_idx()
        mine = []
        reads = Boolean(False)
        for i in range(self.tuning.query_tiles):
            tile = work.tile + i
            known = Boolean(j < work.tiles) & Boolean(tile < work.tiles)
            kind = work.classes[cutlass.min(tile, work.tiles - 1), cutlass.min(j, work.tiles - 1)].to(Int32)
            mine.append(cutlass.select_(known, kind, Int32(ALL_MASKED)))
            reads = reads | Boolean(mine[i] != ALL_MASKED)
        return mine, Int32(cute.arch.vote_ballot_sync(reads))

    def _next(self, slot, phase):
        """The ring's next stage and its parity."""
        wrap = slot == self.tuning.kv_stages - 1
        return cutlass.select_(wrap, Int32(0), slot + 1), phase ^ Int32(wrap)

    # ---- load warp ---------------------------------------------------------------------------------------------------

    @cute.jit
    def _load(self, bars, smem, atoms, tensors, work):
        """q tiles once; then for each key tile the keys and, `lag` tiles later, the values: the MMA warp's order."""
        qk_mma, pv_mma = self._mmas()
        d, parts = self.head_dim, self.kv_parts
        kv = (work.head // (self.heads // self.kv_heads), work.batch)
        # (128, D, tile), (128, D / parts, tile, part), (D, 128 / parts, tile * parts + part)
        gQ = cute.local_tile(tensors[0][None, None, (work.head, work.batch)], (TILE, d), (None, 0))
        gK = cute.local_tile(tensors[1][None, None, kv], (TILE, d // parts), (None, None))
        gV = cute.local_tile(tensors[2][None, None, kv], (d, TILE // parts), (0, None))
        tQsQ, tQgQ = _tma_parts(atoms[0], smem[0], qk_mma.get_slice(0).partition_A(gQ))
        tKsK, tKgK = _tma_parts(atoms[1], smem[1], qk_mma.get_slice(0).partition_B(gK))
        tVsV, tVgV = _tma_parts(atoms[2], smem[2], pv_mma.get_slice(0).partition_B(gV))
        cute.arch.griddepcontrol_wait()
        for i in cutlass.range_constexpr(self.tuning.query_tiles):
            if work.tile + i < work.tiles:
                _load_box(atoms[0], tQgQ[None, work.tile + i], tQsQ[None, i], bars.q_full + i, TILE * d)

        sources = ((atoms[1], tKgK, tKsK), (atoms[2], tVgV, tVsV))
        visit = partial(self._load_visit, bars, sources)
        state = self._walk(visit, (Int32(0), Int32(1), Int32(0), Int32(0), Int32(0)), work)
        slot, phase, count, before, last = state
        ring = (slot, phase)
        if cutlass.const_expr(self.lag == 2):
            if count > 1:
                ring = self._load_values(bars, sources, ring, before)
        if count > 0:
            ring = self._load_values(bars, sources, ring, last)
        cute.arch.griddepcontrol_launch_dependents()

    @cute.jit
    def _load_visit(self, bars, sources, state, j, kinds):
        """state: stage, its parity, tiles visited, and the last two of them."""
        slot, phase, count, before, last = state
        ring = (slot, phase)
        if count >= self.lag:
            ring = self._load_values(bars, sources, ring, last if self.lag == 1 else before)
        for p in cutlass.range_constexpr(self.kv_parts):
            ring = self._load_part(bars, sources[0], ring, (None, j, p))
        return ring[0], ring[1], count + 1, last, j

    def _load_values(self, bars, sources, ring, j):
        for p in range(self.kv_parts):
            ring = self._load_part(bars, sources[1], ring, (None, j * self.kv_parts + p))
        return ring

    def _load_part(self, bars, source, ring, index):
        """A tile or part of one into the ring's next stage, once that is free."""
        atom, gmem, smem = source
        slot, phase = ring
        cute.arch.mbarrier_wait(bars.kv_empty + slot, phase)
        _load_box(atom, gmem[index], smem[None, slot], bars.kv_full + slot, TILE * self.head_dim // self.kv_parts)
        return self._next(slot, phase)

    # ---- MMA warp ----------------------------------------------------------------------------------------------------

    @cute.jit
    def _mma(self, bars, smem, tmem, work):
        """All products of the CTA. They execute in order, so S_g(j) may overwrite P_g once P_g v has been issued."""
        if cutlass.const_expr(self.tuning.query_tiles == 2):
            visit = partial(self._mma_visit_two, bars, smem, tmem)
            start = (Int32(0),) * 6
            state = self._walk(visit, start, work)
            slot, phase, pending, counts = state[0], state[1], (state[2], state[3]), (state[4], state[5])
            for g in cutlass.range_constexpr(GROUPS):
                if pending[g] != 0:
                    self._accumulate(bars, smem, tmem, (slot, phase), Int32(g), counts[g] - 1, False)
                if counts[g] > 0:
                    _commit(bars.o_full + g)
        else:
            visit = partial(self._mma_visit_one, bars, smem, tmem)
            slot, phase, count = self._walk(visit, (Int32(0),) * 3, work)
            ring = (slot, phase)
            if count > 1:
                ring = self._accumulate(bars, smem, tmem, ring, count & 1, count - 2, True)
            if count > 0:
                ring = self._accumulate(bars, smem, tmem, ring, (count - 1) & 1, count - 1, True)
                _commit(bars.o_full)
        cute.arch.mbarrier_wait(bars.done, 0)
        cute.arch.dealloc_tmem(tmem, TMEM_COLUMNS)

    @cute.jit
    def _mma_visit_two(self, bars, smem, tmem, state, j, kinds):
        """For each query tile g: O_g += P_g v of the tile before, then S_g = q_g k^T of this one.
        state: stage and parity; for each g, whether P_g of the last tile waits for its values; scores issued."""
        slot, phase = state[0], state[1]
        pending, counts = [state[2], state[3]], [state[4], state[5]]
        v_ring, k_ring = (slot, phase), (slot, phase)
        if counts[0] + counts[1] > 0:
            k_ring = self._next(slot, phase)
        for g in cutlass.range_constexpr(GROUPS):
            if pending[g] != 0:
                self._accumulate(bars, smem, tmem, v_ring, Int32(g), counts[g] - 1, False)
            pending[g] = Int32(kinds[g] != ALL_MASKED)
            if pending[g] != 0:
                if counts[g] == 0:
                    cute.arch.mbarrier_wait(bars.q_full + g, 0)
                self._scores(bars, smem, tmem, k_ring, g, Int32(g), False)
                counts[g] = counts[g] + 1
        if state[4] + state[5] > 0:
            _commit(bars.kv_empty + v_ring[0])
        _commit(bars.kv_empty + k_ring[0])
        slot, phase = self._next(*k_ring)
        return slot, phase, pending[0], pending[1], counts[0], counts[1]

    @cute.jit
    def _mma_visit_one(self, bars, smem, tmem, state, j, kinds):
        """O += P_g v of the tile before last, whose P_g lies where S_g = q k^T of this one goes; g alternates."""
        slot, phase, count = state
        ring = (slot, phase)
        if count == 0:
            cute.arch.mbarrier_wait(bars.q_full, 0)
        if count >= GROUPS:
            ring = self._accumulate(bars, smem, tmem, ring, count & 1, count - GROUPS, True)
        ring = self._scores(bars, smem, tmem, ring, 0, count & 1, True)
        return ring[0], ring[1], count + 1

    def _scores(self, bars, smem, tmem, ring, q_tile, g, release):
        """S_g = q k^T from the ring's next stages."""
        mma = self._mmas()[0]
        accumulator = _accumulator(mma, (TILE, TILE), tmem + self.s_column(g))
        tQ, tK = mma.make_fragment_A(smem[0]), mma.make_fragment_B(smem[1])
        steps = self.head_dim // self.kv_parts // MMA_K
        for p in range(self.kv_parts):
            slot, phase = ring
            cute.arch.mbarrier_wait(bars.kv_full + slot, phase)
            for i in range(steps):
                mma.set(tcgen05.Field.ACCUMULATE, p + i > 0)
                a, b = tQ[None, None, p * steps + i, q_tile], tK[None, None, i, slot]
                cute.gemm(mma, accumulator, a, b, accumulator)
            if release:
                _commit(bars.kv_empty + slot)
            ring = self._next(slot, phase)
        _commit(bars.s_full + g)
        return ring

    def _accumulate(self, bars, smem, tmem, ring, g, index, release):
        """O += P_g v from the ring's next stages; `index`: how many products the query tile has had before."""
        mma = self._mmas()[1]
        column = self.o_column(g if self.tuning.query_tiles == 2 else 0)
        accumulator = _accumulator(mma, (TILE, self.head_dim), tmem + column)
        tP, tV = self._p_operand(mma, tmem + self.s_column(g)), mma.make_fragment_B(smem[2])
        parity = index & 1 if self.tuning.query_tiles == 2 else (index >> 1) & 1
        p_steps = TILE // MMA_K // self.p_parts
        v_steps = TILE // MMA_K // self.kv_parts
        for i in range(TILE // MMA_K):
            slot, phase = ring
            if i % v_steps == 0:
                cute.arch.mbarrier_wait(bars.kv_full + slot, phase)
            if i % p_steps == 0:
                cute.arch.mbarrier_wait(bars.p_full + g * self.p_parts + i // p_steps, parity)
                fence_after_sync()
            mma.set(tcgen05.Field.ACCUMULATE, index > 0 if i == 0 else True)
            cute.gemm(mma, accumulator, tP[None, None, i], tV[None, None, i % v_steps, slot], accumulator)
            if (i + 1) % v_steps == 0:
                if release:
                    _commit(bars.kv_empty + slot)
                ring = self._next(slot, phase)
        return ring

    def _p_operand(self, mma, pointer):
        """P as A operand in TMEM: two bf16 a column."""
        layout = sm100_utils.make_smem_layout_a(mma, (TILE, self.head_dim, TILE), BFloat16, 1)
        fragment = mma.make_fragment_A(cute.make_tensor(pointer, layout.outer))[None, None, None, 0]
        return cute.make_tensor(cute.recast_ptr(pointer, dtype=BFloat16), fragment.layout)

    # ---- softmax warpgroups ------------------------------------------------------------------------------------------

    @cute.jit
    def _softmax(self, bars, sO, scratch, tmem, out, mask, work):
        """Walks the key tiles of this warpgroup, then writes its part of the output."""
        lane = cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        group, warp = warp // (WARPGROUP // WARP), warp % (WARPGROUP // WARP)
        tile = work.tile + group if self.tuning.query_tiles == 2 else work.tile
        row = tile * TILE + warp * WARP + lane
        minus_max, source = Float32(0.0), None
        if cutlass.const_expr(self.mask == "tensor"):
            cute.arch.griddepcontrol_wait()
            minus_max, source = self._mask_source(mask, scratch[1], row, group * 4 + warp, work)
        rows = softmax.Rows(
            group=group,
            thread=warp * WARP + lane,
            lane=lane,
            warp=warp,
            tile=tile,
            row=row,
            s=work.s,
            scores=tmem + self.s_column(group),
            output=tmem + self.o_column(group),
            minus_max=minus_max,
            plain=cute.arch.vote_all_sync(minus_max == 0.0),
            s_full=bars.s_full + group,
            p_full=bars.p_full + group * self.p_parts,
        )
        zero = Float32(0.0)
        state = (Int32(0), Float32(-Float32.inf), zero, zero)
        count, _, sum0, sum1 = self._walk(partial(self._softmax_visit, rows, source), state, work)
        total = sum0 + sum1
        column, o_full = Int32(0), bars.o_full
        if cutlass.const_expr(self.tuning.query_tiles == 2):
            o_full = bars.o_full + group
        else:
            sums = cute.make_tensor(scratch[0], cute.make_layout((TILE, GROUPS)))
            sums[rows.thread, group] = total
            cute.arch.barrier(barrier_id=1, number_of_threads=GROUPS * WARPGROUP)
            total = sums[rows.thread, 0] + sums[rows.thread, 1]
            column = group
        if tile < work.tiles:
            coordinate = (column, work.head, work.batch)
            softmax.write_output(self, rows, sO, out, coordinate, o_full, total, count > 0)
        softmax.arrive(bars.done)

    @cute.jit
    def _softmax_visit(self, rows, source, state, j, kinds):
        """state: tiles done (by the query tile), running maximum and the two partial sums of the row."""
        count, maximum, sum0, sum1 = state
        if cutlass.const_expr(self.tuning.query_tiles == 2):
            kind = cutlass.select_(rows.group == 0, kinds[0], kinds[1])
            mine, index = kind != ALL_MASKED, count
        else:
            kind = kinds[0]
            mine, index = (count & 1) == rows.group, count >> 1
        if mine:
            cute.arch.mbarrier_wait(rows.s_full, index & 1)
            fence_after_sync()
            if cutlass.const_expr(self.fixed_shift):
                sum0, sum1 = softmax.capped_tile(self, rows, j, kind, source, (sum0, sum1))
            else:
                row = (maximum, sum0, sum1)
                maximum, sum0, sum1 = softmax.online_tile(self, rows, j, kind, source, count > 0, row)
        count = count + (Int32(mine) if self.tuning.query_tiles == 2 else 1)
        return count, maximum, sum0, sum1

    @cute.jit
    def _mask_source(self, mask, scratch, row, warp, work):
        """Minus the row's largest mask entry, and where mixed tiles find their entries: (this batch's mask, scratch)."""
        entries, maxima, _ = mask
        s = work.s
        batch = cutlass.min(work.batch, Int32(entries.shape[0]) - 1)
        largest = Float32(-Float32.inf)
        for c in cutlass.range(maxima.shape[1], unroll=1):
            largest = cute.arch.fmax(largest, maxima[batch, c, cutlass.min(row, s - 1)], nan=True)
        # A row with no key to attend to has no weights to shift.
        largest = cutlass.select_(largest == -Float32.inf, Float32(0.0), largest)
        base = Int64(batch) * Int64(s) * Int64(s)
        mine = mask_entries(entries, base, cute.make_layout((s, s), stride=(Int64(s), 1)))
        return -largest, (mine, scratch + warp * (WARP * softmax.BIAS_PITCH))


@dataclass(frozen=True)
class MaskedAttention(Attention):
    """Attention under an additive mask (B or 1, 1, S, S), bf16 or fp32, which `MaskScan` has looked through.

    row_max, classes: as `MaskScan` writes them.
    """

    mask: str = "tensor"
    mask_dtype: str = "bf16"

    def signature(self) -> Signature:
        q, k, v, out = super().signature()
        return (q, k, v, *mask_arguments(self.mask_dtype), out)

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        mask: cute.Tensor,
        row_max: cute.Tensor,
        classes: cute.Tensor,
        out: cute.Tensor,
        stream: cuda.CUstream,
    ):
        self.launch(q, k, v, out, (mask, row_max, classes), stream)


def _rows(t):
    """(B, S, H, D) as (S, D, (H, B)): the M or N and K modes first, as the tiled TMA wants them."""
    return _reorder(t, (1, 3, 2, 0))


def _columns(t):
    """(B, S, KV, D) as (D, S, (KV, B)): v is the B operand with N = D."""
    return _reorder(t, (3, 1, 2, 0))


def _reorder(t, order):
    shape, stride = ([x[i] for i in order] for x in (t.shape, t.stride))
    layout = cute.make_layout((shape[0], shape[1], tuple(shape[2:])), stride=(stride[0], stride[1], tuple(stride[2:])))
    return cute.make_tensor(t.iterator, layout)


def _tma_parts(atom, smem, gmem):
    """Shared and global tensors cut for one TMA atom: ((box), stage), ((box), tile, ...)."""
    return cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(smem, 0, 3), cute.group_modes(gmem, 0, 3)
    )


def _load_box(atom, source, target, barrier, elements):
    """TMA load that completes on `barrier`; rows beyond the sequence arrive as zeros and count as bytes too."""
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(barrier, elements * BFloat16.width // 8)
    cute.copy(atom, source, target, tma_bar_ptr=barrier)


def _commit(barrier):
    """Arrive once all MMAs issued so far are complete."""
    with cute.arch.elect_one():
        tcgen05.commit(barrier)


def _accumulator(mma, shape, pointer):
    return cute.make_tensor(pointer, mma.make_fragment_C(mma.partition_shape_C(shape)).layout)


def _largest(values):
    n = values[0]
    for x in values[1:]:
        n = cutlass.max(n, x)
    return n
