"""One kernel launch as the host code issued it: the record that launch capture hands to the engine."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import lru_cache

Dim3 = tuple[int, int, int]

# Bytes of shared memory a block may have, compute capability 9.0 and 10.x (CUDA C++ Programming Guide,
# "Technical Specifications per Compute Capability").
MAX_SMEM = 227 * 1024

# PTX ISA, "Kernel Function Parameter Attributes" and "Fundamental Types": bytes of a scalar .param.
_TYPE_SIZE = {
    f"{kind}{bits}": bits // 8 for kind in "busf" for bits in (8, 16, 32, 64) if (kind, bits) != ("f", 8)
}
_PARAM = re.compile(
    r"\.param\s+(?:\.align\s+(?P<align0>\d+)\s+)?\.(?P<type>[busf]\d+)\s*"
    r"(?:\.ptr(?:\s*\.(?:const|global|local|shared))?\s*)?(?:\.align\s+(?P<ptralign>\d+)\s+)?"
    r"(?P<name>[\w$%]+)\s*(?:\[(?P<count>\d+)\])?\s*$"
)
_SHARED = re.compile(
    r"(?<!extern )\.shared\s+(?:\.align\s+(?P<align>\d+)\s+)?\.(?P<type>[busf]\d+)\s+(?P<name>[\w$%]+)"
    r"\s*(?:\[(?P<count>\d+)\])?\s*;"
)
_ENTRY = re.compile(r"^\s*(?:\.visible\s+|\.weak\s+)?\.entry\s+([\w$%]+)", re.MULTILINE)


class LaunchError(RuntimeError):
    """A launch configuration that the CUDA runtime refuses."""


@dataclass(frozen=True)
class Param:
    """A kernel parameter as the PTX .entry declares it; `offset` is its place in the parameter block."""

    name: str
    offset: int
    size: int
    align: int


@dataclass(frozen=True)
class Entry:
    """The header of a PTX .entry: parameters and performance directives (None where the PTX has none).

    static_smem: bytes of the .shared variables of fixed size that the kernel uses.
    """

    name: str
    params: tuple[Param, ...]
    reqntid: Dim3 | None = None
    maxntid: Dim3 | None = None
    minnctapersm: int | None = None
    reqnctapercluster: Dim3 | None = None
    explicitcluster: bool = False
    static_smem: int = 0

    @property
    def param_bytes(self) -> int:
        return self.params[-1].offset + self.params[-1].size if self.params else 0


@dataclass(frozen=True)
class Launch:
    """One kernel launch.

    ptx: the module text the kernel comes from. params: the value of each kernel parameter, in order.
    programmatic: the launch may start before its predecessor in the stream has finished (attribute
    cudaLaunchAttributeProgrammaticStreamSerialization). attributes: every launch attribute as (id, 64 raw
    bytes).
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

    def check(self) -> None:
        """Raises LaunchError for a configuration that the CUDA runtime refuses."""
        entry, threads = self.entry, self.block[0] * self.block[1] * self.block[2]
        reasons = []
        if min(self.grid + self.block + self.cluster) < 1:
            reasons.append("a dimension is zero")
        if threads > 1024:
            reasons.append(f"{threads} threads a block, at most 1024")
        if entry.reqntid and self.block != entry.reqntid:
            reasons.append(f"the kernel requires blocks of {entry.reqntid}")
        if entry.maxntid and threads > entry.maxntid[0] * entry.maxntid[1] * entry.maxntid[2]:
            reasons.append(f"the kernel allows at most {entry.maxntid} threads a block")
        if any(g % c for g, c in zip(self.grid, self.cluster) if c):
            reasons.append("the grid is no multiple of the cluster")
        if entry.reqnctapercluster and self.cluster != entry.reqnctapercluster:
            reasons.append(f"the kernel requires clusters of {entry.reqnctapercluster}")
        if entry.static_smem + self.dynamic_smem > MAX_SMEM:
            reasons.append(
                f"{entry.static_smem + self.dynamic_smem} bytes of shared memory, at most {MAX_SMEM}"
            )
        if reasons:
            raise LaunchError(
                f"launch of {self.kernel_name} refused, grid {self.grid} block {self.block} "
                f"cluster {self.cluster}: {'; '.join(reasons)}"
            )

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
    start = _find_entry(ptx, name)
    header = re.sub(r"//[^\n]*", "", ptx[start : ptx.index("{", start)])
    declared, directives = "", header
    if header.lstrip().startswith("("):
        declared, _, directives = header.partition("(")[2].partition(")")
    return Entry(
        static_smem=_static_smem(ptx, kernel_body(ptx, name)),
        name=name,
        params=_parse_params(name, declared),
        reqntid=_dim3(directives, "reqntid"),
        maxntid=_dim3(directives, "maxntid"),
        minnctapersm=(_dim3(directives, "minnctapersm") or (None,))[0],
        reqnctapercluster=_dim3(directives, "reqnctapercluster"),
        explicitcluster=".explicitcluster" in directives,
    )


def kernel_body(ptx: str, name: str) -> str:
    """The text of kernel `name` between its braces, these included.

    Raises KeyError when the module has no such entry.
    """
    start = ptx.index("{", _find_entry(ptx, name))
    depth = 0
    for brace in re.finditer(r"[{}]", ptx[start:]):
        depth += 1 if brace[0] == "{" else -1
        if not depth:
            return ptx[start : start + brace.end()]
    raise ValueError(f"the PTX ends inside kernel {name}")


def _find_entry(ptx: str, name: str) -> int:
    found = re.search(rf"\.entry\s+{re.escape(name)}(?![\w$%])", ptx)
    if found is None:
        raise KeyError(f"the PTX has no .entry {name}; it has {', '.join(entry_names(ptx)) or 'none'}")
    return found.end()


def _static_smem(ptx: str, body: str) -> int:
    size = 0
    for match in _SHARED.finditer(ptx):
        if re.search(rf"(?<![\w$%]){re.escape(match['name'])}(?![\w$%])", body):
            align = int(match["align"] or _TYPE_SIZE[match["type"]])
            size = -(-size // align) * align + _TYPE_SIZE[match["type"]] * int(match["count"] or 1)
    return size


def _parse_params(kernel: str, text: str) -> tuple[Param, ...]:
    params, offset = [], 0
    for declaration in filter(str.strip, text.split(",")):
        match = _PARAM.match(declaration.strip())
        if match is None:
            raise ValueError(
                f"kernel {kernel}: parameter declaration not understood: {declaration.strip()!r}"
            )
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
