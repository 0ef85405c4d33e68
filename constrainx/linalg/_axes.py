"""Errors for named axes, over which the inner products of a solver do not sum."""

from __future__ import annotations

from typing import Any

import jax
import jax.extend.core as jex

from constrainx.errors import ArgumentTypeError


def check_not_varying(**arguments: Any) -> None:
    """Raises a TypeError if a value differs from device to device inside of `jax.shard_map`."""
    for name, tree in arguments.items():
        for leaf in jax.tree.leaves(tree):
            axes = jax.typeof(leaf).manual_axis_type.varying if isinstance(leaf, jax.Array) else ()
            if axes:
                raise ArgumentTypeError(
                    f"`{name}` varies over the mesh axis {_join_names(axes)} of `jax.shard_map`, "
                    "where `lstsq` would see the part of one device alone. Call it outside: arrays "
                    "may be sharded there, and `matvec` may contain its own `shard_map`. For a "
                    "separate problem on each device, use `jax.vmap`, or "
                    "`jax.shard_map(..., check_vma=False)`."
                )


def check_no_named_axes(matvec: jex.ClosedJaxpr) -> None:
    """Raises a TypeError if ``matvec`` sums over, or asks for, a named axis around it."""
    names = [effect.name for effect in matvec.effects if type(effect).__name__ == "NamedAxisEffect"]
    if names:
        raise ArgumentTypeError(
            f"`matvec` communicates over the named axis {_join_names(names)}, but `lstsq` sees "
            "one lane or device of it at a time, so its inner products would be wrong. Call it "
            "outside of the `jax.vmap` or `jax.shard_map` that names the axis, with a `matvec` "
            "that works on whole arrays."
        )


def _join_names(names: Any) -> str:
    return ", ".join(repr(str(name)) for name in sorted(names, key=str))
