"""A Swin transformer on half of its weights, on ImageNet.

    constrainx train l0-imagenet --weights swin_small.safetensors --pattern 2:4 --fsdp 8
    constrainx train l0-imagenet --data synthetic --steps 3 --batch 2
    constrainx compare l0-imagenet --size cpu --seeds 3

Swin-S with masks on all kernels and a budget of half of the weights, as in the paper's experiment:
from published weights, if a file of them is named, or from scratch. SGD with a learning rate that
rises and falls once, in bfloat16, sharded over all devices. `--pattern 2:4` keeps two of each four
weights, which sparse tensor cores compute with. ImageNet must be prepared by TensorFlow Datasets
(`imagenet2012`); `--data synthetic` needs nothing. At `--size cpu` it is a small Swin on CIFAR-10.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar, Literal

import numpy as np
import optax
from flax import nnx

from constrainx import data
from constrainx.data import Batches, transforms
from constrainx.models import Swin
from constrainx.models.published import load_weights
from constrainx.recipes import SparseRecipe, steps_of
from constrainx.trainers import Evaluation, Precision, Trainer

MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
EXAMPLES = {"imagenet2012": 1_281_167, "cifar10": 50_000, "synthetic": 1_281_167}
CLASSES = {"imagenet2012": 1000, "cifar10": 10, "synthetic": 1000}


@dataclasses.dataclass(frozen=True, kw_only=True)
class L0ImageNet(SparseRecipe):
    """ImageNet on half of the weights of a Swin.

    Attributes:
        data: a data set of TFDS, or "synthetic" images to try the recipe without.
        weights: a file of published weights to start from, see `constrainx.models.published`.
        steps: how many steps to train; as many as the epochs have if None.
        epochs: passes over the training data.
        batch: examples per step, over all devices.
        learning_rate: the largest learning rate.
        optimizer: "sgd" with momentum, or "adam".
        image: height and width of images.
        patch: height and width of a patch, which becomes a token.
        width: channels of the first stage.
        depths: how many blocks each stage has.
        heads: how many attention heads the blocks of each stage have.
        window: height and width of an attention window.
        drop_path: how often the last block is left out in training.
        augment: whether to use RandAugment, mixup, CutMix and random erasing.
        remat: whether to compute blocks again in the backward pass, to save memory.
        workers: how many processes read the data.
        limit: how many training images of CIFAR-10 to use; all if None.
        validate: whether to measure on the last tenth of the training images, and not train on
            them, to choose settings by; the test images then play no part.
    """

    name: ClassVar[str] = "l0-imagenet"
    methods: ClassVar = {
        "learned": {},
        "bernoulli": {"masks": "bernoulli"},
        "gradual": {"prune_by": "magnitude"},
        "one-shot": {"prune_by": "magnitude", "begin": 0.5, "freeze": 0.5},
        "paper": {"prune_by": "draws", "masks": "bernoulli", "begin": 0.0, "gamma": 0.01},
        "dense": {"prune_by": "nothing"},
    }
    sizes: ClassVar = {
        "smoke": {
            "data": "synthetic",
            "steps": 10,
            "batch": 8,
            "image": 16,
            "patch": 2,
            "width": 8,
            "depths": (2,),
            "heads": (2,),
            "window": 4,
            "augment": False,
        },
        "cpu": {
            "data": "cifar10",
            "epochs": 6,
            "batch": 128,
            "limit": 10000,
            "image": 32,
            "patch": 4,
            "width": 32,
            "depths": (2, 2),
            "heads": (2, 4),
            "window": 4,
            "drop_path": 0.0,
            "augment": False,
            "optimizer": "adam",
            "learning_rate": 2e-3,
            "precision": "float32",
        },
    }
    figures: ClassVar = {"error": "test error", "density": "density"}
    sweeps: ClassVar = {
        method: {"learning_rate": (0.02, 0.5)} for method in ("learned", "gradual", "one-shot")
    }
    validation: ClassVar = {"validate": True}
    adjustable: ClassVar = (*SparseRecipe.adjustable, "workers", "remat")

    density: float = 0.5
    precision: Precision = "bfloat16"
    data: Literal["imagenet2012", "cifar10", "synthetic"] = "imagenet2012"
    weights: str | None = None
    steps: int | None = None
    epochs: float = 10
    batch: int = 1024
    learning_rate: float = 0.1
    optimizer: Literal["sgd", "adam"] = "sgd"
    image: int = 224
    patch: int = 4
    width: int = 96
    depths: tuple[int, ...] = (2, 2, 18, 2)
    heads: tuple[int, ...] = (3, 6, 12, 24)
    window: int = 7
    drop_path: float = 0.3
    augment: bool = True
    remat: bool = False
    workers: int = 8
    limit: int | None = None
    validate: bool = False

    def trainer(self, **options: Any) -> Trainer:
        """Builds the transformer, its masks and budget, and the data."""
        examples = self.limit or EXAMPLES[self.data]
        steps = self.steps or steps_of(epochs=self.epochs, examples=examples, batch=self.batch)
        rate = self.schedule(self.learning_rate, steps)
        model = self.model()
        return Trainer(
            model=model,
            loss=self.loss,
            optimizer=self.sparsify(model, self._make_optimizer, rate, steps),
            data=self._train_data(),
            steps=steps,
            method=self.keeping,
            evaluation=Evaluation(
                self._test_data(),
                metrics={"error": self.is_wrong, "density": self.count_density},
                every=max(math.ceil(steps / 5), 1),
            ),
            **self.settings(learning_rate=rate, **options),
        )

    def model(self) -> Swin:
        """The network, without masks."""
        model = Swin(
            size=self.image,
            patch=self.patch,
            width=self.width,
            depths=self.depths,
            heads=self.heads,
            window=self.window,
            classes=CLASSES[self.data],
            drop_path=self.drop_path,
            remat=self.remat,
            scan=max(self.depths) > 2,
            rngs=nnx.Rngs(self.seed),
        )
        return model if self.weights is None else load_weights(model, self.weights)

    @property
    def published(self) -> dict[str, dict[str, str]]:
        """The paper's figures at half of the weights, after 10 epochs from published weights."""
        return {"one-shot": {"error": "0.532"}, "paper": {"error": "0.502"}}

    def _make_optimizer(self, rate: Any) -> optax.GradientTransformation:
        return optax.adam(rate) if self.optimizer == "adam" else optax.sgd(rate, momentum=0.9)

    def _train_data(self) -> Batches:
        if self.data == "synthetic":
            return data.from_function(self._draw, batch=self.batch, seed=self.seed)
        if self.data == "cifar10":
            images = data.load_images("cifar10", "train[:90%]" if self.validate else "train")
            changes = (transforms.RandomCrop(), transforms.RandomFlip(), *self._augmentations())
            arrays = {name: array[: self.limit] for name, array in images.items()}
            return data.arrays(arrays, batch=self.batch, seed=self.seed, transforms=changes)
        return data.tfds(
            "imagenet2012",
            "train[:90%]" if self.validate else "train",
            batch=self.batch,
            seed=self.seed,
            transforms=(
                data.RandomPhotographCrop(self.image),
                transforms.RandomFlip(),
                *self._augmentations(),
            ),
            workers=self.workers,
        )

    def _test_data(self) -> Batches:
        batch = min(self.batch, 1000)
        if self.data == "synthetic":
            count = batch if self.size == "smoke" else 2 * batch
            return data.arrays(self._draw(np.random.default_rng(1), count), batch=batch)
        normalise = transforms.Normalise(MEAN, DEVIATION)
        if self.data == "cifar10":
            images = data.load_images("cifar10", "train[90%:]" if self.validate else "test")
            return data.arrays(images, batch=batch, transforms=(normalise,))
        crop = data.CentrePhotographCrop(self.image)
        return data.tfds(
            "imagenet2012",
            "train[90%:]" if self.validate else "validation",
            batch=batch,
            shuffle=False,
            transforms=(crop, normalise),
            workers=self.workers,
        )

    def _augmentations(self) -> tuple[transforms.Transform, ...]:
        normalise = transforms.Normalise(MEAN, DEVIATION)
        if not self.augment:
            return (normalise,)
        return (
            transforms.RandAugment(),
            normalise,
            transforms.RandomErasing(),
            transforms.MixImages(CLASSES[self.data], smoothing=0.1),
        )

    def _draw(self, rng: np.random.Generator, count: int) -> dict[str, np.ndarray]:
        """Noise whose mean brightness tells the class."""
        labels = rng.integers(0, CLASSES[self.data], count).astype(np.int32)
        images = rng.standard_normal((count, self.image, self.image, 3), np.float32)
        shift = (labels / CLASSES[self.data] - 0.5).astype(np.float32)
        return {"x": images + shift[:, None, None, None], "y": labels}
