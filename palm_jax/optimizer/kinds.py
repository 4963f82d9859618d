"""What a parameter is to an optimizer, from its name. Letters as in model.py."""

from __future__ import annotations

import collections.abc
from typing import Any

import jax

Path = jax.tree_util.KeyPath
Of = collections.abc.Callable[[Path], bool]


def name_of(path: Path) -> str:
    return str(path[-1].key) if path and isinstance(path[-1], jax.tree_util.DictKey) else ""


def kind(path: Path) -> str:
    """norms, embeddings, biases or kernels."""
    stem = name_of(path).rpartition("_")[0]
    if "scale" in stem:
        return "norms"
    if "bias" in stem:
        return "biases"
    return "embeddings" if "embedding" in stem else "kernels"


def is_layer_kernel(path: Path) -> bool:
    """Whether a parameter is one of the layers' matrices."""
    in_layers = any(isinstance(e, jax.tree_util.DictKey) and e.key == "layers" for e in path)
    return in_layers and kind(path) == "kernels"


def decays(no_decay: collections.abc.Collection[str]) -> Of:
    """Whether weight decay acts on a parameter, by `optimizer.no_decay`."""
    return lambda path: kind(path) not in no_decay


def chosen(tree: Any, of: Of, path: Path = ()) -> Any:
    """The part of nested dicts whose leaves `of` chooses."""
    found = {}
    for key, value in tree.items():
        here = (*path, jax.tree_util.DictKey(key))
        if isinstance(value, dict):
            found[key] = chosen(value, of, here)
        elif of(here):
            found[key] = value
    return found


def joined(one: Any, other: Any) -> Any:
    """Nested dicts that have no leaf in common, as one."""
    return {
        key: joined(one[key], other[key])
        if key in one and key in other
        else one.get(key, other.get(key))
        for key in one | other
    }
