"""Five tasks in turn, which a network must not forget: Fashion-MNIST at five angles.

    constrainx data prepare fashion_mnist
    constrainx compare continual-fmnist --size cpu --seeds 5

Each task is the same images turned further, and is seen once, for some epochs; one head serves all.
Every method has the same memory: a sample of the examples so far, and the logits that the network
had for them at the end of their task. "unchanged" keeps these logits as they were, ten smooth rows
a point, projected twice. Rivals: training on ("plain"), replay of labels, logits as a penalty
("der", dark experience replay; "der++" with labels, too), elastic weight consolidation, A-GEM, and
Adam-NSCL. Forgetting is the mean, over all tasks but the last, of the accuracy at the end of a task
minus that at the end of training.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float

from constrainx import data
from constrainx.constraints import Constraint, Unchanged
from constrainx.models import MLP
from constrainx.recipes import Recipe, steps_of
from constrainx.recipes._continual import Keeps, Learner, evaluate_each, weigh_mean
from constrainx.recipes._continual_rivals import InputNullSpace, NotWorse
from constrainx.step import Method, MethodName
from constrainx.trainers import Evaluation, Trainer
from constrainx.trainers.classification import cross_entropy, is_wrong

By = Literal["nothing", "unchanged", "a-gem", "null-space of inputs"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContinualFMNIST(Recipe):
    """Fashion-MNIST at one angle after the other.

    Attributes:
        images: "fashion_mnist" as TFDS has it, or "synthetic" images to try the recipe without.
        angles: those of the tasks, in degrees.
        limit: how many training images a task has; all if None.
        epochs: passes over the images of a task.
        batch: examples per step.
        learning_rate: the largest learning rate of Adam; it falls to zero by a cosine.
        per_task: whether it does so in each task, or once.
        width: of the two hidden layers.
        memory: how many examples are remembered.
        recalled: how many of them a step looks at.
        kept_by: what protects earlier tasks, beside the losses below.
        gamma: of "unchanged", and of nothing else.
        damping: how soft "unchanged" is.
        replay: the weight of the loss on labels from the memory.
        weight: the weight of the squared change of logits from the memory.
        elastic: the weight of elastic weight consolidation.
        share: the share of the squared inputs of a layer that Adam-NSCL leaves free.
        validate: whether to measure on the last sixth of the training images, and not train on
            them, to choose settings by; the test images then play no part.
    """

    name: ClassVar[str] = "continual-fmnist"
    methods: ClassVar = {
        "unchanged": {"kept_by": "unchanged"},
        "plain": {},
        "replay": {"replay": 1.0},
        "der": {"weight": 1.0},
        "der++": {"weight": 1.0, "replay": 0.5},
        "ewc": {"elastic": 100.0},
        "a-gem": {"kept_by": "a-gem"},
        "nscl": {"kept_by": "null-space of inputs"},
    }
    sizes: ClassVar = {
        "smoke": {
            "images": "synthetic",
            "angles": (0.0, 90.0, 180.0),
            "limit": 64,
            "epochs": 2,
            "batch": 16,
            "width": 16,
            "memory": 24,
            "recalled": 4,
            "learning_rate": 1e-2,
            "log_every": 4,
        },
        "cpu": {"limit": 10000, "epochs": 2, "width": 256, "memory": 1000},
    }
    figures: ClassVar = {
        "accuracy": "mean accuracy",
        "forgetting": "forgetting",
        "learnt": "when learnt",
        "change": "change of logits",
    }
    axes: ClassVar = ("error", "forgetting")
    validation: ClassVar = {"validate": True}
    sweeps: ClassVar = {
        "unchanged": {"damping": (1e-4, 1.0)},
        "replay": {"replay": (0.3, 3.0)},
        "der": {"weight": (0.1, 10.0)},
        "der++": {"weight": (0.1, 10.0)},
        "ewc": {"elastic": (1.0, 1e4)},
        "nscl": {"share": (1e-4, 0.1)},
    }

    images: Literal["fashion_mnist", "synthetic"] = "fashion_mnist"
    angles: tuple[float, ...] = (0.0, 40.0, 80.0, 120.0, 160.0)
    limit: int | None = None
    epochs: float = 5
    batch: int = 128
    learning_rate: float = 1e-3
    per_task: bool = False
    width: int = 1024
    memory: int = 2000
    recalled: int = 64
    kept_by: By = "nothing"
    gamma: float = 0.3
    damping: float = 0.01
    replay: float = 0.0
    weight: float = 0.0
    elastic: float = 0.0
    share: float = 0.01
    validate: bool = False

    def trainer(self, **options: Any) -> Trainer:
        """Builds the network with its memory, the tasks, and what protects earlier ones."""
        tasks, tests = self._load()
        examples = len(tasks[0]["y"])
        period = steps_of(epochs=self.epochs, examples=examples, batch=self.batch)
        steps = period * len(tasks)
        rate = self._schedule(period, steps)
        inputs = tasks[0]["x"].shape[1]
        learner = Learner(
            MLP(
                (inputs, self.width, self.width, 10), activation=nnx.relu, rngs=nnx.Rngs(self.seed)
            ),
            example=jnp.zeros(inputs),
            size=self.memory,
            tasks=len(tasks),
            period=period * self.accumulate,
            keeps=self._keeps,
        )
        return Trainer(
            model=learner,
            loss=self._loss,
            optimizer=optax.adam(rate),
            data=data.in_turn(
                [data.arrays(task, batch=self.batch, seed=self.seed) for task in tasks],
                steps=period,
            ),
            steps=steps,
            constraints=self._constraints(period),
            method=self._method,
            evaluation=Evaluation(
                data.arrays(_join(tests), batch=min(1000, len(tests[0]["y"]))),
                metrics={"error": is_wrong},
                every=steps,
            ),
            **self.settings(learning_rate=rate, **options),
        )

    def measure(self, model: Any) -> dict[str, float]:
        """Accuracy on all tasks, what was forgotten of each, and how much logits changed."""
        _, tests = self._load()
        end = evaluate_each(model.network, tests)
        learnt = [evaluate_each(model.recall(task), [test])[0] for task, test in enumerate(tests)]
        lost = [before - now for before, now in zip(learnt, end, strict=True)][:-1]
        found = self._unchanged(0).violation(model, {}, jax.random.key(0))
        return {
            "accuracy": float(np.mean(end)),
            "forgetting": float(np.mean(lost)),
            "learnt": float(np.mean(learnt)),
            "change": float(found),
        }

    def _schedule(self, period: int, steps: int) -> optax.Schedule:
        if not self.per_task:
            return optax.cosine_decay_schedule(self.learning_rate, steps)
        one = optax.cosine_decay_schedule(self.learning_rate, period)
        return lambda step: one(step % period)

    def _unchanged(self, start: int) -> Unchanged:
        return Unchanged(
            "outputs",
            "x",
            memory=lambda model: model.memory,
            examples=self.recalled,
            gamma=self.gamma,
            damping=self.damping,
            start=start,
        )

    def _constraints(self, period: int) -> list[Constraint]:
        """What acts, from the second task on."""
        if self.kept_by == "a-gem":
            return [
                NotWorse(
                    examples_drawn=self.recalled,
                    gamma=0.0,
                    placement="gradient",
                    start=period,
                    name="not-worse",
                )
            ]
        return [self._unchanged(period)]

    @property
    def _method(self) -> Method | MethodName:
        if self.kept_by == "null-space of inputs":
            return InputNullSpace()
        return "none" if self.kept_by == "nothing" else "nullspace"

    @property
    def _keeps(self) -> Keeps:
        if self.elastic:
            return "importance"
        return "inputs" if self.kept_by == "null-space of inputs" else "nothing"

    def _loss(self, model: Learner, batch: dict[str, Array], *, key: Array) -> Float[Array, ""]:
        keep, draw = jax.random.split(key)
        loss = jnp.mean(cross_entropy(model, batch))
        if self.replay or self.weight:
            drawn, weights = model.memory.draw(self.recalled, draw)
            logits = model(drawn["x"])
            again = weigh_mean(cross_entropy(lambda _: logits, drawn), weights)
            change = jnp.mean(jnp.square(logits - drawn["outputs"]), axis=1)
            loss += self.replay * again + self.weight * weigh_mean(change, weights)
        if self.elastic:
            loss += self.elastic * model.drift()
        model.observe(batch, keep, share=self.share)
        return loss

    def _load(self) -> tuple[list[dict[str, np.ndarray]], list[dict[str, np.ndarray]]]:
        """The training and the test images of all tasks."""
        return load_tasks(self.images, self.angles, self.limit, validate=self.validate)


@functools.lru_cache(maxsize=1)
def load_tasks(
    images: str, angles: tuple[float, ...], limit: int | None, *, validate: bool
) -> tuple[list[dict[str, np.ndarray]], list[dict[str, np.ndarray]]]:
    """Flat images of each task with their classes, to train on and to test."""
    if images == "synthetic":
        train, test = make_synthetic(limit or 1024), make_synthetic(64)
    else:
        train, test = data.load_images(images, "train"), data.load_images(images, "test")
    if validate:
        held_out = len(train["y"]) // 6
        test = {k: v[-held_out:] for k, v in train.items()}
        train = {k: v[:-held_out] for k, v in train.items()}
    train = {k: v[:limit] for k, v in train.items()}

    def turn(part: dict[str, np.ndarray], angle: float) -> dict[str, np.ndarray]:
        turned = data.turn_images(part["x"], angle)
        return {"x": turned.reshape(len(turned), -1), "y": part["y"]}

    return [turn(train, angle) for angle in angles], [turn(test, angle) for angle in angles]


def make_synthetic(count: int) -> dict[str, np.ndarray]:
    """Noise with a bright square whose place is the class."""
    rng = np.random.default_rng(count)
    labels = rng.integers(0, 10, count).astype(np.int32)
    images = 0.3 * rng.random((count, 12, 12, 1), np.float32)
    for image, label in zip(images, labels, strict=True):
        row, column = divmod(int(label), 4)
        image[4 * row : 4 * row + 3, 3 * column : 3 * column + 3] += 0.7
    return {"x": images, "y": labels}


def _join(tests: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    return {name: np.concatenate([test[name] for test in tests]) for name in tests[0]}
