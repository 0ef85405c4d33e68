"""The walk over a jaxpr that finds dense layers and convolutions, and taps them.

A tap is a layer whose kernel is a parameter and is used for nothing else. With the layer's input,
the activation, and the gradient with respect to its output, the signal, the kernel's gradient is
known without a backward pass of its own.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
from jaxtyping import Array


class Tap(NamedTuple):
    """A layer found in the jaxpr: the index of its equation, and its output."""

    equation: int
    shape: tuple[int, ...]
    dtype: Any


def find_taps(jaxpr: jex.Jaxpr, parameters: Sequence[Any]) -> dict[int, list[Tap]]:
    """The dense layers or convolutions of each parameter that is their kernel and nothing else."""
    alias = {var: index for index, var in enumerate(parameters)}
    found: dict[int, list[Tap]] = {index: [] for index in range(len(parameters))}
    spoilt: set[int] = set()
    for number, equation in enumerate(jaxpr.eqns):
        touched = [alias.get(a) for a in equation.invars if not isinstance(a, jex.Literal)]
        indices = {index for index in touched if index is not None}
        if not indices:
            continue
        if equation.primitive.name == "convert_element_type":
            alias[equation.outvars[0]] = indices.pop()
        elif _is_layer(equation) and alias.get(equation.invars[0]) is None:
            output: Any = equation.outvars[0].aval
            found[indices.pop()].append(Tap(number, output.shape, output.dtype))
        else:
            spoilt |= indices
    spoilt |= {alias[a] for a in jaxpr.outvars if not isinstance(a, jex.Literal) and a in alias}
    return {index: taps for index, taps in found.items() if taps and index not in spoilt}


def _is_layer(equation: jex.JaxprEqn) -> bool:
    if is_convolution(equation):
        groups = equation.params["feature_group_count"], equation.params["batch_group_count"]
        return groups == (1, 1) and set(equation.params["lhs_dilation"]) == {1}
    if equation.primitive.name != "dot_general":
        return False
    left: Any = equation.invars[0].aval
    right: Any = equation.invars[1].aval
    contract, batch = equation.params["dimension_numbers"]
    plain = contract == ((left.ndim - 1,), (0,)) and batch == ((), ())
    return plain and right.ndim == 2


def is_convolution(equation: jex.JaxprEqn) -> bool:
    return equation.primitive.name == "conv_general_dilated"


def is_worth_factoring(taps: Sequence[Tap], kernel: Array, rows: int) -> bool:
    """Whether inner products of tokens are less work than those of stored gradients."""
    inputs, outputs = kernel.shape
    tokens = sum(count_entries(tap.shape) // outputs for tap in taps)
    factored = (rows * tokens) ** 2 * (inputs + outputs)
    return factored < rows * inputs * outputs * (rows + tokens)


def count_entries(shape: Sequence[int]) -> int:
    return functools.reduce(operator.mul, shape, 1)


def run_with_taps(
    jaxpr: jex.Jaxpr,
    constants: Sequence[Array],
    arguments: Sequence[Array],
    inject: dict[int, Array],
    activations: dict[int, Array],
) -> list[Array]:
    """Runs the jaxpr, adds what is injected to tapped layers, and notes down their inputs."""
    values: dict[Any, Any] = dict(zip(jaxpr.constvars, constants, strict=True))
    values.update(zip(jaxpr.invars, arguments, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, jex.Literal) else values[atom]

    for number, equation in enumerate(jaxpr.eqns):
        inputs = [read(atom) for atom in equation.invars]
        if number in inject:
            activations[number] = inputs[0]
            # What the kernel's gradient would be is known from activation and signal.
            inputs[1] = jax.lax.stop_gradient(inputs[1])
        outputs = _run_equation(jaxpr, equation, inputs)
        if number in inject:
            outputs = [outputs[0] + inject[number]]
        values.update(zip(equation.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


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
