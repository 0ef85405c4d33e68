"""Swin transformers: attention in windows that shift from one block to the next."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from constrainx.errors import ArgumentError
from constrainx.models._partition import name_axes
from constrainx.models._repeat import repeat_modules
from constrainx.models._windows import (
    index_positions,
    join_windows,
    mask_neighbours,
    split_windows,
)

_small = nnx.initializers.truncated_normal(0.02)


class Swin(nnx.Module):
    """A hierarchical transformer with shifted windows (Liu et al., 2021).

    `tiny`, `small` and `base` are the published sizes. Layers compute what those of torchvision,
    timm and transformers compute, so that their weights can be loaded.

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> model = Swin(size=32, width=8, depths=(2, 2), heads=(1, 2), window=4, classes=10,
    ...              rngs=nnx.Rngs(0))
    >>> model(jnp.ones((2, 32, 32, 3))).shape, model.features(jnp.ones((2, 32, 32, 3))).shape
    ((2, 10), (2, 4, 4, 16))

    Args:
        size: height and width of the image. After patches and merging, each stage must be a
            multiple of its window, or at most as large as one.
        patch: height and width of a patch, which becomes one token.
        inputs: channels of the image.
        width: channels of the first stage, doubled by each stage after it.
        depths: how many blocks each stage has.
        heads: how many attention heads the blocks of each stage have.
        window: height and width of a window, in tokens.
        classes: how many logits.
        drop_path: how often the last block is left out in training; earlier ones less often.
        remat: whether to compute each pair of blocks again in the backward pass, which saves most
            of the memory for about a third more time.
        scan: whether to compile equal pairs of blocks once, as a loop, which compiles several times
            faster. Parameters are the same with and without.
        rngs: for the initial weights, and ``dropout`` for the blocks to leave out.
    """

    def __init__(
        self,
        *,
        size: int = 224,
        patch: int = 4,
        inputs: int = 3,
        width: int = 96,
        depths: Sequence[int] = (2, 2, 6, 2),
        heads: Sequence[int] = (3, 6, 12, 24),
        window: int = 7,
        classes: int = 1000,
        drop_path: float = 0.2,
        remat: bool = False,
        scan: bool = False,
        rngs: nnx.Rngs,
    ):
        sides = _check_sizes(size, patch, width, depths, heads, window)
        if not 0 <= drop_path < 1:
            raise ArgumentError(f"`drop_path` must be in [0, 1), got {drop_path!r}.")
        self.patches = nnx.Conv(
            inputs,
            width,
            (patch, patch),
            strides=patch,
            padding="VALID",
            kernel_metadata=name_axes(None, None, "in", "out"),
            rngs=rngs,
        )
        self.patches_norm = _norm(width, rngs=rngs)
        self.stages = nnx.List(
            [
                Stage(
                    width * 2**stage,
                    merges=stage > 0,
                    depth=depths[stage],
                    heads=heads[stage],
                    side=side,
                    window=min(window, side),
                    remat=remat,
                    scan=scan,
                    rngs=rngs,
                )
                for stage, side in enumerate(sides)
            ]
        )
        last = width * 2 ** (len(sides) - 1)
        self.norm = _norm(last, rngs=rngs)
        self.head = _linear(last, classes, rngs=rngs)
        self.size, self.drop_path = size, drop_path
        self.deterministic = False
        self.rngs = rngs.dropout.fork() if drop_path and hasattr(rngs, "dropout") else None

    @classmethod
    def tiny(cls, **settings: Any) -> Self:
        """Swin-T: 28.3 million parameters."""
        return cls(**{"depths": (2, 2, 6, 2), "drop_path": 0.2, **settings})

    @classmethod
    def small(cls, **settings: Any) -> Self:
        """Swin-S: 49.6 million parameters."""
        return cls(**{"depths": (2, 2, 18, 2), "drop_path": 0.3, **settings})

    @classmethod
    def base(cls, **settings: Any) -> Self:
        """Swin-B: 87.8 million parameters."""
        wider = {"width": 128, "heads": (4, 8, 16, 32)}
        return cls(**{"depths": (2, 2, 18, 2), "drop_path": 0.5, **wider, **settings})

    def features(
        self, x: Float[Array, "batch h w c"], *, rngs: nnx.Rngs | None = None
    ) -> Float[Array, "batch h2 w2 channels"]:
        """The tokens of the last stage, normalised."""
        if x.shape[1:3] != (self.size, self.size):
            raise ArgumentError(
                f"this Swin was built for images of {self.size}×{self.size}, got "
                f"{x.shape[1]}×{x.shape[2]}: resize them, or build it with `size={x.shape[1]}`."
            )
        x = self.patches_norm(self.patches(x))
        keep = self._draw_kept(x.shape[0], rngs)
        for stage in self.stages:
            now, keep = keep[: len(stage.blocks)], keep[len(stage.blocks) :]
            x = stage(x, now.astype(x.dtype))
        return self.norm(x)

    def __call__(
        self, x: Float[Array, "batch h w c"], *, rngs: nnx.Rngs | None = None
    ) -> Float[Array, "batch classes"]:
        """The logits."""
        return self.head(self.features(x, rngs=rngs).mean((1, 2)))

    def _draw_kept(self, batch: int, rngs: nnx.Rngs | None) -> Float[Array, "blocks 2 batch"]:
        """A factor for each half of each block and each image: 0 to leave it out.

        All are drawn here, so that blocks need no random streams of their own. The others are
        scaled up, so that means stay what they are.
        """
        blocks = sum(len(stage.blocks) for stage in self.stages)
        stream = self.rngs if rngs is None else rngs.dropout
        if self.deterministic or not self.drop_path:
            return jnp.ones((blocks, 2, batch))
        if stream is None:
            raise ArgumentError(
                "`Swin` leaves out blocks at random in training: build it with "
                "`rngs=nnx.Rngs(params=..., dropout=...)`, pass `rngs=` to the call, or set "
                "`drop_path=0.0`."
            )
        kept = 1 - np.linspace(0, self.drop_path, blocks, dtype=np.float32)[:, None, None]
        return jax.random.bernoulli(stream(), kept, (blocks, 2, batch)) / kept


class Stage(nnx.Module):
    """Blocks at one resolution, after merging patches if there is a stage before it."""

    def __init__(
        self,
        width: int,
        *,
        merges: bool,
        depth: int,
        heads: int,
        side: int,
        window: int,
        remat: bool,
        scan: bool,
        rngs: nnx.Rngs,
    ):
        self.merges, self.remat, self.scan = merges, remat, scan
        if merges:
            self.merge = Merge(width, rngs=rngs)
        # Where one window covers the image there is nowhere to shift it.
        shift = window // 2 if side > window else 0
        self.blocks = nnx.List(
            [
                Block(width, heads=heads, window=window, shift=shift * (index % 2), rngs=rngs)
                for index in range(depth)
            ]
        )

    def __call__(
        self, x: Float[Array, "batch h w c"], keep: Float[Array, "blocks 2 batch"]
    ) -> Float[Array, "batch h2 w2 c2"]:
        """Applies the blocks, two at a time: one of each pair shifts its windows."""
        x = self.merge(x) if self.merges else x
        return repeat_modules(self.blocks, x, keep, period=2, remat=self.remat, scan=self.scan)


class Merge(nnx.Module):
    """Joins each 2×2 patches to one of twice the channels."""

    def __init__(self, width: int, *, rngs: nnx.Rngs):
        self.norm = _norm(2 * width, rngs=rngs)
        self.linear = _linear(2 * width, width, use_bias=False, rngs=rngs)

    def __call__(self, x: Float[Array, "batch h w c"]) -> Float[Array, "batch h2 w2 c2"]:
        """Half the height and width, twice the channels."""
        batch, height, width, channels = x.shape
        x = x.reshape(batch, height // 2, 2, width // 2, 2, channels)
        # Within a group column by column, which is the order that published weights expect.
        x = x.transpose(0, 1, 3, 4, 2, 5).reshape(batch, height // 2, width // 2, 4 * channels)
        return self.linear(self.norm(x))


class Block(nnx.Module):
    """Attention in windows and two dense layers, each added to its input."""

    def __init__(self, width: int, *, heads: int, window: int, shift: int, rngs: nnx.Rngs):
        self.attention_norm = _norm(width, rngs=rngs)
        self.attention = Attention(width, heads=heads, window=window, shift=shift, rngs=rngs)
        self.dense_norm = _norm(width, rngs=rngs)
        self.expand = _linear(width, 4 * width, rngs=rngs)
        self.contract = _linear(4 * width, width, rngs=rngs)

    def __call__(
        self, x: Float[Array, "batch h w c"], keep: Float[Array, "2 batch"]
    ) -> Float[Array, "batch h w c"]:
        """Adds both halves, each times its factor in ``keep``."""
        first, second = keep[:, :, None, None, None]
        x = x + first * self.attention(self.attention_norm(x))
        hidden = nnx.gelu(self.expand(self.dense_norm(x)), approximate=False)
        return x + second * self.contract(hidden)


class Attention(nnx.Module):
    """Self-attention among the tokens of a window, with a bias for each relative position."""

    def __init__(self, width: int, *, heads: int, window: int, shift: int, rngs: nnx.Rngs):
        self.heads, self.window, self.shift = heads, window, shift
        self.qkv = _linear(width, 3 * width, rngs=rngs)
        self.project = _linear(width, width, rngs=rngs)
        offsets = (2 * window - 1) ** 2
        self.position_bias = nnx.Param(
            _small(rngs.params(), (offsets, heads)), **name_axes(None, None)
        )

    def __call__(self, x: Float[Array, "batch h w c"]) -> Float[Array, "batch h w c"]:
        """Attends within windows of the image, shifted by ``shift``."""
        batch, height, width, channels = x.shape
        tokens = self.window**2
        x = jnp.roll(x, (-self.shift, -self.shift), (1, 2)) if self.shift else x
        x = jnp.asarray(split_windows(x, self.window))
        qkv = self.qkv(x).reshape(batch, -1, tokens, 3, self.heads, channels // self.heads)
        q, k, v = jnp.moveaxis(qkv, 3, 0)
        scores = jnp.einsum("bnihd,bnjhd->bnhij", q * q.shape[-1] ** -0.5, k)
        scores = scores + self._bias().astype(scores.dtype)
        if self.shift:
            mask = mask_neighbours(height, width, self.window, self.shift)
            scores = jnp.where(mask[:, None], scores, -100.0 + scores)
        x = jnp.einsum("bnhij,bnjhd->bnihd", jax.nn.softmax(scores, axis=-1), v)
        x = self.project(x.reshape(batch, -1, tokens, channels))
        x = jnp.asarray(join_windows(x, height, width))
        return jnp.roll(x, (self.shift, self.shift), (1, 2)) if self.shift else x

    def _bias(self) -> Float[Array, "heads tokens tokens"]:
        return jnp.moveaxis(self.position_bias[...][index_positions(self.window)], -1, 0)


def _check_sizes(
    size: int,
    patch: int,
    width: int,
    depths: Sequence[int],
    heads: Sequence[int],
    window: int,
) -> list[int]:
    """The side of each stage in tokens; raises unless windows and heads divide it evenly."""
    if len(depths) != len(heads) or not depths:
        raise ArgumentError(
            f"`depths` and `heads` must have one entry for each stage, got {tuple(depths)} and "
            f"{tuple(heads)}."
        )
    sides = [size // (patch * 2**stage) for stage in range(len(depths))]
    unit = patch * 2 ** (len(depths) - 1)
    if size % unit or any(side > window and side % window for side in sides):
        raise ArgumentError(
            f"`size={size}` does not divide evenly into patches of {patch} and windows of {window} "
            f"in {len(depths)} stages: use a multiple of {unit * window}, or another `window`."
        )
    for stage, count in enumerate(heads):
        if (width * 2**stage) % count:
            raise ArgumentError(
                f"`heads={tuple(heads)}` must divide the channels of their stages, but {count} "
                f"does not divide {width * 2**stage}."
            )
    return sides


def _norm(width: int, *, rngs: nnx.Rngs) -> nnx.LayerNorm:
    return nnx.LayerNorm(width, epsilon=1e-5, rngs=rngs)


_linear = functools.partial(nnx.Linear, kernel_init=_small, kernel_metadata=name_axes("in", "out"))
