"""A softmax warpgroup of the attention kernel: scores in TMEM to weights in TMEM, then O to global memory.

One thread owns one query row: its 128 scores of a tile lie in 128 TMEM columns of its lane, so that maxima and sums need
no exchange between threads. Two ways to shift the exponent:
  * fixed (a cap bounds the logits): p = 2^(log2e * (cap * tanh(s * scale / cap) + mask - m)), m the row's largest mask
    entry. Nothing is ever rescaled.
  * running maximum (no cap, or one too large for fp32): O is rescaled in TMEM, but only where the maximum grew by more
    than RESCALE_AT, so rarely.
The denominator sums weights before they are rounded to bf16, but the rounded ones in a tile that may leave a row few
keys.
"""

from dataclasses import dataclass
from functools import partial

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync, tcgen05
from cutlass.cute.typing import BFloat16, Boolean, Float32, Int32

from cute_gemma.kernels.common import softcap as sc
from cute_gemma.kernels.common.mask import ALL_ZERO, MASKED_AT_OR_BELOW, MIXED
from cute_gemma.kernels.common.softmax import abs_max3, max3, pack_bf16, reduce3, unpack_bf16
from cute_gemma.kernels.sm100.mask_scan import entry_value
from cute_gemma.kernels.sm100.tmem import fence_after_sync, fence_before_sync

TILE = 128
WARP = 32
# Scores of a row handled at once outside the unrolled path.
CHUNK = 32
CHUNKS = TILE // CHUNK
P_COLUMNS = TILE // 2  # two bf16 weights a TMEM column
# A warp's 32 mask rows of a chunk in shared memory: the odd pitch spreads a column over all 32 banks.
BIAS_PITCH = CHUNK + 1
# Growth of the running maximum, in base-2 exponents, that O is rescaled at: until then weights stay below 2^8.
RESCALE_AT = 8.0


@dataclass(frozen=True)
class Rows:
    """What a softmax thread works on.

    group: its warpgroup; thread, lane, warp: its place in the group; tile: its query tile; row: its query row in the
    sequence; s: sequence length; scores, output: TMEM of S_g and O_g; minus_max: minus the row's largest mask entry;
    plain: that is 0 in every row of the warp; s_full, p_full: the group's barriers.
    """

    group: Int32
    thread: Int32
    lane: Int32
    warp: Int32
    tile: Int32
    row: Int32
    s: Int32
    scores: cute.Pointer
    output: cute.Pointer
    minus_max: Float32
    plain: Boolean
    s_full: cute.Pointer
    p_full: cute.Pointer


def tmem_load(rows: Rows, pointer, columns: int, dtype=Float32):
    """`columns` TMEM columns of this thread's lane, as a flat register tensor; waits for them."""
    tiled, tensor = _tmem_copy(tcgen05.Ld32x32bOp(tcgen05.Repetition(columns)), pointer, columns, dtype)
    thr = tiled.get_slice(rows.thread)
    shape = thr.partition_D(cute.make_identity_tensor((TILE, columns))).shape
    registers = cute.make_rmem_tensor(shape, dtype)
    cute.copy(tiled, thr.partition_S(tensor), registers)
    cute.arch.fence_view_async_tmem_load()
    return cute.make_tensor(registers.iterator, cute.make_layout(columns))


def tmem_store(rows: Rows, values: list, pointer, dtype=Float32):
    """Values to as many TMEM columns of this thread's lane; the caller waits with `fence_view_async_tmem_store`."""
    columns = len(values)
    tiled, tensor = _tmem_copy(tcgen05.St32x32bOp(tcgen05.Repetition(columns)), pointer, columns, dtype)
    thr = tiled.get_slice(rows.thread)
    shape = thr.partition_S(cute.make_identity_tensor((TILE, columns))).shape
    registers = cute.make_rmem_tensor(shape, dtype)
    flat = cute.make_tensor(registers.iterator, cute.make_layout(columns))
    for i, value in enumerate(values):
        flat[i] = value
    cute.copy(tiled, registers, thr.partition_D(tensor))


def _tmem_copy(op, pointer, columns, dtype):
    tensor = cute.make_tensor(
        cute.recast_ptr(pointer, dtype=dtype), cute.make_layout((TILE, columns), stride=(1 << 16, 1))
    )
    return tcgen05.make_tmem_copy(cute.make_copy_atom(op, dtype), tensor), tensor


def _values(tensor) -> list:
    return [tensor[i] for i in range(cute.size(tensor))]


def _pairs(values) -> list:
    return [(values[i], values[i + 1]) for i in range(0, cute.size(values), 2)]


def arrive(barrier):
    """One arrive for the warp, after all its lanes' work."""
    fence_before_sync()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(barrier)


# ---- fixed shift -----------------------------------------------------------------------------------------------------


@cute.jit
def capped_tile(kernel, rows: Rows, j, kind, bias_source, total):
    """Weights of key tile j under a fixed shift; `kind` is its mask class. Returns the row's two partial sums."""
    if Boolean(kind == ALL_ZERO) & rows.plain & Boolean((j + 1) * TILE <= rows.s):
        scores = tmem_load(rows, rows.scores, TILE)
        largest = reduce3(abs_max3, _values(scores), Float32(0.0))
        softcap = sc.Softcap(kernel.scale, kernel.softcap)
        first, second = sc.TANH_FITS
        if cute.arch.vote_all_sync(largest <= softcap.score_limit(first)):
            total = _capped_unrolled(kernel, rows, scores, first, kernel.tuning.fma_exp2_pairs, total)
        else:
            if cute.arch.vote_all_sync(largest <= softcap.score_limit(second)):
                total = _capped_unrolled(kernel, rows, scores, second, 0, total)
            else:
                total = _capped_chunks(kernel, rows, total)
    else:
        total = _capped_biased(kernel, rows, j, kind, bias_source, total)
    return total


def _capped_unrolled(kernel, rows, scores, fit, on_fma, total):
    """All 128 scores in registers, tanh by polynomial, `on_fma` of the 64 pairs' exponentials on the FMA pipe."""
    softcap = sc.Softcap(kernel.scale, kernel.softcap)

    def weights(i, s):
        # Evenly spread, so that MUFU and FMA work overlap.
        if (i + 1) * on_fma // (TILE // 2) > i * on_fma // (TILE // 2):
            return sc.exp2_capped_on_fma(s, softcap, fit)
        return sc.exp2_capped(s, softcap, fit)

    return _hand_over(kernel, rows, scores, weights, total)


def _hand_over(kernel, rows, scores, weights, total):
    """P = weights(pair, scores of the pair) for the whole row, part by part to TMEM and to the MMA warp; adds to the
    row's sums."""
    pairs = _pairs(scores)
    per_part = len(pairs) // kernel.p_parts
    for part in range(kernel.p_parts):
        packed = []
        for i in range(part * per_part, (part + 1) * per_part):
            p = weights(i, pairs[i])
            total = cute.arch.add_packed_f32x2(total, p)
            packed.append(pack_bf16(*p))
        tmem_store(rows, packed, rows.scores + part * per_part, Int32)
        cute.arch.fence_view_async_tmem_store()
        arrive(rows.p_full + part)
    return total


@cute.jit
def _capped_chunks(kernel, rows, total):
    """Scores near the cap: tanh on the MUFU pipe, 32 scores at a time."""
    softcap = sc.Softcap(kernel.scale, kernel.softcap)
    for chunk in cutlass.range(CHUNKS, unroll=1):
        scores = tmem_load(rows, rows.scores + chunk * CHUNK, CHUNK)
        total = _finish_chunk(rows, chunk, [sc.exp2_capped_wide(s, softcap) for s in _pairs(scores)], total, False)
    _arrive_all(kernel, rows)
    return total


@cute.jit
def _capped_biased(kernel, rows, j, kind, bias_source, total):
    """A tile with masked entries, a mask to read, or a shift: 32 scores at a time, each with its bias."""
    softcap = sc.Softcap(kernel.scale, kernel.softcap)
    fit = sc.TANH_FITS[-1]
    limit, last = key_limits(kernel, rows, j, kind)
    for chunk in cutlass.range(CHUNKS, unroll=1):
        if chunk * CHUNK <= last:
            scores = tmem_load(rows, rows.scores + chunk * CHUNK, CHUNK)
            bias = _pairs(chunk_bias(kernel, rows, j, chunk, kind, limit, bias_source))
            largest = reduce3(abs_max3, _values(scores), Float32(0.0))
            if cute.arch.vote_all_sync(largest <= softcap.score_limit(fit)):
                p = [sc.exp2_capped(s, softcap, fit, b) for s, b in zip(_pairs(scores), bias)]
                total = _finish_chunk(rows, chunk, p, total, True)
            else:
                p = [sc.exp2_capped_wide(s, softcap, b) for s, b in zip(_pairs(scores), bias)]
                total = _finish_chunk(rows, chunk, p, total, True)
        else:
            tmem_store(rows, [Int32(0)] * (CHUNK // 2), rows.scores + chunk * (CHUNK // 2), Int32)
            cute.arch.fence_view_async_tmem_store()
    _arrive_all(kernel, rows)
    return total


def _finish_chunk(rows, chunk, weights, total, sum_rounded):
    """Stores a chunk's weights as bf16, over scores of chunks already read, and adds them to the row's sums: after
    rounding where rows may have few keys, so that a lone key weighs exactly 1."""
    packed = [pack_bf16(*p) for p in weights]
    for p, bits in zip(weights, packed):
        total = cute.arch.add_packed_f32x2(total, unpack_bf16(bits) if sum_rounded else p)
    tmem_store(rows, packed, rows.scores + chunk * (CHUNK // 2), Int32)
    cute.arch.fence_view_async_tmem_store()
    return total


def _arrive_all(kernel, rows):
    for part in range(kernel.p_parts):
        arrive(rows.p_full + part)


# ---- masks -----------------------------------------------------------------------------------------------------------


def key_limits(kernel, rows, j, kind):
    """Last key of tile j, counted from its first, that this row may read by position, and the last any row of the warp
    may read: the sequence's end, and the diagonal where the tile lies on it."""
    end = rows.s - 1 - j * TILE
    below = rows.row - j * TILE
    warp_below = rows.tile * TILE + rows.warp * WARP + WARP - 1 - j * TILE
    if cutlass.const_expr(kernel.mask == "none"):
        return end, end
    diagonal = kind != ALL_ZERO
    if cutlass.const_expr(kernel.mask == "tensor"):
        diagonal = Boolean(kind != ALL_ZERO) & Boolean(kind != MIXED)
    limit = cutlass.select_(diagonal, cutlass.min(below, end), end)
    last = cutlass.select_(diagonal, cutlass.min(warp_below, end), end)
    return limit, last


@cute.jit
def chunk_bias(kernel, rows, j, chunk, kind, limit, source):
    """What is added to the chunk's 32 base-2 exponents of this row: -inf where the key is masked."""
    bias = cute.make_rmem_tensor((CHUNK,), Float32)
    if cutlass.const_expr(kernel.mask == "tensor"):
        if kind == MIXED:
            read_bias(rows, j, chunk, source, bias)
        else:
            _positional_bias(rows, chunk, limit, bias)
    else:
        _positional_bias(rows, chunk, limit, bias)
    return bias


def _positional_bias(rows, chunk, limit, bias):
    inside = limit - chunk * CHUNK
    shift = rows.minus_max * sc.LOG2_E
    for c in range(CHUNK):
        bias[c] = cutlass.select_(c <= inside, shift, -Float32.inf)


def read_bias(rows, j, chunk, source, bias):
    """Mask entries of a mixed tile: read along rows, 32 neighbours at a time, and turned in shared memory, where each
    thread takes its own row. Entries beyond the sequence are clamped to its end and then masked."""
    mask, scratch = source
    key = j * TILE + chunk * CHUNK + rows.lane
    first_row = rows.tile * TILE + rows.warp * WARP
    column = cutlass.min(key, rows.s - 1)
    values = []
    for r in range(WARP):
        row = cutlass.min(first_row + r, rows.s - 1)
        values.append(entry_value(mask[row, column]))
    for r in range(WARP):
        minus_max = cute.arch.shuffle_sync(rows.minus_max, r)
        hidden = Boolean(values[r] <= MASKED_AT_OR_BELOW) | Boolean(key >= rows.s)
        # The difference first: it is exact where entries are close, however large they are.
        value = (values[r] + minus_max) * sc.LOG2_E
        scratch[r * BIAS_PITCH + rows.lane] = cutlass.select_(hidden, -Float32.inf, value)
    cute.arch.sync_warp()
    for c in range(CHUNK):
        bias[c] = scratch[rows.lane * BIAS_PITCH + c]
    cute.arch.sync_warp()


# ---- running maximum -------------------------------------------------------------------------------------------------


@cute.jit
def online_tile(kernel, rows: Rows, j, kind, bias_source, started, state):
    """Weights of key tile j under a running maximum. state: the row's maximum (base-2 exponent) and two partial sums;
    started: whether O holds products already."""
    maximum, sum0, sum1 = state
    slope = Float32(kernel.scale * sc.LOG2_E)
    if cutlass.const_expr(kernel.softcap is not None):
        _logits_in_place(kernel, rows, j, kind, bias_source)
        slope = Float32(1.0)
    else:
        if Boolean(kind == ALL_ZERO) & rows.plain & Boolean((j + 1) * TILE <= rows.s):
            slope = Float32(kernel.scale * sc.LOG2_E)
        else:
            _logits_in_place(kernel, rows, j, kind, bias_source)
            slope = Float32(1.0)
    scores = tmem_load(rows, rows.scores, TILE)
    largest = reduce3(max3, _values(scores), Float32(-Float32.inf)) * slope
    grown = largest > maximum + RESCALE_AT
    if cute.arch.vote_any_sync(grown):
        new = cutlass.select_(grown, largest, maximum)
        factor = cutlass.select_(grown, sc.exp2(maximum - new), Float32(1.0))
        sum0, sum1, maximum = sum0 * factor, sum1 * factor, new
        if started:
            _rescale_output(kernel, rows, factor)
    # A row that has met masked keys alone: its weights are 2^-inf whatever is subtracted.
    subtracted = cutlass.select_(maximum == -Float32.inf, Float32(0.0), maximum)
    total = _hand_over(kernel, rows, scores, partial(_exp2_shifted, slope, subtracted), (sum0, sum1))
    return maximum, total[0], total[1]


def _exp2_shifted(slope, subtracted, _, s):
    y = cute.arch.fma_packed_f32x2(s, (slope, slope), (-subtracted, -subtracted))
    return sc.exp2(y[0]), sc.exp2(y[1])


@cute.jit
def _logits_in_place(kernel, rows, j, kind, bias_source):
    """Scores in TMEM to base-2 exponents with the mask added."""
    limit, _ = key_limits(kernel, rows, j, kind)
    for chunk in cutlass.range(CHUNKS, unroll=1):
        scores = _pairs(tmem_load(rows, rows.scores + chunk * CHUNK, CHUNK))
        bias = _pairs(chunk_bias(kernel, rows, j, chunk, kind, limit, bias_source))
        gain = kernel.scale * sc.LOG2_E
        if cutlass.const_expr(kernel.softcap is not None):
            softcap = sc.Softcap(kernel.scale, kernel.softcap)
            scores = [sc.capped_tanh(s, softcap) for s in scores]
            gain = kernel.softcap * sc.LOG2_E
        y = [cute.arch.fma_packed_f32x2(s, (Float32(gain),) * 2, b) for s, b in zip(scores, bias)]
        tmem_store(rows, [v for pair in y for v in pair], rows.scores + chunk * CHUNK)
        cute.arch.fence_view_async_tmem_store()


@cute.jit
def _rescale_output(kernel, rows, factor):
    """O *= factor in TMEM. Its last product is complete: the scores this tile waited for were committed after it."""
    # Few columns at once: the row's 128 scores are in registers as well.
    step = 16
    for chunk in cutlass.range(kernel.head_dim // step, unroll=1):
        pointer = rows.output + chunk * step
        scaled = [cute.arch.mul_packed_f32x2(o, (factor, factor)) for o in _pairs(tmem_load(rows, pointer, step))]
        tmem_store(rows, [v for pair in scaled for v in pair], pointer)
        cute.arch.fence_view_async_tmem_store()


def _scaled_output(rows, column, factor, packed):
    for c, o in enumerate(_pairs(tmem_load(rows, rows.output + column, CHUNK))):
        packed[c] = pack_bf16(*cute.arch.mul_packed_f32x2(o, (factor, factor)))


# ---- epilogue --------------------------------------------------------------------------------------------------------


@cute.jit
def write_output(kernel, rows: Rows, sO, out, coordinate, o_full, denominator, started):
    """O / denominator as bf16 through shared memory, one TMA store a warp; zeros where the row attended to nothing.

    sO: (32, columns, warp); out: TMA atom and (S, D, (H, B)) tensor; coordinate: (block of columns, head, batch). TMA clips the rows beyond the sequence.
    """
    columns = kernel.o_columns
    warp = rows.group * (TILE // WARP) + rows.warp
    mine = sO[rows.lane, None, warp]
    inverse = cutlass.select_(denominator > 0.0, cute.arch.rcp_approx(denominator), Float32(0.0))
    if started:
        cute.arch.mbarrier_wait(o_full, 0)
        fence_after_sync()
    for i in cutlass.range_constexpr(columns // CHUNK):
        rounded = cute.make_rmem_tensor((CHUNK,), BFloat16)
        packed = cute.make_tensor(cute.recast_ptr(rounded.iterator, dtype=Int32), cute.make_layout(CHUNK // 2))
        packed.fill(0)
        if started:
            _scaled_output(rows, i * CHUNK, inverse, packed)
        cute.autovec_copy(rounded, cute.local_tile(mine, (CHUNK,), (i,)))
    cute.arch.fence_view_async_shared()
    cute.arch.sync_warp()
    atom, mO = out
    column, head, batch = coordinate
    gO = cute.local_tile(mO[None, None, (head, batch)], (WARP, columns), (None, column))
    tOsO, tOgO = cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(sO, 0, 2), cute.group_modes(gO, 0, 2)
    )
    cute.copy(atom, tOsO[None, warp], tOgO[None, rows.tile * (TILE // WARP) + rows.warp])
    cute.arch.cp_async_bulk_commit_group()
    cute.arch.cp_async_bulk_wait_group(0, read=True)
