"""Networks that solve differential equations, with boundary conditions as constraints.

    constrainx compare pinn --equation poisson --size cpu --seeds 3

The loss is the mean squared residual of the equation at points inside; the boundary and initial
conditions are constraints at points of the edge, which stay the same. "nullspace" projects them
twice, and has nothing to sweep. "gauss-newton" has no loss: the residuals inside are soft rows,
below the hard rows of the edge, with momentum and a trust region. "penalty" and "lagrangian" need a
weight, which `--sweep` looks for; "ansatz" is a network whose form obeys the conditions, where one
is known (poisson, burgers). Robin conditions (heat-robin) and a domain like a flower
(reaction-diffusion) are where that is hard.

The error is relative, ‖u − u*‖ / ‖u*‖ on 2,000 other points, with exact solutions u*. Set
JAX_ENABLE_X64=1 to compute in float64, without which errors below 1e-4 are rounding.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float

from constrainx import data
from constrainx.constraints import Constraint, Residuals
from constrainx.models import MLP
from constrainx.recipes import Recipe, RecipeError, weigh_method
from constrainx.step import Method, MethodName, NullSpace
from constrainx.trainers import Evaluation, Trainer
from constrainx.trainers.equations import EQUATIONS, Equation, as_field


@dataclasses.dataclass(frozen=True)
class Edge(Constraint):
    """The conditions of an equation at the points of its edge, a row for each."""

    equation: str = dataclasses.field(default="poisson", kw_only=True)

    def residual(self, model: Any, batch: Any, *, key: Array) -> Float[Array, " points"]:  # noqa: ARG002
        """What is zero on the edge."""
        equation = EQUATIONS[self.equation]
        u = as_field(model, equation)
        return jax.vmap(functools.partial(equation.condition, u))(batch["edge"])


@dataclasses.dataclass(frozen=True, kw_only=True)
class PINN(Recipe):
    """A differential equation solved by a network.

    Attributes:
        equation: "poisson", "heat-robin", "burgers" or "reaction-diffusion".
        steps: the number of training steps.
        edge: the number of points on the edge.
        inside: how many points inside there are for each of them.
        learning_rate: the largest of Adam, decayed to zero by a cosine.
        width: the width of the hidden layers.
        depth: how many hidden layers there are.
        constrained_by: how the conditions on the edge act.
        gamma: the part of the violation that a step removes.
        weight: of the penalty or the Lagrangian, which take means over the points.
        ansatz: whether the form of the network obeys the conditions.
        squares: whether the residuals inside are soft rows, instead of a loss.
        momentum: of the steps on soft rows.
        trust: how long such a step may be at the beginning; it decays to a hundredth by a cosine.
        damping: of soft rows.
    """

    name: ClassVar[str] = "pinn"
    methods: ClassVar = {
        "nullspace": {"constrained_by": "nullspace"},
        "gauss-newton": {"constrained_by": "nullspace", "squares": True},
        "penalty": {"constrained_by": "penalty"},
        "lagrangian": {"constrained_by": "lagrangian"},
        "ansatz": {"ansatz": True},
    }
    sizes: ClassVar = {
        "smoke": {"steps": 20, "edge": 8, "inside": 2, "width": 8, "log_every": 10},
        "cpu": {"steps": 3000, "log_every": 100},
    }
    figures: ClassVar = {"error": "relative error", "edge": "edge, rms"}
    sweeps: ClassVar = {
        "penalty": {"weight": (1.0, 1e4)},
        "lagrangian": {"weight": (0.1, 1e3)},
    }
    axes: ClassVar = ("error", "edge")

    equation: Literal["poisson", "heat-robin", "burgers", "reaction-diffusion"] = "poisson"
    steps: int = 20_000
    edge: int = 64
    inside: int = 8
    learning_rate: float = 3e-3
    width: int = 32
    depth: int = 2
    constrained_by: MethodName = "none"
    gamma: float = 0.3
    weight: float = 100.0
    ansatz: bool = False
    squares: bool = False
    momentum: float = 0.9
    trust: float = 0.3
    damping: float = 1e-6

    def trainer(self, **options: Any) -> Trainer:
        """Builds the network, its points and its conditions."""
        problem = self._problem
        rate = optax.cosine_decay_schedule(self.learning_rate, self.steps)
        shape = (2, *(self.width,) * self.depth, 1)
        model = MLP(shape, activation=jnp.tanh, rngs=nnx.Rngs(self.seed))
        dtype = jnp.result_type(float)
        nnx.update(model, jax.tree.map(lambda p: p.astype(dtype), nnx.state(model, nnx.Param)))
        inside = problem.inside(self.edge * self.inside, seed=self.seed)
        # An example is a point of the edge, with its share of the points inside.
        points = {
            "edge": problem.edge(self.edge).astype(dtype),
            "inside": inside.reshape(self.edge, self.inside, 2).astype(dtype),
        }
        return Trainer(
            model=model,
            loss=None if self.squares else self._loss,
            optimizer=optax.identity() if self.squares else optax.adam(rate),
            data=data.arrays(points, batch=self.edge, seed=self.seed),
            steps=self.steps,
            constraints=self.constraints(),
            method=self._choose_method(),
            evaluation=Evaluation(
                data.arrays(self._make_test(dtype), batch=500),
                metrics={"squared error": self._measure_error},
                every=max(self.steps // 20, 1),
            ),
            **self.settings(learning_rate=None if self.squares else rate, **options),
        )

    def constraints(self) -> list[Constraint]:
        """The conditions on the edge, and the residuals inside if they are rows."""
        # The points of a batch are all there are, so that the rows are the same in each step.
        edge = Edge(equation=self.equation, gamma=self.gamma, placement="twice", name="edge")
        found: list[Constraint] = [] if self.ansatz else [edge]
        if self.squares:
            found = [dataclasses.replace(edge, gamma=1.0, placement="update")]
            found.append(Residuals(self._residuals, damping=self.damping, name="inside"))
        return found

    def measure(self, model: Any) -> dict[str, float]:
        """The relative error, and the conditions at other points of the edge."""
        problem = self._problem
        u = as_field(model, problem, enforced=self.ansatz)
        test = jax.tree.map(jnp.asarray, self._make_test(jnp.result_type(float)))
        found = np.asarray(jax.vmap(u)(test["x"]), np.float64)
        wanted = np.asarray(test["u"], np.float64)
        left = jax.vmap(functools.partial(problem.condition, u))(test["edge"])
        return {
            "error": float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted)),
            "edge": float(jnp.sqrt(jnp.mean(jnp.square(left)))),
        }

    def draw(self, model: Any, path: pathlib.Path) -> None:
        """Draws the solution, and what the network gets wrong."""
        from matplotlib.figure import Figure

        problem = self._problem
        (left, right), (low, high) = problem.box
        across, up = np.meshgrid(np.linspace(left, right, 120)[1:], np.linspace(low, high, 120))
        points = np.stack([across.ravel(), up.ravel()], axis=1)
        u = as_field(model, problem, enforced=self.ansatz)
        found = np.asarray(jax.vmap(u)(jnp.asarray(points)), np.float64)
        is_in = problem.contains(points)
        wanted = np.where(is_in, problem.exact(points), np.nan)
        error = np.where(is_in, np.abs(found - wanted), np.nan)
        figure = Figure(figsize=(8, 3.4), layout="constrained", dpi=150)
        panels = figure.subplots(1, 2)
        for axis, values, title in (
            (panels[0], np.where(is_in, found, np.nan), f"{self.equation}, u"),
            (panels[1], np.log10(np.maximum(error, 1e-12)), "log₁₀ of the error"),
        ):
            drawn = axis.pcolormesh(across, up, values.reshape(across.shape), cmap="viridis")
            axis.set(xlabel=problem.axes[0], ylabel=problem.axes[1], title=title)
            figure.colorbar(drawn, ax=axis)
        figure.savefig(path)

    @property
    def _problem(self) -> Equation:
        problem = EQUATIONS[self.equation]
        if self.ansatz and not problem.can_enforce:
            known = [name for name, one in EQUATIONS.items() if one.can_enforce]
            raise RecipeError(
                f"`ansatz` needs a form that obeys the conditions, and none is known for "
                f"{self.equation!r}. There is one for {' and '.join(known)}."
            )
        return problem

    def _choose_method(self) -> Method:
        if not self.squares:
            return weigh_method(self.constrained_by, self.weight)
        trust = optax.cosine_decay_schedule(self.trust, self.steps, alpha=0.01)
        return NullSpace(momentum=self.momentum, trust=trust)

    def _residuals(
        self, model: Any, batch: Any, key: Array | None = None
    ) -> Float[Array, "examples points"]:
        del key
        u = as_field(model, self._problem, enforced=self.ansatz)
        return jax.vmap(jax.vmap(functools.partial(self._problem.residual, u)))(batch["inside"])

    def _loss(self, model: Any, batch: Any) -> Float[Array, ""]:
        return jnp.mean(jnp.square(self._residuals(model, batch)))

    def _make_test(self, dtype: Any) -> dict[str, np.ndarray]:
        points = self._problem.inside(2000, seed=10_000)
        test = {
            "x": points,
            "u": self._problem.exact(points),
            "inside": points[:, None],
            "edge": self._problem.edge(len(points)),
        }
        return {name: values.astype(dtype) for name, values in test.items()}

    def _measure_error(self, model: Any, batch: Any) -> Float[Array, " points"]:
        u = as_field(model, self._problem, enforced=self.ansatz)
        return jnp.square(jax.vmap(u)(batch["x"]) - batch["u"])
