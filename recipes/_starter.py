"""A network learns a sine, and must be odd: f(−x) = −f(x).

    constrainx train my_recipe.py --size smoke
    constrainx compare my_recipe.py --seeds 3

The first line above is what help texts show. `constrainx train my_recipe.py --help` lists the
options: every field of the class below, and those that all recipes have.
"""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import constrainx as cx
from constrainx.models import MLP
from constrainx.recipes import Recipe
from constrainx.step import MethodName


@dataclasses.dataclass(frozen=True)
class Odd(cx.Constraint):
    """f(−x) = −f(x) at the points of the batch."""

    def residual(self, model: Any, batch: Any, *, key: Any) -> Any:  # noqa: ARG002
        """What must be zero. Its first axis is the examples."""
        return model(-batch["x"]) + model(batch["x"])


@dataclasses.dataclass(frozen=True, kw_only=True)
class MyRecipe(Recipe):
    """What to train, on what, and how. These texts are the help of the options.

    Attributes:
        steps: the number of training steps.
        batch: examples per step.
        learning_rate: the learning rate of Adam, decayed to zero by a cosine.
        width: the width of the hidden layer.
        constrained_by: how the constraint acts.
        gamma: how strongly a step pulls towards the constraint.
    """

    name: ClassVar[str] = "my-recipe"
    # What `--method` and `compare` choose from, with the fields that each sets. The first is the
    # default.
    methods: ClassVar = {
        "nullspace": {"constrained_by": "nullspace"},
        "plain": {"constrained_by": "none"},
    }
    # What `--size` chooses from. "smoke" is for a quick look and for tests.
    sizes: ClassVar = {"smoke": {"steps": 20, "width": 8, "log_every": 10}}
    # The columns of `compare`, with their headings. "violation/NAME" is there for each constraint.
    figures: ClassVar = {"error": "test error", "violation/odd": "violation"}

    steps: int = 1000
    batch: int = 64
    learning_rate: float = 1e-2
    width: int = 32
    constrained_by: MethodName = "nullspace"
    gamma: float = 10.0

    def trainer(self, **options: Any) -> cx.Trainer:
        """Builds everything; called once for each run."""
        rng = np.random.default_rng(self.seed)
        # Training points lie on the right of zero: only the constraint knows the left.
        train, test = make_points(rng, 0, count=512), make_points(rng, -3, count=256)
        rate = optax.cosine_decay_schedule(self.learning_rate, self.steps)
        return cx.Trainer(
            model=MLP((1, self.width, 1), rngs=nnx.Rngs(self.seed)),
            loss=lambda model, batch: jnp.mean((model(batch["x"]) - batch["y"]) ** 2),
            optimizer=optax.adam(rate),
            data=cx.data.arrays(train, batch=self.batch, seed=self.seed),
            steps=self.steps,
            constraints=[Odd(gamma=self.gamma, reduce=cx.Norm(groups=8), name="odd")],
            method=self.constrained_by,
            evaluation=cx.Evaluation(
                cx.data.arrays(test, batch=self.batch),
                # A figure for each example; the mean is reported.
                metrics={"error": lambda model, batch: (model(batch["x"]) - batch["y"]) ** 2},
                every=max(self.steps // 10, 1),
            ),
            # Seed, devices, run folder, logging and so on, as the command line asks for them.
            **self.settings(learning_rate=rate, **options),
        )


def make_points(rng: np.random.Generator, start: float, *, count: int) -> dict[str, np.ndarray]:
    """Noisy points of a sine, from ``start`` to 3."""
    x = rng.uniform(start, 3, (count, 1)).astype(np.float32)
    return {"x": x, "y": np.sin(x) + rng.normal(0, 0.05, x.shape).astype(np.float32)}
