"""The memory between a call's inputs and its outputs: how it is laid out, and who owns it.

A plan owns a `Workspace`. The plain functions keep one block of each kind for a stream (`KEPT`): whatever is
launched there finds them free again, since a stream's launches run in order.
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


_NO_BLOCK = Block(None, 0, 0)


class Blocks(NamedTuple):
    """Memory for the two parts of a layout. bases: their addresses; the same object for the same memory."""

    scratch: Block
    zeroed: Block
    bases: tuple[int, int]


_NO_BLOCKS = Blocks(_NO_BLOCK, _NO_BLOCK, (0, 0))


class Kept:
    """Blocks that are kept from call to call, two for each GPU and stream. Every user leaves the zeroed one zeroed.

    A call takes the blocks out and puts them back once all is launched: no two threads hold the same, and a call
    that fails drops them.
    """

    def __init__(self) -> None:
        self._blocks: dict[tuple[int, int], Blocks] = {}
        self._lock = threading.Lock()

    def take(self, layout: Layout, device: torch.device, key: tuple[int, int] | None) -> Blocks:
        """Blocks that the layout fits in: those kept under `key`, (GPU, stream), or else new ones."""
        kept = self._blocks.pop(key, _NO_BLOCKS)
        if kept.scratch.size >= layout.scratch_bytes and kept.zeroed.size >= layout.zeroed_bytes:
            return kept
        scratch = _fitting(kept.scratch, layout.scratch_bytes, torch.empty, device)
        zeroed = _fitting(kept.zeroed, layout.zeroed_bytes, torch.zeros, device)
        return Blocks(scratch, zeroed, (scratch.address, zeroed.address))

    def put(self, blocks: Blocks, key: tuple[int, int] | None) -> None:
        """Keeps the blocks for the next call under `key`, None: for none."""
        if key is None:
            return
        if blocks.scratch.size > MAX_KEPT_BYTES or blocks.zeroed.size > MAX_KEPT_BYTES:
            scratch, zeroed = (_NO_BLOCK if block.size > MAX_KEPT_BYTES else block for block in blocks[:2])
            blocks = Blocks(scratch, zeroed, (scratch.address, zeroed.address))
        if len(self._blocks) >= MAX_KEPT:
            with self._lock:
                for oldest in list(self._blocks)[: len(self._blocks) + 1 - MAX_KEPT]:
                    self._blocks.pop(oldest, None)
        self._blocks[key] = blocks

    def clear(self) -> None:
        """Frees all that is kept."""
        self._blocks.clear()


def _fitting(kept: Block, size: int, allocate: Callable[..., Tensor], device: torch.device) -> Block:
    """The kept block if it is large enough, or else a new one."""
    if kept.size >= size:
        return kept
    memory = _aligned(allocate, size, device)
    return Block(memory, memory.data_ptr(), size)


def _aligned(allocate: Callable[..., Tensor], size: int, device: torch.device) -> Tensor:
    memory = allocate(size + _ALIGN, dtype=torch.uint8, device=device)
    return memory[-memory.data_ptr() % _ALIGN :][:size]


KEPT = Kept()
