"""`Feasible`: a model whose outputs satisfy constraints, for every input."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, PyTree

from constrainx.constraints import Constraint, OutputConstraint, as_count, constraints_of
from constrainx.errors import ArgumentError, ArgumentTypeError
from constrainx.layers._nearest import find_nearest
from constrainx.linalg import Solver


class UnmetWarning(UserWarning):
    """Some outputs of `Feasible` do not satisfy its constraints."""


class Feasibility(NamedTuple):
    """Outputs, and how well they satisfy the constraints; arrays have an entry for each example.

    Attributes:
        output: what the model returns.
        met: whether each constraint holds to its tolerance.
        violations: for each constraint, by name, the largest violation of an entry.
        iterations: how many linear systems, or for constraints that are not affine how many steps,
            it took.
        nearest: whether the output is the nearest one to what the model inside returned, to
            rounding. If not, it may satisfy the constraints all the same, but gradients through it
            are approximate.
        moved: how far the output is from what the model inside returned; its square, in a loss,
            brings that closer to the constraints.
    """

    output: PyTree[Float[Array, "batch ..."]]
    met: Bool[Array, " batch"]
    violations: dict[str, Float[Array, " batch"]]
    iterations: Int[Array, " batch"]
    nearest: Bool[Array, " batch"]
    moved: Float[Array, " batch"]

    def explain(self) -> str:
        """One sentence for people, outside of `jax.jit`."""
        if isinstance(self.met, jax.core.Tracer):
            raise ArgumentError(
                "`Feasibility.explain` needs finished figures: call it outside of `jax.jit`."
            )
        count, met = len(self.met), int(np.sum(self.met))
        largest = ", ".join(
            f"{name} {float(np.max(figures)):.2g}" for name, figures in self.violations.items()
        )
        first = "" if met == count else f"; the first that does not is {int(np.argmin(self.met))}"
        steps = int(np.max(self.iterations))
        return (
            f"{met} of {count} outputs satisfy the constraints{first}; largest violations: "
            f"{largest}; at most {steps} iterations"
        )


class Feasible(nnx.Module):
    """A model whose every output is moved to the nearest one that satisfies the constraints.

    y ↦ argmin ‖y' − y‖² under of(x, y') = value for each `OutputEquals` and of(x, y') ≤ value for
    each `OutputAtMost`. Constraints that are affine in y are met exactly, up to rounding, by
    projection; for smooth ones it is a sequence of projections on their linearisation, which ends
    at a nearest point near by. Examples are independent of each other. Gradients follow from the
    optimality conditions, by one more least-squares solve. It is a module like any other: train it,
    save it, put it into a larger one.

    An output in a corner, held by as many rows as it has entries, stays there if the model inside
    changes a little, so no gradient comes through. A small multiple of ``check(x).moved ** 2`` in
    the loss leads the model out again.

    >>> import jax.numpy as jnp, constrainx as cx
    >>> from flax import nnx
    >>> shares = cx.OutputEquals(1.0, of=lambda x, y: jnp.sum(y))
    >>> positive = cx.OutputAtMost(0.0, of=lambda x, y: -y)
    >>> model = cx.Feasible(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), [shares, positive])
    >>> y = model(jnp.ones((5, 2)))
    >>> print(y.sum(axis=1).round(5), bool((y > -1e-6).all()))
    [1. 1. 1. 1. 1.] True

    Where no output satisfies the constraints, it returns one that comes close. Outside of `jax.jit`
    that is an `UnmetWarning`; inside, ask `check`.

    Costs, for n outputs, m constraints in total, and each example: a Jacobian of m × n, and for k
    inequalities some ten factorisations of k × k matrices. What does not depend on the example,
    such as a constant Jacobian of the equalities, is factorised once for the batch.
    """

    def __init__(
        self,
        model: nnx.Module,
        constraints: OutputConstraint | Iterable[OutputConstraint] | None = None,
        *,
        solver: Solver | None = None,
        max_iterations: int = 50,
    ):
        """Wraps a model.

        Args:
            model: called with the inputs; the first axis of what it returns runs over examples.
            constraints: one or several; by default those attached to the model.
            solver: of the least-squares problems; by default a damped Cholesky factorisation with
                iterative refinement, which is fast in a batch. `LSMR` is for many rows.
            max_iterations: how many steps to take where constraints are not affine in y.
        """
        if not isinstance(model, nnx.Module):
            raise ArgumentTypeError(
                f"`Feasible` takes an nnx.Module and constraints, got {type(model).__name__} first."
            )
        self.model = model
        self.output_constraints = _check_constraints(constraints, model)
        self.solver = solver
        argument = "Feasible(max_iterations=...)"
        self.max_iterations = as_count(max_iterations, argument=argument)

    def __call__(self, x: PyTree, *args: Any, **kwargs: Any) -> PyTree[Float[Array, "batch ..."]]:
        """The model's outputs, moved to the nearest ones that satisfy the constraints."""
        found = self.check(x, *args, **kwargs)
        if not isinstance(found.met, jax.core.Tracer) and not bool(jnp.all(found.met)):
            warnings.warn(found.explain(), UnmetWarning, stacklevel=2)
        return found.output

    def check(self, x: PyTree, *args: Any, **kwargs: Any) -> Feasibility:
        """The outputs, and for each example whether and how well it satisfies the constraints."""
        return _project(
            x,
            self.model(x, *args, **kwargs),
            constraints=self.output_constraints,
            solver=self.solver,
            max_iterations=self.max_iterations,
        )


@functools.partial(jax.jit, static_argnames=("constraints", "solver", "max_iterations"))
def _project(
    x: PyTree,
    output: PyTree,
    *,
    constraints: tuple[OutputConstraint, ...],
    solver: Solver | None,
    max_iterations: int,
) -> Feasibility:
    """Projects the outputs of all examples."""
    # Rounded to bfloat16, an output would miss what it was moved to.
    output = jax.tree.map(lambda leaf: leaf.astype(jnp.promote_types(leaf, jnp.float32)), output)

    def project_one(x: PyTree, output: PyTree) -> Feasibility:
        target, unflatten = jax.flatten_util.ravel_pytree(output)

        def evaluate(x: PyTree, y: Array) -> list[Array]:
            each = [constraint.excess(x, unflatten(y)) for constraint in constraints]
            return [excess.astype(target.dtype) for excess in each]

        def excess(x: PyTree, y: Array) -> Array:
            return jnp.concatenate(evaluate(x, y))

        sizes = [len(one) for one in jax.eval_shape(evaluate, x, target)]
        kinds = [constraint.kind for constraint in constraints]
        found = find_nearest(
            excess,
            x,
            target,
            tolerance=np.repeat([constraint.tolerance for constraint in constraints], sizes),
            equalities=sum(
                size for size, kind in zip(sizes, kinds, strict=True) if kind == "equality"
            ),
            solver=solver,
            max_iterations=max_iterations,
        )
        violations = {
            constraint.label: jnp.max(constraint.measure(excess))
            for constraint, excess in zip(constraints, evaluate(x, found.y), strict=True)
        }
        met = [violations[constraint.label] <= constraint.tolerance for constraint in constraints]
        return Feasibility(
            unflatten(found.y),
            jnp.all(jnp.stack(met)),
            violations,
            found.iterations,
            found.optimal,
            _measure_length(found.y - target),
        )

    return jax.vmap(project_one)(x, output)


def _measure_length(vector: Float[Array, " n"]) -> Float[Array, ""]:
    """The norm, with a gradient of zero where it is zero."""
    squared = jnp.sum(jnp.square(vector))
    return jnp.where(squared > 0, jnp.sqrt(jnp.where(squared > 0, squared, 1)), 0)


def _check_constraints(given: Any, model: nnx.Module) -> tuple[OutputConstraint, ...]:
    """The constraints, equalities first."""
    if given is None:
        attached = [found.constraint for found in constraints_of(model) if not found.path]
        given = [one for one in attached if isinstance(one, OutputConstraint)]
    constraints = (given,) if isinstance(given, Constraint) else tuple(given)
    if not constraints:
        raise ArgumentError(
            "`Feasible(constraints=...)` needs at least one constraint: pass `OutputEquals` or "
            "`OutputAtMost`, or attach one to the model."
        )
    for constraint in constraints:
        if not isinstance(constraint, OutputConstraint):
            raise ArgumentTypeError(
                "`Feasible(constraints=...)` takes `OutputEquals` and `OutputAtMost`, which say "
                f"what must hold of an output, got {constraint!r}."
            )
    labels = [constraint.label for constraint in constraints]
    repeated = sorted({label for label in labels if labels.count(label) > 1})
    if repeated:
        raise ArgumentError(
            f"`Feasible(constraints=...)` has several constraints called {repeated[0]!r}: tell "
            "them apart by `name=`."
        )
    return tuple(sorted(constraints, key=lambda constraint: constraint.kind == "inequality"))
