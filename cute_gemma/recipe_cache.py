"""Recipes by the description of their arguments: a call like an earlier one neither checks nor plans again."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .checks import ALIGNMENT
from .recipes import Recipe

MAX_RECIPES = 512


class PlainGuards:
    """Tells tensors that are like those it was made of in all that the checks look at, save addresses and grad mode."""

    def __init__(self, *tensors: Tensor) -> None:
        self._described = self._describe(tensors)

    def check(self, *tensors: Tensor) -> bool:
        """Whether each is like the one in its place. As many as there were."""
        return self._describe(tensors) == self._described

    @staticmethod
    def _describe(tensors: Sequence[Tensor]) -> list[tuple]:
        return [(t.shape, t.stride(), t.dtype, t.device, t.requires_grad) for t in tensors]


def _fastest_guards() -> Any:
    """The class of torch.compile's guards: private, but describing the tensors in Python doubles the time of `find`."""
    try:
        from torch._C._dynamo.guards import TensorGuards

        guards = functools.partial(TensorGuards, dynamic_dims_sizes=None, dynamic_dims_strides=None)
        guards(torch.empty(0, device="cpu"))
    except (ImportError, TypeError):  # another torch has them elsewhere or other arguments
        return PlainGuards
    return guards


Guards = _fastest_guards()


class RecipeCache:
    """Recipes of one public function, at most MAX_RECIPES; the oldest go first."""

    def __init__(self) -> None:
        # By a key of what is cheap to describe. The tensors tell which of a key's recipes, newest first.
        self._recipes: dict[tuple, tuple[tuple[Any, Recipe], ...]] = {}
        self._count = 0
        self._lock = threading.Lock()

    def find(
        self, tensors: Sequence[Tensor], numbers: tuple, mask: Tensor | str | None = None
    ) -> tuple[Recipe | None, tuple | None, list[int]]:
        """(recipe, key, addresses of `tensors`) for the arguments of a call; mask: the last of `tensors` if it is one.

        Key and guards hold all that the checks of the arguments look at, so that those found pass them alike. The key
        is None, and so is the recipe, for arguments that cannot be described: the checks will name what is wrong.
        """
        try:
            addresses = list(map(Tensor.data_ptr, tensors))
            if 0 in addresses:  # no memory of its own: launching has to see the tensor itself
                return None, None, []
            key = (
                tensors[0].shape,
                len(tensors),
                tuple(address % ALIGNMENT for address in addresses) if math.gcd(*addresses) % ALIGNMENT else None,
                torch.is_grad_enabled(),
                None if isinstance(mask, Tensor) else mask,
                *numbers,
                *map(type, numbers),  # 1, 1.0 and True are equal
            )
            return self._match(key, tensors), key, addresses
        except (AttributeError, TypeError, RuntimeError):
            return None, None, []

    def keep(self, key: tuple | None, tensors: Sequence[Tensor], recipe: Recipe) -> Recipe:
        """Keeps the recipe of a call whose arguments have passed, and returns the one kept for arguments like them."""
        if key is None:
            return recipe
        with self._lock:
            found = self._match(key, tensors)  # of another thread, meanwhile
            if found is not None:
                return found
            while self._count >= MAX_RECIPES:
                self._count -= len(self._recipes.pop(next(iter(self._recipes))))
            # TensorGuards refuse whatever holds one tensor twice, as calls with tied weights do.
            guards = Guards if len(set(map(id, tensors))) == len(tensors) else PlainGuards
            self._recipes[key] = (guards(*tensors), recipe), *self._recipes.get(key, ())
            self._count += 1
            return recipe

    def recipes(self) -> list[Recipe]:
        """All that are kept."""
        return [recipe for kept in list(self._recipes.values()) for _, recipe in kept]

    def clear(self) -> None:
        """Forgets all of them."""
        with self._lock:
            self._recipes.clear()
            self._count = 0

    def _match(self, key: tuple, tensors: Sequence[Tensor]) -> Recipe | None:
        for guards, recipe in self._recipes.get(key, ()):
            if guards.check(*tensors):
                return recipe
        return None
