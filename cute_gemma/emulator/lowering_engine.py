"""Imports the lowerings of everything that the engine executes, for what they register."""

from . import lowering_async, lowering_memory, lowering_sync, lowering_tensor, lowering_wgmma

__all__ = ["lowering_async", "lowering_memory", "lowering_sync", "lowering_tensor", "lowering_wgmma"]
