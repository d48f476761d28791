"""A consumer warpgroup of the sm_90a attention kernel: both products of its 64 query rows, the weights
between them, and the output.
 Blocks of 64 keys follow one another as a software pipeline. With lead L, when the weights of block i are
done, the warpgroup issues the scores of block i + L, into registers whose scores it has just used up, and the
product of block i's weights with its values; then it waits for the scores of block i + 1, which were issued a
block or two ago. """

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass._mlir.dialects import llvm
from cutlass.cute.nvgpu import cpasync, warp, warpgroup
from cutlass.cute.typing import BFloat16, Boolean, Float32, Int32, Int64
from cutlass.cutlass_dsl import T, dsl_user_op

from cute_gemma.kernels.common.mask import ALL_ZERO, MASKED_AT_OR_BELOW, MIXED
from cute_gemma.kernels.common.softcap import LOG2_E
from cute_gemma.kernels.common.softmax import pack_bf16
from cute_gemma.kernels.sm90 import attention_softmax as softmax
from cute_gemma.kernels.sm90.attention_load import ROWS, TILE, stage_of

WARP = 32
WARPGROUP = 128
STORE_BARRIER = 1  # first of the named barriers, one a consumer; 0 is the CTA's


@dataclass(frozen=True)
class Consumer:
    """What one warpgroup works with.
 group: its number; q (…, k blocks), k and v (…, k blocks, stage): operands in shared memory; scores: buffers
of S; weights: two buffers of P as A operand; out: O; sums: of the thread's rows; lazy: of
softmax.lazy_weights; word: under a mask tensor, the next key tile's. """

    group: Int32
    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    scores: tuple
    weights: tuple
    out: cute.Tensor
    sums: cute.Tensor
    lazy: softmax.Lazy
    word: cute.Tensor


@dataclass(frozen=True)
class Unit:
    """A work unit as one thread sees it: the query tile, the last key tile, the sequence length; under a mask
    tensor the tensor, which of its batches, minus each row's largest entry, and whether that is 0 throughout
    the warp."""

    tile: Int32
    last: Int32
    s: Int32
    mask: cute.Tensor | None
    batch: Int32 | None
    shift: cute.Tensor | None
    plain: Boolean | None


@dataclass(frozen=True)
class KeyTile:
    """One key tile of a unit. j: its number. clean: whether every key of it is read, with nothing added; True
    or False where that is known beforehand. kind: its class under a mask tensor."""

    j: Int32
    clean: Boolean | bool
    kind: Int32 | None


@cute.jit
def consumer_role(kernel, bars, smem, out, mask, b, s):
    """All units of one warpgroup."""
    me = _consumer(kernel, smem)
    number = Int32(0)  # blocks of keys used so far
    if cutlass.const_expr(kernel.mask == "tensor"):
        cute.arch.griddepcontrol_wait()
    for index in cutlass.range(kernel.unit_count(b, s), unroll=1):
        tile, head, batch = kernel.unit(index, b, s)
        me.sums.fill(0.0)
        me.lazy.shift.fill(softmax.LOWEST)
        first, end = kernel.key_tiles(tile, s)
        unit = _unit(me, mask, tile, batch, end - 1, s)
        cute.arch.mbarrier_wait(bars.q_full + me.group, index & 1)
        if cutlass.const_expr(kernel.mask == "tensor"):
            count = _read_word(smem.counts, me.group)
            if count > 0:
                number = _walk(kernel, me, bars, smem, unit, count, number)
            elif cutlass.const_expr(not kernel.shares_q):
                _arrive(bars.q_empty + me.group)
        else:
            number = _walk(kernel, me, bars, smem, unit, end - first, number)
        if cutlass.const_expr(kernel.shares_q):
            # Registers are all in use: anew, instead of kept during the walk.
            tile, head, batch = kernel.unit(softmax.unseen(index), b, s)
        _write_output(kernel, me, smem.out, out, (tile, head, batch))
        if cutlass.const_expr(kernel.shares_q):
            _wait_for_store()
            _arrive(bars.q_empty + me.group)
    _wait_for_store()


def _consumer(kernel, smem):
    group = cute.arch.make_warp_uniform((cute.arch.thread_idx()[0] >> 7) - 1)
    qk_mma, pv_mma = kernel.mmas()
    # Descriptors are the same for every thread of a warpgroup: slice 0.
    qk, pv = qk_mma.get_slice(0), pv_mma.get_slice(0)
    # (D, 64, stages)
    transposed = cute.make_tensor(smem.v.iterator, cute.select(smem.v.layout, mode=[1, 0, 2]))
    s_shape = qk_mma.partition_shape_C((ROWS, ROWS))
    o_shape = pv_mma.partition_shape_C((ROWS, kernel.head_dim))
    return Consumer(
        group,
        qk_mma.make_fragment_A(qk.partition_A(smem.q))[None, None, None, group],
        qk_mma.make_fragment_B(qk.partition_B(smem.k)),
        pv_mma.make_fragment_B(pv.partition_B(transposed)),
        tuple(cute.make_rmem_tensor(s_shape, Float32) for _ in range(kernel.lead)),
        tuple(cute.make_rmem_tensor(pv_mma.partition_shape_A((ROWS, ROWS)), BFloat16) for _ in range(2)),
        cute.make_rmem_tensor(o_shape, Float32),
        cute.make_rmem_tensor((softmax.ROWS,), Float32),
        softmax.Lazy(
            cute.make_rmem_tensor((softmax.ROWS,), Float32),
            cute.make_rmem_tensor((softmax.ROWS,), Float32),
            cute.make_rmem_tensor((1,), Int32),
        ),
        cute.make_rmem_tensor((1,), Int32),
    )


@dsl_user_op
def _thread(*, loc=None, ip=None) -> Int32:
    """This thread's number in its warpgroup, read anew at each use, so that no register keeps it or what
    follows from it."""
    text = f"{{.reg .u32 t; mov.u32 t, %tid.x; and.b32 $0, t, {WARPGROUP - 1};}}"
    return Int32(
        llvm.inline_asm(
            T.i32(), [], text, "=r", has_side_effects=True, asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip
        )
    )


def _row(me, tile):
    """This thread's first row in the sequence; the other is 8 below."""
    thread = _thread()
    return tile * TILE + me.group * ROWS + (thread >> 5) * 16 + ((thread & 31) >> 2)


@cute.jit
def _unit(me, mask: cutlass.Constexpr, tile, batch, last, s):
    tensor, shift, plain = None, None, None
    if cutlass.const_expr(mask is not None):
        tensor, maxima, _ = mask
        row = _row(me, tile)
        batch = cutlass.min(batch, Int32(tensor.shape[0]) - 1)
        shift = cute.make_rmem_tensor((softmax.ROWS,), Float32)
        for i in cutlass.range_constexpr(softmax.ROWS):
            largest = Float32(-Float32.inf)
            for c in cutlass.range(maxima.shape[1], unroll=1):
                largest = cute.arch.fmax(largest, maxima[batch, c, cutlass.min(row + 8 * i, s - 1)], nan=True)
            # A row with no key to attend to has no weights to shift.
            shift[i] = cutlass.select_(largest == -Float32.inf, Float32(0.0), -largest)
        plain = cute.arch.vote_all_sync(Boolean(shift[0] == 0.0) & Boolean(shift[1] == 0.0))
    return Unit(tile, last, s, tensor, batch, shift, plain)


# ---- the pipeline ------------------------------------------------------------------------------------------


@cute.jit
def _walk(kernel, me, bars, smem, unit, count, number):
    """All key tiles of a unit, `count` of them, at least one. Returns the number of the block after."""
    if count > 1:
        _first_tile(kernel, me, bars, smem, unit, number, True)
        for i in cutlass.range(1, count - 1, unroll=1):
            _later_tile(kernel, me, bars, smem, unit, i, number + 2 * i, False)
        _later_tile(kernel, me, bars, smem, unit, count - 1, number + 2 * (count - 1), True)
    else:
        _first_tile(kernel, me, bars, smem, unit, number, False)
    number = number + 2 * count
    warpgroup.wait_group(0)
    _arrive(bars.v_empty + stage_of(kernel, number - 1)[0])
    return number


@cute.jit
def _first_tile(kernel, me, bars, smem, unit, number, more: cutlass.Constexpr):
    """The unit's first key tile; `more`: it is not the only one."""
    _issue_scores(kernel, me, bars, number, 0, Boolean(False))
    warpgroup.commit_group()
    warpgroup.wait_group(0)
    _release_keys(kernel, me, bars, smem, number, True)
    tile = _key_tile(kernel, me, unit, Int32(0), True)
    if cutlass.const_expr(kernel.lead == 2):
        _issue_scores(kernel, me, bars, number + 1, 1, Boolean(False))
        warpgroup.commit_group()
    _block(kernel, me, bars, smem, unit, tile, 0, number, (True, not more))
    _block(kernel, me, bars, smem, unit, tile, 1, number + 1, (False, not more))


@cute.jit
def _later_tile(kernel, me, bars, smem, unit, i, number, last: cutlass.Constexpr):
    """Tile i of a unit, i > 0, whose first block is `number`."""
    tile = _key_tile(kernel, me, unit, i, False)
    for half in cutlass.range_constexpr(2):
        _block(kernel, me, bars, smem, unit, tile, half, number + half, (False, last))


@cute.jit
def _block(kernel, me, bars, smem, unit, tile, half: cutlass.Constexpr, number, place: cutlass.Constexpr):
    """Weights of the block that is this half of a key tile, then the products that follow from them. place:
    whether it is the first block of the unit, and whether the tile is its last.
 Before products are issued, those issued a block ago end: that leaves the other warpgroup's to keep the
tensor core busy, and ptxas, which follows groups in flight through no loop, wants it so. """
    first, last = place
    more = not last or (half == 0 and kernel.lead == 1)
    # Asked before the weights, so that the answer, most often yes, need not be waited for.
    keys_there = _is_full(kernel, bars.k_full, number + kernel.lead) if more else None
    values_there = _is_full(kernel, bars.v_full, number)
    _weights(kernel, me, unit, tile, half, first)
    warpgroup.wait_group(0)
    if cutlass.const_expr(kernel.lead == 2 and not (last and half == 1)):
        _release_keys(kernel, me, bars, smem, number + 1, half == 1)
    if cutlass.const_expr(not first):
        _arrive(bars.v_empty + stage_of(kernel, number - 1)[0])
    if cutlass.const_expr(last and half == 0 and not kernel.shares_q):
        _arrive(bars.q_empty + me.group)  # that was the last that read q
    if cutlass.const_expr(not kernel.fixed_shift and not first):
        if me.lazy.raised[0] != 0:
            _scale_out(me, [me.lazy.rescale[0], me.lazy.rescale[1]])
    if cutlass.const_expr(more):
        _issue_scores(kernel, me, bars, number + kernel.lead, half + kernel.lead, keys_there)
        if cutlass.const_expr(kernel.lead == 1):
            warpgroup.commit_group()  # waited for before the product is
    stage, phase = stage_of(kernel, number)
    if not values_there:
        cute.arch.mbarrier_wait(bars.v_full + stage, phase)
    warpgroup.fence()
    _gemm(kernel.mmas()[1], me.out, me.weights[half], me.v[None, None, None, stage], not first)
    warpgroup.commit_group()
    if cutlass.const_expr(kernel.lead == 1 and not (last and half == 1)):
        warpgroup.wait_group(1)
        _release_keys(kernel, me, bars, smem, number + 1, half == 1)


@cute.jit
def _issue_scores(kernel, me, bars, number, half: cutlass.Constexpr, there):
    """S = q k^T of block `number`, once its keys are there, as they are known to be if `there`."""
    stage, phase = stage_of(kernel, number)
    if not there:
        cute.arch.mbarrier_wait(bars.k_full + stage, phase)
    warpgroup.fence()
    _gemm(kernel.mmas()[0], me.scores[half % kernel.lead], me.q, me.k[None, None, None, stage], False)


def _release_keys(kernel, me, bars, smem, number, first: bool):
    """Gives back the stage of keys of block `number`, whose scores are done. first: of its key tile, whose
    word goes with it."""
    stage = stage_of(kernel, number)[0]
    if kernel.mask == "tensor" and first:
        me.word[0] = _read_word(smem.words, stage)
    _arrive(bars.k_empty + stage)


@cute.jit
def _read_word(words, index):
    """A word that the load warp wrote, read by one lane, as one arrives for the warp; compute-sanitizer counts
    no bar.warp.sync between other lanes' reads and that arrival."""
    word = Int32(0)
    if cute.arch.lane_idx() == 0:
        word = words[index]
    word = cute.arch.shuffle_sync(word, 0)
    cute.arch.sync_warp()
    return word


def _is_full(kernel, barriers, number):
    stage, phase = stage_of(kernel, number)
    return cute.arch.mbarrier_test_wait(barriers + stage, phase)


def _gemm(mma, accumulator, a, b, accumulate):
    """accumulator (+)= a b^T over all K blocks. The atom is fresh: setting its field rebinds it in this
    scope."""
    atom = cute.make_mma_atom(mma.op)
    for i in range(cute.size(a, mode=[2])):
        atom.set(warpgroup.Field.ACCUMULATE, accumulate if i == 0 else True)
        cute.gemm(atom, accumulator, a[None, None, i], b[None, None, i], accumulator)


@cute.jit
def _arrive(barrier):
    """One arrival a warp."""
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(barrier)


# ---- weights -----------------------------------------------------------------------------------------------


def _key_tile(kernel, me, unit, i, first: bool):
    """Tile i of the unit."""
    if kernel.mask == "tensor":
        word = me.word[0]
        j, kind = word >> 2, word & 3
        clean = Boolean(kind == ALL_ZERO) & unit.plain & Boolean((j + 1) * TILE <= unit.s)
        return KeyTile(j, clean, kind)
    j = unit.last - i
    if kernel.window is None or first:
        return KeyTile(j, not first, None)
    # The last row, at the end of the diagonal tile, sees all of the tiles that its window holds.
    return KeyTile(j, i < kernel.window // TILE, None)


@cute.jit
def _weights(kernel, me, unit, tile, half: cutlass.Constexpr, first: cutlass.Constexpr):
    """Weights of the block that is this half of a key tile."""
    me.lazy.raised[0] = Int32(0)
    if cutlass.const_expr(isinstance(tile.clean, bool)):
        if cutlass.const_expr(tile.clean):
            _clean_weights(kernel, me, unit, half, first)
        else:
            _cut_weights(kernel, me, unit, tile, half, first)
    else:
        if tile.clean:
            _clean_weights(kernel, me, unit, half, first)
        else:
            _cut_weights(kernel, me, unit, tile, half, first)


def _clean_weights(kernel, me, unit, half, first):
    rS, rP = me.scores[half % kernel.lead], cute.recast_tensor(me.weights[half], Int32)
    exponent = softmax.exponents(kernel.scale, kernel.softcap)
    if kernel.fixed_shift:
        softmax.weights(rS, rP, me.sums, softmax.Read(unit.s, False), exponent, None)
    else:
        softmax.lazy_weights(rS, rP, me.sums, me.lazy, softmax.Read(unit.s, False), exponent, None, first)


@cute.jit
def _cut_weights(kernel, me, unit, tile, half: cutlass.Constexpr, first: cutlass.Constexpr):
    """A block in which some keys are hidden, or something is added to the logits."""
    rS, rP = me.scores[half % kernel.lead], cute.recast_tensor(me.weights[half], Int32)
    key = tile.j * TILE + (1 - half) * ROWS + 2 * (_thread() & 3)  # of this thread's first element
    row = _row(me, unit.tile)
    view = softmax.View(_last_keys(kernel, unit, tile, row, key), kernel.window)
    exponent = softmax.exponents(kernel.scale, kernel.softcap)
    read = softmax.Read(unit.s, False)
    if cutlass.const_expr(first and kernel.skips):
        read = _read_first(kernel, me, unit, tile)
    if cutlass.const_expr(kernel.mask == "tensor"):
        # Entries are read once, and what follows takes no more registers than without a mask.
        softmax.to_exponents(rS, unit.s, exponent)
        _add_mask(rS, unit, tile, row, key, view, cute.size(rS) if kernel.lead == 2 else 8)
        if cutlass.const_expr(kernel.fixed_shift):
            softmax.weights(rS, rP, me.sums, read, softmax.given, softmax.GIVEN)
        else:
            softmax.lazy_weights(rS, rP, me.sums, me.lazy, read, softmax.given, softmax.GIVEN, first)
    elif cutlass.const_expr(kernel.fixed_shift):
        softmax.weights(rS, rP, me.sums, read, exponent, view)
    else:
        softmax.lazy_weights(rS, rP, me.sums, me.lazy, read, exponent, view, first)


def _read_first(kernel, me, unit, tile):
    """Whether any of the warpgroup's rows reads any key of a unit's first block, the upper half of its last key tile:
    neither lies beyond the sequence, nor the keys beyond the rows."""
    row, key = unit.tile * TILE + me.group * ROWS, tile.j * TILE + ROWS
    found = cutlass.min(unit.s - row, unit.s - key)
    if kernel.mask == "causal":
        found = cutlass.min(found, row + ROWS - key)
    return softmax.Read(found, True)


def _last_keys(kernel, unit, tile, row, key):
    """The last key, less `key`, that positions let each of the thread's rows read. Rows beyond the sequence
    are stored nowhere: a causal row needs no other bound."""
    rows = [row, row + 8]
    if kernel.mask == "causal":
        last = rows
    elif kernel.mask == "none":
        last = [unit.s - 1] * 2
    else:  # a class says so, or the entries do
        diagonal = Boolean(tile.kind != ALL_ZERO) & Boolean(tile.kind != MIXED)
        last = [cutlass.select_(diagonal, cutlass.min(row, unit.s - 1), unit.s - 1) for row in rows]
    return tuple(x - key for x in last)


@cute.jit
def _add_mask(rS, unit, tile, row, key, view, group: cutlass.Constexpr):
    """Adds the mask, less each row's largest entry, to exponents, which become -inf where the key is hidden.
    group: elements whose entries are read at a time."""
    if tile.kind == MIXED:
        left, size = unit.s - key, unit.mask.element_type.width // 8
        starts = []
        for i in cutlass.range_constexpr(softmax.ROWS):
            entry = (Int64(unit.batch) * unit.s + cutlass.min(row + 8 * i, unit.s - 1)) * unit.s + key
            starts.append(unit.mask.iterator.toint() + entry * size)
        for first in cutlass.range_constexpr(0, cute.size(rS), group):
            # A branch of their own: ptxas reads as many entries at once as it finds together.
            if left > 2 * first:
                _add_entries(rS, unit, range(first, first + group), starts, left, size)
            else:
                for e in cutlass.range_constexpr(first, first + group):
                    rS[e] = Float32(-Float32.inf)
    else:
        for e in cutlass.range_constexpr(cute.size(rS)):
            bias = unit.shift[(e // 2) % softmax.ROWS] * LOG2_E
            bias = cutlass.select_(softmax.seen(view, e), bias, Float32(-Float32.inf))
            rS[e] = rS[e] + bias


def _add_entries(rS, unit, elements, starts, left, size):
    """The same for some elements. left: columns of the mask from this thread's first one on."""
    for e in elements:
        value = _entry(starts[(e // 2) % softmax.ROWS], 8 * (e // 4) + e % 2, left, size)
        # The difference first: it is exact where entries are close, however large they are.
        bias = (value + unit.shift[(e // 2) % softmax.ROWS]) * LOG2_E
        bias = cutlass.select_(value <= MASKED_AT_OR_BELOW, Float32(-Float32.inf), bias)
        rS[e] = rS[e] + bias


@dsl_user_op
def _entry(start: Int64, column: int, left: Int32, size: int, *, loc=None, ip=None) -> Float32:
    """Entry `column` of a row of the mask from address `start` on, as fp32; -inf from column `left` on, which
    is not read. size: its bytes, 2 for bf16, the upper half of an fp32, and 4 for fp32."""
    if size == 2:
        load = "mov.b16 x, 0xff80; @p ld.global.b16 x, [$1 + {0}]; mov.b16 z, 0; mov.b32 $0, {{z, x}};"
    else:
        load = "mov.b32 $0, 0xff800000; @p ld.global.b32 $0, [$1 + {0}];"
    text = "{{.reg .pred p; .reg .b16 x, z; setp.gt.s32 p, $2, {1}; " + load + "}}"
    bits = llvm.inline_asm(
        T.i32(), [start.ir_value(loc=loc, ip=ip), left.ir_value(loc=loc, ip=ip)],
        text.format(column * size, column), "=&r,l,r", has_side_effects=True,
        asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip,
    )  # fmt: skip
    return Int32(bits).bitcast(Float32)


def _scale_out(me, factors):
    for c in range(cute.size(me.out)):
        me.out[c] = me.out[c] * factors[(c // 2) % softmax.ROWS]


def _clear_empty(me, totals):
    """Sets O to 0 in rows without weights, where it is what it was. Filled with 0 where a unit turns out to
    have no keys, it would make ptxas let products wait for one another (C7514)."""
    for c in range(cute.size(me.out)):
        empty = Boolean(totals[(c // 2) % softmax.ROWS] == 0.0)
        me.out[c] = cutlass.select_(empty, Float32(0.0), me.out[c])


# ---- output ------------------------------------------------------------------------------------------------


@cute.jit
def _wait_for_store():
    """Until the last stored tile has left shared memory."""
    if _thread() < WARP:
        with cute.arch.elect_one():
            cute.arch.cp_async_bulk_wait_group(0, read=True)


@cute.jit
def _write_output(kernel, me, sO, out, unit):
    """O / sums to bf16, through shared memory, by one TMA store of this warpgroup's 64 rows; rows without
    weights are 0."""
    tile, head, batch = unit
    factors, totals = [], []
    for row in cutlass.range_constexpr(softmax.ROWS):
        total = me.sums[row]
        for offset in cutlass.range_constexpr(2):  # a row's columns lie in four lanes
            total = total + cute.arch.shuffle_sync_bfly(total, offset=1 << offset)
        factors.append(cutlass.select_(total == 0.0, Float32(0.0), cute.arch.rcp_approx(total)))
        totals.append(total)
    _scale_out(me, factors)
    if cutlass.const_expr(kernel.mask == "tensor"):
        _clear_empty(me, totals)
    rounded = cute.make_rmem_tensor(me.out.shape, BFloat16)
    packed = cute.recast_tensor(rounded, Int32)
    for c in cutlass.range_constexpr(0, cute.size(me.out), 2):
        packed[c // 2] = pack_bf16(me.out[c], me.out[c + 1])
    store = cute.make_tiled_copy_C(
        cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), BFloat16), kernel.mmas()[1]
    ).get_slice(_thread())
    _wait_for_store()
    cute.arch.barrier(barrier_id=STORE_BARRIER + me.group, number_of_threads=WARPGROUP)
    cute.copy(store, store.retile(rounded), store.partition_D(sO)[None, None, None, me.group])
    cute.arch.fence_view_async_shared()
    cute.arch.barrier(barrier_id=STORE_BARRIER + me.group, number_of_threads=WARPGROUP)
    if _thread() < WARP:
        atom, mO = out
        gO = cute.local_tile(mO[None, None, (head, batch)], (ROWS, kernel.head_dim), (None, 0))
        tOsO, tOgO = cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(sO, 0, 2), cute.group_modes(gO, 0, 2)
        )
        # One thread stores, the one that waits: bulk groups are a thread's own.
        with cute.arch.elect_one():
            cute.copy(atom, tOsO[None, me.group], tOgO[None, tile * (TILE // ROWS) + me.group])
            cute.arch.cp_async_bulk_commit_group()
