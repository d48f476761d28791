"""The memory between a call's inputs and its outputs: how it is laid out, and who owns it.

A plan owns a `Workspace`. The plain functions keep one block of each kind for a stream (`Kept`): whatever is
launched there finds it free again, since a stream's launches run in order.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

# What cudaMalloc aligns to (CUDA C++ Programming Guide, device memory accesses); no kernel asks for more.
_ALIGN = 256
# Larger blocks are not kept: beside the work that needs them, an allocation costs nothing.
MAX_KEPT_BYTES = 32 << 20
# Streams for which blocks are kept at a time.
MAX_KEPT = 8


class Slot(NamedTuple):
    """A tensor of the workspace, `offset` bytes into the zeroed or the other part."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    zeroed: bool
    offset: int


@dataclass
class Layout:
    """Slots by name, in two parts: what a kernel finds zeroed, and leaves so, and the rest. *_bytes: their sizes."""

    slots: dict[str, Slot] = field(default_factory=dict)
    zeroed_bytes: int = 0
    scratch_bytes: int = 0

    def add(self, name: str, dtype: torch.dtype, shape: tuple[int, ...], zeroed: bool = False) -> str:
        """A new slot. Returns its name."""
        size = -(-math.prod(shape) * dtype.itemsize // _ALIGN) * _ALIGN
        self.slots[name] = Slot(dtype, shape, zeroed, self.zeroed_bytes if zeroed else self.scratch_bytes)
        if zeroed:
            self.zeroed_bytes += size
        else:
            self.scratch_bytes += size
        return name


class Workspace:
    """One allocation that holds all slots of a layout, as tensors by name."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self.device = device
        memory = _aligned(torch.empty, layout.zeroed_bytes + layout.scratch_bytes, device)
        self._scratch = memory[layout.zeroed_bytes :]
        memory[: layout.zeroed_bytes].zero_()
        self.tensors: dict[str, Tensor] = {}
        for name, slot in layout.slots.items():
            begin = slot.offset if slot.zeroed else layout.zeroed_bytes + slot.offset
            end = begin + math.prod(slot.shape) * slot.dtype.itemsize
            self.tensors[name] = memory[begin:end].view(slot.dtype).view(slot.shape)

    def poison(self) -> None:
        """Sets every bit of all but the zeroed part: NaN as bfloat16 and float32, -1 as an integer."""
        self._scratch.fill_(0xFF)


class Block(NamedTuple):
    """Memory of at least `size` bytes at `address`, which `owner` keeps."""

    owner: Tensor | None
    address: int
    size: int


_NONE = Block(None, 0, 0)


class Kept:
    """Blocks that are kept from call to call, one for each GPU and stream. allocate: torch.empty, or torch.zeros for
    blocks that every user leaves zeroed.

    A call takes the block out and puts it back once all is launched: no two threads hold the same, and a call that
    fails drops it.
    """

    def __init__(self, allocate: Callable[..., Tensor]) -> None:
        self._allocate = allocate
        self._blocks: dict[tuple[int, int], Block] = {}
        self._lock = threading.Lock()

    def take(self, size: int, device: torch.device, key: tuple[int, int] | None) -> Block:
        """A block of at least `size` bytes: the one kept under `key`, (GPU, stream), or else a new one."""
        if not size:
            return _NONE
        if key is not None and size <= MAX_KEPT_BYTES:
            block = self._blocks.pop(key, None)
            if block is not None and block.size >= size:
                return block
        memory = _aligned(self._allocate, size, device)
        return Block(memory, memory.data_ptr(), size)

    def put(self, block: Block, key: tuple[int, int] | None) -> None:
        """Keeps a block for the next call under `key`."""
        if key is None or not 0 < block.size <= MAX_KEPT_BYTES:
            return
        if len(self._blocks) >= MAX_KEPT:
            with self._lock:
                for oldest in list(self._blocks)[: len(self._blocks) + 1 - MAX_KEPT]:
                    self._blocks.pop(oldest, None)
        self._blocks[key] = block

    def clear(self) -> None:
        """Frees all that is kept."""
        self._blocks.clear()


def _aligned(allocate: Callable[..., Tensor], size: int, device: torch.device) -> Tensor:
    memory = allocate(size + _ALIGN, dtype=torch.uint8, device=device)
    return memory[-memory.data_ptr() % _ALIGN :][:size]


SCRATCH = Kept(torch.empty)
ZEROED = Kept(torch.zeros)
