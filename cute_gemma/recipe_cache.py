"""Recipes by the description of their arguments: a call like an earlier one neither checks nor plans again."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from operator import attrgetter

import torch
from torch import Tensor

from .checks import ALIGNMENT
from .recipes import Recipe

MAX_RECIPES = 512

_described = attrgetter("shape", "dtype", "device")
_described_with_grad = attrgetter("shape", "dtype", "device", "requires_grad")


class RecipeCache:
    """Recipes of one public function, at most MAX_RECIPES; the oldest goes first."""

    def __init__(self) -> None:
        self._recipes: dict[tuple, Recipe] = {}
        self._lock = threading.Lock()

    def find(
        self, tensors: Sequence[Tensor], numbers: tuple, mask: Tensor | str | None = None
    ) -> tuple[Recipe | None, tuple | None, list[int]]:
        """(recipe, key, addresses of `tensors`) for the arguments of a call; mask: the last of `tensors` if it is one.

        The key holds all that the checks of the arguments look at, so that equal keys pass them alike. It is None,
        and so is the recipe, for arguments that cannot be described: the checks will name what is wrong with them.
        """
        try:
            addresses = list(map(Tensor.data_ptr, tensors))
            if 0 in addresses:  # no memory of its own: launching has to see the tensor itself
                return None, None, []
            key = (
                *map(_described_with_grad if torch.is_grad_enabled() else _described, tensors),
                *map(Tensor.is_contiguous, tensors),
                *[address % ALIGNMENT for address in addresses],
                mask.stride() if isinstance(mask, Tensor) else mask,
                *numbers,
                *map(type, numbers),  # 1, 1.0 and True are equal
            )
            return self._recipes.get(key), key, addresses
        except (AttributeError, TypeError, RuntimeError):
            return None, None, []

    def keep(self, key: tuple | None, recipe: Recipe) -> Recipe:
        """Keeps the recipe of a call whose arguments have passed, and returns the one kept under `key`."""
        if key is None:
            return recipe
        with self._lock:
            while len(self._recipes) >= MAX_RECIPES:
                del self._recipes[next(iter(self._recipes))]
            return self._recipes.setdefault(key, recipe)

    def clear(self) -> None:
        """Forgets all of them."""
        with self._lock:
            self._recipes.clear()
