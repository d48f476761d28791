"""Registers that wgmma.mma_async uses without a wgmma.fence after other instructions touched them.

PTX ISA, "wgmma.fence": a fence comes between an access to a register and a wgmma.mma_async that has it as
accumulator or in A, unless that access is another wgmma.mma_async's. No run shows the lack of one, since values
are here as soon as they are written: all paths are looked at instead, whether or not they can be taken.
"""

from __future__ import annotations


def unfenced(builder, flow) -> list[int]:
    """wgmma.mma_async instructions that some path reaches with a register touched since its last fence.
    builder: lowering.Builder; flow: its registers.Flow."""
    products: dict[int, list[int]] = builder.pending.get("wgmma", {})
    owned = set().union(*products.values())
    fences = {
        i
        for i, ins in enumerate(builder.kernel.instructions)
        if list(ins.words[:2]) == ["wgmma", "fence"] and ins.guard is None
    }
    # Registers touched since the last fence, at the start of each block; all of them before the first fence.
    touched_at: list[set[int] | None] = [None] * len(flow.starts)
    touched_at[0] = owned
    found, work = set(), [0] if products else []
    while work:
        b = work.pop()
        touched = set(touched_at[b])
        for i in range(flow.starts[b], flow.ends[b]):
            if i in fences:
                touched.clear()
            elif i not in products:
                touched |= owned.intersection(builder.uses[i] + builder.defs[i])
            elif not touched.isdisjoint(products[i]):
                found.add(i)
        for t in flow.successors[b]:
            if touched_at[t] is None or not touched <= touched_at[t]:
                touched_at[t] = touched | (touched_at[t] or set())
                work.append(t)
    return sorted(found)
