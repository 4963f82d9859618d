"""How devices that share one model's heads, feed-forward and vocabulary work together."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import jax


class Split(Protocol):
    """How the devices that share one model's heads, feed-forward and vocabulary work together."""

    @property
    def size(self) -> int:
        """Into how many parts those axes are cut."""

    def index(self) -> Any:
        """Which part is here."""

    def whole(self, x: jax.Array) -> jax.Array:
        """[..., d] -> [..., D]: each device's part of the last axis."""

    def summed(self, x: jax.Array) -> jax.Array:
        """[..., D] -> [..., d]: the sum over devices, of which each keeps its part."""

    def total(self, x: jax.Array) -> jax.Array:
        """The sum over devices, on all of them."""

    def maximum(self, x: jax.Array) -> jax.Array:
        """The maximum over devices; not differentiated."""

    def part(self, x: jax.Array) -> jax.Array:
        """[D, ...] -> [d, ...]: this device's part of what all have."""


@dataclasses.dataclass(frozen=True)
class Undivided:
    """One device has all of it."""

    size: int = 1

    def index(self) -> int:
        return 0

    def whole(self, x: jax.Array) -> jax.Array:
        return x

    summed = total = maximum = part = whole


UNDIVIDED = Undivided()
