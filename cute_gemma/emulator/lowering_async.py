"""Lowerings of bulk copies, with and without tensor maps (csrc/tma.c)."""

from __future__ import annotations

from . import ptx
from .lowering import Builder, lowers
from .lowering_words import Words, items, offsets, operands

_DIMS = {f"{n}d": n for n in range(1, 6)}
_REDUCTIONS = {"add": 1, "min": 2, "max": 3, "inc": 4, "dec": 5, "and": 6, "or": 7, "xor": 8}


def lower_bulk(ins: ptx.Instruction, b: Builder) -> None:
    """cp.async.bulk..."""
    words = Words(ins, b, 2)
    words.need("bulk")
    if words.has("commit_group"):
        words.done()
        return b.emit("BULK_COMMIT")
    if words.has("wait_group"):
        read = words.has("read")
        words.done()
        return b.emit("BULK_WAIT", sub=read, imm=operands(ins, b, 1)[0].value)
    if words.has("prefetch"):
        return b.emit("PREFETCH")
    if words.has("tensor"):
        return _tensor(ins, b, words, 0)
    _linear(ins, b, words)


@lowers("cp.reduce")
def lower_reduce(ins: ptx.Instruction, b: Builder) -> None:
    words = Words(ins, b, 2)
    words.need("async", "bulk", "tensor")
    _tensor(ins, b, words, words.choice(_REDUCTIONS))


def _spaces(b: Builder, words: Words) -> tuple[str, str]:
    """Destination and source: the first two words that name a state space."""
    found = [w for w in words.left if w in ("global", "shared::cta", "shared::cluster")]
    if len(found) != 2:
        raise b.unsupported("its state spaces")
    for word in found:
        words.left.remove(word)
    return found[0], found[1]


def _tensor(ins: ptx.Instruction, b: Builder, words: Words, reduction: int) -> None:
    dims = words.choice(_DIMS)
    to, source = _spaces(b, words)
    words.has("tile")
    hint = words.has("L2::cache_hint")
    if to == "global":
        words.need("bulk_group")
        words.done()
        return _store(ins, b, dims, reduction, hint)
    words.need("mbarrier::complete_tx::bytes")
    if reduction or source != "global":
        raise b.unsupported()
    multicast = words.has("multicast::cluster")
    group = words.choice({"cta_group::1": 1, "cta_group::2": 2}, 0)
    words.done()
    destination, tensor, barrier, *rest = operands(ins, b, 3 + multicast + hint)
    target, target_offset = b.address(destination, 32)
    tensor_ref, tensor_offset = b.address(tensor, 64)
    barrier_ref, barrier_offset = b.address(barrier, 32)
    mask = b.src(rest[0], 16) if multicast else b.imm(0, 32)
    coords = [b.src(c, 32) for c in tensor.coords]
    if len(coords) != dims:
        raise b.unsupported(f"{len(coords)} coordinates")
    sub = dims | multicast << 3 | (group == 2) << 4 | (to == "shared::cta") << 5
    b.emit(
        "TMA_LOAD", target, tensor_ref, barrier_ref, mask, *coords, sub=sub,
        imm=offsets(target_offset, barrier_offset), imm2=tensor_offset,
    )  # fmt: skip


def _store(ins: ptx.Instruction, b: Builder, dims: int, reduction: int, hint: bool) -> None:
    tensor, source = operands(ins, b, 2 + hint)[:2]
    tensor_ref, tensor_offset = b.address(tensor, 64)
    source_ref, source_offset = b.address(source, 32)
    coords = [b.src(c, 32) for c in tensor.coords]
    if len(coords) != dims:
        raise b.unsupported(f"{len(coords)} coordinates")
    sub = dims | reduction << 3
    b.emit("TMA_STORE", tensor_ref, source_ref, *coords, sub=sub, imm=source_offset, imm2=tensor_offset)


def _linear(ins: ptx.Instruction, b: Builder, words: Words) -> None:
    to, source = _spaces(b, words)
    hint = words.has("L2::cache_hint")
    if to == "global":
        words.need("bulk_group")
        words.done()
        target, origin, size = operands(ins, b, 3 + hint)[:3]
        target_ref, target_offset = b.address(target, 64)
        source_ref, source_offset = b.address(origin, 32)
        return b.emit(
            "BULK_COPY", target_ref, source_ref, b.src(size, 32), sub=1, imm=offsets(target_offset),
            imm2=source_offset,
        )  # fmt: skip
    words.need("mbarrier::complete_tx::bytes")
    multicast = words.has("multicast::cluster")
    words.done()
    kind = 0 if source == "global" else 2
    target, origin, size, barrier, *rest = operands(ins, b, 4 + multicast + hint)
    target_ref, target_offset = b.address(target, 32)
    source_ref, source_offset = b.address(origin, 64 if kind == 0 else 32)
    barrier_ref, barrier_offset = b.address(barrier, 32)
    mask = b.src(rest[0], 16) if multicast else b.imm(0, 32)
    b.emit(
        "BULK_COPY", target_ref, source_ref, b.src(size, 32), barrier_ref, mask, sub=kind | multicast << 3,
        imm=offsets(target_offset, barrier_offset), imm2=source_offset,
    )  # fmt: skip




# ---------------------------------------------------------------- clusterlaunchcontrol
@lowers("clusterlaunchcontrol")
def lower_cluster_launch_control(ins: ptx.Instruction, b: Builder) -> None:
    words = Words(ins, b)
    words.need("b128")
    if words.has("try_cancel"):
        words.need("async", "mbarrier::complete_tx::bytes")
        words.drop({"shared::cta"})
        everyone = words.has("multicast::cluster::all")
        words.done()
        pointer, barrier = operands(ins, b, 2)
        address, offset = b.address(pointer, 32)
        barrier_ref, barrier_offset = b.address(barrier, 32)
        return b.emit(
            "CLC_TRY_CANCEL", address, barrier_ref, sub=everyone, imm=offsets(offset, barrier_offset)
        )
    words.need("query_cancel")
    target, response = operands(ins, b, 2)
    source = b.src(response, 128)
    if words.has("is_canceled"):
        words.need("pred")
        words.done()
        return b.emit("CLC_QUERY", source, b.pred_dst(target), sub=0)
    words.need("b32")
    axes = {f"get_first_ctaid::{axis}": i for i, axis in enumerate("xyz", 1)}
    part = words.choice(axes | {"get_first_ctaid": 4})
    words.has("v4")
    words.done()
    found = items(target)
    if len(found) != (4 if part == 4 else 1):
        raise b.unsupported(f"{len(found)} results")
    b.emit("CLC_QUERY", source, *(b.dst(t, 32) for t in found), sub=part)
