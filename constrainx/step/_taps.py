"""The walk over a jaxpr that finds dense layers and convolutions, and taps them.

A tap is a layer whose kernel is a parameter and is used for nothing else. With the layer's input,
the activation, and the gradient with respect to its output, the signal, the kernel's gradient is
known without a backward pass of its own.

The walk goes into functions that `jax.jit` or `jax.checkpoint` has wrapped. Any other use of a
parameter, known or not, spoils it: its gradients are then stored as JAX computes them.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jaxtyping import Array

# The number of an equation, after those of the equations that wrap it.
Path: TypeAlias = tuple[int, ...]


class Tap(NamedTuple):
    """A layer found in the jaxpr: where, and its equation."""

    path: Path
    equation: jex.JaxprEqn

    @property
    def output(self) -> Any:
        """The shape and dtype of what the layer gives."""
        return self.equation.outvars[0].aval


class _Kernel(NamedTuple):
    """A variable that holds a parameter: which, and the dtype that it has as a parameter."""

    parameter: int
    dtype: Any


class _Uses(NamedTuple):
    """What a walk has found: the layers of each parameter, and those with another use."""

    taps: dict[int, list[Tap]]
    spoilt: set[int]


def find_taps(jaxpr: jex.Jaxpr, parameters: Sequence[Any]) -> dict[int, list[Tap]]:
    """For each parameter that is used as a kernel only, the layers that use it."""
    uses = _Uses({index: [] for index in range(len(parameters))}, set())
    kernels = [_Kernel(index, variable.aval.dtype) for index, variable in enumerate(parameters)]
    results = _walk(jaxpr, dict(zip(parameters, kernels, strict=True)), (), uses)
    spoilt = uses.spoilt | {kernel.parameter for kernel in results if kernel is not None}
    return {index: taps for index, taps in uses.taps.items() if taps and index not in spoilt}


def _walk(
    jaxpr: jex.Jaxpr, kernels: dict[Any, _Kernel], path: Path, uses: _Uses
) -> list[_Kernel | None]:
    """Adds to the uses; returns which parameter each output of the jaxpr is, if it is one."""

    def find(atom: Any) -> _Kernel | None:
        return None if isinstance(atom, jex.Literal) else kernels.get(atom)

    for number, equation in enumerate(jaxpr.eqns):
        operands = [find(atom) for atom in equation.invars]
        touched = [kernel for kernel in operands if kernel is not None]
        if not touched:
            continue
        here = (*path, number)
        inner = _find_wrapped(equation)
        if inner is not None:
            passed = zip(inner.jaxpr.invars, operands, strict=True)
            named = {variable: kernel for variable, kernel in passed if kernel is not None}
            results = _walk(inner.jaxpr, named, here, uses)
            # NNX returns the parameters of a module, and later equations read them from there.
            outputs = zip(equation.outvars, results, strict=True)
            kernels.update((variable, kernel) for variable, kernel in outputs if kernel is not None)
        elif _is_harmless_cast(equation, touched[0]):
            kernels[equation.outvars[0]] = touched[0]
        elif _is_layer(equation) and operands[0] is None:
            uses.taps[touched[0].parameter].append(Tap(here, equation))
        else:
            uses.spoilt.update(kernel.parameter for kernel in touched)
    return [find(atom) for atom in jaxpr.outvars]


def _find_wrapped(equation: jex.JaxprEqn) -> jex.ClosedJaxpr | None:
    """The function inside of an equation that can be run in its place, or None."""
    name, parameters = equation.primitive.name, equation.params
    if name in ("jit", "pjit"):
        # Run without its `jax.jit`, the function would lose the shardings that were asked for.
        shardings = [*parameters["in_shardings"], *parameters["out_shardings"]]
        if any(isinstance(sharding, jax.sharding.Sharding) for sharding in shardings):
            return None
        return parameters["jaxpr"]
    # A `prevent_cse` for each argument would not cover those that a tap adds.
    if (
        _is_checkpoint(equation)
        and not parameters["differentiated"]
        and isinstance(parameters["prevent_cse"], bool)
    ):
        return jex.ClosedJaxpr(parameters["jaxpr"], ())
    return None


def _is_checkpoint(equation: jex.JaxprEqn) -> bool:
    return equation.primitive.name in ("remat2", "remat", "checkpoint")


def _is_harmless_cast(equation: jex.JaxprEqn, kernel: _Kernel) -> bool:
    """Whether a cast leaves the gradient as it is, up to the rounding of its last use.

    A single cast between real types does; layers that compute in another precision than that of
    their parameters have one. A cast to integers stops the gradient, and one to complex numbers
    keeps only the real part of it. After a second cast, JAX has rounded the gradient to a precision
    that neither the layer nor the parameter has.
    """
    if equation.primitive.name != "convert_element_type":
        return False
    source: Any = equation.invars[0].aval
    target: Any = equation.outvars[0].aval
    first = source.dtype == kernel.dtype or source.dtype == target.dtype
    return first and _is_real(source.dtype) and _is_real(target.dtype)


def _is_real(dtype: Any) -> bool:
    """Whether it is one of the real types that JAX promotes to float32 and beyond by itself."""
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits >= 16


def _is_layer(equation: jex.JaxprEqn) -> bool:
    if not (is_convolution(equation) or equation.primitive.name == "dot_general"):
        return False
    arrays: list[Any] = [atom.aval for atom in (*equation.invars, *equation.outvars)]
    # With an empty axis there is nothing to save, and no token to divide by.
    if not all(_is_real(array.dtype) and 0 not in array.shape for array in arrays):
        return False
    left, right, _ = arrays
    if is_convolution(equation):
        groups = equation.params["feature_group_count"], equation.params["batch_group_count"]
        dilation = equation.params["lhs_dilation"]
        return right.ndim > 2 and groups == (1, 1) and set(dilation) == {1}
    contract, batch = equation.params["dimension_numbers"]
    plain = contract == ((left.ndim - 1,), (0,)) and batch == ((), ())
    return plain and right.ndim == 2


def is_convolution(equation: jex.JaxprEqn) -> bool:
    return equation.primitive.name == "conv_general_dilated"


def is_worth_factoring(taps: Sequence[Tap], kernel: Array, examples: int, rows: int) -> bool:
    """Whether inner products of tokens are less work than those of stored gradients.

    Args:
        taps: the layers that use the kernel, for one example.
        kernel: the parameter.
        examples: how many there are.
        rows: how many each of them has.
    """
    inputs, outputs = kernel.shape
    tokens = sum(count_entries(tap.output.shape) // outputs for tap in taps)
    factored = (examples * tokens) ** 2 * (inputs + rows**2 * outputs)
    return factored < examples * rows * inputs * outputs * (examples * rows + tokens)


def count_entries(shape: Sequence[int]) -> int:
    return functools.reduce(operator.mul, shape, 1)


def run_with_taps(
    closed: jex.ClosedJaxpr, arguments: Sequence[Array], inject: dict[Path, Array]
) -> tuple[list[Array], dict[Path, Array]]:
    """Runs the jaxpr, and adds what is injected to the outputs of tapped layers.

    Do not differentiate with respect to the kernels of these layers: their gradients follow from
    activations and signals.

    Args:
        closed: the jaxpr.
        arguments: its inputs.
        inject: for each tapped layer, an array like its output.

    Returns:
        The outputs, and the activations of the tapped layers.
    """
    jaxpr = closed.jaxpr
    values: dict[Any, Any] = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    values.update(zip(jaxpr.invars, arguments, strict=True))
    activations: dict[Path, Array] = {}

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, jex.Literal) else values[atom]

    for number, equation in enumerate(jaxpr.eqns):
        inputs = [read(atom) for atom in equation.invars]
        inside = {path[1:]: value for path, value in inject.items() if path[0] == number}
        if () in inside:
            activations[(number,)] = inputs[0]
            (output,) = _run_equation(jaxpr, equation, inputs)
            outputs = [output + inside[()]]
        elif inside:
            outputs, noted = _run_wrapped(equation, inputs, inside)
            activations.update({(number, *path): value for path, value in noted.items()})
        else:
            outputs = _run_equation(jaxpr, equation, inputs)
        values.update(zip(equation.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars], activations


def _run_wrapped(
    equation: jex.JaxprEqn, inputs: Sequence[Array], inject: dict[Path, Array]
) -> tuple[list[Array], dict[Path, Array]]:
    inner = _find_wrapped(equation)
    assert inner is not None
    run: Callable[..., Any] = functools.partial(run_with_taps, inner)
    if _is_checkpoint(equation):
        # The activations are kept, as factors. Everything else is still recomputed.
        settings = {name: equation.params[name] for name in ("prevent_cse", "policy")}
        run = jax.checkpoint(run, **settings)
    return run(inputs, inject)


def _run_equation(jaxpr: jex.Jaxpr, equation: jex.JaxprEqn, inputs: Sequence[Array]) -> list[Array]:
    values = {
        atom: value
        for atom, value in zip(equation.invars, inputs, strict=True)
        if not isinstance(atom, jex.Literal)
    }
    single = jaxpr.replace(
        constvars=[],
        invars=list(values),
        outvars=list(equation.outvars),
        eqns=[equation],
        debug_info=jaxpr.debug_info.with_unknown_names(),
    )
    return jex.jaxpr_as_fun(jex.ClosedJaxpr(single, ()))(*values.values())
