"""What an emulated launch can raise: one exception class a kind of fault, all of them `EmulationError`."""

from __future__ import annotations


class EmulationError(RuntimeError):
    """A launch that the emulator refused or stopped.

    kernel: the entry's name. line, text: the PTX line (1-based) and its text. source: "file:line" of the
    Python source when the kernel was compiled with line information. cta, warp, role: who executed it.
    """

    def __init__(
        self,
        message: str,
        *,
        kernel: str | None = None,
        line: int | None = None,
        text: str | None = None,
        source: str | None = None,
        cta: tuple[int, int, int] | None = None,
        warp: int | None = None,
    ) -> None:
        self.message, self.kernel, self.line, self.text = message, kernel, line, text
        self.source, self.cta, self.warp = source, cta, warp
        super().__init__(self._describe())

    def _describe(self) -> str:
        parts = [self.message]
        if self.text:
            parts.append(f"  PTX line {self.line}: {self.text}")
        elif self.line:
            parts.append(f"  PTX line {self.line}")
        if self.source:
            parts.append(f"  source: {self.source}")
        if self.warp is not None:
            parts.append(f"  CTA {self.cta}, warp {self.warp}")
        if self.kernel:
            parts.append(f"  kernel {self.kernel}")
        return "\n".join(parts)


class PtxSyntaxError(EmulationError):
    """The PTX text is not understood."""


class UnsupportedInstruction(EmulationError):
    """An opcode, modifier, operand or descriptor form that the emulator does not implement."""


class MemoryFault(EmulationError):
    """An access outside the memory the launch was given, or to memory nothing wrote."""


class MisalignedAccess(MemoryFault):
    """An address that is not a multiple of the access size, or of what the instruction asks for."""


class UninitialisedRead(MemoryFault):
    """A read of shared memory, TMEM or a register that nothing wrote."""


class RaceError(EmulationError):
    """Two accesses to the same bytes, one of them a write, that nothing orders."""


class ProxyFenceError(RaceError):
    """Accesses through two proxies with no proxy fence between."""


class AsyncRegisterError(RaceError):
    """A register used while an asynchronous operation still owns it."""


class TensorMemoryError(EmulationError):
    """Tensor memory used outside its allocation, by the wrong warp, or after it was freed."""


class BarrierError(EmulationError):
    """An mbarrier or named barrier used against its rules."""


class DescriptorError(EmulationError):
    """A TMA, matrix or instruction descriptor with a value that the hardware does not take."""


class DeadlockError(EmulationError):
    """No warp can go on; the message lists who waits where."""


class LeakError(EmulationError):
    """A CTA left with asynchronous work pending or tensor memory allocated."""


class ProgrammaticLaunchError(EmulationError):
    """Memory of the launch before touched ahead of griddepcontrol.wait."""


class DivergenceError(EmulationError):
    """A warp-wide instruction that some of its lanes do not reach."""


class IllegalInstruction(EmulationError):
    """An operation whose run-time operands the ISA leaves undefined, or a trap."""


# In the order of FaultKind in csrc/emu.h.
FAULTS: tuple[type[EmulationError], ...] = (
    UnsupportedInstruction,
    MemoryFault,
    MisalignedAccess,
    UninitialisedRead,
    RaceError,
    ProxyFenceError,
    AsyncRegisterError,
    TensorMemoryError,
    BarrierError,
    DescriptorError,
    DeadlockError,
    LeakError,
    ProgrammaticLaunchError,
    DivergenceError,
    IllegalInstruction,
)
