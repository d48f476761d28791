"""GQA attention for sm_90a: out = softmax(logits + mask) v, logits = cap * tanh(q k^T * scale / cap) or q k^T * scale.

q (B, S, H, D), k and v (B, S, KV, D), out (B, S, H, D), all bf16; query head h reads kv head h // (H / KV).

A CTA walks a static list of work units, each one head's tile of 64 query rows a consumer warpgroup, longest first. Roles,
in the order data meets them:
  load      one warp: q, k and v tiles by TMA into 128-byte-swizzled shared memory
  consumer  2 warpgroups: S = q k^T (wgmma, both operands in shared memory) into registers, weights P from S in registers,
            O += P v (wgmma, P from registers); then O through shared memory to global memory by TMA
A warpgroup's S of the next key tile and O of this one are in flight together, and it computes weights while its own O and
the other warpgroup's products run. P has two register buffers, so that weights are written while the older P is read.
"""

from dataclasses import dataclass, field, fields

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90_utils
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup
from cutlass.cute.typing import BFloat16, Float32, Int32, Int64
from cutlass.memory import SmemAllocator
from cutlass.utils import LayoutEnum

from cute_gemma.jit.signature import Signature, TensorArg
from cute_gemma.kernels.common.softcap import FIXED_SHIFT_CAP, Softcap
from cute_gemma.kernels.common.softmax import pack_bf16
from cute_gemma.kernels.sm90 import attention_softmax as softmax

ROWS = 64  # query rows a warpgroup: M of wgmma
WARP = 32
WARPGROUP = 128
ALIGN = 1024  # the 128-byte swizzle repeats every 1024 bytes
SMEM_BYTES = 232448  # shared memory a CTA may use (CUDA programming guide, compute capability 9.0)
BARRIER_BYTES = 1024
# Registers a thread by number of consumer warpgroups: (consumer, load warpgroup). They share the SM's 65,536.
REGISTERS = {1: (256, 56), 2: (240, 24), 3: (160, 32)}
# Named barriers; 0 is the CTA's.
TURN_BARRIER = 1
STORE_BARRIER = 4


@dataclass(frozen=True)
class AttentionTuning:
    """What may change without changing the result.

    sm_count: CTAs in flight. consumers: warpgroups of 64 query rows. key_rows: rows of a key or value tile; None: 128,
    or 64 where D > 128. take_turns: whether warpgroups issue their products in turn.
    """

    sm_count: int = 132
    consumers: int = 2
    key_rows: int | None = None
    take_turns: bool = True
    group: int = 8
    lag: int = 1


@dataclass(frozen=True)
class Barriers:
    """First mbarrier of each kind: q_full, q_empty one a consumer; kv_full, kv_empty one a stage."""

    q_full: cute.Pointer
    q_empty: cute.Pointer
    kv_full: cute.Pointer
    kv_empty: cute.Pointer


@dataclass(frozen=True)
class Consumer:
    """What one warpgroup works with: its number, its thread's number in it, shared-memory operands and registers.

    tQ (…, k blocks); tK, tV (…, k blocks, stage); rS, rO fp32 accumulators; weights: two buffers of P as A operand;
    sums: one a row of the thread. level: of
    softmax.capped_weights. lazy: state of softmax.lazy_weights.
    """

    number: Int32
    thread: Int32
    tQ: cute.Tensor
    tK: cute.Tensor
    tV: cute.Tensor
    rS: cute.Tensor
    rO: cute.Tensor
    weights: tuple
    sums: cute.Tensor
    level: cute.Tensor
    lazy: softmax.Lazy


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
        return (self.tuning.consumers + 1) * WARPGROUP

    @property
    def rows(self) -> int:
        """Query rows of a work unit."""
        return self.tuning.consumers * ROWS

    @property
    def key_rows(self) -> int:
        return self.tuning.key_rows or (128 if self.head_dim <= 128 else 64)

    @property
    def diagonal_tiles(self) -> int:
        """Key tiles of a unit that causal masking cuts."""
        return -(-self.rows // self.key_rows)

    @property
    def shares_q(self) -> bool:
        """Whether out is staged in q's shared memory, because both together leave too little for keys and values."""
        return self.head_dim > 128

    @property
    def fixed_shift(self) -> bool:
        """Whether the cap alone bounds the exponents, so that no running maximum is needed."""
        return self.softcap is not None and self.softcap <= FIXED_SHIFT_CAP

    @property
    def first_level(self) -> int:
        """How softmax computes tanh until it knows better: the cheapest way that the cap admits."""
        return softmax.usable_levels(Softcap(self.scale, self.softcap))[0] if self.fixed_shift else 0

    @property
    def stages(self) -> int:
        staging = self.rows * self.head_dim * 2 * (1 if self.shares_q else 2)
        return (SMEM_BYTES - BARRIER_BYTES - staging) // (self.key_rows * self.head_dim * 2)

    @cute.jit
    def __call__(self, q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, out: cute.Tensor, stream: cuda.CUstream):
        """TMA descriptors, grid and launch."""
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        row_tile, key_tile = (ROWS, self.head_dim), (self.key_rows, self.head_dim)
        row_layout, key_layout = self._smem_layout(row_tile), self._smem_layout(key_tile)
        tma_q = cpasync.make_tiled_tma_atom(load, _rows(q), row_layout, row_tile)
        tma_k = cpasync.make_tiled_tma_atom(load, _rows(k), key_layout, key_tile)
        tma_v = cpasync.make_tiled_tma_atom(load, _rows(v), key_layout, key_tile)
        tma_o = cpasync.make_tiled_tma_atom(store, _rows(out), row_layout, row_tile)
        b, s = q.shape[0], q.shape[1]
        units = self.heads * b * cute.ceil_div(s, self.rows)
        blocks = cutlass.min(units, self.tuning.sm_count)
        atoms, tensors = zip(tma_q, tma_k, tma_v, tma_o)
        self.kernel(atoms, tensors, Int32(b), Int32(s)).launch(
            grid=(blocks, 1, 1), block=(self.threads, 1, 1), stream=stream, min_blocks_per_mp=1, use_pdl=True
        )

    def _smem_layout(self, tile, stages=None):
        """(rows, D[, stages]), rows of D contiguous, in the widest swizzle D allows."""
        atom = warpgroup.make_smem_layout_atom(
            sm90_utils.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, BFloat16, self.head_dim), BFloat16
        )
        if stages is None:
            return cute.tile_to_shape(atom, tile, order=(0, 1))
        return cute.tile_to_shape(atom, (*tile, stages), order=(0, 1, 2))

    def _mmas(self):
        """Tiled MMAs of one warpgroup: S = q k^T (both K-major) and O = P v (P from registers, v as it lies: N-major)."""
        qk = sm90_utils.make_trivial_tiled_mma(
            BFloat16, BFloat16, OperandMajorMode.K, OperandMajorMode.K, Float32, (1, 1, 1), (ROWS, self.key_rows)
        )
        pv = sm90_utils.make_trivial_tiled_mma(
            BFloat16,
            BFloat16,
            OperandMajorMode.K,
            OperandMajorMode.MN,
            Float32,
            (1, 1, 1),
            (ROWS, self.head_dim),
            warpgroup.OperandSource.RMEM,
        )
        return qk, pv

    def _storage(self):
        consumers, stages = self.tuning.consumers, self.stages
        row_elements = self.rows * self.head_dim
        out_elements = 0 if self.shares_q else row_elements

        @cute.struct
        class Storage:
            q_full: cute.struct.MemRange[Int64, consumers]
            q_empty: cute.struct.MemRange[Int64, consumers]
            kv_full: cute.struct.MemRange[Int64, stages]
            kv_empty: cute.struct.MemRange[Int64, stages]
            q: cute.struct.Align[cute.struct.MemRange[BFloat16, row_elements], ALIGN]
            kv: cute.struct.Align[cute.struct.MemRange[BFloat16, stages * self.key_rows * self.head_dim], ALIGN]
            out: cute.struct.Align[cute.struct.MemRange[BFloat16, out_elements], ALIGN]

        return Storage

    @cute.kernel
    def kernel(self, atoms: tuple, tensors: tuple, b: Int32, s: Int32):
        """Device entry: barriers, then one call for each role."""
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        storage = SmemAllocator().allocate(self._storage())
        bars = Barriers(*(getattr(storage, f.name).data_ptr() for f in fields(Barriers)))
        smem = self._smem_tensors(storage)
        if warp_index == 0:
            for atom in atoms:
                cpasync.prefetch_descriptor(atom)
            self._init_barriers(bars)
        cute.arch.sync_threads()
        consumer_registers, load_registers = REGISTERS[self.tuning.consumers]
        if warp_index < WARPGROUP // WARP:
            cute.arch.setmaxregister_decrease(load_registers)
            if warp_index == 0:
                self._load(bars, smem, atoms, tensors, b, s)
        else:
            cute.arch.setmaxregister_increase(consumer_registers)
            self._consume(bars, smem, (atoms[3], tensors[3]), b, s)

    @cute.jit
    def _init_barriers(self, bars):
        consumers, warps = self.tuning.consumers, WARPGROUP // WARP
        with cute.arch.elect_one():
            for g in cutlass.range_constexpr(consumers):
                cute.arch.mbarrier_init(bars.q_full + g, 1)
                cute.arch.mbarrier_init(bars.q_empty + g, warps)
            for i in cutlass.range_constexpr(self.stages):
                cute.arch.mbarrier_init(bars.kv_full + i, 1)
                cute.arch.mbarrier_init(bars.kv_empty + i, consumers * warps)
        cute.arch.mbarrier_init_fence()

    def _smem_tensors(self, storage):
        """(sQ, sKV, sO): (64, D, consumers), (key rows, D, stages), (64, D, consumers)."""
        rows = self._smem_layout((ROWS, self.head_dim), self.tuning.consumers)
        keys = self._smem_layout((self.key_rows, self.head_dim), self.stages)
        out = storage.q if self.shares_q else storage.out
        pairs = ((storage.q, rows), (storage.kv, keys), (out, rows))
        return tuple(buffer.get_tensor(layout.outer, swizzle=layout.inner) for buffer, layout in pairs)

    # Work units

    def _unit_count(self, b, s):
        """How many units this CTA has. Round i gives CTA c unit i * CTAs + c, every other round in reverse order, so that
        the longer units of one round meet the shorter ones of the next."""
        units = self.heads * b * cute.ceil_div(s, self.rows)
        ctas, cta = cute.arch.grid_dim()[0], cute.arch.block_idx()[0]
        rounds, rest = units // ctas, units % ctas
        place = cutlass.select_(rounds % 2 == 0, cta, ctas - 1 - cta)
        return rounds + Int32(place < rest)

    def _unit(self, index, b, s):
        """(query tile, head, batch, key tiles) of this CTA's unit `index`: longest query tiles first; then heads, so that
        those which share a kv head run together and read k and v from L2."""
        ctas, cta = cute.arch.grid_dim()[0], cute.arch.block_idx()[0]
        unit = index * ctas + cutlass.select_(index % 2 == 0, cta, ctas - 1 - cta)
        tile = cute.ceil_div(s, self.rows) - 1 - unit // (self.heads * b)
        head, batch = unit % self.heads, (unit // self.heads) % b
        keys = s
        if cutlass.const_expr(self.mask == "causal"):
            keys = cutlass.min(s, (tile + 1) * self.rows)
        return tile, head, batch, cute.ceil_div(keys, self.key_rows)

    def _next(self, slot, phase):
        """The ring's next slot and its parity."""
        wrap = slot == self.stages - 1
        return cutlass.select_(wrap, Int32(0), slot + 1), phase ^ Int32(wrap)

    # Load warp

    @cute.jit
    def _load(self, bars, smem, atoms, tensors, b, s):
        """q of each unit, and k and v tiles in the order of use: k_n, then k_j and v_j+1 downwards, then v_0."""
        sQ, sKV, _ = smem
        slot, phase = Int32(0), Int32(1)
        cute.arch.griddepcontrol_wait()
        for index in cutlass.range(self._unit_count(b, s), unroll=1):
            tile, head, batch, count = self._unit(index, b, s)
            kv_head = head // (self.heads // self.kv_heads)
            # (64, D, row blocks), (key rows, D, tiles), (key rows, D, tiles) of this head and batch
            gQ = cute.local_tile(tensors[0][None, None, (head, batch)], (ROWS, self.head_dim), (None, 0))
            gK = cute.local_tile(tensors[1][None, None, (kv_head, batch)], (self.key_rows, self.head_dim), (None, 0))
            gV = cute.local_tile(tensors[2][None, None, (kv_head, batch)], (self.key_rows, self.head_dim), (None, 0))
            tQsQ, tQgQ = _tma_parts(atoms[0], sQ, gQ)
            tKsK, tKgK = _tma_parts(atoms[1], sKV, gK)
            tVsV, tVgV = _tma_parts(atoms[2], sKV, gV)
            for g in cutlass.range_constexpr(self.tuning.consumers):
                cute.arch.mbarrier_wait(bars.q_empty + g, (index & 1) ^ 1)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(bars.q_full + g, ROWS * self.head_dim * 2)
                cute.copy(
                    atoms[0], tQgQ[None, tile * self.tuning.consumers + g], tQsQ[None, g], tma_bar_ptr=bars.q_full + g
                )
            self._load_tile(bars, atoms[1], tKgK[None, count - 1], tKsK, slot, phase)
            slot, phase = self._next(slot, phase)
            for i in cutlass.range(1, count, unroll=1):
                self._load_tile(bars, atoms[1], tKgK[None, count - 1 - i], tKsK, slot, phase)
                slot, phase = self._next(slot, phase)
                self._load_tile(bars, atoms[2], tVgV[None, count - i], tVsV, slot, phase)
                slot, phase = self._next(slot, phase)
            self._load_tile(bars, atoms[2], tVgV[None, 0], tVsV, slot, phase)
            slot, phase = self._next(slot, phase)
        cute.arch.griddepcontrol_launch_dependents()

    @cute.jit
    def _load_tile(self, bars, atom, source, target, slot, phase):
        """One key or value tile into stage `slot`, once it is free."""
        full = bars.kv_full + slot
        cute.arch.mbarrier_wait(bars.kv_empty + slot, phase)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, self.key_rows * self.head_dim * 2)
        cute.copy(atom, source, target[None, slot], tma_bar_ptr=full)

    # Consumer warpgroups

    def _consumer(self, smem):
        sQ, sKV, _ = smem
        thread = cute.arch.thread_idx()[0] - WARPGROUP
        number = cute.arch.make_warp_uniform(thread >> 7)
        qk_mma, pv_mma = self._mmas()
        # Descriptors are the same for every thread of a warpgroup: slice 0.
        qk, pv = qk_mma.get_slice(0), pv_mma.get_slice(0)
        sV = cute.make_tensor(sKV.iterator, cute.select(sKV.layout, mode=[1, 0, 2]))  # (D, key rows, stages)
        weights = [
            cute.make_rmem_tensor(pv_mma.partition_shape_A((ROWS, self.key_rows)), BFloat16) for _ in range(2)
        ]
        return Consumer(
            number,
            thread & (WARPGROUP - 1),
            qk_mma.make_fragment_A(qk.partition_A(sQ))[None, None, None, number],
            qk_mma.make_fragment_B(qk.partition_B(sKV)),
            pv_mma.make_fragment_B(pv.partition_B(sV)),
            cute.make_rmem_tensor(qk_mma.partition_shape_C((ROWS, self.key_rows)), Float32),
            cute.make_rmem_tensor(pv_mma.partition_shape_C((ROWS, self.head_dim)), Float32),
            tuple(weights),
            cute.make_rmem_tensor((softmax.ROWS,), Float32),
            cute.make_rmem_tensor((1,), Int32),
            softmax.Lazy(
                cute.make_rmem_tensor((softmax.ROWS,), Float32),
                cute.make_rmem_tensor((softmax.ROWS,), Float32),
                cute.make_rmem_tensor((1,), Int32),
            ),
        )

    @cute.jit
    def _consume(self, bars, smem, out, b, s):
        """All units of one consumer warpgroup."""
        me = self._consumer(smem)
        if cutlass.const_expr(self.tuning.take_turns):
            if me.number == self.tuning.consumers - 1:
                self._pass_turn(me)  # warpgroup 0 goes first
        slot, phase = Int32(0), Int32(0)
        for index in cutlass.range(self._unit_count(b, s), unroll=1):
            tile, head, batch, count = self._unit(index, b, s)
            me.rO.fill(0.0)
            me.sums.fill(0.0)
            me.level[0] = Int32(self.first_level)
            me.lazy.shift.fill(softmax.LOWEST)
            row = (tile * self.tuning.consumers + me.number) * ROWS + (me.thread >> 5) * 16 + ((me.thread & 31) >> 2)
            cute.arch.mbarrier_wait(bars.q_full + me.number, index & 1)
            self._first(me, bars, slot, phase, self._limits(me, row, count - 1, s))
            slot, phase = self._next(slot, phase)
            for i in cutlass.range_constexpr(1, self.diagonal_tiles if self.mask == "causal" else 1):
                if i < count:
                    self._step(me, bars, (0, 1), slot, phase, self._limits(me, row, count - 1 - i, s))
                    me.weights[0].store(me.weights[1].load())
                    slot, phase = self._advance(slot, phase)
            left = cutlass.max(count - (self.diagonal_tiles if self.mask == "causal" else 1), 0)
            for _ in cutlass.range(left // 2, unroll=1):
                self._step(me, bars, (0, 1), slot, phase, None)
                slot, phase = self._advance(slot, phase)
                self._step(me, bars, (1, 0), slot, phase, None)
                slot, phase = self._advance(slot, phase)
            if left % 2 == 1:
                self._step(me, bars, (0, 1), slot, phase, None)
                me.weights[0].store(me.weights[1].load())
                slot, phase = self._advance(slot, phase)
            if cutlass.const_expr(not self.shares_q):
                self._arrive(bars.q_empty + me.number)
            self._last(me, bars, slot, phase)
            slot, phase = self._next(slot, phase)
            self._epilogue(me, smem[2], out, (tile, head, batch))
            if cutlass.const_expr(self.shares_q):
                self._wait_for_store(me)
                self._arrive(bars.q_empty + me.number)
        self._wait_for_store(me)

    def _advance(self, slot, phase):
        """Two places: a key tile and a value tile."""
        slot, phase = self._next(slot, phase)
        return self._next(slot, phase)

    def _limits(self, me, row, key_tile, s):
        """What rows `row` and `row` + 8 may see of a key tile."""
        first = key_tile * self.key_rows + 2 * (me.thread & 3)
        columns = [s - 1, s - 1]
        if cutlass.const_expr(self.mask == "causal"):
            columns = [row, row + 8]
        return softmax.Limits(tuple(c - first for c in columns))

    @cute.jit
    def _first(self, me, bars, slot, phase, limits: cutlass.Constexpr):
        """S of the unit's first key tile, and its weights into buffer 0."""
        cute.arch.mbarrier_wait(bars.kv_full + slot, phase)
        warpgroup.fence()
        _gemm(self._mmas()[0], me.rS, me.tQ, me.tK[None, None, None, slot], False)
        warpgroup.commit_group()
        warpgroup.wait_group(0)
        self._arrive(bars.kv_empty + slot)
        self._weights(me, 0, limits, True)

    @cute.jit
    def _step(self, me, bars, buffers: cutlass.Constexpr, slot, phase, limits: cutlass.Constexpr):
        """S of the next key tile in `slot`, O += P v of the one before with v in the slot after, weights of the next."""
        old, new = buffers
        v_slot, v_phase = self._next(slot, phase)
        cute.arch.mbarrier_wait(bars.kv_full + slot, phase)
        if cutlass.const_expr(self.tuning.take_turns):
            cute.arch.barrier(barrier_id=TURN_BARRIER + me.number, number_of_threads=2 * WARPGROUP)
        warpgroup.fence()
        _gemm(self._mmas()[0], me.rS, me.tQ, me.tK[None, None, None, slot], False)
        warpgroup.commit_group()
        cute.arch.mbarrier_wait(bars.kv_full + v_slot, v_phase)
        _gemm(self._mmas()[1], me.rO, me.weights[old], me.tV[None, None, None, v_slot], True)
        warpgroup.commit_group()
        if cutlass.const_expr(self.tuning.take_turns):
            self._pass_turn(me)
        warpgroup.wait_group(1)
        self._arrive(bars.kv_empty + slot)
        me.lazy.raised[0] = Int32(0)
        self._weights(me, new, limits, False)
        warpgroup.wait_group(0)
        self._arrive(bars.kv_empty + v_slot)
        if cutlass.const_expr(not self.fixed_shift):
            if me.lazy.raised[0] != 0:
                self._scale_out(me, [me.lazy.rescale[0], me.lazy.rescale[1]])

    @cute.jit
    def _last(self, me, bars, slot, phase):
        """O += P v of the unit's last tile."""
        cute.arch.mbarrier_wait(bars.kv_full + slot, phase)
        warpgroup.fence()
        _gemm(self._mmas()[1], me.rO, me.weights[0], me.tV[None, None, None, slot], True)
        warpgroup.commit_group()
        warpgroup.wait_group(0)
        self._arrive(bars.kv_empty + slot)

    def _weights(self, me, buffer, limits, first):
        """Weights from rS into P's buffer, for the first key tile of a unit or a later one."""
        rP = cute.recast_tensor(me.weights[buffer], Int32)
        if not self.fixed_shift:
            exponent = softmax.any_exponent(self.scale, self.softcap)
            softmax.lazy_weights(me.rS, rP, me.sums, me.lazy, exponent, limits, first)
        elif limits is None:
            softmax.capped_weights(me.rS, rP, me.sums, me.level, Softcap(self.scale, self.softcap), self.tuning.group, self.tuning.lag)
        else:
            softmax.capped_weights_within(me.rS, rP, me.sums, Softcap(self.scale, self.softcap), limits)

    def _scale_out(self, me, factors):
        for c in range(cute.size(me.rO)):
            me.rO[c] = me.rO[c] * factors[(c // 2) % softmax.ROWS]

    @cute.jit
    def _arrive(self, barrier):
        """One arrival a warp."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(barrier)

    @cute.jit
    def _pass_turn(self, me):
        after = cutlass.select_(me.number == self.tuning.consumers - 1, Int32(0), me.number + 1)
        cute.arch.barrier_arrive(barrier_id=TURN_BARRIER + after, number_of_threads=2 * WARPGROUP)

    @cute.jit
    def _wait_for_store(self, me):
        """Until the last stored out tile has left shared memory."""
        if me.thread < WARP:
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def _epilogue(self, me, sO, out, unit):
        """O / sums to bf16, through shared memory, by one TMA store of this warpgroup's 64 rows."""
        tile, head, batch = unit
        factors = []
        for row in cutlass.range_constexpr(softmax.ROWS):
            total = me.sums[row]
            for offset in cutlass.range_constexpr(2):
                total = total + cute.arch.shuffle_sync_bfly(total, offset=1 << offset)
            factors.append(cutlass.select_(total > 0.0, cute.arch.rcp_approx(total), Float32(0.0)))
        self._scale_out(me, factors)
        rOut = cute.make_rmem_tensor(me.rO.shape, BFloat16)
        packed = cute.recast_tensor(rOut, Int32)
        for c in cutlass.range_constexpr(0, cute.size(me.rO), 2):
            packed[c // 2] = pack_bf16(me.rO[c], me.rO[c + 1])
        store = cute.make_tiled_copy_C(
            cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), BFloat16), self._mmas()[1]
        ).get_slice(softmax.unseen(me.thread))
        self._wait_for_store(me)
        cute.arch.barrier(barrier_id=STORE_BARRIER + me.number, number_of_threads=WARPGROUP)
        cute.copy(store, store.retile(rOut), store.partition_D(sO)[None, None, None, me.number])
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=STORE_BARRIER + me.number, number_of_threads=WARPGROUP)
        if me.thread < WARP:
            atom, mO = out
            gO = cute.local_tile(mO[None, None, (head, batch)], (ROWS, self.head_dim), (None, 0))
            tOsO, tOgO = _tma_parts(atom, sO, gO)
            cute.copy(atom, tOsO[None, me.number], tOgO[None, tile * self.tuning.consumers + me.number])
            cute.arch.cp_async_bulk_commit_group()


def _rows(t):
    """(B, S, H, D) as (S, D, (H, B)): a tile's modes first."""
    return cute.make_tensor(
        t.iterator,
        cute.make_layout(
            (t.shape[1], t.shape[3], (t.shape[2], t.shape[0])),
            stride=(t.stride[1], t.stride[3], (t.stride[2], t.stride[0])),
        ),
    )


def _tma_parts(atom, smem, gmem):
    """Shared and global tensors cut for one TMA atom: ((box), stage), ((box), tile)."""
    return cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(smem, 0, 2), cute.group_modes(gmem, 0, 2)
    )


def _gemm(mma, accumulator, a, b, accumulate):
    """accumulator (+)= a b^T over all K blocks. The atom is fresh: setting its field rebinds it in this scope."""
    atom = cute.make_mma_atom(mma.op)
    for i in range(cute.size(a, mode=[2])):
        atom.set(warpgroup.Field.ACCUMULATE, accumulate if i == 0 else True)
        cute.gemm(atom, accumulator, a[None, None, i], b[None, None, i], accumulator)
