"""The softmax warpgroups of the attention kernel: which tiles a warpgroup computes weights for, what it needs
for them, and the output at the end."""

from functools import partial

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.typing import BFloat16, Float32, Int32, Int64

from cute_gemma.kernels.common.softmax import pack_bf16
from cute_gemma.kernels.sm100 import attention_softmax as softmax
from cute_gemma.kernels.sm100.attention_mma import GROUPS
from cute_gemma.kernels.sm100.attention_softmax import CHUNK, TILE, WARP, Rows, tmem_load
from cute_gemma.kernels.common.mask_scan import mask_entries
from cute_gemma.kernels.sm100.tmem import fence_after_sync

WARPGROUP = 128


@cute.jit
def softmax_role(kernel, bars, sO, scratch, tmem, out, mask, work):
    """Walks the key tiles of this warpgroup, then writes its part of the output."""
    lane = cute.arch.lane_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    group, warp = warp // (WARPGROUP // WARP), warp % (WARPGROUP // WARP)
    tile = work.tile + group if kernel.tuning.query_tiles == 2 else work.tile
    row = tile * TILE + warp * WARP + lane
    minus_max, source = Float32(0.0), None
    if cutlass.const_expr(kernel.mask == "tensor"):
        cute.arch.griddepcontrol_wait()
        minus_max, source = _mask_source(kernel, mask, scratch[0], row, group * 4 + warp, work)
    rows = softmax.Rows(
        group=group,
        thread=warp * WARP + lane,
        lane=lane,
        warp=warp,
        tile=tile,
        row=row,
        s=work.s,
        scores=tmem + kernel.s_column(group),
        accumulator=tmem + kernel.o_column(group if kernel.tuning.query_tiles == 2 else 0),
        output=tmem + kernel.o_column(group),
        minus_max=minus_max,
        plain=cute.arch.vote_all_sync(minus_max == 0.0),
        s_full=bars.s_full + group,
        p_full=bars.p_full + group * kernel.p_parts,
    )
    # With one query tile, its key tiles go to the warpgroups in turn.
    mine, share = (group, (0, 1)) if kernel.tuning.query_tiles == 2 else (Int32(0), (group, GROUPS))
    zero = Float32(0.0)
    count = Int32(share[0] if kernel.mask != "tensor" else 0)
    state = (count, Int32(softmax.TOP_LEVEL), Float32(-Float32.inf), zero, zero)
    visit = partial(_softmax_visit, kernel, rows, (source, _chain(kernel, bars, scratch[1], group)), mine)
    count, _, maximum, sum0, sum1 = kernel.walk(visit, state, work, mine, share)
    total = sum0 + sum1
    column, ready = Int32(0), (bars.q_full, bars.o_full)
    if cutlass.const_expr(kernel.tuning.query_tiles == 2):
        ready = (bars.q_full + group, bars.o_full + group)
    else:
        total, column = _combine(kernel, scratch, rows, maximum, total), group
    if tile < work.tiles:
        coordinate = (column, work.head, work.batch)
        # Only a mask given as a tensor leaves a query tile without keys.
        started = count > 0 if cutlass.const_expr(kernel.mask == "tensor") else True
        write_output(kernel, rows, sO, out, coordinate, ready, total, started)
    softmax.arrive(rows, bars.done)


def _chain(kernel, bars, maxima, group):
    if not kernel.chained:
        return None
    mine, theirs = group, GROUPS - 1 - group
    return softmax.MaximumChain(
        mine=maxima + mine * TILE,
        theirs=maxima + theirs * TILE,
        mine_full=bars.max_full + mine,
        theirs_full=bars.max_full + theirs,
        o_done=bars.o_done,
    )


def _combine(kernel, scratch, rows, maximum, total):
    """The row's denominator from the sums of both warpgroups, brought to the larger of their maxima:
    O's."""
    sums, maxima = (cute.make_tensor(x, cute.make_layout((TILE, GROUPS))) for x in scratch)
    if kernel.chained or kernel.mask == "tensor":
        # Both warpgroups are past reading mask entries and what the chain passed on.
        cute.arch.barrier(barrier_id=1, number_of_threads=GROUPS * WARPGROUP)
    sums[rows.thread, rows.group] = total
    if kernel.chained:
        maxima[rows.thread, rows.group] = maximum
    cute.arch.barrier(barrier_id=1, number_of_threads=GROUPS * WARPGROUP)
    parts = [sums[rows.thread, g] for g in range(GROUPS)]
    if kernel.chained:
        found = [maxima[rows.thread, g] for g in range(GROUPS)]
        largest = cute.arch.fmax(*found)
        parts = [t * softmax.rescale_factor(m, largest) for t, m in zip(parts, found)]
    return parts[0] + parts[1]


@cute.jit
def _softmax_visit(kernel, rows, source, mine, state, j, kind_of):
    """state: key tiles of the query tile before this one; level, running maximum and the two partial sums of
    the row."""
    count, level, maximum, sum0, sum1 = state
    row = (level, maximum, sum0, sum1)
    step = 1
    if cutlass.const_expr(kernel.tuning.query_tiles == 1 and kernel.mask == "tensor"):
        if count % GROUPS == rows.group:
            row = _softmax_tile(kernel, rows, source, j, kind_of(mine), count, row)
    else:
        step = GROUPS // kernel.tuning.query_tiles
        row = _softmax_tile(kernel, rows, source, j, kind_of(mine), count, row)
    return count + step, row[0], row[1], row[2], row[3]


def _softmax_tile(kernel, rows, source, j, kind, count, row):
    level, maximum, sum0, sum1 = row
    cute.arch.mbarrier_wait(rows.s_full, (count if kernel.tuning.query_tiles == 2 else count >> 1) & 1)
    fence_after_sync()
    if kernel.fixed_shift:
        level, sum0, sum1 = softmax.capped_tile(kernel, rows, j, kind, source[0], (level, sum0, sum1))
    else:
        row = (maximum, sum0, sum1)
        maximum, sum0, sum1 = softmax.online_tile(kernel, rows, j, kind, source, count, row)
    return level, maximum, sum0, sum1


@cute.jit
def _mask_source(kernel, mask, scratch, row, warp, work):
    """Minus the row's largest mask entry, and where mixed tiles find their entries: (this batch's mask,
    scratch)."""
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


@cute.jit
def write_output(kernel, rows: Rows, sO, out, coordinate, ready, denominator, started):
    """O / denominator as bf16 through shared memory, one TMA store a warp; zeros where the row attended to
    nothing.

    sO: (32, columns, warp); out: TMA atom and (S, D, (H, B)) tensor; coordinate: (block of columns, head,
    batch); ready: the query tile's q_full and o_full. TMA clips the rows beyond the sequence.
    """
    columns = kernel.o_columns
    warp = rows.group * (TILE // WARP) + rows.warp
    mine = sO[rows.lane, None, warp]
    inverse = cutlass.select_(denominator > 0.0, cute.arch.rcp_approx(denominator), Float32(0.0))
    q_full, o_full = ready
    if started:
        cute.arch.mbarrier_wait(o_full, 0)
        fence_after_sync()
    else:
        # The memory is q's, which no product has waited for.
        cute.arch.mbarrier_wait(q_full, 0)
    for i in cutlass.range_constexpr(columns // CHUNK):
        rounded = cute.make_rmem_tensor((CHUNK,), BFloat16)
        pairs = cute.make_layout(CHUNK // 2)
        packed = cute.make_tensor(cute.recast_ptr(rounded.iterator, dtype=Int32), pairs)
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
    # One thread stores, and waits: bulk groups are a thread's own.
    with cute.arch.elect_one():
        cute.copy(atom, tOsO[None, warp], tOgO[None, rows.tile * (TILE // WARP) + rows.warp])
        cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0, read=True)


def _scaled_output(rows, column, factor, packed):
    for c, o in enumerate(softmax.pairs_of(tmem_load(rows, rows.output + column, CHUNK))):
        packed[c] = pack_bf16(*cute.arch.mul_packed_f32x2(o, (factor, factor)))
