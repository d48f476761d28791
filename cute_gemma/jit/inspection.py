"""Reads what a compiled kernel costs from its cubin: registers, stack, shared memory, instructions."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import struct
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cute_gemma.emulator.build import cache_dir, write_atomically
from cute_gemma.emulator.launch import kernel_body, parse_entry
from cute_gemma.jit.cache import content_name
from cute_gemma.jit.compiler import Compiled, compile

# Attributes of .nv.info, (symbol, value) pairs; cuobjdump --dump-elf prints their names as EIATTR_*.
_REGCOUNT, _FRAME_SIZE, _MIN_STACK_SIZE = 0x2F, 0x11, 0x12
# Their encodings: no value, a byte, two bytes, or a 16-bit length and that many bytes.
_FORMAT_SIZED = 4

_LABEL = re.compile(r"^\.text\.([\w$]+):")
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P[T\d]\w*\s+)?([A-Z][\w.]*)")
_TMEM_ALLOC = re.compile(r"tcgen05\.alloc\.[\w.:]+\s+\[[^\]]*\]\s*,\s*([\w%$]+)")


class DisassemblerNotFoundError(RuntimeError):
    """nvdisasm is not installed."""


@dataclass(frozen=True)
class KernelReport:
    """What the cubin says of one device kernel.

    registers: a thread. stack_bytes: a thread's stack frame, spills included. local_loads, local_stores:
    instructions that touch local memory. static_smem: bytes of shared memory besides the launch's dynamic
    part. tmem_columns: tensor-memory columns it allocates, None where it allocates none or their number is
    not a constant. instructions: how often each SASS mnemonic, modifiers included, stands in the code.
    """

    name: str
    target: str
    ptxas: tuple[int, int]
    registers: int
    stack_bytes: int
    local_loads: int
    local_stores: int
    static_smem: int
    threads: int | None
    tmem_columns: int | None
    ptx_path: Path
    cubin_path: Path
    sass_path: Path
    instructions: dict[str, int] = field(repr=False)

    @property
    def spills(self) -> bool:
        """Whether anything lives in local memory."""
        return bool(self.stack_bytes or self.local_loads or self.local_stores)

    def count(self, mnemonic: str) -> int:
        """Instructions with this mnemonic, whatever modifiers follow: count("MUFU"), count("MUFU.EX2")."""
        return sum(n for name, n in self.instructions.items() if f"{name}.".startswith(f"{mnemonic}."))


def inspect(kernel: Any, target: str | None = None) -> tuple[KernelReport, ...]:
    """Reports on each device kernel of `kernel` (a Compiled, or what `compile` takes) from its cubin.

    Raises DisassemblerNotFoundError without nvdisasm, and what `compile` raises.
    """
    compiled = kernel if isinstance(kernel, Compiled) else compile(kernel, target)
    folder = cache_dir("sass")
    stem = folder / content_name(compiled.cubin)
    paths = {suffix: stem.with_suffix(suffix) for suffix in (".ptx", ".cubin", ".sass")}
    for suffix, content in ((".ptx", compiled.ptx.encode()), (".cubin", compiled.cubin)):
        if not paths[suffix].exists():
            write_atomically(paths[suffix], content)
    if not paths[".sass"].exists():
        write_atomically(paths[".sass"], disassemble(paths[".cubin"]).encode())
    instructions = count_instructions(paths[".sass"].read_text())
    resources = _Elf(compiled.cubin).resources()
    return tuple(
        _report(compiled, name, resources[name], instructions[name], paths) for name in compiled.kernel_names
    )


def _report(
    compiled: Compiled,
    name: str,
    resources: dict[int, int],
    instructions: Counter[str],
    paths: dict[str, Path],
) -> KernelReport:
    entry = parse_entry(compiled.ptx, name)
    by_base = Counter[str]()
    for mnemonic, count in instructions.items():
        by_base[mnemonic.partition(".")[0]] += count
    return KernelReport(
        name=name,
        target=compiled.target.name,
        ptxas=compiled.ptxas_version,
        registers=resources[_REGCOUNT],
        stack_bytes=max(resources[_FRAME_SIZE], resources[_MIN_STACK_SIZE]),
        local_loads=by_base["LDL"],
        local_stores=by_base["STL"],
        static_smem=entry.static_smem,
        threads=entry.reqntid[0] * entry.reqntid[1] * entry.reqntid[2] if entry.reqntid else None,
        tmem_columns=tmem_columns(kernel_body(compiled.ptx, name)),
        ptx_path=paths[".ptx"],
        cubin_path=paths[".cubin"],
        sass_path=paths[".sass"],
        instructions=dict(instructions),
    )


def find_disassembler() -> str:
    """Path of nvdisasm: from the nvidia-cuda-nvdisasm package, PATH or CUDA_HOME.

    Raises DisassemblerNotFoundError when there is none.
    """
    try:
        files = importlib.metadata.files("nvidia-cuda-nvdisasm") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == "nvdisasm" and (path := Path(file.locate())).exists():
            return str(path)
    cuda_home = os.environ.get("CUDA_HOME")
    found = shutil.which("nvdisasm")
    if found is None and cuda_home:
        found = shutil.which("nvdisasm", path=f"{cuda_home}/bin")
    if found is None:
        raise DisassemblerNotFoundError(
            "nvdisasm, which reads cubins, is not installed: `pip install nvidia-cuda-nvdisasm` (it is in "
            "the package's `test` extra), or put a CUDA toolkit's bin folder on PATH"
        )
    return found


def disassemble(cubin: Path) -> str:
    """The SASS of a cubin file.

    Raises DisassemblerNotFoundError, and RuntimeError with its output when nvdisasm refuses the file.
    """
    done = subprocess.run([find_disassembler(), "-c", str(cubin)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"nvdisasm failed on {cubin}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def count_instructions(sass: str) -> dict[str, Counter[str]]:
    """Occurrences of each mnemonic by kernel, without what follows a kernel's code as padding."""
    counts: dict[str, Counter[str]] = {}
    current: Counter[str] | None = None
    for line in sass.splitlines():
        if label := _LABEL.match(line):
            current = counts.setdefault(label[1], Counter())
        elif current is not None and (instruction := _INSTRUCTION.match(line)):
            current[instruction[1]] += 1
    for counter in counts.values():
        counter.pop("NOP", None)
    return counts


def tmem_columns(body: str) -> int | None:
    """Columns the kernel's tcgen05.alloc instructions ask for together, if all are constants."""
    total = 0
    for operand in _TMEM_ALLOC.findall(body):
        if not operand.isdigit():
            values = re.findall(rf"mov\.[bus]32\s+{re.escape(operand)},\s*(\w+);", body)
            if len(values) != 1 or not values[0].isdigit():
                return None
            operand = values[0]
        total += int(operand)
    return total or None


class _Elf:
    """The few parts of a cubin's ELF64 little-endian structure that are needed here."""

    def __init__(self, content: bytes) -> None:
        if content[:4] != b"\x7fELF":
            raise ValueError("the cubin is no ELF file")
        self.content = content
        offset, size, count, names = struct.unpack_from("<Q10xHHH", content, 0x28)
        # sh_name, sh_type, sh_flags, sh_addr, sh_offset, sh_size, sh_link, sh_info, sh_addralign, sh_entsize
        headers = [struct.unpack_from("<IIQQQQIIQQ", content, offset + size * i) for i in range(count)]
        self.sections = {self._string(headers[names][4], header[0]): header for header in headers}
        self.headers = headers

    def resources(self) -> dict[str, dict[int, int]]:
        """Attribute -> value of .nv.info, by function name."""
        symbols = self._symbols()
        found: dict[str, dict[int, int]] = {}
        for attribute, payload in self._attributes(".nv.info"):
            if attribute in (_REGCOUNT, _FRAME_SIZE, _MIN_STACK_SIZE):
                symbol, value = struct.unpack("<II", payload)
                found.setdefault(symbols[symbol], {})[attribute] = value
        return found

    def _attributes(self, section: str) -> Iterator[tuple[int, bytes]]:
        position, size = self.sections[section][4:6]
        end = position + size
        while position < end:
            form, attribute, length = struct.unpack_from("<BBH", self.content, position)
            position += 4
            if form == _FORMAT_SIZED:
                yield attribute, self.content[position : position + length]
                position += length

    def _symbols(self) -> list[str]:
        table = self.sections[".symtab"]
        strings = self.headers[table[6]][4]
        starts = range(table[4], table[4] + table[5], table[9])
        return [self._string(strings, struct.unpack_from("<I", self.content, start)[0]) for start in starts]

    def _string(self, table: int, index: int) -> str:
        start = table + index
        return self.content[start : self.content.index(b"\0", start)].decode()
