"""A kernel's PTX as a program of the interpreter, made once per PTX text and kept in memory."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import threading

import numpy as np

from . import lowering_alu, lowering_cvt, lowering_engine, lowering_flow, ptx, registers
from .lowering import WARP_SPECIALS, Builder, opcodes

assert lowering_alu and lowering_cvt and lowering_flow and lowering_engine  # imported for what they register

_FM_EDGE = 8192  # csrc/alu.h
_APPROXIMATE = (
    "EX2_F32", "LG2_F32", "RCP_APPROX_F32", "RSQRT_F32", "SQRT_APPROX_F32", "SIN_F32", "COS_F32", "TANH_F32",
    "DIV_APPROX_F32", "DIV_FULL_F32", "EX2_HALF", "TANH_HALF",
)  # fmt: skip
_CACHE_SIZE = 128


def aligned(size: int, alignment: int = 128) -> np.ndarray:
    """A zeroed byte array whose data starts at a multiple of `alignment`."""
    buffer = np.zeros(size + alignment, np.uint8)
    start = -buffer.ctypes.data % alignment
    return buffer[start : start + size]


class CProgram(ctypes.Structure):
    """Program of emu.h."""

    _fields_ = [
        ("ops", ctypes.c_void_p), ("nops", ctypes.c_uint32), ("refs", ctypes.c_void_p), ("consts",
        ctypes.c_void_p),
        ("reg_bytes", ctypes.c_uint32), ("npreds", ctypes.c_uint32), ("specials",
        ctypes.c_int32 * len(WARP_SPECIALS)),
    ]  # fmt: skip


class Program:
    """One kernel, ready to run.

    kernel, module: the parsed PTX. ops, refs: as emu.h lays them out. first_op[i]: the operation that is
    executed as often as instruction i. static_smem, dynamic_base: of shared memory. reg_bytes: register file
    of a warp. undefined: instructions that may read a register nothing wrote; unfenced: those that may use
    one without a wgmma.fence.
    """

    def __init__(self, module: ptx.Module, kernel: ptx.Kernel, lines: list[str]) -> None:
        builder = Builder(kernel, module, lines)
        builder.run()
        slots, top, self.undefined, self.unfenced = registers.allocate(builder)
        self.module, self.kernel, self.lines, self.source = module, kernel, lines, builder.source
        self.const_keys = list(builder.consts)
        self.const_slots, self.const_size = self._place_constants()
        self.ops, self.refs = registers.encode(builder, slots, self.const_slots, top)
        self.specials = registers.special_slots(builder, slots)
        self.reg_bytes, self.npreds = top * registers.SLOT, builder.npreds + registers.pred_shift(top)
        self.first_op = np.array(builder.first_op[:-1], np.int64)
        self.static_smem, self.dynamic_base = builder.static_smem, builder.dynamic_base
        self.edge_ops = np.isin(self.ops["code"], [opcodes()[name] for name in _APPROXIMATE])
        self.variables = self._place_variables()
        self.template = aligned(max(64, self.const_size))
        for (kind, value, bits), slot in zip(self.const_keys, self.const_slots):
            if kind == "imm":
                self._row(self.template, slot, bits)[:] = value
            elif kind == "lanes":
                self._row(self.template, slot, bits)[:] = value
            elif kind == "global":
                name, offset = value
                self._row(self.template, slot, bits)[:] = self.variables[name].ctypes.data + offset

    def _place_constants(self) -> tuple[list[int], int]:
        slots, top = [], 0
        for _, _, bits in self.const_keys:
            slots.append(top)
            top += bits // 16
        return slots, top * registers.SLOT

    def _place_variables(self) -> dict[str, np.ndarray]:
        """Memory of .global and .const variables. It lives as long as the program, as a loaded module's
        does."""
        memory = {}
        for variable in (*self.module.variables.values(), *self.kernel.variables.values()):
            if variable.space in ("global", "const"):
                memory[variable.name] = aligned(max(1, variable.size))
                if variable.data:
                    memory[variable.name][: len(variable.data)] = np.frombuffer(variable.data, np.uint8)
        return memory

    @staticmethod
    def _row(bank: np.ndarray, slot: int, bits: int) -> np.ndarray:
        start = slot * registers.SLOT
        return bank[start : start + 4 * bits].view(np.uint64 if bits == 64 else np.uint32)

    def constants(self, params: np.ndarray, launch: dict[str, int]) -> np.ndarray:
        """The constant bank of one launch: params is its parameter block, launch the values of special
        registers."""
        bank = aligned(len(self.template))
        bank[:] = self.template
        for (kind, value, bits), slot in zip(self.const_keys, self.const_slots):
            if kind == "param":
                offset, width, signed = value
                field = int.from_bytes(
                    params[offset : offset + width // 8].tobytes(), "little", signed=signed
                )
                self._row(bank, slot, bits)[:] = field & ((1 << bits) - 1)
            elif kind == "param_addr":
                self._row(bank, slot, bits)[:] = params.ctypes.data + value
            elif kind == "launch":
                self._row(bank, slot, bits)[:] = launch[value]
        return bank

    def c_struct(self, consts: np.ndarray, approx_edge: bool = False) -> tuple[CProgram, list]:
        """The struct for C, and what has to outlive it."""
        ops = self.ops
        if approx_edge:
            ops = ops.copy()
            ops["sub"][self.edge_ops] |= _FM_EDGE
        program = CProgram(
            ops.ctypes.data, len(ops), self.refs.ctypes.data, consts.ctypes.data, self.reg_bytes, self.npreds,
            (ctypes.c_int32 * len(WARP_SPECIALS))(*self.specials),
        )  # fmt: skip
        return program, [ops, consts]

    def text(self, line: int) -> str | None:
        return self.lines[line - 1].strip() if 0 < line <= len(self.lines) else None

    @functools.cached_property
    def _sources(self) -> dict[int, str | None]:
        return {ins.line: self.source(ins) for ins in self.kernel.instructions}

    def source_of(self, line: int) -> str | None:
        """ "file:line" of the Python source of a PTX line, when the kernel was compiled with line
        information."""
        return self._sources.get(line)

    def instruction_counts(self, counts: np.ndarray) -> np.ndarray:
        """Executions of each PTX instruction from [warp, operation] counts: [warp, instruction]."""
        return counts[:, self.first_op]


_programs: dict[tuple[bytes, str], Program] = {}
_modules: dict[bytes, tuple[ptx.Module, list[str]]] = {}
_lock = threading.Lock()


def load(text: str, kernel: str) -> Program:
    """The program of `kernel` in the PTX `text`.

    Raises KeyError for a kernel that the text lacks, PtxSyntaxError, and UnsupportedInstruction for what is
    not implemented.
    """
    key = hashlib.sha256(text.encode()).digest()
    with _lock:
        found = _programs.get((key, kernel))
        if found is not None:
            return found
        if key not in _modules:
            if len(_modules) >= _CACHE_SIZE:
                _modules.pop(next(iter(_modules)))
            _modules[key] = (ptx.parse(text), text.split("\n"))
        module, lines = _modules[key]
        if kernel not in module.kernels:
            raise KeyError(f"the PTX has no kernel {kernel}; it has {', '.join(module.kernels) or 'none'}")
        if len(_programs) >= _CACHE_SIZE:
            _programs.pop(next(iter(_programs)))
        program = _programs[key, kernel] = Program(module, module.kernels[kernel], lines)
        return program
