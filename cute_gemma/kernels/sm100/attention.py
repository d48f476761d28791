"""Softcapped GQA attention for sm_100a: out = softmax(cap * tanh(q k^T * scale / cap) + mask) v.

q (B, S, H, D), k and v (B, S, KV, D), out (B, S, H, D), all bf16; query head h reads kv head h // (H / KV).

A CTA owns two 128-row query tiles of one head and walks over 128-row key/value tiles. Warp roles, in the order data
meets them:
  load     one warp: q, k and v tiles by TMA into 128-byte-swizzled shared memory
  mma      one warp: S_g = q_g k^T and O_g += P_g v, for query tile g = 0, 1, all accumulators in TMEM
  softmax  one warpgroup for each query tile: S_g to P_g in registers, one row a thread; then O_g to global memory
While one warpgroup computes P_g, the tensor core works on the other tile. P_g overwrites S_g as bf16 and is the second
product's A operand straight from TMEM.
"""

from dataclasses import dataclass, field, fields

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as sm100_utils
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05
from cutlass.cute.typing import BFloat16, Boolean, Float32, Int32, Int64
from cutlass.memory import SmemAllocator

from cute_gemma.jit.signature import Signature, TensorArg
from cute_gemma.kernels.sm100 import attention_softmax

# MMA tile: M = 128 rows fill the 128 TMEM lanes, so that a softmax thread owns a whole row.
TILE_M = 128
TILE_N = 128
TMEM_COLUMNS = 512  # PTX ISA, tcgen05.alloc: columns of an SM's tensor memory
WARP = 32
WARPGROUP = 128
ALIGN = 1024  # the 128-byte swizzle repeats every 1024 bytes


@dataclass(frozen=True)
class AttentionTuning:
    """What may change without changing the result.

    query_tiles: query tiles a CTA owns, each with its own softmax warpgroup.
    kv_stages: 128-row key or value tiles in flight.
    fma_exp2_pairs: of the 64 pairs of weights a thread computes per tile, how many use the FMA pipe for 2^x.
    """

    query_tiles: int = 2
    kv_stages: int = 4
    fma_exp2_pairs: int = 6


@dataclass(frozen=True)
class Barriers:
    """First mbarrier of each kind, in shared memory.

    q_full, s_full, p_full, o_full: one for each query tile; kv_full, kv_empty: one a stage; done: one.
    A plain record of pointers: the tracer takes a method call on a value for a change of it, so that the storage struct
    itself cannot be read within a loop.
    """

    q_full: cute.Pointer
    kv_full: cute.Pointer
    kv_empty: cute.Pointer
    s_full: cute.Pointer
    p_full: cute.Pointer
    o_full: cute.Pointer
    done: cute.Pointer


@dataclass(frozen=True)
class Attention:
    """heads, kv_heads, head_dim: H, KV, D. scale: factor of q k^T. softcap: cap of the logits, None for none.
    mask: "causal" or "none"."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    softcap: float | None
    mask: str = "causal"
    tuning: AttentionTuning = field(default_factory=AttentionTuning)

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

    @property
    def threads(self) -> int:
        return self.tuning.query_tiles * WARPGROUP + 2 * WARP

    @property
    def mma_warp(self) -> int:
        return self.tuning.query_tiles * WARPGROUP // WARP

    @property
    def load_warp(self) -> int:
        return self.mma_warp + 1

    @property
    def s_columns(self) -> tuple[int, ...]:
        """First TMEM column of each S_g; P_g takes the first half of the same columns."""
        return tuple(g * TILE_N for g in range(self.tuning.query_tiles))

    @property
    def o_columns(self) -> tuple[int, ...]:
        """First TMEM column of each O_g."""
        return tuple(self.tuning.query_tiles * TILE_N + g * self.head_dim for g in range(self.tuning.query_tiles))

    @cute.jit
    def __call__(self, q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, out: cute.Tensor, stream: cuda.CUstream):
        self.launch(q, k, v, out, stream)

    @cute.jit
    def launch(self, q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, out: cute.Tensor, stream: cuda.CUstream):
        """TMA descriptors, grid and launch."""
        qk_mma, pv_mma = self._mmas()
        layouts = self._smem_layouts(qk_mma, pv_mma)
        load = cpasync.CopyBulkTensorTileG2SOp(tcgen05.CtaGroup.ONE)
        store = cpasync.CopyBulkTensorTileS2GOp()
        cluster = (1, 1, 1, 1)
        qk_tile, pv_tile = self._mma_tiles()
        one = [cute.select(layout, mode=[0, 1, 2]) for layout in layouts[:3]]
        tma_q = cute.nvgpu.make_tiled_tma_atom_A(load, _rows(q), one[0], qk_tile, qk_mma, cluster)
        tma_k = cute.nvgpu.make_tiled_tma_atom_B(load, _rows(k), one[1], qk_tile, qk_mma, cluster)
        tma_v = cute.nvgpu.make_tiled_tma_atom_B(load, _columns(v), one[2], pv_tile, pv_mma, cluster)
        o_layout = cute.select(layouts[3], mode=[0, 1])
        tma_o = cpasync.make_tiled_tma_atom(store, _rows(out), o_layout, (WARP, self.head_dim))
        b, s = q.shape[0], q.shape[1]
        rows = TILE_M * self.tuning.query_tiles
        blocks = (self.heads * b * cute.ceil_div(s, rows), 1, 1)
        self.kernel(
            (tma_q[0], tma_k[0], tma_v[0], tma_o[0]), (tma_q[1], tma_k[1], tma_v[1], tma_o[1]), Int32(b), Int32(s)
        ).launch(grid=blocks, block=(self.threads, 1, 1), stream=stream, min_blocks_per_mp=1, use_pdl=True)

    def _mmas(self):
        """Tiled MMAs of S = q k^T (both K-major) and O = P v (P from TMEM, v as it lies: N-major)."""
        qk = sm100_utils.make_trivial_tiled_mma(
            BFloat16, BFloat16, OperandMajorMode.K, OperandMajorMode.K, Float32, tcgen05.CtaGroup.ONE, (TILE_M, TILE_N)
        )
        pv = sm100_utils.make_trivial_tiled_mma(
            BFloat16,
            BFloat16,
            OperandMajorMode.K,
            OperandMajorMode.MN,
            Float32,
            tcgen05.CtaGroup.ONE,
            (TILE_M, self.head_dim),
            tcgen05.OperandSource.TMEM,
        )
        return qk, pv

    def _mma_tiles(self):
        return (TILE_M, TILE_N, self.head_dim), (TILE_M, self.head_dim, TILE_N)

    def _smem_layouts(self, qk_mma, pv_mma):
        """Layouts of q (…, query tile), k and v (…, stage) and of out, staged by warp: (32, D, warp)."""
        qk_tile, pv_tile = self._mma_tiles()
        stages = self.tuning.kv_stages
        q = sm100_utils.make_smem_layout_a(qk_mma, qk_tile, BFloat16, self.tuning.query_tiles)
        k = sm100_utils.make_smem_layout_b(qk_mma, qk_tile, BFloat16, stages)
        v = sm100_utils.make_smem_layout_b(pv_mma, pv_tile, BFloat16, stages)
        warps = self.tuning.query_tiles * TILE_M // WARP
        o = sm100_utils.make_smem_layout_epi(
            BFloat16, cutlass.utils.LayoutEnum.ROW_MAJOR, (WARP, self.head_dim), warps
        )
        return q, k, v, o

    def _storage(self):
        groups, stages = self.tuning.query_tiles, self.tuning.kv_stages
        tile = TILE_M * self.head_dim

        @cute.struct
        class Storage:
            q_full: cute.struct.MemRange[Int64, groups]
            kv_full: cute.struct.MemRange[Int64, stages]
            kv_empty: cute.struct.MemRange[Int64, stages]
            s_full: cute.struct.MemRange[Int64, groups]
            p_full: cute.struct.MemRange[Int64, groups]
            o_full: cute.struct.MemRange[Int64, groups]
            done: cute.struct.MemRange[Int64, 1]
            tmem: Int32
            q: cute.struct.Align[cute.struct.MemRange[BFloat16, groups * tile], ALIGN]
            kv: cute.struct.Align[cute.struct.MemRange[BFloat16, stages * tile], ALIGN]

        return Storage

    @cute.kernel
    def kernel(self, atoms: tuple, tensors: tuple, b: Int32, s: Int32):
        """Device entry: barriers and TMEM, then one call for each warp role."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        storage = SmemAllocator().allocate(self._storage())
        bars = Barriers(*(getattr(storage, f.name).data_ptr() for f in fields(Barriers)))
        smem = self._smem_tensors(storage)
        if warp == self.load_warp:
            for atom in atoms:
                cpasync.prefetch_descriptor(atom)
            self._init_barriers(bars)
        if warp == self.mma_warp:
            cute.arch.alloc_tmem(TMEM_COLUMNS, storage.tmem)
            cute.arch.relinquish_tmem_alloc_permit()
        cute.arch.sync_threads()
        tmem = cute.arch.retrieve_tmem_ptr(Float32, 16, storage.tmem)
        # Longest query tiles first, so that the short ones fill the last wave; then heads, so that those that share a
        # kv head run together and read k and v from L2.
        groups = self.tuning.query_tiles
        block, _, _ = cute.arch.block_idx()
        pair = cute.ceil_div(s, TILE_M * groups) - 1 - block // (self.heads * b)
        head, batch = block % self.heads, (block // self.heads) % b
        counts = [self._kv_tiles(pair * groups + g, s) for g in range(groups)]
        if warp == self.load_warp:
            self._load(bars, smem, atoms, tensors, (pair, head, batch), counts)
        if warp == self.mma_warp:
            self._mma(bars, smem, tmem, counts)
        if warp < self.mma_warp:
            self._softmax(bars, smem[3], tmem, (atoms[3], tensors[3]), (pair, head, batch), counts, s)

    def _kv_tiles(self, q_tile, s):
        """Key tiles that query tile `q_tile` reads; 0 beyond the end."""
        kv = cute.ceil_div(s, TILE_N)
        if cutlass.const_expr(self.mask == "causal"):
            n = cutlass.min(q_tile + 1, kv)
        else:
            n = kv
        return n * Int32(q_tile < kv)

    @cute.jit
    def _init_barriers(self, bars):
        with cute.arch.elect_one():
            for g in cutlass.range_constexpr(self.tuning.query_tiles):
                cute.arch.mbarrier_init(bars.q_full + g, 1)
                cute.arch.mbarrier_init(bars.s_full + g, 1)
                cute.arch.mbarrier_init(bars.p_full + g, WARPGROUP // WARP)
                cute.arch.mbarrier_init(bars.o_full + g, 1)
            for i in cutlass.range_constexpr(self.tuning.kv_stages):
                cute.arch.mbarrier_init(bars.kv_full + i, 1)
                cute.arch.mbarrier_init(bars.kv_empty + i, 1)
            cute.arch.mbarrier_init(bars.done, self.mma_warp)
        cute.arch.mbarrier_init_fence()

    def _smem_tensors(self, storage):
        """(sQ, sK, sV, sO); k and v tiles share the stages, out reuses q's memory."""
        layouts = self._smem_layouts(*self._mmas())
        buffers = (storage.q, storage.kv, storage.kv, storage.q)
        return [x.get_tensor(layout.outer, swizzle=layout.inner) for x, layout in zip(buffers, layouts)]

    @cute.jit
    def _load(self, bars, smem, atoms, tensors, tile, counts):
        """Load warp: q tiles once, then k and v of each key tile through the ring of stages."""
        pair, head, batch = tile
        qk_mma, pv_mma = self._mmas()
        sQ, sK, sV, _ = smem
        kv_head = head // (self.heads // self.kv_heads)
        # (128, D, tiles of q), (128, D, tiles of k), (D, 128, tiles of v), of this head and batch
        gQ = cute.local_tile(tensors[0][None, None, (head, batch)], (TILE_M, self.head_dim), (None, 0))
        gK = cute.local_tile(tensors[1][None, None, (kv_head, batch)], (TILE_N, self.head_dim), (None, 0))
        gV = cute.local_tile(tensors[2][None, None, (kv_head, batch)], (self.head_dim, TILE_N), (0, None))
        tQsQ, tQgQ = _tma_parts(atoms[0], sQ, qk_mma.get_slice(0).partition_A(gQ))
        tKsK, tKgK = _tma_parts(atoms[1], sK, qk_mma.get_slice(0).partition_B(gK))
        tVsV, tVgV = _tma_parts(atoms[2], sV, pv_mma.get_slice(0).partition_B(gV))
        tile_bytes = TILE_M * self.head_dim * BFloat16.width // 8
        cute.arch.griddepcontrol_wait()
        for g in cutlass.range_constexpr(self.tuning.query_tiles):
            if counts[g] > 0:
                full = bars.q_full + g
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(full, tile_bytes)
                cute.copy(
                    atoms[0], tQgQ[None, pair * self.tuning.query_tiles + g], tQsQ[None, g], tma_bar_ptr=full
                )
        slot, phase = Int32(0), Int32(1)
        for j in cutlass.range(_most(counts), unroll=1):
            self._load_tile(bars, atoms[1], tKgK[None, j], tKsK, slot, phase)
            slot, phase = self._next(slot, phase)
            self._load_tile(bars, atoms[2], tVgV[None, j], tVsV, slot, phase)
            slot, phase = self._next(slot, phase)
        cute.arch.griddepcontrol_launch_dependents()

    @cute.jit
    def _load_tile(self, bars, atom, source, target, slot, phase):
        """One key or value tile into stage `slot`, once it is free."""
        full = bars.kv_full + slot
        cute.arch.mbarrier_wait(bars.kv_empty + slot, phase)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, TILE_N * self.head_dim * BFloat16.width // 8)
        cute.copy(atom, source, target[None, slot], tma_bar_ptr=full)

    def _next(self, slot, phase):
        """The ring's next slot and its parity."""
        wrap = slot == self.tuning.kv_stages - 1
        return cutlass.select_(wrap, Int32(0), slot + 1), phase ^ Int32(wrap)

    @cute.jit
    def _mma(self, bars, smem, tmem, counts):
        """MMA warp. For each key tile j and query tile g: O_g += P_g v of tile j - 1, then S_g = q_g k^T of tile j.

        The tensor core executes in order, so S_g(j) overwrites P_g(j - 1) only after it was read.
        """
        qk_mma, pv_mma = self._mmas()
        sQ, sK, sV, _ = smem
        tQ, tK = qk_mma.make_fragment_A(sQ), qk_mma.make_fragment_B(sK)
        tV = pv_mma.make_fragment_B(sV)
        groups = self.tuning.query_tiles
        tS = [self._accumulator(qk_mma, (TILE_M, TILE_N), tmem + c) for c in self.s_columns]
        tO = [self._accumulator(pv_mma, (TILE_M, self.head_dim), tmem + c) for c in self.o_columns]
        tP = [self._p_operand(pv_mma, tmem + c) for c in self.s_columns]
        slot, phase, v_slot, v_phase = Int32(0), Int32(0), Int32(0), Int32(0)
        for j in cutlass.range(_most(counts), unroll=1):
            k_slot = slot
            cute.arch.mbarrier_wait(bars.kv_full + slot, phase)
            slot, phase = self._next(slot, phase)
            for g in cutlass.range_constexpr(groups):
                if j > 0:
                    if j <= counts[g]:
                        self._accumulate(bars, (tO[g], tP[g], tV, v_slot, v_phase), g, j - 1)
                        if j == counts[g]:
                            with cute.arch.elect_one():
                                tcgen05.commit(bars.o_full + g)
                if j < counts[g]:
                    if j == 0:
                        cute.arch.mbarrier_wait(bars.q_full + g, 0)
                    _gemm(self._mmas()[0], tS[g], tQ[None, None, None, g], tK[None, None, None, k_slot], False)
                    with cute.arch.elect_one():
                        tcgen05.commit(bars.s_full + g)
            with cute.arch.elect_one():
                tcgen05.commit(bars.kv_empty + k_slot)
                if j > 0:
                    tcgen05.commit(bars.kv_empty + v_slot)
            v_slot, v_phase = slot, phase
            slot, phase = self._next(slot, phase)
        for g in cutlass.range_constexpr(groups):
            if counts[g] == _most(counts):
                self._accumulate(bars, (tO[g], tP[g], tV, v_slot, v_phase), g, counts[g] - 1)
                with cute.arch.elect_one():
                    tcgen05.commit(bars.o_full + g)
        cute.arch.mbarrier_wait(bars.done, 0)
        cute.arch.dealloc_tmem(tmem, TMEM_COLUMNS)

    @cute.jit
    def _accumulate(self, bars, operands, g: cutlass.Constexpr, j):
        """O_g += P_g v for g's j-th tile."""
        tO, tP, tV, v_slot, v_phase = operands
        cute.arch.mbarrier_wait(bars.kv_full + v_slot, v_phase)
        cute.arch.mbarrier_wait(bars.p_full + g, j & 1)
        _gemm(self._mmas()[1], tO, tP, tV[None, None, None, v_slot], j > 0)

    def _accumulator(self, mma, shape, pointer):
        return cute.make_tensor(pointer, mma.make_fragment_C(mma.partition_shape_C(shape)).layout)

    def _p_operand(self, pv_mma, pointer):
        """P as A operand in TMEM: two bf16 a column."""
        layout = sm100_utils.make_smem_layout_a(pv_mma, self._mma_tiles()[1], BFloat16, 1)
        fragment = pv_mma.make_fragment_A(cute.make_tensor(pointer, layout.outer))[None, None, None, 0]
        return cute.make_tensor(cute.recast_ptr(pointer, dtype=BFloat16), fragment.layout)

    @cute.jit
    def _softmax(self, bars, sO, tmem, out, tile, counts, s):
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        for g in cutlass.range_constexpr(self.tuning.query_tiles):
            if warp // 4 == g:
                attention_softmax.softmax_role(
                    self, bars, sO, (tmem + self.s_columns[g], tmem + self.o_columns[g]), out, tile, counts[g], g, s
                )


def _rows(t):
    """(B, S, H, D) as (S, D, (H, B)): the M or N and K modes first, as the tiled TMA wants them."""
    return cute.make_tensor(
        t.iterator,
        cute.make_layout(
            (t.shape[1], t.shape[3], (t.shape[2], t.shape[0])),
            stride=(t.stride[1], t.stride[3], (t.stride[2], t.stride[0])),
        ),
    )


def _columns(t):
    """(B, S, KV, D) as (D, S, (KV, B)): v is the B operand with N = D."""
    return cute.make_tensor(
        t.iterator,
        cute.make_layout(
            (t.shape[3], t.shape[1], (t.shape[2], t.shape[0])),
            stride=(t.stride[3], t.stride[1], (t.stride[2], t.stride[0])),
        ),
    )


def _tma_parts(atom, smem, gmem):
    """Shared and global tensors cut for one TMA atom: ((box), stage), ((box), tile)."""
    return cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(smem, 0, 3), cute.group_modes(gmem, 0, 3)
    )


def _gemm(mma, accumulator, a, b, accumulate):
    """accumulator (+)= a b^T over all K blocks. `mma` is a fresh atom: setting its field rebinds it in this scope."""
    for i in range(cute.size(a, mode=[2])):
        mma.set(tcgen05.Field.ACCUMULATE, accumulate if i == 0 else True)
        cute.gemm(mma, accumulator, a[None, None, i], b[None, None, i], accumulator)


def _most(counts):
    n = counts[0]
    for c in counts[1:]:
        n = cutlass.max(n, c)
    return n
