"""A convolutional network whose features turn with the image, on Fashion-MNIST.

    constrainx data prepare fashion_mnist
    constrainx compare c4-fmnist --size cpu --seeds 3

The features after the convolutions of a LeNet must be equivariant to quarter turns, as in the
paper's experiment. "kernels" asks that of the kernels, as a linear constraint on the weights, which
is exact for every image and has a closed form. "rows" asks it of the images of the batch by
projected gradients; "paper" does so in the paper's setting, where channels stay as they are, which
forces each filter to be symmetric. "augmentation" trains on rotated images, and "frames" averages
the logits over the four rotations, in training and in testing.

The violation is the mean of ‖f(Rx) − R f(x)‖² over test images and rotations. That depends on the
scale of the features: a smaller last convolution and a larger layer behind it change it, and
nothing else. So it is also stated relative to the mean of ‖f‖². "averaged error" is that of the
logits averaged over the four rotations of a test image, which costs four evaluations.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float

from constrainx import data
from constrainx.constraints import Constraint, Equivariance, EquivariantKernels, Norm, groups
from constrainx.constraints.representations import Image, Regular, Representation
from constrainx.models import LeNet
from constrainx.recipes import Recipe, steps_of, weigh_method
from constrainx.step import MethodName
from constrainx.trainers import Evaluation, Trainer
from constrainx.trainers.classification import cross_entropy, is_wrong

GROUP = groups.Cyclic(4)
# Constant learning rate, channels that stay, every image and rotation of the batch.
PAPER = {
    "constrained_by": "nullspace",
    "on": "images",
    "channels": "stay",
    "learning_rate": 1e-3,
    "decay": False,
    "gamma": 1e-4,
    "rows": 128,
    "examples": 128,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class C4FMNIST(Recipe):
    """Fashion-MNIST under quarter turns.

    Attributes:
        images: "fashion_mnist" as TFDS has it, or "synthetic" images to try the recipe without.
        epochs: passes over the training data.
        batch: examples per step.
        learning_rate: the learning rate of Adam.
        decay: whether the learning rate goes down to zero by a cosine.
        width: channels of the first convolution; the second has twice as many.
        channels: whether channels are "permuted" along with the pixels, or "stay" as in the paper.
        constrained_by: how the constraint acts.
        on: whether it is a constraint on the "kernels", or on the features of "images".
        pretrained: the fraction of the steps before the constraint on kernels begins; from then on
            it grows tighter by a schedule. At 0 the network begins on the constraint.
        pull: the γ with which it begins; it has grown to 1 when half of the steps left are taken.
        turned: whether to rotate training images at random by quarter turns.
        frames: whether to average logits over the rotations of an image, also in training.
        examples: how many images of a batch the constraint on images looks at.
        rows: the number of rows of that constraint; each is the norm over examples / rows images.
        gamma: how strongly steps pull towards the constraint on images; multiplied by the learning
            rate.
        weight: the weight of the penalty, which takes the mean over the rows.
        limit: how many training images to use; all if None.
        validate: whether to measure on the last tenth of the training images, and not train on
            them, to choose settings by; the test images then play no part.
    """

    name: ClassVar[str] = "c4-fmnist"
    methods: ClassVar = {
        "kernels": {"constrained_by": "nullspace", "on": "kernels"},
        "annealed": {"constrained_by": "nullspace", "on": "kernels", "pretrained": 0.5},
        "plain": {},
        "rows": {"constrained_by": "nullspace", "rows": 16},
        "paper": PAPER,
        "penalty": {"constrained_by": "penalty"},
        "penalty-strong": {"constrained_by": "penalty", "weight": 32.0},
        "augmentation": {"turned": True},
        "frames": {"frames": True},
    }
    sizes: ClassVar = {
        "smoke": {
            "images": "synthetic",
            "epochs": 1,
            "limit": 128,
            "batch": 32,
            "examples": 8,
            "rows": 4,
            "width": 4,
        },
        "cpu": {"epochs": 4},
    }
    presets: ClassVar = {"paper": {"learning_rate": 1e-3, "decay": False, "channels": "stay"}}
    figures: ClassVar = {
        "error": "test error",
        "averaged error": "averaged error",
        "violation": "violation",
        "relative violation": "relative",
    }
    sweeps: ClassVar = {
        "rows": {"gamma": (0.1, 10.0)},
        "annealed": {"pull": (1e-4, 1e-2)},
        "penalty": {"weight": (0.32, 32.0)},
    }
    validation: ClassVar = {"validate": True}
    axes: ClassVar = ("error", "relative violation")

    images: Literal["fashion_mnist", "synthetic"] = "fashion_mnist"
    epochs: float = 100
    batch: int = 128
    learning_rate: float = 5e-3
    decay: bool = True
    width: int = 8
    channels: Literal["permuted", "stay"] = "permuted"
    constrained_by: MethodName = "none"
    on: Literal["kernels", "images"] = "images"
    pretrained: float = 0.0
    pull: float = 1e-3
    turned: bool = False
    frames: bool = False
    examples: int = 32
    rows: int = 32
    gamma: float = 1.0
    weight: float = 3.2
    limit: int | None = None
    validate: bool = False

    def trainer(self, **options: Any) -> Trainer:
        """Builds the network, its constraint and the data."""
        train, test = self._load()
        steps = steps_of(epochs=self.epochs, examples=len(train["y"]), batch=self.batch)
        rate = self.learning_rate
        schedule = optax.cosine_decay_schedule(rate, steps) if self.decay else rate
        constraint = self.constraint(steps)
        model = self._draw_network()
        if isinstance(constraint, EquivariantKernels) and self.begins_on_constraint:
            constraint.impose(model)
        return Trainer(
            model=model,
            loss=self._loss,
            optimizer=optax.adam(schedule),
            data=data.arrays(train, batch=self.batch, seed=self.seed),
            steps=steps,
            constraints=[constraint],
            method=weigh_method(self.constrained_by, self.weight),
            augment=turn_at_random if self.turned else None,
            evaluation=Evaluation(
                data.arrays(test, batch=min(500, len(test["y"]))),
                metrics={
                    "error": self._is_wrong,
                    "averaged error": is_wrong_on_average,
                    "violation": self._measure_violation,
                },
                every=max(steps // 5, 1),
            ),
            **self.settings(learning_rate=schedule, **options),
        )

    @property
    def published(self) -> dict[str, dict[str, str]]:
        """The paper's figures, after 100 epochs."""
        return {
            "plain": {"error": "0.105 ± 0.004", "violation": "743.5 ± 141.7"},
            "paper": {"error": "0.147 ± 0.004", "violation": "0.27 ± 0.12"},
        }

    def constraint(self, steps: int = 1) -> Constraint:
        """The features turn with the image: by the kernels, or at the images of a batch."""
        turned = self.features_turn_by
        if self.on == "kernels":
            layers = (("first", Image(), turned), ("second", turned, turned))
            if not self.pretrained:
                return EquivariantKernels(GROUP, layers, placement="gradient", name="turns")
            start = round(self.pretrained * steps)
            return EquivariantKernels(
                GROUP,
                layers,
                start=start,
                gamma=tighten(self.pull, start=start, end=(start + steps) // 2),
                placement="twice",
                name="turns",
            )
        return Equivariance(
            GROUP,
            of=lambda model, x: model.features(x),
            output=turned,
            reduce=Norm(groups=self.rows),
            examples=self.examples,
            gamma=self.gamma,
            placement="gradient",
            name="turns",
        )

    @property
    def begins_on_constraint(self) -> bool:
        """Whether kernels are averaged over the group before the first step."""
        return self.constrained_by != "none" and not self.pretrained

    @property
    def features_turn_by(self) -> Representation:
        """How a rotation acts on the features."""
        return Regular() if self.channels == "permuted" else Image()

    def measure(self, model: Any) -> dict[str, float]:
        """The violation relative to the size of the features, on the test images."""
        _, test = self._load()
        images = jnp.asarray(test["x"][:2000])
        turned = jnp.mean(self._measure_violation(model, {"x": images}))
        size = jnp.mean(jnp.sum(jnp.square(model.features(images)), axis=(1, 2, 3)))
        return {"relative violation": float(turned / size)}

    def draw(self, model: Any, path: pathlib.Path) -> None:
        """Draws the features of a rotated image beside the rotated features of the image.

        First of the network as it was drawn at random, without a constraint; then as it is trained.
        """
        from matplotlib import pyplot as plt

        _, test = self._load()
        image = jnp.asarray(test["x"][:1])
        turned = jnp.rot90(image, axes=(1, 2))
        networks = {"before training": self._draw_network(), "after": model}
        shown = min(6, 2 * self.width)
        size = (1.4 * (shown + 1), 7.2)
        figure, axes = plt.subplots(4, shown + 1, figsize=size, layout="constrained")
        for pair, (when, network) in zip((axes[:2], axes[2:]), networks.items(), strict=True):
            maps = {
                "features of\nthe turned image": network.features(turned)[0],
                "turned features\nof the image": self.features_turn_by(
                    GROUP, 1, network.features(image)[0]
                ),
            }
            # One scale for both, so that equal colours are equal numbers.
            most = jnp.maximum(*(jnp.max(array, axis=(0, 1)) for array in maps.values()))
            for row, (what, array) in zip(pair, maps.items(), strict=True):
                row[0].imshow(turned[0, ..., 0], cmap="gray")
                row[0].set_title(f"{when}:\n{what}", fontsize=8)
                for channel, axis in enumerate(row[1:]):
                    axis.imshow(array[..., channel], cmap="viridis", vmin=0, vmax=most[channel])
        for axis in axes.flat:
            axis.set_axis_off()
        figure.savefig(path, dpi=100)
        plt.close(figure)

    def _draw_network(self) -> LeNet:
        return LeNet(channels=(self.width, 2 * self.width), rngs=nnx.Rngs(self.seed))

    def _load(self) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        if self.images == "synthetic":
            return make_synthetic(self.limit or 1024), make_synthetic(64)
        train = data.load_images(self.images, "train")
        if not self.validate:
            test = data.load_images(self.images, "test")
            return {k: v[: self.limit] for k, v in train.items()}, test
        held_out = len(train["y"]) // 10
        test = {k: v[-held_out:] for k, v in train.items()}
        return {k: v[:-held_out][: self.limit] for k, v in train.items()}, test

    def _loss(self, model: Any, batch: dict[str, Array]) -> Float[Array, ""]:
        if self.frames:
            return jnp.mean(cross_entropy(lambda x: average_turns(model, x), batch))
        return jnp.mean(cross_entropy(model, batch))

    def _is_wrong(self, model: Any, batch: dict[str, Array]) -> Float[Array, " batch"]:
        return is_wrong_on_average(model, batch) if self.frames else is_wrong(model, batch)

    def _measure_violation(self, model: Any, batch: dict[str, Array]) -> Float[Array, "batch 4"]:
        """‖f(Rx) − R f(x)‖² for each image and rotation."""
        features = model.features(batch["x"])

        def differ(quarters: int) -> Array:
            act = jax.vmap(lambda array: self.features_turn_by(GROUP, quarters, array))
            found = model.features(jnp.rot90(batch["x"], quarters, axes=(1, 2)))
            return jnp.sum(jnp.square(found - act(features)), axis=(1, 2, 3))

        return jnp.stack([differ(quarters) for quarters in range(4)], axis=1)


def average_turns(model: Any, x: Float[Array, "batch h w c"]) -> Float[Array, "batch classes"]:
    """The mean of the logits over the four rotations of each image."""
    turned = jnp.concatenate([jnp.rot90(x, quarters, axes=(1, 2)) for quarters in range(4)])
    return jnp.mean(model(turned).reshape(4, len(x), -1), axis=0)


def is_wrong_on_average(model: Any, batch: dict[str, Array]) -> Float[Array, " batch"]:
    """Whether the logits, averaged over rotations, are largest for another class."""
    return is_wrong(lambda x: average_turns(model, x), batch)


def tighten(first: float, *, start: int, end: int) -> Callable[[Any], Any]:
    """A schedule of γ that grows from its first value to 1 by equal factors."""
    return optax.exponential_decay(
        first, max(end - start, 1), 1 / first, transition_begin=start, end_value=1.0
    )


def turn_at_random(batch: dict[str, Array], key: Array) -> dict[str, Array]:
    """Rotates each image by a number of quarter turns of its own."""
    quarters = jax.random.randint(key, batch["y"].shape, 0, 4)
    turn = jax.vmap(lambda image, q: Image()(GROUP, q, image))
    return {**batch, "x": turn(batch["x"], quarters)}


def make_synthetic(count: int) -> dict[str, np.ndarray]:
    """Noise with a bright square whose place is the class."""
    rng = np.random.default_rng(count)
    labels = rng.integers(0, 10, count).astype(np.int32)
    images = 0.3 * rng.random((count, 28, 28, 1), np.float32)
    for image, label in zip(images, labels, strict=True):
        row, column = divmod(int(label), 4)
        image[9 * row : 9 * row + 5, 7 * column : 7 * column + 5] += 0.7
    return {"x": images, "y": labels}
