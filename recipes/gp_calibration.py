"""The hyperparameters of a Gaussian process, from the fit of its mean instead of its likelihood.

    constrainx compare gp-calibration --size cpu --seeds 10

f(x) = cos 2πx + x sin 5πx at 1600 training and 400 test points on [0, 1]. The noise grows with x,
although the model assumes that it is constant. The process has 200 random Fourier features.
"likelihood" maximises the marginal likelihood of all training points, as is usual. "predictive"
fits the weights on four fifths of them by `lstsq` and minimises the squared error on the last
fifth; the gradient with respect to ℓ, σ and λ goes through the solve. "paper" has the paper's loss,
‖Φ z − y‖² + λ²‖z‖ on the training points. The paper found its loss more than ten times faster, with
a lower test error (p = 3.11 %). It does not state its noise, optimizer or starting point; ours are
below. Ten seeds took a quarter of an hour on two cores, nearly all of it for the likelihood: 1 s a
run for "predictive", 68 s for "likelihood", and a test RMSE of 0.229 ± 0.011 for both. So only the
speed is confirmed here.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array
from matplotlib.figure import Figure
from scipy import stats

from constrainx import data
from constrainx.models import FourierProcess
from constrainx.recipes import Recipe
from constrainx.trainers import Trainer


@dataclasses.dataclass(frozen=True, kw_only=True)
class GpCalibration(Recipe):
    """Calibration of a Gaussian process.

    Attributes:
        loss: what to minimise.
        steps: the number of steps of Adam.
        examples: the number of training points.
        tests: the number of test points.
        features: the number of features of the process.
        learning_rate: the learning rate of Adam.
        noise: the standard deviation of the data's noise is this times (0.2 + x).
        start_length: ℓ before the first step.
        start_noise: λ before the first step.
    """

    name: ClassVar[str] = "gp-calibration"
    methods: ClassVar = {
        "predictive": {"loss": "predictive"},
        "likelihood": {"loss": "likelihood"},
        "paper": {"loss": "paper"},
    }
    sizes: ClassVar = {
        "smoke": {"steps": 4, "examples": 100, "tests": 40, "features": 20},
        "cpu": {"steps": 100},
    }
    figures: ClassVar = {"rmse": "test RMSE"}
    sweeps: ClassVar = {
        method: {"learning_rate": (5e-3, 0.5)} for method in ("predictive", "likelihood", "paper")
    }
    axes: ClassVar = ("rmse",)

    loss: Literal["predictive", "likelihood", "paper"] = "predictive"
    steps: int = 200
    examples: int = 1600
    tests: int = 400
    features: int = 200
    learning_rate: float = 0.05
    noise: float = 0.3
    start_length: float = 0.5
    start_noise: float = 0.05
    devices: int | None = 1
    log_every: int = 20

    def trainer(self, **options: Any) -> Trainer:
        """Builds the process and the data."""
        points, _ = self._points()
        losses = {"predictive": predictive, "likelihood": likelihood, "paper": as_in_the_paper}
        return Trainer(
            model=FourierProcess(
                features=self.features,
                length=self.start_length,
                noise=self.start_noise,
                rngs=nnx.Rngs(self.seed),
            ),
            loss=losses[self.loss],
            optimizer=optax.adam(self.learning_rate),
            data=data.arrays(points, batch=self.examples, shuffle=False),
            steps=self.steps,
            **self.settings(learning_rate=self.learning_rate, **options),
        )

    def measure(self, model: Any) -> dict[str, float]:
        """Measures the error on the test points, with weights from all training points."""
        points, test = self._points()
        weights = model.weights(points["x"], points["y"])
        error = model.mean(test["x"], weights) - test["y"]
        return {
            "rmse": float(jnp.sqrt(jnp.mean(error**2))),
            "length": float(jnp.exp(model.log_length[...])),
            "noise": float(model.noise),
        }

    def draw(self, model: Any, path: pathlib.Path) -> None:
        """Draws the fit, the training points and the function."""
        points, _ = self._points()
        x = jnp.linspace(0, 1, 400)
        mean = model.mean(x, model.weights(points["x"], points["y"]))
        figure = Figure(figsize=(6, 3.6), layout="constrained")
        axes = figure.subplots()
        axes.scatter(points["x"], points["y"], s=2, alpha=0.3, label="training points")
        axes.plot(x, truth(np.asarray(x)), color="black", linewidth=1, label="function")
        axes.plot(x, mean, color="#D55E00", label=f"mean, {self.method}")
        axes.legend()
        figure.savefig(path, dpi=150)

    def remarks(self, results: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
        """How much faster "predictive" is, and whether the errors could differ by chance."""
        ours, theirs = results.get("predictive", ()), results.get("likelihood", ())
        if len(ours) < 2 or len(theirs) < 2:
            return []
        errors = [[run["metrics"]["rmse"] for run in runs] for runs in (ours, theirs)]
        times = [np.mean([run["seconds"] for run in runs]) for runs in (ours, theirs)]
        p = stats.ttest_rel(*errors).pvalue
        lower = sum(a < b for a, b in zip(*errors, strict=True))
        return [
            f"predictive is {times[1] / times[0]:.0f} times faster than likelihood. Its test RMSE "
            f"is lower for {lower} of {len(ours)} seeds; paired t-test, two-sided: p = {p:.2g}."
        ]

    def _points(self) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        rng = np.random.default_rng([self.seed, 3])
        x = rng.uniform(size=self.examples + self.tests).astype(np.float32)
        noise = self.noise * (0.2 + x) * rng.normal(size=len(x))
        y = (truth(x) + noise).astype(np.float32)
        cut = self.examples
        return {"x": x[:cut], "y": y[:cut]}, {"x": x[cut:], "y": y[cut:]}


def truth(x: np.ndarray) -> np.ndarray:
    """The function behind the data."""
    return np.cos(2 * np.pi * x) + x * np.sin(5 * np.pi * x)


def predictive(model: FourierProcess, batch: dict[str, Array]) -> Array:
    """The squared error on a fifth of the points, with weights from the others."""
    x, y = batch["x"], batch["y"]
    cut = len(x) * 4 // 5
    weights = model.weights(x[:cut], y[:cut])
    return jnp.mean((model.mean(x[cut:], weights) - y[cut:]) ** 2)


def likelihood(model: FourierProcess, batch: dict[str, Array]) -> Array:
    """The negative marginal log-likelihood, per point."""
    return -model.log_marginal(batch["x"], batch["y"]) / len(batch["x"])


def as_in_the_paper(model: FourierProcess, batch: dict[str, Array]) -> Array:
    """‖Φ z − y‖² + λ²‖z‖, as the paper prints it, per point."""
    weights = model.weights(batch["x"], batch["y"])
    residual = model.mean(batch["x"], weights) - batch["y"]
    penalty = model.noise**2 * jnp.linalg.norm(weights)
    return (jnp.sum(residual**2) + penalty) / len(batch["x"])
