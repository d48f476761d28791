"""One kernel launch as the host code issued it: the record that launch capture hands to the engine."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import lru_cache

Dim3 = tuple[int, int, int]

# PTX ISA, "Kernel Function Parameter Attributes" and "Fundamental Types": bytes of a scalar .param.
_TYPE_SIZE = {
    f"{kind}{bits}": bits // 8 for kind in "busf" for bits in (8, 16, 32, 64) if (kind, bits) != ("f", 8)
}
_PARAM = re.compile(
    r"\.param\s+(?:\.align\s+(?P<align0>\d+)\s+)?\.(?P<type>[busf]\d+)\s*"
    r"(?:\.ptr(?:\s*\.(?:const|global|local|shared))?\s*)?(?:\.align\s+(?P<ptralign>\d+)\s+)?"
    r"(?P<name>[\w$%]+)\s*(?:\[(?P<count>\d+)\])?\s*$"
)
_ENTRY = re.compile(r"^\s*(?:\.visible\s+|\.weak\s+)?\.entry\s+([\w$%]+)", re.MULTILINE)


@dataclass(frozen=True)
class Param:
    """A kernel parameter as the PTX .entry declares it. `offset` is its place in the packed parameter block."""

    name: str
    offset: int
    size: int
    align: int


@dataclass(frozen=True)
class Entry:
    """The header of a PTX .entry: parameters and performance directives (None where the PTX has none)."""

    name: str
    params: tuple[Param, ...]
    reqntid: Dim3 | None = None
    maxntid: Dim3 | None = None
    minnctapersm: int | None = None
    reqnctapercluster: Dim3 | None = None
    explicitcluster: bool = False

    @property
    def param_bytes(self) -> int:
        return self.params[-1].offset + self.params[-1].size if self.params else 0


@dataclass(frozen=True)
class Launch:
    """One kernel launch.

    ptx: the module text the kernel comes from. params: the value of each kernel parameter, in order.
    programmatic: the launch may start before its predecessor in the stream has finished (attribute
    cudaLaunchAttributeProgrammaticStreamSerialization). attributes: every launch attribute as (id, 64 raw bytes).
    """

    kernel_name: str
    ptx: str = field(repr=False)
    grid: Dim3
    block: Dim3
    cluster: Dim3
    dynamic_smem: int
    params: tuple[bytes, ...] = field(repr=False)
    programmatic: bool = False
    stream: int = 0
    attributes: tuple[tuple[int, bytes], ...] = field(default=(), repr=False)

    @property
    def entry(self) -> Entry:
        """The kernel's PTX header."""
        return parse_entry(self.ptx, self.kernel_name)

    def param_block(self) -> bytes:
        """The parameters packed at the offsets at which ld.param finds them; padding is zero."""
        entry = self.entry
        block = bytearray(entry.param_bytes)
        for param, value in zip(entry.params, self.params, strict=True):
            block[param.offset : param.offset + param.size] = value
        return bytes(block)


def entry_names(ptx: str) -> tuple[str, ...]:
    """Names of the kernels a PTX module defines."""
    return tuple(_ENTRY.findall(ptx))


@lru_cache(maxsize=256)
def parse_entry(ptx: str, name: str) -> Entry:
    """Reads the header of kernel `name`.

    Raises KeyError when the module has no such entry, ValueError for a declaration it does not understand.
    """
    found = re.search(rf"\.entry\s+{re.escape(name)}(?![\w$%])", ptx)
    if found is None:
        raise KeyError(f"the PTX has no .entry {name}; it has {', '.join(entry_names(ptx)) or 'none'}")
    header = re.sub(r"//[^\n]*", "", ptx[found.end() : ptx.index("{", found.end())])
    declared, directives = "", header
    if header.lstrip().startswith("("):
        declared, _, directives = header.partition("(")[2].partition(")")
    return Entry(
        name=name,
        params=_parse_params(name, declared),
        reqntid=_dim3(directives, "reqntid"),
        maxntid=_dim3(directives, "maxntid"),
        minnctapersm=(_dim3(directives, "minnctapersm") or (None,))[0],
        reqnctapercluster=_dim3(directives, "reqnctapercluster"),
        explicitcluster=".explicitcluster" in directives,
    )


def _parse_params(kernel: str, text: str) -> tuple[Param, ...]:
    params, offset = [], 0
    for declaration in filter(str.strip, text.split(",")):
        match = _PARAM.match(declaration.strip())
        if match is None:
            raise ValueError(f"kernel {kernel}: parameter declaration not understood: {declaration.strip()!r}")
        element = _TYPE_SIZE[match["type"]]
        size = element * int(match["count"] or 1)
        align = int(match["align0"] or element)
        offset = -(-offset // align) * align
        params.append(Param(match["name"], offset, size, align))
        offset += size
    return tuple(params)


def _dim3(directives: str, name: str) -> Dim3 | None:
    match = re.search(rf"\.{name}\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?", directives)
    return tuple(int(g or 1) for g in match.groups()) if match else None
