"""The softmax warpgroup of the attention kernel: scores in TMEM to weights in TMEM, then O to global memory.

One thread owns one query row: its scores come by one TMEM load of 128 columns, so maxima and sums need no shuffle.
"""

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync, tcgen05
from cutlass.cute.typing import BFloat16, Boolean, Float32, Int32

from cute_gemma.kernels.common.softcap import Softcap, exp2_capped, exp2_capped_on_fma, exp2_capped_wide

TILE = 128
WARP = 32
EPILOGUE_COLUMNS = 32


def softmax_role(kernel, bars, sO, columns, out, tile, count, g, s):
    """Warpgroup g: `count` key tiles of query tile `tile[0] * query_tiles + g`; then the epilogue."""
    _softmax_role(kernel, bars, sO, columns, out, tile, count, g, s)


def _tmem_rows(pointer, columns, op):
    """This thread's part of 128 rows by `columns` fp32 TMEM columns, and the tiled copy that moves it."""
    tensor = cute.make_tensor(pointer, cute.make_layout((TILE, columns), stride=(1 << 16, 1)))
    tiled = tcgen05.make_tmem_copy(cute.make_copy_atom(op, Float32), tensor)
    return tensor, tiled


@cute.jit
def _softmax_role(kernel, bars, sO, columns, out, tile, count, g: cutlass.Constexpr, s):
    thread = cute.arch.thread_idx()[0] % TILE
    s_column, o_column = columns
    q_tile = tile[0] * kernel.tuning.query_tiles + g
    row = q_tile * TILE + thread
    load = tcgen05.Ld32x32bOp(tcgen05.Repetition(TILE))
    store = tcgen05.St32x32bOp(tcgen05.Repetition(32))
    tS, tiled_load = _tmem_rows(s_column, TILE, load)
    tP, tiled_store = _tmem_rows(s_column, TILE // 2, store)
    thr_load, thr_store = tiled_load.get_slice(thread), tiled_store.get_slice(thread)
    tSt = thr_load.partition_S(tS)
    tPt = thr_store.partition_D(tP)
    shape_s = thr_load.partition_D(cute.make_identity_tensor((TILE, TILE))).shape
    shape_p = thr_store.partition_S(cute.make_identity_tensor((TILE, TILE // 2))).shape
    softcap = Softcap(kernel.scale, kernel.softcap)
    total = (Float32(0.0), Float32(0.0))
    for j in cutlass.range(count, unroll=1):
        cute.arch.mbarrier_wait(bars.s_full + g, j & 1)
        rS = cute.make_rmem_tensor(shape_s, Float32)
        cute.copy(tiled_load, tSt, rS)
        cute.arch.fence_view_async_tmem_load()
        rP = cute.make_rmem_tensor(shape_p, Float32)
        limit = s - 1
        if cutlass.const_expr(kernel.mask == "causal"):
            limit = cutlass.min(row, limit)
        limit = limit - j * TILE
        for c in cutlass.range_constexpr(0, TILE, 2):
            p = exp2_capped((rS[c], rS[c + 1]), softcap)
            p0 = cutlass.select_(c <= limit, p[0], Float32(0.0))
            p1 = cutlass.select_(c + 1 <= limit, p[1], Float32(0.0))
            total = cute.arch.add_packed_f32x2(total, (p0, p1))
            rS[c], rS[c + 1] = p0, p1
        rPb = cute.make_tensor(cute.recast_ptr(rP.iterator, dtype=BFloat16), cute.make_layout(TILE))
        rPb.store(cute.make_tensor(rS.iterator, cute.make_layout(TILE)).load().to(BFloat16))
        cute.copy(tiled_store, rP, tPt)
        cute.arch.fence_view_async_tmem_store()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(bars.p_full + g)
    denominator = total[0] + total[1]
    _epilogue(kernel, bars, sO, o_column, out, tile, count, g, denominator)


@cute.jit
def _epilogue(kernel, bars, sO, o_column, out, tile, count, g: cutlass.Constexpr, denominator):
    """O / denominator to bf16, through shared memory, by one TMA store a warp."""
    thread = cute.arch.thread_idx()[0] % TILE
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    if count > 0:
        cute.arch.mbarrier_wait(bars.o_full + g, 0)
        mine = sO[thread % WARP, None, warp]  # (D,) of this row
        inverse = cutlass.select_(denominator > 0.0, cute.arch.rcp_approx(denominator), Float32(0.0))
        load = tcgen05.Ld32x32bOp(tcgen05.Repetition(EPILOGUE_COLUMNS))
        for i in cutlass.range_constexpr(kernel.head_dim // EPILOGUE_COLUMNS):
            tO, tiled = _tmem_rows(o_column + i * EPILOGUE_COLUMNS, EPILOGUE_COLUMNS, load)
            thr = tiled.get_slice(thread)
            rO = cute.make_rmem_tensor(thr.partition_D(cute.make_identity_tensor((TILE, EPILOGUE_COLUMNS))).shape, Float32)
            cute.copy(tiled, thr.partition_S(tO), rO)
            cute.arch.fence_view_async_tmem_load()
            rOb = cute.make_rmem_tensor((EPILOGUE_COLUMNS,), BFloat16)
            rOb.store((cute.make_tensor(rO.iterator, cute.make_layout(EPILOGUE_COLUMNS)).load() * inverse).to(BFloat16))
            cute.autovec_copy(rOb, cute.local_tile(mine, (EPILOGUE_COLUMNS,), (i,)))
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        atom, mO = out
        pair, head, batch = tile
        # (32, D, row blocks of 32)
        gO = cute.local_tile(mO, (WARP, kernel.head_dim), (None, 0, (head, batch)))
        tOsO, tOgO = cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(sO, 0, 2), cute.group_modes(gO, 0, 2)
        )
        block = (pair * kernel.tuning.query_tiles + g) * (TILE // WARP) + warp % (TILE // WARP)
        cute.copy(atom, tOsO[None, warp], tOgO[None, block])
        cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0, read=True)
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(bars.done)
