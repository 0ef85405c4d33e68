"""What it costs to move a batch of outputs to where constraints hold, and to differentiate that."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from benchmarks.measure import best_times, compile_for
from benchmarks.report import Report, Table
from constrainx.layers import Feasible
from constrainx.models import MLP
from constrainx.recipes.feasible_qp import FeasibleQp


def run(*, quick: bool) -> Report:
    """Times the network alone, inside of `Feasible`, and the gradient through it."""
    recipe = FeasibleQp(size="smoke" if quick else "full")
    x = jnp.asarray(recipe.problem.x[-recipe.tests :], jnp.float32)
    widths = (recipe.equalities, recipe.width, recipe.width, recipe.variables)
    rows, largest = [], 0.0
    for spread in (0.0, 1.0):
        network = MLP(widths, rngs=nnx.Rngs(0))
        # Wider outputs are farther away, and have more active rows.
        last = network.layers[-1]
        last.bias[...] = spread * jax.random.normal(jax.random.key(0), last.bias.shape)
        model = Feasible(network, recipe.problem.constraints())
        contestants = {
            "network": network,
            "inside of Feasible": model,
            "gradient through it": jax.grad(lambda x, model=model: jnp.sum(model(x) ** 2)),
        }
        compiled = {name: compile_for(function, x) for name, function in contestants.items()}
        times = best_times(compiled, x, rounds=2 if quick else 10)
        found = jax.jit(model.check)(x)
        largest = max(largest, *(float(jnp.max(one)) for one in found.violations.values()))
        active = _count_active(recipe, found.output)
        rows += [(active, name, 1e3 * seconds) for name, seconds in times.items()]
    sizes = (recipe.variables, recipe.equalities, recipe.inequalities)
    return Report(
        name="feasible",
        setting=f"A batch of {len(x)}: {sizes[0]} variables, {sizes[1]} equalities, {sizes[2]} "
        f"inequalities. Float32; the largest violation is {largest:.1e}.",
        tables=[
            Table("One batch", {"mean active inequalities": ".1f", "what": "", "ms": ".1f"}, rows)
        ],
        goals=[],
    )


def _count_active(recipe: FeasibleQp, y: Array) -> float:
    slack = recipe.problem.h - y @ recipe.problem.G.T
    return float(jnp.mean(jnp.sum(slack < 1e-4, axis=1)))
