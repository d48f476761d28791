"""What the mask pre-pass tells attention about a 128x128 tile of an additive mask."""

from cute_gemma.config import MASKED_AT_OR_BELOW

MASK_TILE = 128
# Columns a row's largest entry is taken over; attention takes the largest of them.
SCAN_COLUMNS = 1024

# Classes of a tile, one byte each. A tile reads as the first of these that holds for all of its entries.
ALL_ZERO = 0  # adds nothing
ALL_MASKED = 1  # every entry <= MASKED_AT_OR_BELOW: the tile is skipped
DIAGONAL = 2  # 0 up to the diagonal, masked beyond: known without reading the mask
MIXED = 3  # anything else: attention reads the entries

__all__ = ["ALL_MASKED", "ALL_ZERO", "DIAGONAL", "MASKED_AT_OR_BELOW", "MASK_TILE", "MIXED", "SCAN_COLUMNS"]
