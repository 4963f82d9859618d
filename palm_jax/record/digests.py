"""Order-independent digests of the bits of a tree of arrays.

Every element's bit pattern is mixed with its global index and the results are summed modulo
2^32. An integer sum has the same value in any order, so a digest does not depend on how an
array is sharded; it is computed on the devices, inside jit, and nothing is gathered. Two sums
with different constants give 64 bits a leaf.

For a fixed index the mixing is a bijection of the bit pattern (murmur3's finaliser: xor-shifts
and odd multipliers). One changed element therefore always changes a digest; any other change
escapes with probability 2^-64.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec


class _Mixer(NamedTuple):
    """Constants of one of the two words; the multipliers must be odd."""

    seed: int
    shifts: tuple[int, int, int]
    multipliers: tuple[int, int]

    def __call__(self, word: jax.Array) -> jax.Array:
        first, second, third = self.shifts
        word = (word ^ (word >> first)) * np.uint32(self.multipliers[0])
        word = (word ^ (word >> second)) * np.uint32(self.multipliers[1])
        return word ^ (word >> third)


_MIXERS = (
    _Mixer(0x9E3779B9, (16, 13, 16), (0x85EBCA6B, 0xC2B2AE35)),  # murmur3
    _Mixer(0x3C6EF372, (16, 15, 16), (0x7FEB352D, 0x846CA68B)),  # Wellons' lowbias32
)


@dataclasses.dataclass(frozen=True)
class Digest:
    """Digest of a tree: 16 hexadecimal digits for each leaf, and for the whole.

    `leaves` hash elements and their indices; `whole` hashes the leaves with their paths,
    dtypes and shapes.
    """

    leaves: dict[str, str]
    whole: str

    def differing(self, other: Digest) -> list[str]:
        """Paths of leaves that differ or that only one of the two has, sorted."""
        paths = self.leaves.keys() | other.leaves.keys()
        return sorted(path for path in paths if self.leaves.get(path) != other.leaves.get(path))


def named_leaves(tree: Any) -> dict[str, Any]:
    """Leaves by path, such as `params/layers/w_gate_DF`; the path of a bare array is ""."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    named = {jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in leaves}
    assert len(named) == len(leaves), f"two leaves share a path: {sorted(named)}"
    return named


def describe(leaf: Any) -> str:
    """Dtype and shape of an array or ShapeDtypeStruct, such as `float32[8,16]`."""
    return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"


def described(text: str, sharding: jax.sharding.Sharding | None = None) -> jax.ShapeDtypeStruct:
    """The array that `describe` describes."""
    dtype, _, dims = text.removesuffix("]").partition("[")
    shape = tuple(int(dim) for dim in dims.split(",") if dim)
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding)


def _bit_words(path: str, x: jax.Array) -> list[jax.Array]:
    """Bit patterns as uint32[x.shape]; two, the low word first, for 64-bit dtypes."""
    if x.dtype == jnp.bool_:
        return [x.astype(jnp.uint32)]
    if jnp.issubdtype(x.dtype, jnp.integer):
        num_bits = jnp.iinfo(x.dtype).bits
    elif jnp.issubdtype(x.dtype, jnp.floating):
        num_bits = jnp.finfo(x.dtype).bits
    else:
        num_bits = 0
    if num_bits == 64:
        words = jax.lax.bitcast_convert_type(x, jnp.uint32)
        return [words[..., 0], words[..., 1]]
    if num_bits not in (8, 16, 32):
        raise TypeError(f"there is no digest for leaf {path!r} of dtype {x.dtype}")
    return [jax.lax.bitcast_convert_type(x, f"uint{num_bits}").astype(jnp.uint32)]


def _index_words(shape: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """Global index of each element, two uint32[shape]: over the leading dims, in the last.

    One word would wrap: leaves of the 540B model have more than 2^32 elements.
    """

    def along(dim: int) -> jax.Array:
        return jax.lax.broadcasted_iota(jnp.uint32, shape, dim)

    row = jnp.zeros(shape, jnp.uint32)
    for dim in range(len(shape) - 1):
        row += along(dim) * np.uint32(math.prod(shape[dim + 1 : -1]) % 2**32)
    return row, along(len(shape) - 1) if shape else jnp.zeros(shape, jnp.uint32)


def _refuse_halving(path: str, leaf: Any) -> None:
    # JAX silently keeps 32 bits of each element where 64-bit types are off.
    if isinstance(leaf, np.ndarray) and leaf.dtype != jax.dtypes.canonicalize_dtype(leaf.dtype):
        raise TypeError(f"leaf {path!r} is {leaf.dtype}: enable 64-bit types in JAX to digest it")


def leaf_digests(tree: Any) -> dict[str, jax.Array]:
    """Two words for each leaf, uint32[2] by path. Pure; call it inside or outside of jit.

    The leaves are global arrays: inside shard_map an index would be local to the shard.

    Raises:
      TypeError: a dtype without digest (complex, or below 8 bits), or a NumPy array with
        64-bit elements, of which JAX would keep only half.
    """
    words = {}
    for path, leaf in named_leaves(tree).items():
        x = leaf
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x = jax.random.key_data(x)
        _refuse_halving(path, x)
        patterns = _bit_words(path, jnp.asarray(x))
        row, column = _index_words(x.shape)
        sums = []
        for mix in _MIXERS:
            mixed = mix(mix(row ^ np.uint32(mix.seed)) ^ column)
            for pattern in patterns:
                mixed = mix(mixed ^ pattern)
            sums.append(jnp.sum(mixed, dtype=jnp.uint32))
        words[path] = jnp.stack(sums)
    return words


def mixed_with_place(words: jax.Array, name: str) -> jax.Array:
    """Sum modulo 2^32 of words u32[n, 2], each mixed with its index and a name: u32[2].

    Joins digests of parts into one of the whole. Pure; call it inside or outside of jit.
    """
    seed = np.uint32(int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little"))
    index = jnp.arange(words.shape[0], dtype=jnp.uint32)
    sums = [
        jnp.sum(mix(mix(index ^ seed ^ np.uint32(mix.seed)) ^ words[:, word]), dtype=jnp.uint32)
        for word, mix in enumerate(_MIXERS)
    ]
    return jnp.stack(sums)


@functools.lru_cache(maxsize=8)
def _compiled(mesh: Mesh | None) -> Callable[[Any], dict[str, jax.Array]]:
    # Replicated, so that every process of a multi-host run can read the words.
    replicated = None if mesh is None else NamedSharding(mesh, PartitionSpec())
    return jax.jit(leaf_digests, out_shardings=replicated)


def digest_tree(tree: Any) -> dict[str, jax.Array]:
    """`leaf_digests`, compiled once for each structure and mesh; does not wait for the result."""
    shardings = (getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(tree))
    meshes = (s.mesh for s in shardings if isinstance(s, NamedSharding))
    for path, leaf in named_leaves(tree).items():
        _refuse_halving(path, leaf)
    return _compiled(next(meshes, None))(tree)


def digest(tree: Any) -> Digest:
    """Digest of the bits of `tree`; waits for the devices. Errors as in `leaf_digests`."""
    words = jax.device_get(digest_tree(tree))
    leaves = {path: f"{first:08x}{second:08x}" for path, (first, second) in words.items()}
    return joined(leaves, named_leaves(tree))


def joined(leaves: Mapping[str, str], named: Mapping[str, Any]) -> Digest:
    """Digest of a tree whose leaves were digested one by one.

    Args:
      leaves: the digest of each leaf, by path.
      named: arrays or ShapeDtypeStructs of the same paths.
    """
    leaves = dict(sorted(leaves.items()))
    rows = [
        [path, str(named[path].dtype), list(named[path].shape), hexadecimal]
        for path, hexadecimal in leaves.items()
    ]
    text = json.dumps(rows, separators=(",", ":"))
    return Digest(leaves, hashlib.sha256(text.encode()).hexdigest()[:16])
