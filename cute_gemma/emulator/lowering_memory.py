"""Lowerings of loads, stores, atomics, matrix moves and prefetches (csrc/memory.c, csrc/atomic.c)."""

from __future__ import annotations

from . import ptx
from .lowering import Builder, lowers
from .lowering_words import CACHE_WORDS, Words, items, offsets, operands

GLOBAL, SHARED, CLUSTER, GENERIC = range(4)        # SPACE_* of csrc/memory.h
WRITABLE_SPACES = {"global": GLOBAL, "shared": SHARED, "shared::cta": SHARED, "shared::cluster": CLUSTER}
SPACES = WRITABLE_SPACES | {"const": GLOBAL}
VECTORS = {"v2": 2, "v4": 4, "v8": 8}
SCOPES = ("cta", "cluster", "gpu", "sys")


def space(words: Words) -> int:
    if words.has("param", "param::entry"):
        return GLOBAL
    return words.choice(SPACES, GENERIC)


def address_bits(where: int) -> int:
    return 32 if where in (SHARED, CLUSTER) else 64


def semantics(words: Words, strongest: str) -> int:
    """0 weak, 1 relaxed or volatile, 2 acquire or release, 3 the same of .cta or .cluster scope."""
    if words.has("weak"):
        return 0
    if words.has("volatile"):
        return 1
    for value, names in ((1, ("relaxed",)), (2, (strongest,))):
        if words.has(*names):
            narrow = words.has("cta", "cluster")            # orders nothing between clusters
            words.has(*SCOPES)
            return 3 if narrow and value == 2 else value
    if words.has("mmio"):
        raise words.b.unsupported("modifier .mmio")
    return 0


def element(ins: ptx.Instruction, b: Builder, words: Words) -> tuple[str, int]:
    kind = words.left.pop()
    bits = ptx.TYPE_BITS.get(kind, 0)
    if bits < 8 or kind in ("f32x2",):
        raise b.unsupported(f"type .{kind}")
    return kind, bits


def cache_policy(ins: ptx.Instruction, words: Words, ops: tuple) -> tuple:
    """Operands without the cache policy, which changes nothing here."""
    return ops[:-1] if words.has("L2::cache_hint") else ops


@lowers("ld", "ldu")
def lower_ld(ins: ptx.Instruction, b: Builder) -> None:
    words = Words(ins, b)
    kind, bits = element(ins, b, words)
    ops = cache_policy(ins, words, ins.operands)
    if len(ops) != 2:
        raise b.unsupported(f"{len(ops)} operands")
    sem, where = semantics(words, "acquire"), space(words)
    read_only = words.has("nc")
    words.drop(CACHE_WORDS)
    count = words.choice(VECTORS, 1)
    words.done()
    targets = items(ops[0])
    if len(targets) != count:
        raise b.unsupported(f"{len(targets)} results")
    address, offset = b.address(ops[1], address_bits(where))
    # Sub-word results are extended to the width of their register.
    widest = max((t.bits for t in targets if t is not ptx.SINK), default=32)
    width = 1 if bits >= 32 else {16: 0, 32: 1, 64: 2}[widest]
    stored = bits if bits >= 32 else 64 if width == 2 else 32
    signed = kind[0] == "s"
    results = [b.dst(t, stored, signed=signed) if t is not ptx.SINK else b.scratch for t in targets]
    sub = where | (bits // 8).bit_length() - 1 << 2 | count << 5 | sem << 9 | signed << 11 | width << 12
    sub |= read_only << 14
    b.emit("LD", address, *results, sub=sub, imm=offset)


@lowers("st")
def lower_st(ins: ptx.Instruction, b: Builder) -> None:
    words = Words(ins, b)
    if words.has("async"):
        return _store_async(ins, b, words)
    kind, bits = element(ins, b, words)
    ops = cache_policy(ins, words, ins.operands)
    if len(ops) != 2:
        raise b.unsupported(f"{len(ops)} operands")
    sem, where = semantics(words, "release"), words.choice(WRITABLE_SPACES, GENERIC)
    words.drop(CACHE_WORDS)
    count = words.choice(VECTORS, 1)
    words.done()
    sources = items(ops[1])
    if len(sources) != count:
        raise b.unsupported(f"{len(sources)} values")
    address, offset = b.address(ops[0], address_bits(where))
    sub = where | (bits // 8).bit_length() - 1 << 2 | count << 5 | sem << 9
    b.emit("ST", address, *(b.src(s, bits) for s in sources), sub=sub, imm=offset)


def _store_async(ins: ptx.Instruction, b: Builder, words: Words) -> None:
    """st.async of 4- or 8-byte elements (csrc/st_async.c)."""
    words.need("shared::cluster", "mbarrier::complete_tx::bytes")
    words.drop({"weak"})
    bits = words.choice({"b32": 32, "u32": 32, "s32": 32, "f32": 32, "b64": 64, "u64": 64, "s64": 64, "f64": 64})
    count = words.choice({"v2": 2, "v4": 4}, 1)
    words.done()
    target, values, barrier = operands(ins, b, 3)
    sources = items(values)
    if len(sources) != count or bits * count > 128:
        raise b.unsupported(f"{len(sources)} values of {bits} bits")
    address, offset = b.address(target, 32)
    barrier_ref, barrier_offset = b.address(barrier, 32)
    b.emit(
        "ST_ASYNC", address, barrier_ref, *(b.src(s, bits) for s in sources),
        sub=(bits // 8).bit_length() - 1 | count << 2, imm=offsets(offset, barrier_offset),
    )  # fmt: skip


# ---------------------------------------------------------------- atom, red
_ATOMICS = ("add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec")
_ATOMIC_TYPES = {
    "u32": 0, "b32": 0, "u64": 0, "b64": 0, "b16": 0, "s32": 1, "s64": 1, "f32": 2, "f64": 3,
    "f16": 4, "f16x2": 4, "bf16": 5, "bf16x2": 5,
}  # fmt: skip
_FLOAT_ATOMICS = {2: ("add", "exch"), 3: ("add", "exch"), 4: ("add", "min", "max"), 5: ("add", "min", "max")}


@lowers("atom", "red")
def lower_atom(ins: ptx.Instruction, b: Builder) -> None:
    words = Words(ins, b)
    if words.has("async"):
        raise b.unsupported()
    result = ins.words[0] == "atom"
    kind, bits = element(ins, b, words)
    ops = list(cache_policy(ins, words, ins.operands))
    if kind not in _ATOMIC_TYPES:
        raise b.unsupported(f"type .{kind}")
    sem = words.choice({"relaxed": 0, "acquire": 1, "release": 2, "acq_rel": 3}, 0)
    narrow = words.has("cta", "cluster")
    words.has(*SCOPES)
    where, count = words.choice(WRITABLE_SPACES, GENERIC), words.choice(VECTORS, 1)
    words.drop({"noftz", *CACHE_WORDS})
    what = words.choice(_ATOMICS)
    words.done()
    type_ = _ATOMIC_TYPES[kind]
    if type_ in _FLOAT_ATOMICS and _ATOMICS[what] not in _FLOAT_ATOMICS[type_]:
        raise b.unsupported(f".{_ATOMICS[what]} of .{kind}")
    results = items(ops.pop(0)) if result else ()
    pointer, *values = ops
    if len(values) != (2 if _ATOMICS[what] == "cas" else 1):
        raise b.unsupported(f"{len(values)} values")
    address, offset = b.address(pointer, address_bits(where))
    sources = [b.src(v, bits) for operand in values for v in items(operand)]
    targets = [b.dst(r, bits) if r is not ptx.SINK else b.scratch for r in results]
    sub = where | (bits // 8).bit_length() - 1 << 2 | count << 5 | sem << 9 | what << 11
    sub |= type_ << 15 | result << 18 | narrow << 19
    b.emit("ATOM", address, *sources, *targets, sub=sub, imm=offset)


# ---------------------------------------------------------------- ldmatrix, stmatrix, mapa, prefetches
def _matrix(ins: ptx.Instruction, b: Builder) -> int:
    words = Words(ins, b)
    words.need("sync", "aligned", "m8n8", "b16")
    words.has("shared", "shared::cta")
    sub = words.choice({"x1": 1, "x2": 2, "x4": 4}) | words.has("trans") << 3
    words.done()
    return sub


@lowers("ldmatrix")
def lower_ldmatrix(ins: ptx.Instruction, b: Builder) -> None:
    sub = _matrix(ins, b)
    target, pointer = operands(ins, b, 2)
    address, offset = b.address(pointer, 32)
    b.emit("LDMATRIX", address, *(b.dst(t, 32) for t in items(target)), sub=sub, imm=offset, aligned=True)


@lowers("stmatrix")
def lower_stmatrix(ins: ptx.Instruction, b: Builder) -> None:
    sub = _matrix(ins, b)
    pointer, source = operands(ins, b, 2)
    address, offset = b.address(pointer, 32)
    b.emit("STMATRIX", address, *(b.src(s, 32) for s in items(source)), sub=sub, imm=offset, aligned=True)


@lowers("mapa")
def lower_mapa(ins: ptx.Instruction, b: Builder) -> None:
    words = Words(ins, b)
    shared = words.has("shared::cluster")
    bits = words.choice({"u32": 32, "u64": 64})
    words.done()
    if bits == 64 and shared:
        raise b.unsupported("64-bit shared::cluster addresses")
    target, pointer, rank = operands(ins, b, 3)
    address = b.src(pointer, bits)
    b.emit("MAPA", b.dst(target, bits), address, b.src(rank, 32), sub=bits == 64)


@lowers("prefetch", "prefetchu", "applypriority", "discard")
def lower_prefetch(ins: ptx.Instruction, b: Builder) -> None:
    if ins.words[0] != "prefetch":
        raise b.unsupported()
    words = Words(ins, b)
    words.drop({"global", "param", "const", "tensormap", "L1", "L2", "L2::evict_last", "L2::evict_normal"})
    words.done()
    b.emit("PREFETCH")


@lowers("createpolicy")
def lower_createpolicy(ins: ptx.Instruction, b: Builder) -> None:
    b.emit("MOV_B64", b.dst(ins.operands[0], 64), b.imm(0, 64))        # an opaque hint


# ---------------------------------------------------------------- cp.async
@lowers("cp.async")
def lower_cp(ins: ptx.Instruction, b: Builder) -> None:
    if "bulk" in ins.words:
        from .lowering_async import lower_bulk

        return lower_bulk(ins, b)
    words = Words(ins, b, 2)
    if words.has("commit_group"):
        words.done()
        return b.emit("CP_ASYNC_COMMIT")
    if words.has("wait_group", "wait_all"):
        everything = "wait_all" in ins.words
        return b.emit("CP_ASYNC_WAIT", sub=everything, imm=0 if everything else ins.operands[0].value)
    if words.has("mbarrier"):
        words.need("arrive", "b64")
        noinc = words.has("noinc")
        words.has("shared", "shared::cta")
        words.done()
        address, offset = b.address(operands(ins, b, 1)[0], 32)
        return b.emit("CP_ASYNC_ARRIVE", address, sub=noinc, imm=offset)
    _cp_async(ins, b, words)


def _cp_async(ins: ptx.Instruction, b: Builder, words: Words) -> None:
    ops = cache_policy(ins, words, ins.operands)
    words.need("global")
    words.drop({"ca", "cg", "shared", "shared::cta", "L2::64B", "L2::128B", "L2::256B"})
    words.done()
    if len(ops) not in (3, 4) or not isinstance(ops[2], ptx.Imm):
        raise b.unsupported("operands")
    if len(ops) == 4 and isinstance(ops[3], ptx.Reg) and ops[3].bits == 1:
        raise b.unsupported("an ignore-src predicate")
    to, to_offset = b.address(ops[0], 32)
    source, offset = b.address(ops[1], 64)
    refs = [to, source] + ([b.src(ops[3], 32)] if len(ops) == 4 else [])
    b.emit("CP_ASYNC", *refs, sub=ops[2].value | (len(ops) == 4) << 5, imm=offsets(to_offset), imm2=offset)
