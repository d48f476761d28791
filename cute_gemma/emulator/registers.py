"""Register allocation: from the builder's symbolic registers to slots of a warp's register file.

Registers are allocated by linear scan over live intervals, so that a warp's file stays within the cache. One
lane's control flow decides liveness, as for a scalar processor: a row holds every lane's own value, and lanes
elsewhere in the program keep theirs because writes are masked. A result that arrives asynchronously keeps its
row to itself until the wait of its class has run on every path.
"""

from __future__ import annotations

import heapq

import numpy as np

from .lowering import CONST, LABEL, PENDING, PRED, WARP_SPECIALS, Builder
from .wgmma_fences import unfenced

# struct Op of emu.h.
OP_DTYPE = np.dtype(
    [
        ("code", "<u2"), ("flags", "u1"), ("nargs", "u1"), ("guard", "<i4"), ("args", "<u4"), ("sub", "<u4"),
        ("target", "<i4"), ("line", "<u4"), ("imm", "<i8"), ("imm2", "<i8"),
    ]
)  # fmt: skip
SLOT = 64
_CONST_BIT = -(1 << 31)


class Flow:
    """Basic blocks of the instruction list: starts[b], ends[b] (exclusive), successors[b]."""

    def __init__(self, builder: Builder) -> None:
        count = len(builder.uses)
        leaders = {0, *(t for targets in builder.jumps.values() for t in targets)}
        leaders.update(i + 1 for i in builder.jumps)
        leaders.update(i + 1 for i in builder.ends)
        self.starts = sorted(i for i in leaders if i < count)
        self.ends = [*self.starts[1:], count]
        block_of = {start: b for b, start in enumerate(self.starts)}
        self.successors: list[list[int]] = []
        for b, end in enumerate(self.ends):
            last = end - 1
            targets = [block_of[t] for t in builder.jumps.get(last, ()) if t < count]
            if last not in builder.ends and b + 1 < len(self.starts):
                targets.append(b + 1)
            self.successors.append(targets)


def _liveness(builder: Builder, flow: Flow, nregs: int) -> tuple[np.ndarray, np.ndarray]:
    """Registers live at the start and the end of each block, as bool arrays [block, register]."""
    blocks = len(flow.starts)
    use = np.zeros((blocks, nregs), bool)
    define = np.zeros((blocks, nregs), bool)
    instructions = builder.kernel.instructions
    for b, (start, end) in enumerate(zip(flow.starts, flow.ends)):
        defined, used = set(), set()
        for i in range(start, end):
            used.update(r for r in builder.uses[i] if r not in defined)
            if instructions[i].guard is None:  # a guarded write keeps the old value in some lanes
                defined.update(builder.defs[i])
        use[b, list(used)] = True
        define[b, list(defined)] = True
    live_in, live_out = use.copy(), np.zeros_like(use)
    keep = ~define
    predecessors: list[list[int]] = [[] for _ in range(blocks)]
    for b, targets in enumerate(flow.successors):
        for t in targets:
            predecessors[t].append(b)
    work, queued = list(range(blocks)), [True] * blocks
    while work:
        b = work.pop()
        queued[b] = False
        for t in flow.successors[b]:
            live_out[b] |= live_in[t]
        new = use[b] | (live_out[b] & keep[b])
        if (new != live_in[b]).any():
            live_in[b] = new
            for p in predecessors[b]:
                if not queued[p]:
                    queued[p] = True
                    work.append(p)
    return live_in, live_out


def _in_flight(builder: Builder, flow: Flow) -> list[set[int]]:
    """For each instruction, the registers that some path leaves in flight before it."""
    before: list[set[int]] = [set() for _ in builder.uses]
    for name, starts in builder.pending.items():
        done = {i for i, names in builder.completions.items() if name in names}
        at_start: list[set[int] | None] = [None] * len(flow.starts)
        at_start[0] = set()
        work = [0]
        while work:
            b = work.pop()
            state = set(at_start[b])
            for i in range(flow.starts[b], flow.ends[b]):
                before[i] |= state
                # A guarded wait may not run: what it waits for stays in flight.
                if i in done and builder.kernel.instructions[i].guard is None:
                    state.clear()
                state.update(starts.get(i, ()))
            for t in flow.successors[b]:
                if at_start[t] is None or not state <= at_start[t]:
                    at_start[t] = state | (at_start[t] or set())
                    work.append(t)
    return before


def _intervals(
    builder: Builder, flow: Flow, before: list[set[int]], live: tuple, nregs: int
) -> tuple[list, list]:
    """First and last instruction at which each register needs its row; last < first where it is unused."""
    first, last = [len(builder.uses)] * nregs, [-1] * nregs
    for i, (uses, defs) in enumerate(zip(builder.uses, builder.defs)):
        for r in (*uses, *defs):
            if i < first[r]:
                first[r] = i
            last[r] = i
    live_in, live_out = live
    blocks = len(flow.starts)
    for r, b in zip(*_first_true(live_in)):
        first[r] = min(first[r], flow.starts[b])
    for r, b in zip(*_first_true(live_out[::-1])):
        last[r] = max(last[r], flow.ends[blocks - 1 - b] - 1)
    for i, flying in enumerate(before):
        for r in flying:
            first[r] = min(first[r], i)
            last[r] = max(last[r], i)
    return first, last


def _first_true(table: np.ndarray) -> tuple[list[int], list[int]]:
    """Columns of a bool table that hold a True, and the first row of each that does."""
    columns = np.flatnonzero(table.any(0))
    return columns.tolist(), table[:, columns].argmax(0).tolist()


def _undefined(builder: Builder, live_in: np.ndarray) -> list[int]:
    """Instructions that read a PTX register which some path has not written. wgmma is passed over: with a
    false scale-d it does not read the accumulators that it names."""
    instructions = builder.kernel.instructions
    unwritten = set(np.flatnonzero(live_in[0, : builder.kernel.nregs]).tolist())
    for i, ins in enumerate(instructions):
        if unwritten and ins.words[0] == "wgmma":
            unwritten -= set(builder.defs[i])
    return [i for i, uses in enumerate(builder.uses) if not unwritten.isdisjoint(uses)] if unwritten else []


def _linear_scan(first: list[int], last: list[int], registers: list[int]) -> tuple[dict[int, int], int]:
    """Rows for registers of one size: register -> row, and how many rows."""
    rows, free, active, count = {}, [], [], 0
    for r in sorted(registers, key=first.__getitem__):
        while active and active[0][0] < first[r]:
            heapq.heappush(free, heapq.heappop(active)[1])
        if free:
            row = heapq.heappop(free)
        else:
            row, count = count, count + 1
        rows[r] = row
        heapq.heappush(active, (last[r], row))
    return rows, count


def allocate(builder: Builder) -> tuple[dict[int, int], int, list[int], list[int]]:
    """Slots of the value registers, the slots a register file has, and the instructions that may read an
    unwritten one, and those that use one without a wgmma.fence.

    Warp specials and the scratch row keep their slots all along. Flags operations that touch a register in
    flight.
    """
    flow = Flow(builder)
    before = _in_flight(builder, flow)
    nregs = len(builder.reg_bits)
    live = _liveness(builder, flow, nregs)
    first, last = _intervals(builder, flow, before, live, nregs)
    slots: dict[int, int] = {builder.scratch: 0}
    top = 8  # scratch: one 128-bit row
    fixed = {builder.scratch, *builder.specials.values()}
    for value in builder.specials.values():
        slots[value] = top
        top += 2
    for size in (64, 128, 32):  # the widest first keeps every row aligned
        low = {64: 33, 128: 65, 32: 1}[size]
        members = [
            r
            for r, bits in enumerate(builder.reg_bits)
            if low <= bits <= size and r not in fixed and last[r] >= 0
        ]
        rows, count = _linear_scan(first, last, members)
        width = size // 16
        top = -(-top // width) * width
        slots.update((r, top + row * width) for r, row in rows.items())
        top += count * width
    _flag_pending(builder, before)
    return slots, top, _undefined(builder, live[0]), unfenced(builder, flow)


def _flag_pending(builder: Builder, before: list[set[int]]) -> None:
    for op in builder.ops:
        flying = before[op.ins]
        if flying and not op.settled and not flying.isdisjoint(op.refs):
            op.flags |= PENDING


def pred_shift(top: int) -> int:
    """What is added to predicate indices (but the two constant ones) so that none is also the slot of a value
    register: the check for registers in flight sees bare numbers."""
    return top


def encode(
    builder: Builder, slots: dict[int, int], const_slots: list[int], top: int
) -> tuple[np.ndarray, np.ndarray]:
    """Operations and references as emu.h lays them out; targets become indices of operations."""
    count = len(builder.ops)
    ops = np.zeros(count, OP_DTYPE)
    refs: list[int] = []
    first_op = builder.first_op
    shift = pred_shift(top)

    def predicate(index: int) -> int:
        return index + shift if index > 1 else index

    for row, op in enumerate(builder.ops):
        ops[row] = (
            op.code, op.flags, len(op.refs), predicate(op.guard), len(refs), op.sub,
            -1 if op.target is None else first_op[op.target], op.line, op.imm, op.imm2,
        )  # fmt: skip
        for ref in op.refs:
            if ref < CONST:
                refs.append(slots[ref])
            elif ref < PRED:
                refs.append(const_slots[ref - CONST] + _CONST_BIT)
            elif ref < LABEL:
                refs.append(predicate(ref - PRED))
            else:
                refs.append(first_op[ref - LABEL])
    return ops, np.array(refs or [0], np.int32)


def special_slots(builder: Builder, slots: dict[int, int]) -> list[int]:
    """Slots of the warp specials in the order of Program's fields, -1 for one that is not used."""
    return [slots[builder.specials[n]] if n in builder.specials else -1 for n in WARP_SPECIALS]
