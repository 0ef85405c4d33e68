"""Which inputs a traced function really depends on."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import jax.extend.core as jex


def find_live_inputs(closed: jex.ClosedJaxpr) -> tuple[bool, ...]:
    """For each input, whether any output may depend on it.

    Looks inside of functions that `jax.jit` and `jax.checkpoint` have wrapped, and of scans, loops
    and conditions, which hand on much that is never read, such as the random streams of a model in
    evaluation mode. Any other equation whose result is needed counts as needing all of its inputs;
    a custom derivative may depend on what the value does not.

    >>> import jax
    >>> find_live_inputs(jax.make_jaxpr(lambda a, b, c: (a + 0 * b) * 2)(1.0, 2.0, 3.0))
    (True, True, False)
    """
    return _find_live(closed.jaxpr, [True] * len(closed.jaxpr.outvars))


def _find_live(jaxpr: jex.Jaxpr, needed: Sequence[bool]) -> tuple[bool, ...]:
    live = {
        atom
        for atom, is_needed in zip(jaxpr.outvars, needed, strict=True)
        if is_needed and not isinstance(atom, jex.Literal)
    }
    for equation in reversed(jaxpr.eqns):
        outputs = [variable in live for variable in equation.outvars]
        if not any(outputs):
            continue
        live |= {
            atom
            for atom, is_live in zip(equation.invars, _find_read(equation, outputs), strict=True)
            if is_live and not isinstance(atom, jex.Literal)
        }
    return tuple(variable in live for variable in jaxpr.invars)


def _find_read(equation: jex.JaxprEqn, outputs: Sequence[bool]) -> Sequence[bool]:
    """For each input of an equation, whether the outputs that are needed may depend on it."""
    parameters = equation.params
    match equation.primitive.name:
        case "jit" | "pjit":
            return _find_live(parameters["jaxpr"].jaxpr, outputs)
        case "remat2" | "remat" | "checkpoint":
            return _find_live(parameters["jaxpr"], outputs)
        case "cond":
            branches = [_find_live(branch.jaxpr, outputs) for branch in parameters["branches"]]
            return [True, *map(any, zip(*branches, strict=True))]
        case "scan":
            return _find_read_by_scan(equation, outputs)
        case "while":
            return _find_read_by_loop(equation, outputs)
    return [True] * len(equation.invars)


def _find_read_by_scan(equation: jex.JaxprEqn, outputs: Sequence[bool]) -> Sequence[bool]:
    body = equation.params["jaxpr"].jaxpr
    constants, carried = equation.params["num_consts"], equation.params["num_carry"]
    carry, stacked = list(outputs[:carried]), outputs[carried:]
    while True:
        live = _find_live(body, [*carry, *stacked])
        # What is carried on is needed where the next round reads it.
        wider = list(map(operator.or_, carry, live[constants : constants + carried]))
        if wider == carry:
            return [*live[:constants], *carry, *live[constants + carried :]]
        carry = wider


def _find_read_by_loop(equation: jex.JaxprEqn, outputs: Sequence[bool]) -> Sequence[bool]:
    body, condition = (equation.params[name].jaxpr for name in ("body_jaxpr", "cond_jaxpr"))
    asking, doing = equation.params["cond_nconsts"], equation.params["body_nconsts"]
    asked = _find_live(condition, [True])
    carry = list(map(operator.or_, outputs, asked[asking:]))
    while True:
        live = _find_live(body, carry)
        wider = list(map(operator.or_, carry, live[doing:]))
        if wider == carry:
            return [*asked[:asking], *live[:doing], *carry]
        carry = wider
