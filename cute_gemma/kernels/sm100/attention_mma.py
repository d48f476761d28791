"""The load warp and the MMA warp of the attention kernel.

Keys and values share one ring of stages. The load warp fills it in the order the MMA warp empties it: the
keys of a tile, then the values of the tile `lag` before it. The MMA warp's products execute in order, so S_g
may overwrite P_g once P_g v has been issued.
"""

from functools import partial

import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as sm100_utils
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm, nvvm
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05
from cutlass.cute.typing import BFloat16, Boolean, Float32, Int32
from cutlass.cutlass_dsl import dsl_user_op

from cute_gemma.kernels.common.mask import ALL_MASKED
from cute_gemma.kernels.sm100.tmem import fence_after_sync

TILE = 128
GROUPS = 2
MMA_K = 16  # bf16 elements of K in one tcgen05.mma (PTX ISA, tcgen05 matrix shapes)


def tiled_mmas(head_dim: int):
    """Tiled MMAs of S = q k^T (both K-major) and O = P v (P from TMEM, v as it lies: N-major)."""
    k_major, one = OperandMajorMode.K, tcgen05.CtaGroup.ONE
    qk = sm100_utils.make_trivial_tiled_mma(BFloat16, BFloat16, k_major, k_major, Float32, one, (TILE, TILE))
    n_major, from_tmem = OperandMajorMode.MN, tcgen05.OperandSource.TMEM
    pv = sm100_utils.make_trivial_tiled_mma(
        BFloat16, BFloat16, k_major, n_major, Float32, one, (TILE, head_dim), from_tmem
    )
    return qk, pv


def next_stage(kernel, ring):
    """The ring's next (stage, parity)."""
    slot, phase = ring
    wrap = slot == kernel.tuning.kv_stages - 1
    return cutlass.select_(wrap, Int32(0), slot + 1), phase ^ Int32(wrap)


# ---- load warp ---------------------------------------------------------------------------------------------


@cute.jit
def load_role(kernel, bars, smem, atoms, tensors, work):
    """q tiles once; then keys and values of each key tile."""
    qk_mma, pv_mma = tiled_mmas(kernel.head_dim)
    d, parts = kernel.head_dim, kernel.kv_parts
    kv = (work.head // (kernel.heads // kernel.kv_heads), work.batch)
    # (128, D, tile), (128, D / parts, tile, part), (D, 128 / parts, tile * parts + part)
    gQ = cute.local_tile(tensors[0][None, None, (work.head, work.batch)], (TILE, d), (None, 0))
    gK = cute.local_tile(tensors[1][None, None, kv], (TILE, d // parts), (None, None))
    gV = cute.local_tile(tensors[2][None, None, kv], (d, TILE // parts), (0, None))
    tQsQ, tQgQ = _tma_parts(atoms[0], smem[0], qk_mma.get_slice(0).partition_A(gQ))
    tKsK, tKgK = _tma_parts(atoms[1], smem[1], qk_mma.get_slice(0).partition_B(gK))
    tVsV, tVgV = _tma_parts(atoms[2], smem[2], pv_mma.get_slice(0).partition_B(gV))
    cute.arch.griddepcontrol_wait()
    for i in cutlass.range_constexpr(kernel.tuning.query_tiles):
        if work.tile + i < work.tiles:
            _load_box(atoms[0], tQgQ[None, work.tile + i], tQsQ[None, i], bars.q_full + i, TILE * d)
    sources = ((atoms[1], tKgK, tKsK), (atoms[2], tVgV, tVsV))
    start = (Int32(0), Int32(1), Int32(0), Int32(0), Int32(0))
    slot, phase, count, before, last = kernel.walk(partial(_load_visit, kernel, bars, sources), start, work)
    ring = (slot, phase)
    if cutlass.const_expr(kernel.lag == 2):
        if count > 1:
            ring = _load_values(kernel, bars, sources, ring, before)
    if count > 0:
        ring = _load_values(kernel, bars, sources, ring, last)
    cute.arch.griddepcontrol_launch_dependents()


@cute.jit
def _load_visit(kernel, bars, sources, state, j, kind_of):
    """state: stage, its parity, tiles visited, and the last two of them."""
    slot, phase, count, before, last = state
    ring = (slot, phase)
    if count >= kernel.lag:
        ring = _load_values(kernel, bars, sources, ring, last if kernel.lag == 1 else before)
    for p in cutlass.range_constexpr(kernel.kv_parts):
        ring = _load_part(kernel, bars, sources[0], ring, (None, j, p))
    return ring[0], ring[1], count + 1, last, j


def _load_values(kernel, bars, sources, ring, j):
    for p in range(kernel.kv_parts):
        ring = _load_part(kernel, bars, sources[1], ring, (None, j * kernel.kv_parts + p))
    return ring


def _load_part(kernel, bars, source, ring, index):
    """A tile, or a part of one, into the ring's next stage once that is free."""
    atom, gmem, smem = source
    slot, phase = ring
    cute.arch.mbarrier_wait(bars.kv_empty + slot, phase)
    elements = TILE * kernel.head_dim // kernel.kv_parts
    _load_box(atom, gmem[index], smem[None, slot], bars.kv_full + slot, elements)
    return next_stage(kernel, ring)


def _load_box(atom, source, target, barrier, elements):
    """TMA load that completes on `barrier`; rows beyond the sequence arrive as zeros and count as bytes
    too."""
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(barrier, elements * BFloat16.width // 8)
    cute.copy(atom, source, target, tma_bar_ptr=barrier)


def _tma_parts(atom, smem, gmem):
    """Shared and global tensors cut for one TMA atom: ((box), stage), ((box), tile, ...)."""
    return cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(smem, 0, 3), cute.group_modes(gmem, 0, 3)
    )


# ---- MMA warp ----------------------------------------------------------------------------------------------


@cute.jit
def mma_role(kernel, bars, smem, tmem, work):
    """All products of the CTA, then the end of its TMEM. One elected thread waits and issues."""
    if cutlass.const_expr(kernel.mask == "tensor"):
        # The walk reads the tile classes, which the mask scan may still be writing.
        cute.arch.griddepcontrol_wait()
    if cutlass.const_expr(kernel.tuning.query_tiles == 2):
        visit = partial(_visit_two_tiles, kernel, bars, smem, tmem)
        state = kernel.walk(visit, (Int32(0),) * 6, work)
        slot, phase, pending, counts = state[0], state[1], (state[2], state[3]), (state[4], state[5])
        with cute.arch.elect_one():
            for g in cutlass.range_constexpr(GROUPS):
                if pending[g] != 0:
                    _accumulate(kernel, bars, smem, tmem, (slot, phase), Int32(g), counts[g] - 1)
                if counts[g] > 0:
                    tcgen05.commit(bars.o_full + g)
    else:
        visit = partial(_visit_one_tile, kernel, bars, smem, tmem)
        slot, phase, count = kernel.walk(visit, (Int32(0),) * 3, work)
        ring = (slot, phase)
        two, after = count > 1, _skip(kernel, ring, kernel.kv_parts)
        last = (cutlass.select_(two, after[0], slot), cutlass.select_(two, after[1], phase))
        with cute.arch.elect_one():
            if two:
                _accumulate(kernel, bars, smem, tmem, ring, count & 1, count - 2, kernel.kv_parts)
            if count > 0:
                _accumulate(kernel, bars, smem, tmem, last, (count - 1) & 1, count - 1, 0)
                tcgen05.commit(bars.o_full)
    cute.arch.mbarrier_wait(bars.done, 0)
    cute.arch.dealloc_tmem(tmem, kernel.tmem_columns)


@cute.jit
def _visit_two_tiles(kernel, bars, smem, tmem, state, j, kind_of):
    """For each query tile g: O_g += P_g v of the tile before, then S_g = q_g k^T of this one. state: stage
    and parity; for each g, whether the last tile's P_g waits for its values; for each g, scores issued."""
    ring = (state[0], state[1])
    pending, counts = (state[2], state[3]), (state[4], state[5])
    started = counts[0] + counts[1] > 0
    after = next_stage(kernel, ring)
    k_slot, k_phase = cutlass.select_(started, after[0], ring[0]), cutlass.select_(started, after[1], ring[1])
    kinds = [kind_of(g) for g in (0, 1)]
    with cute.arch.elect_one():
        for g in cutlass.range_constexpr(GROUPS):
            if pending[g] != 0:
                _accumulate(kernel, bars, smem, tmem, ring, Int32(g), counts[g] - 1)
            if kinds[g] != ALL_MASKED:
                if counts[g] == 0:
                    cute.arch.mbarrier_wait(bars.q_full + g, 0)
                _scores(kernel, bars, smem, tmem, (k_slot, k_phase), g, Int32(g))
        if started:
            tcgen05.commit(bars.kv_empty + ring[0])
        tcgen05.commit(bars.kv_empty + k_slot)
    cute.arch.sync_warp()  # the other lanes do not run ahead while the elected one waits
    reads = [Int32(kind != ALL_MASKED) for kind in kinds]
    slot, phase = next_stage(kernel, (k_slot, k_phase))
    return slot, phase, reads[0], reads[1], counts[0] + reads[0], counts[1] + reads[1]


@cute.jit
def _visit_one_tile(kernel, bars, smem, tmem, state, j, kind_of):
    """O += P_g v of the tile before last, whose P_g lies where S_g = q k^T of this one goes; g alternates."""
    slot, phase, count = state
    ring = (slot, phase)
    started = count >= GROUPS
    after = _skip(kernel, ring, kernel.kv_parts)
    k_ring = (cutlass.select_(started, after[0], slot), cutlass.select_(started, after[1], phase))
    with cute.arch.elect_one():
        if count == 0:
            cute.arch.mbarrier_wait(bars.q_full, 0)
        if started:
            _accumulate(kernel, bars, smem, tmem, ring, count & 1, count - GROUPS)
        _scores(kernel, bars, smem, tmem, k_ring, 0, count & 1)
    cute.arch.sync_warp()
    slot, phase = _skip(kernel, k_ring, kernel.kv_parts)
    return slot, phase, count + 1


def _skip(kernel, ring, stages):
    for _ in range(stages):
        ring = next_stage(kernel, ring)
    return ring


def _scores(kernel, bars, smem, tmem, ring, q_tile, g):
    """S_g = q k^T from the ring's next stages."""
    mma = tiled_mmas(kernel.head_dim)[0]
    tQ, tK = mma.make_fragment_A(smem[0]), mma.make_fragment_B(smem[1])
    steps = kernel.head_dim // kernel.kv_parts // MMA_K
    for p in range(kernel.kv_parts):
        slot, phase = ring
        # No tcgen05.fence: what was in S_g before is ordered by the wait for P_g.
        cute.arch.mbarrier_wait(bars.kv_full + slot, phase)
        for i in range(steps):
            a = _descriptor(tQ[None, None, p * steps + i, q_tile])
            b = _descriptor(tK[None, None, i, slot])
            _issue(tmem + kernel.s_column(g), a, b, _instruction(TILE, False), p + i > 0)
        if kernel.tuning.query_tiles == 1:
            tcgen05.commit(bars.kv_empty + slot)
        ring = next_stage(kernel, ring)
    tcgen05.commit(bars.s_full + g)


def _accumulate(kernel, bars, smem, tmem, ring, g, index, last=None):
    """O += P_g v from the ring's next stages; `index`: how many products the query tile has had before;
    `last`: stages that are still filled after these, None for more than there are."""
    two = kernel.tuning.query_tiles == 2
    mma = tiled_mmas(kernel.head_dim)[1]
    tV = mma.make_fragment_B(smem[2])
    parity = index & 1 if two else (index >> 1) & 1
    steps = TILE // MMA_K
    for i in range(steps):
        slot, phase = ring
        if i % (steps // kernel.kv_parts) == 0:
            cute.arch.mbarrier_wait(bars.kv_full + slot, phase)
        if i % (steps // kernel.p_parts) == 0:
            part = i // (steps // kernel.p_parts)
            cute.arch.mbarrier_wait(bars.p_full + g * kernel.p_parts + part, parity)
            fence_after_sync()
        b = _descriptor(tV[None, None, i % (steps // kernel.kv_parts), slot])
        # A from TMEM: two bf16 weights a column.
        a = _tmem_pointer(tmem + (kernel.s_column(g) + i * MMA_K // 2))
        accumulator = tmem + kernel.o_column(g if two else 0)
        _issue(accumulator, a, b, _instruction(kernel.head_dim, True), index > 0 if i == 0 else True)
        if (i + 1) % (steps // kernel.kv_parts) == 0:
            part = i // (steps // kernel.kv_parts)
            refilled = last is None or kernel.kv_parts - 1 - part + last >= kernel.tuning.kv_stages
            if not two and refilled:
                tcgen05.commit(bars.kv_empty + slot)
            ring = next_stage(kernel, ring)
    if kernel.chained:
        tcgen05.commit(bars.o_done)


def _descriptor(fragment):
    """Shared-memory matrix descriptor of one K block of an operand (PTX ISA, tcgen05 shared memory
    descriptor)."""
    return tcgen05.smem_descriptor_to_int(fragment.iterator)


def _instruction(n: int, b_is_n_major: bool) -> int:
    """Instruction descriptor of a bf16 product of M = 128 with fp32 accumulators (PTX ISA, tcgen05
    instruction descriptor, .kind::f16): D fp32 in bits 4-5, A and B bf16 in 7-9 and 10-12, B's major in 16, N
    / 8, M / 16."""
    return 1 << 4 | 1 << 7 | 1 << 10 | int(b_is_n_major) << 16 | (n >> 3) << 17 | (TILE >> 4) << 24


@dsl_user_op
def _tmem_pointer(pointer, *, loc=None, ip=None) -> ir.Value:
    """A TMEM address as the MMA instruction takes it."""
    kind = llvm.PointerType.get(cute.AddressSpace.tmem.value)
    return llvm.inttoptr(kind, pointer.toint(loc=loc, ip=ip).ir_value(loc=loc, ip=ip), loc=loc, ip=ip)


@dsl_user_op
def _issue(accumulator, a, b, instruction, accumulate, *, loc=None, ip=None):
    """One tcgen05.mma, issued by the calling thread alone. `cute.gemm` would elect a thread for each."""
    nvvm.tcgen05_mma(
        nvvm.Tcgen05MMAKind.F16,
        nvvm.CTAGroupKind.CTA_1,
        _tmem_pointer(accumulator, loc=loc, ip=ip),
        a if isinstance(a, ir.Value) else a.ir_value(loc=loc, ip=ip),
        b.ir_value(loc=loc, ip=ip),
        Int32(instruction).ir_value(loc=loc, ip=ip),
        Boolean(accumulate).ir_value(loc=loc, ip=ip),
        loc=loc,
        ip=ip,
    )
