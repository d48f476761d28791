"""Softcapped GQA attention for sm_100a: out = softmax(cap * tanh(q k^T * scale / cap) + mask) v.

q (B, S, H, D), k and v (B, S, KV, D), out (B, S, H, D), all bf16; query head h reads kv head h // (H / KV).

A CTA owns one or two 128-row query tiles of one head and walks over 128-row key tiles. Warp roles, in the
order data meets them:
  load     one warp: q, k and v tiles by TMA into 128-byte-swizzled shared memory
  mma      one warp: S_g = q k^T and O += P_g v, all accumulators in TMEM
  softmax  two warpgroups g = 0, 1: S_g to P_g in registers, one row a thread; then O to global memory
P_g overwrites S_g as bf16 and is the second product's A operand straight from TMEM. While one warpgroup
computes its P, the tensor core works for the other:
  two query tiles  warpgroup g has query tile g, every key tile, and an O of its own (head_dim <= 128);
  one query tile   the warpgroups take key tiles in turn and add to one O of up to 256 TMEM columns.
"""

import math
from dataclasses import dataclass, fields
from functools import partial

import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as sm100_utils
from cutlass.cute.nvgpu import cpasync, tcgen05
from cutlass.cute.typing import BFloat16, Boolean, Float32, Int32, Int64
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from cute_gemma.kernels.common.attention import AttentionBase, MaskTensor, reorder
from cute_gemma.kernels.common.mask import ALL_MASKED, ALL_ZERO, DIAGONAL
from cute_gemma.kernels.sm100 import attention_softmax as softmax
from cute_gemma.kernels.sm100.attention_consumer import softmax_role
from cute_gemma.kernels.sm100.attention_mma import GROUPS, load_role, mma_role, tiled_mmas

# MMA tile: M = 128 rows fill the 128 TMEM lanes, so that a softmax thread owns a whole row.
TILE = 128
WARP = 32
WARPGROUP = 128
ALIGN = 1024  # bytes the 128-byte swizzle repeats after
# Registers a thread. A kernel of 384 threads starts with 168 (65536 / 384, in eights); two warpgroups at 208
# and one at 88 take as many.
SOFTMAX_REGISTERS = 208
OTHER_REGISTERS = 88
SHARED_BYTES = 227 * 1024  # of a CTA (CUDA programming guide, compute capability 10.0)
SCAN_BLOCK = 32  # tile classes a warp reads at once
# (B, S, heads, D) to (S, D, (heads, B)); v, the B operand with N = D, to (D, S, (heads, B)).
_ROWS, _COLUMNS = (1, 3, 2, 0), (3, 1, 2, 0)


@dataclass(frozen=True)
class AttentionTuning:
    """What may change without changing what is computed.

    query_tiles: 128-row query tiles a CTA owns, 1 or 2.
    kv_stages: stages of keys and values in flight, 128 x 128 elements each (128 x 64 at head_dim 64).
    fma_exp2_pairs: of the 64 pairs of weights a thread computes a tile, how many take the FMA pipe for 2^x
        where scores are small.
    mufu_tanh_pairs: how many take the MUFU pipe for tanh where scores are larger, which needs fewer
        instructions.
    """

    query_tiles: int = 2
    kv_stages: int = 4
    fma_exp2_pairs: int = 8
    mufu_tanh_pairs: int = 20

    def __post_init__(self) -> None:
        if self.query_tiles not in (1, 2):
            raise ValueError(f"query_tiles: got {self.query_tiles}, want 1 or 2")
        if self.kv_stages < 1:
            raise ValueError(f"kv_stages: got {self.kv_stages}, want at least 1")
        for name in ("fma_exp2_pairs", "mufu_tanh_pairs"):
            if not 0 <= getattr(self, name) <= 64:
                raise ValueError(f"{name}: got {getattr(self, name)}, want 0 to 64")


def default_tuning(head_dim: int, blocks: int | None = None, sm_count: int = 148) -> AttentionTuning:
    """The tuning for a call with `blocks` 256-row query blocks, heads * B * ceil(S / 256); None for many.

    Two query tiles a CTA halve the traffic of keys and values from L2, where two O of head_dim columns fit in
    TMEM beside two S. One tile makes twice as many CTAs, half as long: for grids of two waves or fewer, where
    the longest CTA (a causal block's last) decides, that ends sooner.
    """
    few = blocks is not None and blocks <= 2 * sm_count
    return AttentionTuning(query_tiles=1 if few or head_dim > 128 else 2)


@dataclass(frozen=True)
class Barriers:
    """First mbarrier of each kind. A plain record of pointers: the tracer takes a method call on a value for
    a change of it, so that the storage struct itself cannot be read within a loop.

    q_full, o_full: one a query tile; kv_full, kv_empty: one a stage; s_full, max_full: one a warpgroup;
    p_full: one a warpgroup and part of P; o_done, done: one. max_full and o_done: only where the warpgroups
    are chained.
    """

    q_full: cute.Pointer
    kv_full: cute.Pointer
    kv_empty: cute.Pointer
    s_full: cute.Pointer
    p_full: cute.Pointer
    o_full: cute.Pointer
    max_full: cute.Pointer
    o_done: cute.Pointer
    done: cute.Pointer


@dataclass(frozen=True)
class Work:
    """A CTA's share: query tiles from `tile` on, of one head and batch, over sequences of s rows, `tiles`
    tiles long. classes: None, or this batch's mask classes (query tile, key tile)."""

    tile: Int32
    head: Int32
    batch: Int32
    s: Int32
    tiles: Int32
    classes: cute.Tensor | None


@dataclass(frozen=True)
class Attention(AttentionBase):
    """See AttentionBase. tuning: see `default_tuning`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tuning is None:
            object.__setattr__(self, "tuning", default_tuning(self.head_dim))
        if self.head_dim > 128 and self.tuning.query_tiles != 1:
            got = self.tuning.query_tiles
            raise ValueError(f"query_tiles: got {got}, want 1 for head_dim {self.head_dim}")
        if self.shared_bytes > SHARED_BYTES:
            got = f"{self.tuning.kv_stages}, which takes {self.shared_bytes} bytes of shared memory"
            raise ValueError(f"kv_stages: got {got}, want at most {SHARED_BYTES} bytes")

    # ---- sizes ---------------------------------------------------------------------------------------------

    @property
    def chained(self) -> bool:
        """Whether two warpgroups have to agree on the running maximum of one O."""
        return not self.fixed_shift and self.tuning.query_tiles == 1

    @property
    def mma_warp(self) -> int:
        return GROUPS * WARPGROUP // WARP

    @property
    def load_warp(self) -> int:
        return self.mma_warp + 1

    @property
    def threads(self) -> int:
        """Three whole warpgroups, since setmaxnreg takes effect by the warpgroup; the last two warps only
        take part in that."""
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
        """Parts of P handed to the MMA warp on their own, so that the product starts before the last weight
        is known."""
        return 2

    @property
    def tmem_columns(self) -> int:
        """All of an SM's tensor memory (PTX ISA, tcgen05.alloc): a CTA has the SM for itself."""
        return 512

    @property
    def o_columns(self) -> int:
        """Columns of O a warpgroup writes."""
        return self.head_dim * self.tuning.query_tiles // GROUPS

    @property
    def exchange_words(self) -> int:
        """fp32 words for a row's sum in each warpgroup; where mask entries are turned in shared memory, that
        memory is free by then."""
        return GROUPS * TILE * (softmax.BIAS_PITCH if self.mask == "tensor" else 1)

    @property
    def maxima_words(self) -> int:
        """fp32 words for the maxima that two warpgroups pass on."""
        return GROUPS * TILE if self.chained else 1

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: barriers and exchanged words, up to the alignment of the tiles; q; the
        stages."""
        stage = TILE * self.head_dim // self.kv_parts
        tiles = self.tuning.query_tiles * TILE * self.head_dim + self.tuning.kv_stages * stage
        barriers = 3 * self.tuning.query_tiles + 2 * self.tuning.kv_stages + (3 + self.p_parts) * GROUPS + 2
        small = 8 * barriers + 4 * (1 + self.exchange_words + self.maxima_words)
        return math.ceil(small / ALIGN) * ALIGN + tiles * BFloat16.width // 8

    def s_column(self, g):
        """First TMEM column of S_g; P_g takes the first half of the same columns."""
        return g * TILE

    def o_column(self, g):
        """First TMEM column of the O that warpgroup g writes."""
        return GROUPS * TILE + g * self.o_columns

    # ---- host entry ----------------------------------------------------------------------------------------

    def launch(self, q, k, v, out, mask, stream):
        """TMA descriptors, grid and launch. mask: None, or (mask, row maxima, tile classes)."""
        qk_mma, pv_mma = tiled_mmas(self.head_dim)
        layouts = self._smem_layouts()
        load, store = cpasync.CopyBulkTensorTileG2SOp(tcgen05.CtaGroup.ONE), cpasync.CopyBulkTensorTileS2GOp()
        cluster = (1, 1, 1, 1)
        q_one, k_one, v_one = (cute.select(layout, mode=[0, 1, 2]) for layout in layouts[:3])
        o_one = cute.select(layouts[3], mode=[0, 1])
        qk_tile, pv_tile = self._mma_tiles()
        part = (TILE, TILE, qk_tile[2] // self.kv_parts)
        tma = (
            cute.nvgpu.make_tiled_tma_atom_A(load, reorder(q, _ROWS), q_one, qk_tile, qk_mma, cluster),
            cute.nvgpu.make_tiled_tma_atom_B(load, reorder(k, _ROWS), k_one, part, qk_mma, cluster),
            cute.nvgpu.make_tiled_tma_atom_B(load, reorder(v, _COLUMNS), v_one, pv_tile, pv_mma, cluster),
            cpasync.make_tiled_tma_atom(store, reorder(out, _ROWS), o_one, (WARP, self.o_columns)),
        )
        b, s = Int32(q.shape[0]), Int32(q.shape[1])
        grid = (self.heads, b, cute.ceil_div(s, TILE * self.tuning.query_tiles))
        self.kernel(tuple(t[0] for t in tma), tuple(t[1] for t in tma), mask, s).launch(
            grid=grid, block=(self.threads, 1, 1), stream=stream, min_blocks_per_mp=1, use_pdl=True
        )

    def _mma_tiles(self):
        """(M, N, K) of q k^T, and of the part of P v that one stage of values takes part in."""
        return (TILE, TILE, self.head_dim), (TILE, self.head_dim, TILE // self.kv_parts)

    def _smem_layouts(self):
        """q (MMA, M, K, query tile), k and v (MMA, N, K, stage), and out, staged by warp: (32, columns,
        warp)."""
        qk_mma, pv_mma = tiled_mmas(self.head_dim)
        qk_tile, pv_tile = self._mma_tiles()
        stages = self.tuning.kv_stages
        part = (TILE, TILE, self.head_dim // self.kv_parts)
        row_major = LayoutEnum.ROW_MAJOR
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
        @cute.struct
        class Storage:
            q_full: cute.struct.MemRange[Int64, tiles]
            kv_full: cute.struct.MemRange[Int64, stages]
            kv_empty: cute.struct.MemRange[Int64, stages]
            s_full: cute.struct.MemRange[Int64, GROUPS]
            p_full: cute.struct.MemRange[Int64, GROUPS * self.p_parts]
            o_full: cute.struct.MemRange[Int64, tiles]
            max_full: cute.struct.MemRange[Int64, GROUPS]
            o_done: cute.struct.MemRange[Int64, 1]
            done: cute.struct.MemRange[Int64, 1]
            tmem: Int32
            exchange: cute.struct.MemRange[Float32, self.exchange_words]
            maxima: cute.struct.MemRange[Float32, self.maxima_words]
            q: cute.struct.Align[cute.struct.MemRange[BFloat16, tiles * TILE * self.head_dim], ALIGN]
            kv: cute.struct.Align[cute.struct.MemRange[BFloat16, stages * part], ALIGN]

        return Storage

    # ---- device entry --------------------------------------------------------------------------------------

    @cute.kernel
    def kernel(self, atoms: tuple, tensors: tuple, mask: tuple | None, s: Int32):
        """Barriers and TMEM, then one call for each warp role."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        storage = SmemAllocator().allocate(self._storage())
        bars = Barriers(*(getattr(storage, f.name).data_ptr() for f in fields(Barriers)))
        # k and v share the stages; out reuses q's memory.
        buffers = zip((storage.q, storage.kv, storage.kv, storage.q), self._smem_layouts())
        smem = tuple(x.get_tensor(layout.outer, swizzle=layout.inner) for x, layout in buffers)
        scratch = (storage.exchange.data_ptr(), storage.maxima.data_ptr())
        if warp == self.load_warp:
            for atom in atoms:
                cpasync.prefetch_descriptor(atom)
            self._init_barriers(bars)
        if warp == self.mma_warp:
            cute.arch.alloc_tmem(self.tmem_columns, storage.tmem)
            cute.arch.relinquish_tmem_alloc_permit()
        cute.arch.sync_threads()
        tmem = cute.arch.retrieve_tmem_ptr(Float32, 16, storage.tmem)
        if warp >= self.mma_warp:
            cute.arch.setmaxregister_decrease(OTHER_REGISTERS)
            if warp == self.load_warp:
                load_role(self, bars, smem, atoms, tensors, self._work(mask, s))
            if warp == self.mma_warp:
                mma_role(self, bars, smem, tmem, self._work(mask, s))
        else:
            cute.arch.setmaxregister_increase(SOFTMAX_REGISTERS)
            out = (atoms[3], tensors[3])
            softmax_role(self, bars, smem[3], scratch, tmem, out, mask, self._work(mask, s))

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
                if self.chained:
                    cute.arch.mbarrier_init(bars.max_full + g, WARPGROUP // WARP)
            for i in range(GROUPS * self.p_parts):
                cute.arch.mbarrier_init(bars.p_full + i, WARPGROUP // WARP)
            if self.chained:
                cute.arch.mbarrier_init(bars.o_done, 1)
            cute.arch.mbarrier_init(bars.done, self.mma_warp)
        cute.arch.mbarrier_init_fence()

    # ---- which key tiles -----------------------------------------------------------------------------------

    def _work(self, mask, s):
        """This CTA's share. Blocks start in order of x, y, z: heads first, so that those that share a kv head
        run together and find k and v in L2; the longest query tiles before short ones, so that these fill the
        last wave."""
        head, batch, z = cute.arch.block_idx()
        tile = (cute.arch.grid_dim()[2] - 1 - z) * self.tuning.query_tiles
        tiles = cute.ceil_div(s, TILE)
        classes = None
        if self.mask == "tensor":
            # A mask shared by all batches has one set of classes.
            base = cutlass.min(batch, Int32(mask[2].shape[0]) - 1) * tiles * tiles
            layout = cute.make_layout((tiles, tiles), stride=(tiles, 1))
            classes = cute.make_tensor(mask[2].iterator + base, layout)
        return Work(tile, head, batch, s, tiles, classes)

    @cute.jit
    def walk(self, visit, state, work, only=None, share=(0, 1)):
        """Calls state = visit(state, j, kind_of) for each key tile j that some query tile of the CTA reads,
        or that query tile `only` of it does; last first: a causal diagonal, which is slow but gives sums for
        softmax to go by, comes at the start. kind_of(i): the mask class of the tile for query tile i of the
        CTA, ALL_MASKED where that does not read it. share: (first, step) of the tiles to call it for; under a
        mask tensor, which alone knows how many there are, the visit has to skip the others."""
        if cutlass.const_expr(self.mask == "tensor"):
            blocks = cute.ceil_div(work.tiles, SCAN_BLOCK)
            for i in cutlass.range(blocks, unroll=1):
                block = blocks - 1 - i
                classes, bits = self._scan(work, block, only)
                while bits != 0:
                    lane = 31 - Int32(cute.arch.clz(bits))
                    bits = bits ^ (1 << lane)
                    state = visit(state, block * SCAN_BLOCK + lane, partial(_class_of, classes, lane))
        else:
            tile = work.tile + (0 if only is None else only)
            last = work.tile + (self.tuning.query_tiles - 1 if only is None else only)
            first, end = self._first_key_tile(tile), work.tiles
            if cutlass.const_expr(self.mask == "causal"):
                end = cutlass.min(end, last + 1)
            if cutlass.const_expr(only is not None):
                end = cutlass.select_(last < work.tiles, end, first)
            for i in cutlass.range(share[0], end - first, share[1], unroll=1):
                j = end - 1 - i
                state = visit(state, j, partial(self._class_by_position, work, j, only is not None))
        return state

    def _first_key_tile(self, tile):
        """The first key tile that query tile `tile` reads."""
        if self.window is None:
            return Int32(0)
        return cutlass.max(tile * TILE - (self.window - 1), Int32(0)) // TILE

    def _class_by_position(self, work, j, read, i):
        """`read`: known to be read by query tile i."""
        tile = work.tile + i
        kind = Int32(ALL_ZERO)
        if self.mask == "causal":
            cut = Boolean(j == tile)
            if self.window is not None:
                # Its last row's window starts beyond the tile's first key.
                cut = cut | Boolean(tile * TILE + TILE - self.window > j * TILE)
            kind = cutlass.select_(cut, Int32(DIAGONAL), kind)
        if read:
            return kind
        reads = Boolean(tile < work.tiles)
        if self.mask == "causal":
            reads = reads & Boolean(j <= tile)
        if self.window is not None:
            reads = reads & Boolean(j >= self._first_key_tile(tile))
        return cutlass.select_(reads, kind, Int32(ALL_MASKED))

    def _scan(self, work, block, only):
        """Classes of 32 key tiles, one a lane, for each query tile (or for `only`); and a bit for each key
        tile that some of them reads."""
        j = block * SCAN_BLOCK + cute.arch.lane_idx()
        classes = []
        reads = Boolean(False)
        for i in range(self.tuning.query_tiles) if only is None else [only]:
            tile = work.tile + i
            known = Boolean(j < work.tiles) & Boolean(tile < work.tiles)
            kind = work.classes[cutlass.min(tile, work.tiles - 1), cutlass.min(j, work.tiles - 1)].to(Int32)
            kind = cutlass.select_(known, kind, Int32(ALL_MASKED))
            classes.append(kind)
            reads = reads | Boolean(kind != ALL_MASKED)
        return classes, Int32(cute.arch.vote_ballot_sync(reads))


@dataclass(frozen=True)
class MaskedAttention(MaskTensor, Attention):
    """See MaskTensor."""


def _class_of(classes, lane, i):
    """The class that lane `lane` holds for query tile i of the CTA, or for the only one scanned."""
    return cute.arch.shuffle_sync(classes[i if len(classes) > 1 else 0], lane)
