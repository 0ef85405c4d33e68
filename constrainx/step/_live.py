"""Which inputs a traced function really depends on."""

from __future__ import annotations

import jax.extend.core as jex


def find_live_inputs(closed: jex.ClosedJaxpr) -> tuple[bool, ...]:
    """For each input, whether any output may depend on it.

    Looks inside of functions that `jax.jit` has wrapped. Any other equation whose result is needed
    counts as needing all of its inputs.

    >>> import jax
    >>> find_live_inputs(jax.make_jaxpr(lambda a, b, c: (a + 0 * b) * 2)(1.0, 2.0, 3.0))
    (True, True, False)
    """
    return _find_live(closed.jaxpr, [True] * len(closed.jaxpr.outvars))


def _find_live(jaxpr: jex.Jaxpr, needed: list[bool]) -> tuple[bool, ...]:
    live = {
        atom
        for atom, is_needed in zip(jaxpr.outvars, needed, strict=True)
        if is_needed and not isinstance(atom, jex.Literal)
    }
    for equation in reversed(jaxpr.eqns):
        outputs = [variable in live for variable in equation.outvars]
        if not any(outputs):
            continue
        inputs = [True] * len(equation.invars)
        inner = equation.params.get("jaxpr")
        if equation.primitive.name in ("jit", "pjit") and isinstance(inner, jex.ClosedJaxpr):
            inputs = list(_find_live(inner.jaxpr, outputs))
        live |= {
            atom
            for atom, is_live in zip(equation.invars, inputs, strict=True)
            if is_live and not isinstance(atom, jex.Literal)
        }
    return tuple(variable in live for variable in jaxpr.invars)
