"""Equivariance as a linear constraint on the weights of single layers."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, PyTree

from constrainx.constraints._commute import check_layers_commute
from constrainx.constraints._constraint import Constraint
from constrainx.constraints._symmetry import FiniteGroup, PixelGroup, Representation
from constrainx.constraints.representations import Image, Regular, Trivial
from constrainx.errors import ArgumentError, ArgumentTypeError, did_you_mean

# Above this order, the average over a group is a loop instead of a sum of so many terms.
UNROLLED = 16


class LayerSymmetry(NamedTuple):
    """How the group acts on what goes into a layer and on what comes out.

    Attributes:
        path: of the layer in the model, such as ``"first"`` or ``"blocks.0.dense"``.
        input: the representation of its input.
        output: the representation of its output.
    """

    path: str
    input: Representation
    output: Representation


@dataclasses.dataclass(frozen=True)
class EquivariantKernels(Constraint):
    """Convolutions and dense layers that commute with a group, whatever their input.

    ρ_out(g) K = K ρ_in(g) for every g, and biases that ρ_out(g) leaves as they are. Exact, for all
    inputs, and linear in the weights: the nearest kernel that satisfies it is the mean of
    ρ_out(g) K ρ_in(g)⁻¹ over the group. The step uses that mean in place of a solver, unless
    another constraint moves the same weights, and costs next to nothing.

    A network of such layers is equivariant if what stands between them commutes with the group as
    well: activations do, and so does pooling whose windows tile the image; `check` finds out.

    >>> import jax.numpy as jnp, constrainx as cx
    >>> from constrainx.models import LeNet
    >>> from flax import nnx
    >>> from constrainx.constraints.representations import Image, Regular
    >>> turns = cx.EquivariantKernels(
    ...     cx.groups.Cyclic(4), (("first", Image(), Regular()), ("second", Regular(), Regular()))
    ... )
    >>> model = LeNet(rngs=nnx.Rngs(0))
    >>> turns.impose(model)
    >>> turns.check(model, lambda m: m.features(jnp.ones((1, 28, 28, 1))))

    Attributes:
        group: a finite group: quarter turns, reflections, permutations, your own matrices.
        layers: path, input and output representation of each layer. For convolutions these are
            `Image()`, where pixels move and channels stay, or `Regular()`, where channels are
            permuted along; for dense layers any representation by orthogonal matrices, such as
            `Trivial()`, `Regular(Trivial())`, `Vector()` or `Permute()`.
    """

    group: FiniteGroup
    layers: tuple[LayerSymmetry | tuple[str, Representation, Representation], ...]
    gamma: float | Callable[[Any], Any] = dataclasses.field(default=1.0, kw_only=True)
    tolerance: float = dataclasses.field(default=1e-6, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.group, FiniteGroup):
            raise ArgumentTypeError(
                f"`EquivariantKernels(group=...)` must be a finite group, got {self.group!r}. For "
                "others use `Equivariance`, which draws elements."
            )
        if self.reduce != "none":
            raise ArgumentError(
                f"`EquivariantKernels(reduce={self.reduce!r})` has no use: its nearest point is "
                'known. Leave it at "none".'
            )
        layers = tuple(_as_symmetry(layer, self.group) for layer in self.layers)
        if not layers:
            raise ArgumentError("`EquivariantKernels(layers=...)` names no layer.")
        object.__setattr__(self, "layers", layers)
        if self.wrt is nnx.Param:
            object.__setattr__(self, "wrt", _Inside(tuple(layer.path for layer in layers)))

    def residual(self, model: Any, batch: Any, *, key: Array) -> PyTree[Float[Array, ...]]:  # noqa: ARG002
        """Returns by how much each kernel and bias differs from its mean over the group."""
        return {
            f"{path}.{name}": variable[...] - mean
            for path, name, variable, mean in self._means(model)
        }

    def nearest(self, model: Any) -> None:
        """Replaces each kernel and bias by its mean over the group, in place."""
        for _, _, variable, mean in self._means(model):
            variable.set_value(mean.astype(variable.dtype))

    def impose(self, model: Any) -> None:
        """Starts a model on the constraint, in place.

        The mean of independent weights is smaller than they are; each kernel is scaled to keep its
        size, so that the network starts with the activations that it was initialised for.
        """
        for _, _, variable, mean in self._means(model):
            before, after = jnp.linalg.norm(variable[...]), jnp.linalg.norm(mean)
            scale = jnp.where(after > 0, before / jnp.where(after > 0, after, 1), 1)
            variable.set_value((scale * mean).astype(variable.dtype))

    def check(self, model: nnx.Module, call: Callable[[Any], Any], *, rtol: float = 1e-4) -> None:
        """Raises an error that names where the network does not commute with the group.

        Weights and statistics that the constraint does not hold are given other values for this,
        as training would: a `BatchNorm` or a scale for each channel commutes only until then.

        Args:
            model: the model; it is not changed.
            call: runs the network from its input to its features, as in
                ``lambda m: m.features(images)``. Each layer is tested on inputs of the shapes that
                it sees there.
            rtol: which relative difference is rounding.
        """
        symmetric = nnx.clone(model)
        symmetric.eval()
        self.nearest(symmetric)
        layers = {layer.path: layer for layer in self._symmetries}
        check_layers_commute(symmetric, call, self.group, layers, rtol=rtol)

    def scale(self, model: Any, batch: Any, key: Array) -> Float[Array, ""]:  # noqa: ARG002
        """Returns the root mean square of the kernels and biases."""
        values = [variable[...] for _, _, variable in self._variables(model)]
        squares = sum(jnp.sum(jnp.square(value)) for value in values)
        return jnp.sqrt(squares / sum(value.size for value in values))

    @property
    def _symmetries(self) -> tuple[LayerSymmetry, ...]:
        return tuple(LayerSymmetry(*layer) for layer in self.layers)

    def _variables(self, model: Any) -> Iterator[tuple[LayerSymmetry, str, nnx.Variable]]:
        modules = {".".join(map(str, path)): module for path, module in nnx.iter_modules(model)}
        for layer in self._symmetries:
            module = modules.get(layer.path)
            if module is None:
                raise ArgumentError(
                    f"`EquivariantKernels(layers=...)` names {layer.path!r}, which this "
                    f"{type(model).__name__} does not have.{did_you_mean(layer.path, modules)}"
                )
            _check_layer(layer, module, self.group)
            for name in ("kernel", "bias"):
                variable = getattr(module, name, None)
                if variable is not None:
                    yield layer, name, variable

    def _means(self, model: Any) -> Iterator[tuple[str, str, nnx.Variable, Array]]:
        for layer, name, variable in self._variables(model):
            act = _act_on_kernel if name == "kernel" else _act_on_bias
            yield layer.path, name, variable, self._average(layer, act, variable[...])

    def _average(
        self, layer: LayerSymmetry, act: Callable[..., Array], value: Float[Array, ...]
    ) -> Float[Array, ...]:
        group = self.group
        if group.order <= UNROLLED:
            # Each element is a constant, so that turning a kernel costs a copy and no selection.
            elements = [e.item() if np.ndim(e) == 0 else e for e in group.elements]
            return jnp.mean(jnp.stack([act(group, e, layer, value) for e in elements]), axis=0)

        def add(total: Array, element: Array) -> tuple[Array, None]:
            return total + act(group, element, layer, value), None

        total, _ = jax.lax.scan(add, jnp.zeros_like(value), jnp.asarray(group.elements))
        return total / group.order


@dataclasses.dataclass(frozen=True)
class _Inside:
    """An NNX filter: the kernels and biases of some layers, wherever their model is attached."""

    paths: tuple[str, ...]

    def __call__(self, path: tuple[Any, ...], variable: Any) -> bool:
        del variable
        *module, name = map(str, path)
        return name in ("kernel", "bias") and any(
            module[len(module) - len(parts) :] == parts
            for parts in (layer.split(".") for layer in self.paths)
        )


def _as_symmetry(layer: Any, group: FiniteGroup) -> LayerSymmetry:
    try:
        found = LayerSymmetry(*layer)
    except TypeError:
        raise ArgumentTypeError(
            "`EquivariantKernels(layers=...)` needs a path, an input and an output representation "
            f'for each layer, such as ("first", Image(), Regular()), got {layer!r}.'
        ) from None
    for representation in (found.input, found.output):
        if not isinstance(representation, Representation):
            raise ArgumentTypeError(
                f"the layer {found.path!r} of `EquivariantKernels` needs two representations, got "
                f"{representation!r}."
            )
        representation.check(group)
    return found


def _check_layer(layer: LayerSymmetry, module: Any, group: FiniteGroup) -> None:
    """Raises for layers that cannot commute with the group, whatever their kernel."""
    where = f"the layer {layer.path!r} of `EquivariantKernels`"
    if isinstance(module, nnx.Linear):
        for representation, size in (
            (layer.input, module.in_features),
            (layer.output, module.out_features),
        ):
            if not _is_orthogonal(representation, group, size):
                raise ArgumentError(
                    f"{where} is acted on by {representation} of {group}, whose matrices are not "
                    "orthogonal: the mean over the group is then not the nearest kernel. Choose "
                    "coordinates in which they are."
                )
        return
    if not isinstance(module, nnx.Conv):
        raise ArgumentTypeError(
            f"{where} must be an `nnx.Conv` or `nnx.Linear`, got {type(module).__name__}."
        )
    if len(module.kernel_size) != 2:
        raise ArgumentError(f"{where} must convolve images, got kernels of {module.kernel_size}.")
    if module.feature_group_count != 1:
        raise ArgumentError(f"{where} convolves groups of channels apart, which is not supported.")
    for representation in (layer.input, layer.output):
        if representation not in (Image(), Regular()):
            raise ArgumentError(
                f"{where} is a convolution, on whose images a group acts by `Image()` or "
                f"`Regular()`, got {representation}."
            )
    padding = module.padding
    sides = [] if isinstance(padding, str | int) else list(padding)
    uneven = [side for side in sides if not isinstance(side, int) and side[0] != side[1]]
    same_and_even = padding == "SAME" and any(size % 2 == 0 for size in module.kernel_size)
    if uneven or same_and_even or padding == "CAUSAL":
        raise ArgumentError(
            f"{where} pads one side of the image more than the other (kernel {module.kernel_size}, "
            f"padding {padding!r}), which a rotated image does not: use an odd kernel, or pad both "
            "sides alike."
        )


@functools.cache
def _is_orthogonal(representation: Representation, group: FiniteGroup, size: int) -> bool:
    """Whether the matrices by which the generators act are orthogonal."""
    if isinstance(representation, Trivial | Regular):
        return True
    with jax.ensure_compile_time_eval():
        for element in group.generators:
            matrix = jax.vmap(lambda v, g=element: representation(group, g, v))(jnp.eye(size))
            if not np.allclose(matrix @ matrix.T, np.eye(size), atol=1e-5):
                return False
    return True


def _act_on_kernel(
    group: FiniteGroup, element: Any, layer: LayerSymmetry, kernel: Float[Array, ...]
) -> Float[Array, ...]:
    """ρ_out(g) K ρ_in(g)⁻¹, on kernels with inputs and outputs on the last two axes."""
    if kernel.ndim == 4:
        assert isinstance(group, PixelGroup)  # by the representations' checks
        kernel = group.move_pixels(element, kernel)
    kernel = _act_on_axis(group, element, _on_channels(layer.input), kernel, axis=-2)
    return _act_on_axis(group, element, _on_channels(layer.output), kernel, axis=-1)


def _act_on_bias(
    group: FiniteGroup, element: Any, layer: LayerSymmetry, bias: Float[Array, " outputs"]
) -> Float[Array, " outputs"]:
    return _act_on_axis(group, element, _on_channels(layer.output), bias, axis=-1)


def _on_channels(representation: Representation) -> Representation:
    """How a representation of feature maps acts on the channels of one pixel."""
    known: Mapping[Representation, Representation] = {
        Image(): Trivial(),
        Regular(): Regular(Trivial()),
    }
    return known.get(representation, representation)


def _act_on_axis(
    group: FiniteGroup, element: Any, representation: Representation, array: Array, *, axis: int
) -> Array:
    if isinstance(representation, Trivial):
        return array
    moved = jnp.moveaxis(array, axis, -1)
    vectors = moved.reshape(-1, moved.shape[-1])
    acted = jax.vmap(lambda vector: representation(group, element, vector))(vectors)
    return jnp.moveaxis(acted.reshape(moved.shape), -1, axis)
