"""The softmax of the attention kernel: scores in TMEM to weights in TMEM.

One thread owns one query row: its 128 scores of a tile lie in 128 TMEM columns of its lane, so that maxima
and sums need no exchange between threads. Two ways to shift the exponent:
  * fixed (a cap bounds the logits): p = 2^(log2e * (cap * tanh(s * scale / cap) + mask - m)), m the row's
    largest mask entry. Nothing is ever rescaled.
  * running maximum (no cap, or one too large for fp32): O is rescaled in TMEM, but only where the maximum
    grew by more than RESCALE_AT, so rarely.
The denominator sums weights before they are rounded to bf16, but the rounded ones in a tile that may leave a
row few keys.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import tcgen05
from cutlass.cute.typing import Boolean, Float32, Int32

from cute_gemma.kernels.common import softcap as sc
from cute_gemma.kernels.common.mask import ALL_ZERO, MASKED_AT_OR_BELOW, MIXED
from cute_gemma.kernels.common.softmax import abs_max3, max3, pack_bf16, reduce3, unpack_bf16
from cute_gemma.kernels.common.mask_scan import entry_value
from cute_gemma.kernels.sm100.tmem import fence_after_sync, fence_before_sync

TILE = 128
WARP = 32
# Scores of a row handled at once outside the unrolled path.
CHUNK = 32
CHUNKS = TILE // CHUNK
# A weight this far below its row's sum, as a power of 2, is lost in it, even a million times over.
NEGLIGIBLE = 30
# A polynomial is of use where it reaches this base-2 exponent within its range: then ordinary sums of
# weights, from 2^-10 to 2^40, say that scores were in range.
LEAST_EXPONENT = NEGLIGIBLE + 10
# What a tile's sum stays below the limit, as a power of 2, for the next tile to count as in range: retries
# are dear.
MARGIN = 8
TOP_LEVEL = len(sc.TANH_FITS)
P_COLUMNS = TILE // 2  # two bf16 weights a TMEM column
# A warp's 32 mask rows of a chunk in shared memory: the odd pitch spreads a column over all 32 banks.
BIAS_PITCH = CHUNK + 1
# Growth of the running maximum, in base-2 exponents, that O is rescaled at: until then weights stay below
# 2^8.
RESCALE_AT = 8.0


@dataclass(frozen=True)
class Rows:
    """What a softmax thread works on.

    group: its warpgroup; thread, lane, warp: its place in the group; tile: its query tile; row: its query row
    in the sequence; s: sequence length; scores, accumulator, output: TMEM of S_g, of O, and of the part of O
    it writes; minus_max: minus the row's largest mask entry; plain: that is 0 in every row of the warp;
    s_full, p_full: the group's barriers.
    """

    group: Int32
    thread: Int32
    lane: Int32
    warp: Int32
    tile: Int32
    row: Int32
    s: Int32
    scores: cute.Pointer
    accumulator: cute.Pointer
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
    """Values to as many TMEM columns of this thread's lane; the caller waits with
    `fence_view_async_tmem_store`."""
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


def pairs_of(values) -> list:
    return [(values[i], values[i + 1]) for i in range(0, cute.size(values), 2)]


@cute.jit
def arrive(rows, barrier):
    """One arrive for the warp, after all its lanes' tcgen05 operations."""
    fence_before_sync()
    if rows.lane == 0:
        cute.arch.mbarrier_arrive(barrier)


# ---- fixed shift -------------------------------------------------------------------------------------------


@cute.jit
def capped_tile(kernel, rows: Rows, j, kind, bias_source, state):
    """Weights of key tile j under a fixed shift; `kind` is its mask class. state: the warp's level and the
    row's two partial sums.

    The level says how tanh is computed: 0 and 1 by polynomials for narrow and wider ranges, 2 on the MUFU
    pipe. Whether the scores were in range shows in the weights' sums, so next to nothing is spent on looking
    at the scores: what was not in range is done again at level 2, and the next tile starts at the level that
    these sums ask for.
    """
    level, sum0, sum1 = state
    done, part0, part1, look = Int32(0), Float32(0.0), Float32(0.0), Boolean(True)
    if Boolean(kind == ALL_ZERO) & rows.plain & Boolean((j + 1) * TILE <= rows.s):
        if level == 0:
            done, part0, part1 = _by_polynomial(kernel, rows, 0)
            look = Boolean(done < CHUNKS)
        else:
            if level == 1:
                done, part0, part1 = _by_polynomial(kernel, rows, 1)
        if done < CHUNKS:
            part0, part1 = _wide_chunks(kernel, rows, done, (part0, part1))
    else:
        part0, part1 = _capped_biased(kernel, rows, j, kind, bias_source)
    sum0, sum1 = cute.arch.add_packed_f32x2((sum0, sum1), (part0, part1))
    if look:
        level = _level_for(kernel, part0 + part1, sum0 + sum1)
    return level, sum0, sum1


def _level_for(kernel, tile_sum, row_sum):
    """The lowest level whose polynomial would have been good for the warp's scores in this tile.

    The polynomial increases, so a sum below its value at the end of the range says that no score was beyond.
    A score beyond the other end has a weight below 2^-limit whichever way tanh is computed, and that is lost
    in the row's sum once that is 2^NEGLIGIBLE times as large; the row's sum only grows.
    """
    softcap = sc.Softcap(kernel.scale, kernel.softcap)
    level = Int32(TOP_LEVEL)
    for i in reversed(range(len(sc.TANH_FITS))):
        limit = softcap.exponent_limit(sc.TANH_FITS[i])
        if limit >= LEAST_EXPONENT:
            good = Boolean(tile_sum <= 2.0 ** (limit - MARGIN))
            good = good & Boolean(row_sum >= 2.0 ** (NEGLIGIBLE - limit))
            level = cutlass.select_(cute.arch.vote_all_sync(good), Int32(i), level)
    return level


@cute.jit
def _by_polynomial(kernel, rows, level: cutlass.Constexpr):
    """P by polynomial tanh from 128 scores in registers, handed over part by part while in range. Returns how
    many chunks of P that was, and their two partial sums."""
    limit = 2.0 ** sc.Softcap(kernel.scale, kernel.softcap).exponent_limit(sc.TANH_FITS[level])
    pairs = pairs_of(tmem_load(rows, rows.scores, TILE))
    done, sum0, sum1 = Int32(0), Float32(0.0), Float32(0.0)
    first, packed, fine = _polynomial_part(kernel, pairs, level, 0)
    if cute.arch.vote_all_sync(fine & Boolean(first[0] + first[1] <= limit)):
        _store_part(kernel, rows, packed, 0)
        done, sum0, sum1 = Int32(CHUNKS // 2), first[0], first[1]
        second, packed, fine = _polynomial_part(kernel, pairs, level, 1)
        if cute.arch.vote_all_sync(fine & Boolean(second[0] + second[1] <= limit)):
            _store_part(kernel, rows, packed, 1)
            done = Int32(CHUNKS)
            sum0, sum1 = cute.arch.add_packed_f32x2((sum0, sum1), second)
    return done, sum0, sum1


def _polynomial_part(kernel, pairs, level, part):
    """Half a row's weights: their two partial sums, the weights as packed bf16, and whether all exponentials
    taken on the FMA pipe were within its range."""
    softcap, fit = sc.Softcap(kernel.scale, kernel.softcap), sc.TANH_FITS[level]
    half = len(pairs) // 2
    total, packed, on_fma = None, [], []
    for i in range(part * half, (part + 1) * half):
        if level == 0 and _is_picked(i, kernel.tuning.fma_exp2_pairs):
            p = sc.exp2_capped_on_fma(pairs[i], softcap, fit)
            on_fma += pairs[i]
        elif level == 1 and _is_picked(i, kernel.tuning.mufu_tanh_pairs):
            p = sc.exp2_capped_wide(pairs[i], softcap)
        else:
            p = sc.exp2_capped(pairs[i], softcap, fit)
        total = p if total is None else cute.arch.add_packed_f32x2(total, p)
        packed.append(pack_bf16(*p))
    fine = Boolean(True)
    if on_fma:
        fine = Boolean(reduce3(abs_max3, on_fma, Float32(0.0)) <= softcap.score_limit_on_fma(fit))
    return total, packed, fine


def _is_picked(i: int, share: int) -> bool:
    """Whether pair i of a row's 64 is among `share` evenly spread ones: spread, so that the pipes work side
    by side."""
    return (i + 1) * share // P_COLUMNS > i * share // P_COLUMNS


def _store_part(kernel, rows, packed, part):
    """A part of P to TMEM, and word of it to the MMA warp."""
    tmem_store(rows, packed, rows.scores + part * len(packed), Int32)
    cute.arch.fence_view_async_tmem_store()
    arrive(rows, rows.p_full + part)


@cute.jit
def _wide_chunks(kernel, rows, first, sums):
    """P of the chunks from `first` on, tanh on the MUFU pipe, for any score. Returns the two partial sums."""
    softcap = sc.Softcap(kernel.scale, kernel.softcap)
    for chunk in cutlass.range(first, CHUNKS, unroll=1):
        scores = tmem_load(rows, rows.scores + chunk * CHUNK, CHUNK)
        weights = [sc.exp2_capped_wide(s, softcap) for s in pairs_of(scores)]
        sums = _finish_chunk(rows, chunk, weights, sums, False)
        if chunk % 2 == 1:
            arrive(rows, rows.p_full + chunk // 2)
    return sums


@cute.jit
def _capped_biased(kernel, rows, j, kind, bias_source):
    """A tile with masked entries, a mask to read, or a shift: 32 scores at a time, each with its bias."""
    softcap = sc.Softcap(kernel.scale, kernel.softcap)
    fit = sc.TANH_FITS[-1]
    keys = key_range(kernel, rows, j, kind)
    total = (Float32(0.0), Float32(0.0))
    for chunk in cutlass.range(CHUNKS, unroll=1):
        if not chunk_is_hidden(keys, chunk):
            scores = tmem_load(rows, rows.scores + chunk * CHUNK, CHUNK)
            bias = pairs_of(chunk_bias(kernel, rows, j, chunk, kind, keys, bias_source))
            largest = reduce3(abs_max3, _values(scores), Float32(0.0))
            if cute.arch.vote_all_sync(largest <= softcap.score_limit(fit)):
                p = [sc.exp2_capped(s, softcap, fit, b) for s, b in zip(pairs_of(scores), bias)]
                total = _finish_chunk(rows, chunk, p, total, True)
            else:
                p = [sc.exp2_capped_wide(s, softcap, b) for s, b in zip(pairs_of(scores), bias)]
                total = _finish_chunk(rows, chunk, p, total, True)
        else:
            tmem_store(rows, [Int32(0)] * (CHUNK // 2), rows.scores + chunk * (CHUNK // 2), Int32)
            cute.arch.fence_view_async_tmem_store()
    _arrive_all(kernel, rows)
    return total


def _finish_chunk(rows, chunk, weights, total, sum_rounded):
    """Stores a chunk's weights as bf16, over scores of chunks already read, and adds them to the row's sums:
    after rounding where rows may have few keys, so that a lone key weighs exactly 1."""
    packed = [pack_bf16(*p) for p in weights]
    for p, bits in zip(weights, packed):
        total = cute.arch.add_packed_f32x2(total, unpack_bf16(bits) if sum_rounded else p)
    tmem_store(rows, packed, rows.scores + chunk * (CHUNK // 2), Int32)
    cute.arch.fence_view_async_tmem_store()
    return total


@cute.jit
def _arrive_all(kernel, rows):
    fence_before_sync()
    if rows.lane == 0:
        for part in cutlass.range_constexpr(kernel.p_parts):
            cute.arch.mbarrier_arrive(rows.p_full + part)


# ---- masks -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class KeyRange:
    """Keys of a tile, counted from its first, that positions allow: first .. last for this row, and for the
    warp's rows together. first is None without a window."""

    first: Int32 | None
    last: Int32
    warp_first: Int32 | None
    warp_last: Int32


def key_range(kernel, rows, j, kind) -> KeyRange:
    """Keys up to the sequence's end; in a tile that is not ALL_ZERO by position, also up to the diagonal and
    from the start of the window on."""
    end = rows.s - 1 - j * TILE
    row, warp_row = rows.row - j * TILE, rows.tile * TILE + rows.warp * WARP - j * TILE
    last = warp_last = end
    if kernel.mask != "none":
        cut = Boolean(kind != ALL_ZERO)
        if kernel.mask == "tensor":
            cut = cut & Boolean(kind != MIXED)
        last = cutlass.select_(cut, cutlass.min(row, end), end)
        warp_last = cutlass.select_(cut, cutlass.min(warp_row + WARP - 1, end), end)
    if kernel.window is None:
        return KeyRange(None, last, None, warp_last)
    return KeyRange(row - kernel.window + 1, last, warp_row - kernel.window + 1, warp_last)


def chunk_is_hidden(keys: KeyRange, chunk) -> Boolean:
    """Whether no row of the warp may read a key of the chunk."""
    hidden = Boolean(chunk * CHUNK > keys.warp_last)
    if keys.warp_first is not None:
        hidden = hidden | Boolean((chunk + 1) * CHUNK <= keys.warp_first)
    return hidden


@cute.jit
def chunk_bias(kernel, rows, j, chunk, kind, keys, source):
    """What is added to the chunk's 32 base-2 exponents of this row: -inf where the key is masked."""
    bias = cute.make_rmem_tensor((CHUNK,), Float32)
    if cutlass.const_expr(kernel.mask == "tensor"):
        if kind == MIXED:
            read_bias(rows, j, chunk, source, bias)
        else:
            _positional_bias(rows, chunk, keys, bias)
    else:
        _positional_bias(rows, chunk, keys, bias)
    return bias


def _positional_bias(rows, chunk, keys, bias):
    shift = rows.minus_max * sc.LOG2_E
    for c in range(CHUNK):
        visible = Boolean(c <= keys.last - chunk * CHUNK)
        if keys.first is not None:
            visible = visible & Boolean(c >= keys.first - chunk * CHUNK)
        bias[c] = cutlass.select_(visible, shift, -Float32.inf)


def read_bias(rows, j, chunk, source, bias):
    """Mask entries of a mixed tile: read along rows, 32 neighbours at a time, and turned in shared memory,
    where each thread takes its own row. Entries beyond the sequence are clamped to its end and then
    masked."""
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


# ---- running maximum ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MaximumChain:
    """How two warpgroups that add to one O agree on its maximum: each takes it over from the other's last
    tile and passes it on. A row's thread has the same place in both.

    mine, theirs: the rows' maxima in shared memory, and mine_full, theirs_full the barriers that say they are
    there; o_done: completes with each product added to O.
    """

    mine: cute.Pointer
    theirs: cute.Pointer
    mine_full: cute.Pointer
    theirs_full: cute.Pointer
    o_done: cute.Pointer


@cute.jit
def online_tile(kernel, rows: Rows, j, kind, source, count, state):
    """Weights of key tile j under a running maximum. source: (mask to read, maximum chain), None where there
    is none; count: tiles of the query tile before this one; state: the maximum (base-2 exponent) this
    thread's two partial sums refer to, and these. Returns the state."""
    maximum, sum0, sum1 = state
    bias_source, chain = source
    slope = Float32(kernel.scale * sc.LOG2_E)
    if cutlass.const_expr(kernel.softcap is not None):
        _logits_in_place(kernel, rows, j, kind, bias_source)
        slope = Float32(1.0)
    else:
        if not Boolean(kind == ALL_ZERO) & rows.plain & Boolean((j + 1) * TILE <= rows.s):
            _logits_in_place(kernel, rows, j, kind, bias_source)
            slope = Float32(1.0)
    scores = tmem_load(rows, rows.scores, TILE)
    largest = reduce3(max3, _values(scores), Float32(-Float32.inf)) * slope
    of_output = maximum
    if cutlass.const_expr(chain is not None):
        if count > 0:
            cute.arch.mbarrier_wait(chain.theirs_full, ((count - 1) >> 1) & 1)
            of_output = cute.make_tensor(chain.theirs, cute.make_layout(TILE))[rows.thread]
    grown = largest > of_output + RESCALE_AT
    new = cutlass.select_(grown, largest, of_output)
    if cutlass.const_expr(chain is not None):
        cute.make_tensor(chain.mine, cute.make_layout(TILE))[rows.thread] = new
        cute.arch.sync_warp()
        if rows.lane == 0:
            cute.arch.mbarrier_arrive(chain.mine_full)
        own = rescale_factor(maximum, new)
        sum0, sum1 = sum0 * own, sum1 * own
    if cute.arch.vote_any_sync(grown):
        factor = rescale_factor(of_output, new)
        if cutlass.const_expr(chain is None):
            sum0, sum1 = sum0 * factor, sum1 * factor
        if count > 0:
            if cutlass.const_expr(chain is not None):
                cute.arch.mbarrier_wait(chain.o_done, (count - 1) & 1)
                fence_after_sync()
            _rescale_output(kernel, rows, factor)
    # A row that has met masked keys alone: its weights are 2^-inf whatever is subtracted.
    subtracted = cutlass.select_(new == -Float32.inf, Float32(0.0), new)
    total, pairs = (sum0, sum1), pairs_of(scores)
    for part in cutlass.range_constexpr(kernel.p_parts):
        total, packed = _shifted_part(pairs, part, (slope, slope), (-subtracted, -subtracted), total)
        if cutlass.const_expr(chain is not None and part == kernel.p_parts - 1):
            if count > 0:  # every phase is waited for, also where nothing is rescaled
                cute.arch.mbarrier_wait(chain.o_done, (count - 1) & 1)
        _store_part(kernel, rows, packed, part)
    return new, total[0], total[1]


def rescale_factor(old, new):
    """2^(old - new), and 1 where both are -inf."""
    return cutlass.select_(old == new, Float32(1.0), sc.exp2(old - new))


def _shifted_part(pairs, part, slope, minus_maximum, total):
    """Half a row's weights 2^(s * slope - maximum) as packed bf16, and the sums with them."""
    half, packed = len(pairs) // 2, []
    for s in pairs[part * half : (part + 1) * half]:
        y = cute.arch.fma_packed_f32x2(s, slope, minus_maximum)
        p = (sc.exp2(y[0]), sc.exp2(y[1]))
        total = cute.arch.add_packed_f32x2(total, p)
        packed.append(pack_bf16(*p))
    return total, packed


@cute.jit
def _logits_in_place(kernel, rows, j, kind, bias_source):
    """Scores in TMEM to base-2 exponents with the mask added."""
    keys = key_range(kernel, rows, j, kind)
    for chunk in cutlass.range(CHUNKS, unroll=1):
        scores = pairs_of(tmem_load(rows, rows.scores + chunk * CHUNK, CHUNK))
        bias = pairs_of(chunk_bias(kernel, rows, j, chunk, kind, keys, bias_source))
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
    """O *= factor in TMEM, once its last product is complete: with a query tile of its own, the scores that
    the warpgroup has waited for were committed after that."""
    # Few columns at once: the row's 128 scores are in registers as well.
    step = 16
    for chunk in cutlass.range(kernel.head_dim // step, unroll=1):
        pointer = rows.accumulator + chunk * step
        output = pairs_of(tmem_load(rows, pointer, step))
        scaled = [cute.arch.mul_packed_f32x2(o, (factor, factor)) for o in output]
        tmem_store(rows, [v for pair in scaled for v in pair], pointer)
        cute.arch.fence_view_async_tmem_store()
