"""A loss in two dimensions with a curved constraint: which way four methods go, and where to."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float
from matplotlib.figure import Figure

import constrainx as cx
from benchmarks.report import Goal, Report, Table

START = (2.1, -0.7)
RATE = 0.03
# A penalty needs tuning, and so does a Lagrangian; the null space does not.
METHODS: dict[str, cx.Method] = {
    "SGD": cx.Unconstrained(),
    "penalty 1": cx.Penalty(1.0),
    "penalty 10": cx.Penalty(10.0),
    "Lagrangian": cx.Lagrangian(1.0),
    "null space": cx.NullSpace(),
}


def loss(p: Float[Array, 2]) -> Float[Array, ""]:
    """A tilted bowl with its minimum off the curve."""
    return 0.5 * (p[0] - 1.0) ** 2 + 1.5 * (p[1] - 1.2) ** 2 + 0.4 * p[0] * p[1]


def curve(p: Float[Array, 2]) -> Float[Array, ""]:
    """Zero on a parabola."""
    return p[1] - 0.6 * p[0] ** 2 + 0.5


def run(*, quick: bool) -> Report:
    """Follows each method from the same point."""
    steps = 50 if quick else 600
    paths = {name: _path(method, steps) for name, method in METHODS.items()}
    best = _best_on_the_curve()
    rows = [
        (name, float(loss(path[-1])), float(abs(curve(path[-1]))), _distance(path[-1], best))
        for name, path in paths.items()
    ]
    on_curve = {name: violation for name, _, violation, _ in rows}
    met = on_curve["null space"] < 1e-5 < on_curve["penalty 10"]
    return Report(
        name="toy",
        setting=f"Plain gradient descent, rate {RATE}, {steps} steps from {START}; float32.",
        tables=[
            Table(
                "Where they end",
                {"method": "", "loss": ".4f", "|c|": ".1e", "distance to the solution": ".1e"},
                rows,
            )
        ],
        goals=[
            Goal(
                "the null space ends on the curve, a penalty beside it",
                f"|c| of {on_curve['null space']:.0e} and {on_curve['penalty 10']:.0e}",
                bool(met) or quick,
            )
        ],
        plots={"toy": _plot(paths, best)},
    )


def _path(method: cx.Method, steps: int) -> Float[Array, "steps 2"]:
    optimizer = cx.constrain(optax.sgd(RATE), curve, gamma=0.1, method=method)

    def step(carry: Any, _: None) -> tuple[Any, Array]:
        p, state = carry
        updates, state = optimizer.update(jax.grad(loss)(p), state, p)
        return (optax.apply_updates(p, updates), state), p

    start = jnp.array(START)
    return jax.jit(lambda: jax.lax.scan(step, (start, optimizer.init(start)), length=steps)[1])()


def _best_on_the_curve() -> np.ndarray:
    x = np.linspace(-3, 3, 600_001)
    points = np.stack([x, 0.6 * x**2 - 0.5])
    values = 0.5 * (points[0] - 1) ** 2 + 1.5 * (points[1] - 1.2) ** 2 + 0.4 * points[0] * points[1]
    return points[:, np.argmin(values)]


def _distance(point: Float[Array, 2], best: np.ndarray) -> float:
    return float(np.linalg.norm(np.asarray(point) - best))


def _plot(paths: dict[str, Array], best: np.ndarray) -> Figure:
    figure = Figure(figsize=(6, 5), layout="constrained")
    axis = figure.subplots()
    x, y = np.meshgrid(np.linspace(-2.2, 2.4, 200), np.linspace(-1.2, 2.2, 200))
    values = jax.vmap(jax.vmap(lambda a, b: loss(jnp.array([a, b]))))(x, y)
    axis.contour(x, y, values, levels=20, cmap="Greys", alpha=0.5)
    line = np.linspace(-2.2, 2.4, 200)
    axis.plot(line, 0.6 * line**2 - 0.5, "k--", label="c = 0")
    for name, path in paths.items():
        axis.plot(path[:, 0], path[:, 1], label=name)
        axis.plot(path[-1, 0], path[-1, 1], "o", color=axis.lines[-1].get_color())
    axis.plot(*best, "k*", markersize=12, label="solution")
    axis.set(xlim=(-2.2, 2.4), ylim=(-1.2, 2.2), xlabel="θ₁", ylabel="θ₂")
    axis.set_title("Gradient descent under a curved constraint")
    axis.legend(loc="lower right", fontsize=8)
    return figure
