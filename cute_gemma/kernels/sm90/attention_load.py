"""The load warp of the sm_90a attention kernel: q, k and v of each work unit by TMA, in the order the
consumers use them.
 Block i of a unit is half of a key tile, the upper half first; tiles come last first, so that a causal
diagonal is at the start. With lead L the order is k_0 .. k_L-1, then k_i+L and v_i for each i. """

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.typing import Boolean, Int32

from cute_gemma.kernels.common.mask import ALL_MASKED

ROWS = 64
TILE = 128
SCAN_BLOCK = 32  # tile classes a warp reads at once


@cute.jit
def load_role(kernel, bars, smem, atoms, tensors, mask, b, s):
    """All units of this CTA."""
    number = Int32(0)  # blocks loaded so far
    count = Int32(kernel.unit_count(b, s))
    tile, head, batch = kernel.unit(Int32(0), b, s)
    # Always so. Without a branch the first unit's divisions would come after the wait, where others wait for them.
    if (count | tile | head | batch) >= 0:
        cute.arch.griddepcontrol_wait()
    for index in cutlass.range(count, unroll=1):
        kv_head = head // (kernel.heads // kernel.kv_heads)
        q = _parts(atoms[0], smem.q, _of_head(kernel, tensors[0], head, batch))
        k = _parts(atoms[1], smem.k, _of_head(kernel, tensors[1], kv_head, batch))
        v = _parts(atoms[2], smem.v, _of_head(kernel, tensors[2], kv_head, batch))
        loads = ((atoms[1], k, bars.k_full, bars.k_empty), (atoms[2], v, bars.v_full, bars.v_empty))
        if cutlass.const_expr(kernel.mask == "tensor"):
            classes = class_row(mask[2], tile, batch, s)
            _load_q(kernel, bars, smem, (atoms[0], q), index, tile, _count(classes))
            number = _load_chosen(kernel, smem, loads, classes, number)
        else:
            _load_q(kernel, bars, smem, (atoms[0], q), index, tile, None)
            first, end = kernel.key_tiles(tile, s)
            number = _begin_tile(kernel, smem, loads, end - 1, None, number)
            for i in cutlass.range(end - 1 - first, unroll=1):
                number = _next_tile(kernel, smem, loads, end - 1 - i, end - 2 - i, None, number)
            number = _end_tile(kernel, smem, loads, first, number)
        tile, head, batch = kernel.unit(index + 1, b, s)
    cute.arch.griddepcontrol_launch_dependents()


def _of_head(kernel, tensor, head, batch):
    """(64, D, blocks) of one head."""
    return cute.local_tile(tensor[None, None, (head, batch)], (ROWS, kernel.head_dim), (None, 0))


def _parts(atom, smem, gmem):
    """Shared and global tensors cut for one TMA atom: ((box), stage), ((box), block)."""
    return cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(smem, 0, 2), cute.group_modes(gmem, 0, 2)
    )


@cute.jit
def _load_q(kernel, bars, smem, load, index, tile, count):
    """q of each consumer and, under a mask tensor, how many key tiles there are."""
    atom, (target, source) = load
    consumers = cute.size(smem.q, mode=[2])
    for g in cutlass.range_constexpr(consumers):
        cute.arch.mbarrier_wait(bars.q_empty + g, (index & 1) ^ 1)
        with cute.arch.elect_one():
            if cutlass.const_expr(count is not None):
                smem.counts[g] = count
            cute.arch.mbarrier_arrive_and_expect_tx(bars.q_full + g, ROWS * kernel.head_dim * 2)
        cute.copy(atom, source[None, tile * consumers + g], target[None, g], tma_bar_ptr=bars.q_full + g)


@cute.jit
def _load_block(kernel, smem, load, block, number, word):
    """Block `number` of this CTA's keys or values from rows 64 * `block`, once its stage is free. word: of
    the tile whose first keys these are, under a mask tensor, else None."""
    atom, (target, source), full, empty = load
    stage, phase = stage_of(kernel, number)
    # Also where other waits tell that it is free: every phase is to be waited for.
    cute.arch.mbarrier_wait(empty + stage, phase ^ 1)
    with cute.arch.elect_one():
        if cutlass.const_expr(word is not None):
            smem.words[stage] = word
        cute.arch.mbarrier_arrive_and_expect_tx(full + stage, ROWS * kernel.head_dim * 2)
    cute.copy(atom, source[None, block], target[None, stage], tma_bar_ptr=full + stage)


def stage_of(kernel, number):
    """(stage, parity) of a block, counted over all units of the CTA."""
    stages = kernel.tuning.stages
    return number & (stages - 1), (number >> (stages.bit_length() - 1)) & 1


def _begin_tile(kernel, smem, loads, j, word, number):
    """The first tile's keys that lead. Returns the number of the first block whose values are to come."""
    for i in range(kernel.lead):
        _load_block(kernel, smem, loads[0], 2 * j + 1 - i, number + i, word if i == 0 else None)
    return number


def _next_tile(kernel, smem, loads, j, following, word, number):
    """Values of tile j, and the keys that come before them: L blocks ahead."""
    if kernel.lead == 2:
        keys, words = (2 * following + 1, 2 * following), (word, None)
    else:
        keys, words = (2 * j, 2 * following + 1), (None, word)
    for i in range(2):
        _load_block(kernel, smem, loads[0], keys[i], number + kernel.lead + i, words[i])
        _load_block(kernel, smem, loads[1], 2 * j + 1 - i, number + i, None)
    return number + 2


def _end_tile(kernel, smem, loads, j, number):
    """What is left of a unit's last tile."""
    if kernel.lead == 1:
        _load_block(kernel, smem, loads[0], 2 * j, number + 1, None)
    for i in range(2):
        _load_block(kernel, smem, loads[1], 2 * j + 1 - i, number + i, None)
    return number + 2


# ---- under a mask tensor: tiles by class -------------------------------------------------------------------


def class_row(classes, tile, batch, s):
    """Classes of the key tiles of one query tile; a mask shared by all batches has one set."""
    tiles = cute.ceil_div(s, TILE)
    base = (cutlass.min(batch, Int32(classes.shape[0]) - 1) * tiles + tile) * tiles
    return cute.make_tensor(classes.iterator + base, cute.make_layout(tiles))


def _scan(classes, block):
    """Classes of 32 key tiles, one a lane, and a bit for each that is to be read."""
    tiles = cute.size(classes)
    j = block * SCAN_BLOCK + cute.arch.lane_idx()
    kind = cutlass.select_(j < tiles, classes[cutlass.min(j, tiles - 1)].to(Int32), Int32(ALL_MASKED))
    return kind, Int32(cute.arch.vote_ballot_sync(Boolean(kind != ALL_MASKED)))


@cute.jit
def _count(classes):
    """How many tiles are to be read."""
    count = Int32(0)
    for block in cutlass.range(cute.ceil_div(cute.size(classes), SCAN_BLOCK), unroll=1):
        count += cute.arch.popc(_scan(classes, block)[1])
    return count


@cute.jit
def _load_chosen(kernel, smem, loads, classes, number):
    """Keys and values of the tiles that are to be read, last first."""
    last = Int32(-1)
    blocks = cute.ceil_div(cute.size(classes), SCAN_BLOCK)
    for i in cutlass.range(blocks, unroll=1):
        block = blocks - 1 - i
        kinds, bits = _scan(classes, block)
        while bits != 0:
            lane = 31 - Int32(cute.arch.clz(bits))
            bits = bits ^ (1 << lane)
            j = block * SCAN_BLOCK + lane
            word = 4 * j + cute.arch.shuffle_sync(kinds, lane)
            if last < 0:
                _begin_tile(kernel, smem, loads, j, word, number)
            else:
                number = _next_tile(kernel, smem, loads, last, j, word, number)
            last = j
    if last >= 0:
        number = _end_tile(kernel, smem, loads, last, number)
    return number
