"""Small PTX texts on NumPy arrays, for the tests of the emulator."""

from __future__ import annotations

import numpy as np

from cute_gemma.emulator import Launch, LaunchReport, Options, Region, run_launch

KERNEL = """.version 9.0
.target {target}
.address_size 64
{module}
.visible .entry k({params})
.reqntid {block}, 1, 1
{{
.reg .pred %p<40>;
.reg .b16 %h<40>;
.reg .b32 %r<80>;
.reg .b64 %d<80>;
.reg .b128 %q<4>;
{body}
ret;
}}
"""


def run(
    body: str,
    *arrays: np.ndarray,
    block: int = 32,
    grid: int = 1,
    cluster: int = 1,
    module: str = "",
    target: str = "sm_100a",
    dynamic_smem: int = 0,
    scalars: tuple[tuple[str, bytes], ...] = (),
    **options,
) -> LaunchReport:
    """Runs `body` with the arrays' addresses in parameters p0, p1, ...; then the scalars (type, bytes)."""
    types = [*("u64" for _ in arrays), *(kind for kind, _ in scalars)]
    params = ", ".join(f".param .{kind} p{i}" for i, kind in enumerate(types))
    text = KERNEL.format(params=params, body=body, block=block, module=module, target=target)
    values = tuple(int(a.ctypes.data).to_bytes(8, "little") for a in arrays) + tuple(
        value for _, value in scalars
    )
    launch = Launch("k", text, (grid, 1, 1), (block, 1, 1), (cluster, 1, 1), dynamic_smem, values)
    return run_launch(launch, [Region(a.ctypes.data, a.nbytes) for a in arrays], Options(**options))


_REGISTER = {2: "h", 4: "r", 8: "d"}


def lanes(instruction: str, *inputs: np.ndarray, out: type = np.uint32, **options) -> np.ndarray:
    """One instruction on every element: {d} is its result, {a}, {b}, {c} the inputs, {p} a predicate result
    or source.

    All inputs have the same length, a multiple of 32. With {p} and no {d}, the result is 0 or 1 in uint32.
    """
    count = len(inputs[0])
    predicate = "{d}" not in instruction
    result = np.zeros(count, out)
    body = ["mov.u32 %r70, %tid.x;", "mov.u32 %r71, %ctaid.x;", "mad.lo.u32 %r72, %r71, 32, %r70;"]
    names = {}
    for i, array in enumerate((*inputs, result)):
        size = array.itemsize
        body += [f"ld.param.u64 %d{60 + i}, [p{i}];", f"mad.wide.u32 %d{70 + i}, %r72, {size}, %d{60 + i};"]
        name = "d" if i == len(inputs) else "abc"[i]
        names[name] = f"%{_REGISTER[size]}{i + 1}"
        if i < len(inputs):
            body.append(f"ld.global.b{8 * size} {names[name]}, [%d{70 + i}];")
    body.append(instruction.format(p="%p1", q="%p2", **names))
    if predicate:
        body.append(f"selp.b32 {names['d']}, 1, 0, %p1;")
    body.append(f"st.global.b{8 * result.itemsize} [%d{70 + len(inputs)}], {names['d']};")
    run("\n".join(body), *inputs, result, grid=count // 32, **options)
    return result
