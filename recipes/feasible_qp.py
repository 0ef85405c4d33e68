"""A network that solves quadratic programs, and whose every answer satisfies their constraints.

    constrainx compare feasible-qp --size cpu

The benchmark of Donti, Rolnick and Kolter (DC3, 2021), with the very numbers of their repository:
minimise ½ yᵀQ y + pᵀy over 100 variables, under 50 equalities A y = x and 50 inequalities G y ≤ h,
where x is the input of the network. With ``--objective sine`` it is pᵀ sin(y), which is not convex.
The network sees no solutions; its loss is the objective. "feasible" is trained inside of
`Feasible`, which moves each output to the nearest one that satisfies the constraints; "penalty" has
a penalty on them in training, and nothing at inference; "penalty-projected" is the same network,
put into `Feasible` afterwards. The gap is how far the mean objective is above that of the optima,
which are found in float64; for the sine, they are local.
On one core, two minutes of "feasible" end 0.28 % above the optima, with violations below 1e-5 for
all test inputs, in float32; DC3 is 10.6 % above. The penalties end 12 % above.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float
from matplotlib.figure import Figure

from constrainx import data
from constrainx.constraints import OutputAtMost, OutputEquals
from constrainx.layers import Feasible
from constrainx.models import MLP
from constrainx.recipes import Recipe, weigh_method
from constrainx.step import MethodName
from constrainx.trainers import Evaluation, Trainer

Objective: TypeAlias = Literal["quadratic", "sine"]
# Of the mean over the test inputs, as the notebook in the repository of DC3 prints them.
DC3 = {
    "quadratic": {"optimum": -15.05, "objective": -13.46, "seconds": 0.017},
    "sine": {"optimum": -11.59, "objective": -10.66, "seconds": 0.013},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeasibleQp(Recipe):
    """Quadratic programs with one answer for each input.

    Attributes:
        objective: "quadratic" or "sine".
        steps: the number of training steps.
        batch: examples per step.
        learning_rate: the learning rate of Adam, decayed to zero by a cosine.
        width: the width of the two hidden layers.
        inside: whether the network is trained inside of `Feasible`.
        projected: whether it is put into `Feasible` at the end.
        pull: how strongly the loss pulls outputs towards the constraints before they are moved: the
            weight of the squared distance by which they are.
        constrained_by: how the constraints act in training.
        weight: of the penalty, which takes means over the rows.
        longer: multiplies the steps, to give a method as much time as "feasible" takes.
        variables: the number of variables.
        equalities: the number of equalities, and of inputs.
        inequalities: the number of inequalities.
        examples: the number of inputs, for training and tests.
        tests: how many of them are for tests.
        validate: whether to measure on as many inputs in front of these, and not train on them, to
            choose settings by; the test inputs then play no part.
    """

    name: ClassVar[str] = "feasible-qp"
    methods: ClassVar = {
        "feasible": {"inside": True},
        "penalty": {"constrained_by": "penalty", "longer": 5.0},
        "penalty-projected": {"constrained_by": "penalty", "projected": True, "longer": 5.0},
    }
    sizes: ClassVar = {
        "smoke": {
            "steps": 6, "batch": 16, "width": 16, "variables": 8, "equalities": 3,
            "inequalities": 4, "examples": 96, "tests": 32, "log_every": 3,
        },
        "cpu": {"steps": 1000},
    }  # fmt: skip
    figures: ClassVar = {
        "objective": "objective",
        "gap": "gap (%)",
        "largest equality": "largest equality",
        "largest inequality": "largest inequality",
        "met": "inputs met to 1e-5",
    }
    sweeps: ClassVar = {
        "feasible": {"pull": (1e-5, 0.1)},
        "penalty": {"weight": (10.0, 1e5)},
        "penalty-projected": {"weight": (10.0, 1e5)},
    }
    validation: ClassVar = {"validate": True}
    # An answer that violates its constraints can be better than the optimum.
    axes: ClassVar = ("distance", "largest equality")

    objective: Objective = "quadratic"
    steps: int = 42_000
    batch: int = 200
    learning_rate: float = 1e-3
    width: int = 200
    inside: bool = False
    projected: bool = False
    pull: float = 1e-3
    constrained_by: MethodName = "none"
    weight: float = 1000.0
    longer: float = 1.0
    variables: int = 100
    equalities: int = 50
    inequalities: int = 50
    examples: int = 10_000
    tests: int = 833
    validate: bool = False

    def trainer(self, **options: Any) -> Trainer:
        """Builds the network, its constraints and the data."""
        train, test = self._split()
        widths = (self.equalities, self.width, self.width, self.variables)
        network = MLP(widths, activation=nnx.relu, rngs=nnx.Rngs(self.seed))
        steps = round(self.steps * self.longer)
        rate = optax.cosine_decay_schedule(self.learning_rate, steps)
        return Trainer(
            model=self._enclose(network) if self.inside else network,
            loss=self._loss,
            optimizer=optax.adam(rate),
            data=data.arrays({"x": train}, batch=self.batch, seed=self.seed),
            steps=steps,
            constraints=[] if self.inside else self.problem.constraints(),
            method=weigh_method(self.constrained_by, self.weight),
            evaluation=Evaluation(
                data.arrays({"x": test}, batch=self.tests),
                metrics={"objective": lambda model, batch: self._value(model(batch["x"]))},
                every=max(steps // 10, 1),
            ),
            **self.settings(learning_rate=rate, **options),
        )

    @property
    def problem(self) -> Problem:
        """What all quadratic programs have in common."""
        sizes = (self.variables, self.equalities, self.inequalities, self.examples)
        return draw_problem(*sizes)

    def measure(self, model: Any) -> dict[str, float]:
        """Measures objective, gap and violations on the test inputs, in float64."""
        problem, x = self.problem, jnp.asarray(self._split()[1])
        y = np.asarray(self._answer(model, x), np.float64)
        value = float(jnp.mean(self._value(y)))
        best = float(np.mean(self._value(self._optima())))
        equality = np.abs(y @ problem.A.T - np.asarray(x))
        inequality = np.maximum(y @ problem.G.T - problem.h, 0)
        return {
            "objective": value,
            "optimum": best,
            "gap": 100 * (value - best) / abs(best),
            "distance": 100 * abs(value - best) / abs(best),
            "largest equality": float(equality.max()),
            "mean equality": float(equality.mean()),
            "largest inequality": float(inequality.max()),
            "mean inequality": float(inequality.mean()),
            "met": float(np.mean(np.maximum(equality.max(1), inequality.max(1)) <= 1e-5)),
        }

    def remarks(self, results: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
        """The optimum, and what DC3 reports for the same inputs."""
        best = next(iter(results.values()))[0]["metrics"]["optimum"]
        lines = [f"The mean objective of the optima is {best:.3f}."]
        if (self.variables, self.equalities, self.inequalities) == (100, 50, 50):
            theirs = DC3[self.objective]
            gap = 100 * (theirs["objective"] / theirs["optimum"] - 1)
            lines.append(
                f"The repository of DC3 has {theirs['optimum']} for the optima and "
                f"{theirs['objective']} for DC3, a gap of {-gap:.1f} %, with violations of 0.00, "
                f"in {theirs['seconds']} s a batch on its authors' machine."
            )
        return lines

    def draw(self, model: Any, path: pathlib.Path) -> None:
        """Draws the objective of each test input against its optimum."""
        x = jnp.asarray(self._split()[1])
        y = self._answer(model, x)
        best = np.asarray(self._value(self._optima()))
        figure = Figure(figsize=(4.5, 4), layout="constrained")
        axes = figure.subplots()
        axes.plot(best, self._value(y), ".", color="#0072B2", label=self.method)
        axes.axline((best.min(), best.min()), slope=1, color="black", linewidth=1, label="optimum")
        axes.set(xlabel="objective of the optimum", ylabel="objective of the answer")
        axes.legend()
        figure.savefig(path, dpi=150)

    def _enclose(self, network: nnx.Module) -> Feasible:
        return Feasible(network, self.problem.constraints())

    def _answer(self, model: nnx.Module, x: Float[Array, "batch inputs"]) -> Any:
        return nnx.jit(self._enclose(model) if self.projected else model)(x)

    def _loss(self, model: Any, batch: dict[str, Array]) -> Float[Array, ""]:
        if not self.inside:
            return jnp.mean(self._value(model(batch["x"])))
        found = model.check(batch["x"])
        return jnp.mean(self._value(found.output)) + self.pull * jnp.mean(found.moved**2)

    def _value(self, y: Any) -> Any:
        """The objective of each answer."""
        return evaluate(self.problem, y, self.objective)

    def _split(self) -> tuple[Float[np.ndarray, "train inputs"], Float[np.ndarray, "test inputs"]]:
        x = self.problem.x.astype(np.float32)
        if self.validate:
            x = x[: -self.tests]
        return x[: -self.tests], x[-self.tests :]

    def _optima(self) -> Float[np.ndarray, "tests variables"]:
        sizes = (self.variables, self.equalities, self.inequalities, self.examples)
        if not self.validate:
            return find_optima(*sizes, self.tests, self.objective)
        return find_optima(*sizes, 2 * self.tests, self.objective)[: self.tests]


class Problem(NamedTuple):
    """½ yᵀ diag(q) y + pᵀy, or pᵀ sin(y), under A y = x and G y ≤ h; and all inputs x."""

    q: Float[np.ndarray, " variables"]
    p: Float[np.ndarray, " variables"]
    A: Float[np.ndarray, "equalities variables"]
    x: Float[np.ndarray, "examples equalities"]
    G: Float[np.ndarray, "inequalities variables"]
    h: Float[np.ndarray, " inequalities"]

    def constraints(
        self, scale: Float[np.ndarray, " variables"] | float = 1.0
    ) -> list[OutputEquals | OutputAtMost]:
        """What must hold of an answer in which each variable is multiplied by a scale."""
        A, G = self.A / scale, self.G / scale
        return [
            OutputEquals(0.0, of=lambda x, y: _multiply(A, y) - x, name="equalities"),
            OutputAtMost(
                0.0,
                of=lambda x, y: _multiply(G, y) - jnp.asarray(self.h, y.dtype),  # noqa: ARG005
                name="inequalities",
            ),
        ]


@functools.cache
def draw_problem(variables: int, equalities: int, inequalities: int, examples: int) -> Problem:
    """The numbers of DC3, drawn in the same order from the same seed.

    h = Σ |G A⁺| along the rows, so that A⁺x satisfies the inequalities for all x in [−1, 1].
    """
    random = np.random.RandomState(17)
    q, p = random.random_sample(variables), random.random_sample(variables)
    A = random.normal(size=(equalities, variables))
    x = random.uniform(-1, 1, size=(examples, equalities))
    G = random.normal(size=(inequalities, variables))
    return Problem(q, p, A, x, G, np.sum(np.abs(G @ np.linalg.pinv(A)), axis=1))


def evaluate(problem: Problem, y: Any, objective: Objective) -> Any:
    """The objective of each answer."""
    linear = jnp.sin(y) if objective == "sine" else y
    return jnp.sum(0.5 * problem.q * y**2 + problem.p * linear, axis=-1)


@functools.cache
def find_optima(
    variables: int,
    equalities: int,
    inequalities: int,
    examples: int,
    tests: int,
    objective: Objective,
) -> Float[np.ndarray, "tests variables"]:
    """The optimum for each test input, in float64.

    A quadratic program with a diagonal matrix is a projection in scaled variables. The sine is
    bounded above by its tangent plus ½ p (y − y')², whose minimum is no higher, and so on until
    nothing moves; that ends at a local optimum.
    """
    problem = draw_problem(variables, equalities, inequalities, examples)
    curvature = problem.q + (problem.p if objective == "sine" else 0)
    scale = np.sqrt(curvature)
    y = np.zeros((tests, variables))
    with jax.enable_x64(True):
        projection = nnx.jit(Feasible(_Second(), problem.constraints(scale)))
        x = jnp.asarray(problem.x[-tests:])
        for _ in range(400):
            # In NumPy: JAX may hold its arrays in float32, from outside of this context.
            slope = np.cos(y) - y if objective == "sine" else np.ones_like(y)
            last, y = y, np.asarray(projection(x, jnp.asarray(-problem.p * slope / scale))) / scale
            if objective == "quadratic" or np.max(np.abs(y - last)) < 1e-6:
                break
    return y


class _Second(nnx.Module):
    """Returns its second argument."""

    def __call__(self, x: Array, y: Array) -> Array:
        del x
        return y


def _multiply(matrix: np.ndarray, y: Array) -> Array:
    return jnp.matmul(jnp.asarray(matrix, y.dtype), y, precision="highest")
