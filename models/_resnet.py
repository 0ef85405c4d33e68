"""Residual networks for images: ResNet-18, its wider and narrower relatives, and small stems."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Literal, TypeAlias, get_args

from flax import nnx
from jaxtyping import Array, Float

from constrainx.errors import ArgumentError, check_choice
from constrainx.models._partition import name_axes

Stem: TypeAlias = Literal["cifar", "imagenet"]

# He initialisation by the outputs, which keeps the size of gradients, as torchvision has it.
_he = nnx.initializers.variance_scaling(2.0, "fan_out", "normal")


class ResNet(nnx.Module):
    """A residual network of basic blocks; ResNet-18 by default (He et al., 2015).

    Convolutions in front of a batch norm have no bias, which the norm would remove again. Layers
    compute what those of torchvision compute, so that published weights can be loaded.

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> model = ResNet(stem="cifar", width=8, rngs=nnx.Rngs(0))
    >>> model(jnp.ones((2, 32, 32, 3))).shape, model.features(jnp.ones((2, 32, 32, 3))).shape
    ((2, 10), (2, 4, 4, 64))

    Args:
        stem: "cifar" starts with a 3×3 convolution and keeps the size of small images; "imagenet"
            starts with a 7×7 convolution of stride 2 and a max-pool, which make it a quarter.
        blocks: how many blocks each stage has. Each stage after the first halves the image.
        width: channels of the first stage, doubled by each stage after it: 64 is ResNet-18.
        inputs: channels of the image.
        classes: how many logits; 10 by default for the small stem, and 1000 for the large one.
        rngs: for the initial weights.
    """

    def __init__(
        self,
        *,
        stem: Stem = "cifar",
        blocks: Sequence[int] = (2, 2, 2, 2),
        width: int = 64,
        inputs: int = 3,
        classes: int | None = None,
        rngs: nnx.Rngs,
    ):
        check_choice("stem", stem, get_args(Stem), owner="ResNet")
        if not blocks or min(blocks) < 1:
            raise ArgumentError(
                f"`blocks` must hold at least one block for each stage, got {tuple(blocks)}."
            )
        if width < 1:
            raise ArgumentError(f"`width` must be at least 1, got {width!r}.")
        self.stem = stem
        if stem == "cifar":
            self.first = _convolution(inputs, width, size=3, rngs=rngs)
        else:
            self.first = _convolution(inputs, width, size=7, stride=2, rngs=rngs)
        self.norm = _norm(width, rngs=rngs)
        widths = [width * 2**stage for stage in range(len(blocks))]
        self.stages: nnx.List[nnx.List[BasicBlock]] = nnx.List()
        for stage, (before, after) in enumerate(itertools.pairwise([width, *widths])):
            first = BasicBlock(before, after, stride=2 if stage else 1, rngs=rngs)
            others = [BasicBlock(after, after, rngs=rngs) for _ in range(blocks[stage] - 1)]
            self.stages.append(nnx.List([first, *others]))
        if classes is None:
            classes = 10 if stem == "cifar" else 1000
        self.head = nnx.Linear(
            widths[-1], classes, kernel_metadata=name_axes("in", "out"), rngs=rngs
        )

    def features(self, x: Float[Array, "batch h w c"]) -> Float[Array, "batch h2 w2 channels"]:
        """The feature maps of the last stage."""
        x = nnx.relu(self.norm(self.first(x)))
        if self.stem == "imagenet":
            x = nnx.max_pool(x, (3, 3), strides=(2, 2), padding=((1, 1), (1, 1)))
        for stage in self.stages:
            for block in stage:
                x = block(x)
        return x

    def __call__(self, x: Float[Array, "batch h w c"]) -> Float[Array, "batch classes"]:
        """The logits."""
        return self.head(self.features(x).mean((1, 2)))


class BasicBlock(nnx.Module):
    """Two 3×3 convolutions with batch norms, added to their input."""

    def __init__(self, inputs: int, outputs: int, *, stride: int = 1, rngs: nnx.Rngs):
        self.first = _convolution(inputs, outputs, size=3, stride=stride, rngs=rngs)
        self.first_norm = _norm(outputs, rngs=rngs)
        self.second = _convolution(outputs, outputs, size=3, rngs=rngs)
        self.second_norm = _norm(outputs, rngs=rngs)
        self.has_shortcut = stride != 1 or inputs != outputs
        if self.has_shortcut:
            self.shortcut = _convolution(inputs, outputs, size=1, stride=stride, rngs=rngs)
            self.shortcut_norm = _norm(outputs, rngs=rngs)

    def __call__(self, x: Float[Array, "batch h w c"]) -> Float[Array, "batch h2 w2 c2"]:
        """The block's output, halved in size by a stride of 2."""
        y = nnx.relu(self.first_norm(self.first(x)))
        y = self.second_norm(self.second(y))
        if self.has_shortcut:
            x = self.shortcut_norm(self.shortcut(x))
        return nnx.relu(x + y)


def _convolution(
    inputs: int, outputs: int, *, size: int, stride: int = 1, rngs: nnx.Rngs
) -> nnx.Conv:
    # Padded alike on both sides. "SAME" pads only one side where the stride is 2.
    pad = (size - 1) // 2
    return nnx.Conv(
        inputs,
        outputs,
        (size, size),
        strides=stride,
        padding=((pad, pad), (pad, pad)),
        use_bias=False,
        kernel_init=_he,
        kernel_metadata=name_axes(None, None, "in", "out"),
        rngs=rngs,
    )


def _norm(channels: int, *, rngs: nnx.Rngs) -> nnx.BatchNorm:
    return nnx.BatchNorm(channels, momentum=0.9, epsilon=1e-5, rngs=rngs)
