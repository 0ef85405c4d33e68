"""Convolutions as products with patches, for the gradients of many rows at once.

JAX computes each row's gradient of a kernel as a convolution whose own kernel is the signal. Under
`jax.vmap` that becomes a grouped convolution, which is slow. As a product of patches with signals
it is one batched matrix product.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def kernel_gradients(
    inputs: Float[Array, ...],
    signals: Float[Array, "rows ..."],
    *,
    kernel: Sequence[int],
    strides: Sequence[int],
    padding: Sequence[tuple[int, int]],
    dilation: Sequence[int],
    layout: jax.lax.ConvDimensionNumbers,
) -> Float[Array, "rows ..."]:
    """The gradients of ⟨signals, inputs ∗ kernel⟩ with respect to the kernel, one for each row.

    Args:
        inputs: of the convolution, in its own layout.
        signals: for each row, an array shaped like the output of the convolution.
        kernel: the shape of the kernel.
        strides: of the window.
        padding: of the inputs, before and after; may be negative.
        dilation: of the kernel.
        layout: which axis is what in inputs, kernel and output.
    """
    inputs = jnp.transpose(inputs, _channels_last(layout.lhs_spec))
    rows = len(signals)
    signals = jnp.transpose(signals, (0, *(1 + axis for axis in _channels_last(layout.out_spec))))
    window = [kernel[axis] for axis in layout.rhs_spec[2:]]
    dtype = jnp.result_type(jnp.float32, inputs, signals)
    patches = _patches(inputs, signals.shape[2:-1], window, strides, padding, dilation)
    gradients = jnp.einsum(
        "tki,rto->rkio",
        patches.astype(dtype),
        signals.reshape(rows, -1, signals.shape[-1]).astype(dtype),
        precision="highest",
    )
    gradients = gradients.reshape(rows, *window, *gradients.shape[2:])
    order = [*layout.rhs_spec[2:], layout.rhs_spec[1], layout.rhs_spec[0]]
    return jnp.transpose(gradients, (0, *(1 + order.index(axis) for axis in range(len(order)))))


def _patches(
    inputs: Float[Array, "examples ... channels"],
    positions: Sequence[int],
    window: Sequence[int],
    strides: Sequence[int],
    padding: Sequence[tuple[int, int]],
    dilation: Sequence[int],
) -> Float[Array, "tokens offsets channels"]:
    """What the window sees at each position of each example."""
    ends = [(0, 0, 0), *((low, high, 0) for low, high in padding), (0, 0, 0)]
    padded = jax.lax.pad(inputs, jnp.zeros((), inputs.dtype), ends)
    shifted = []
    for offset in itertools.product(*map(range, window)):
        first = [o * d for o, d in zip(offset, dilation, strict=True)]
        last = [f + (n - 1) * s + 1 for f, n, s in zip(first, positions, strides, strict=True)]
        shifted.append(
            jax.lax.slice(
                padded,
                (0, *first, 0),
                (inputs.shape[0], *last, inputs.shape[-1]),
                (1, *strides, 1),
            )
        )
    stacked = jnp.stack(shifted, axis=-2)
    return stacked.reshape(-1, len(shifted), inputs.shape[-1])


def _channels_last(spec: Sequence[int]) -> tuple[int, ...]:
    examples, channels, *space = spec
    return (examples, *space, channels)
