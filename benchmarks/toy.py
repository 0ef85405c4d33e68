"""A loss in two dimensions with a curved constraint: which way four methods go, and where to."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float
from matplotlib.axes import Axes
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
# Okabe and Ito's colours, which colour-blind readers can tell apart.
COLORS = {
    "SGD": "#6B6B6B",
    "penalty 1": "#56B4E9",
    "penalty 10": "#0072B2",
    "Lagrangian": "#E69F00",
    "null space": "#D55E00",
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
    figure = Figure(figsize=(9, 4.2), layout="constrained", dpi=150)
    plane, distance = figure.subplots(1, 2, width_ratios=(1.25, 1))
    _draw_paths(plane, paths, best)
    for name, path in paths.items():
        off = np.maximum(np.abs(jax.vmap(curve)(path)), 1e-8)
        distance.semilogy(off, color=COLORS[name], label=name, linewidth=2)
    distance.set(xlabel="step", title="Distance from the constraint, |c|")
    distance.grid(alpha=0.3)
    for axis in (plane, distance):
        axis.spines[["top", "right"]].set_visible(False)
    return figure


def _draw_paths(axis: Axes, paths: dict[str, Array], best: np.ndarray) -> None:
    x, y = np.meshgrid(np.linspace(-2.2, 2.4, 200), np.linspace(-1.2, 2.2, 200))
    values = jax.vmap(jax.vmap(lambda a, b: loss(jnp.array([a, b]))))(x, y)
    axis.contour(x, y, values, levels=20, cmap="Greys", alpha=0.4)
    line = np.linspace(-2.2, 2.4, 200)
    axis.plot(line, 0.6 * line**2 - 0.5, "k--", linewidth=2, label="c(θ) = 0")
    for name, path in paths.items():
        axis.plot(path[:, 0], path[:, 1], color=COLORS[name], label=name, linewidth=2)
        axis.plot(path[-1, 0], path[-1, 1], "o", color=COLORS[name])
    axis.plot(*best, "k*", markersize=14, label="solution")
    axis.set(xlim=(-2.2, 2.4), ylim=(-1.2, 2.2), xlabel="θ₁", ylabel="θ₂")
    axis.set_title("Gradient descent under a curved constraint")
    axis.legend(loc="upper center", fontsize=8, ncols=2)
