"""The recipe of quarter turns: its kernels, its figures, and its data by TFDS."""

import io

import jax
import numpy as np
import pytest
import tensorflow_datasets
from flax import nnx
from PIL import Image as Picture

from constrainx import data
from constrainx.models import LeNet
from constrainx.recipes.c4_fmnist import C4FMNIST, average_turns, make_synthetic, turn_at_random


def encode(image) -> bytes:
    file = io.BytesIO()
    Picture.fromarray(image[..., 0]).save(file, format="PNG")
    return file.getvalue()


class FashionMnist(tensorflow_datasets.core.GeneratorBasedBuilder):
    """A few images in the layout of the real data set."""

    name = "fashion_mnist"
    VERSION = tensorflow_datasets.core.Version("3.0.1")

    def _info(self):
        features = tensorflow_datasets.features
        return self.dataset_info_from_configs(
            features=features.FeaturesDict(
                {
                    "image": features.Image(shape=(28, 28, 1)),
                    "label": features.ClassLabel(num_classes=10),
                }
            )
        )

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples(96), "test": self._generate_examples(64)}

    def _generate_examples(self, count):
        made = make_synthetic(count)
        pixels = np.round(255 * np.clip(made["x"], 0, 1)).astype(np.uint8)
        for i in range(count):
            yield i, {"image": encode(pixels[i]), "label": int(made["y"][i])}


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tfds")
    FashionMnist(data_dir=folder, file_format="array_record").download_and_prepare()
    return folder


def test_images_are_read_by_tfds(data_dir, monkeypatch):
    monkeypatch.setenv("TFDS_DATA_DIR", str(data_dir))
    images = data.load_images("fashion_mnist", "train")
    made = make_synthetic(96)
    # TFDS writes them in an order of its own.
    away = np.abs(images["x"][:, None] - np.clip(made["x"], 0, 1)[None]).max((2, 3, 4))
    order = np.argmin(away, axis=1)
    assert away.min(1).max() <= 0.5 / 255 + 1e-6
    assert sorted(order) == list(range(96))
    np.testing.assert_array_equal(images["y"], made["y"][order])
    recipe = C4FMNIST(size="smoke", images="fashion_mnist", batch=32)
    result = recipe.trainer(progress=False).fit()
    assert result.step == 3
    assert result.metrics["violation"] < 1e-9


def test_kernels_turn_and_plain_features_do_not():
    violation = {}
    for method in ("kernels", "annealed", "plain"):
        recipe = C4FMNIST(size="smoke", method=method)
        result = recipe.trainer(progress=False).fit()
        violation[method] = recipe.measure(result.model)["relative violation"]
    assert violation["kernels"] < 1e-10
    # Its last steps are on the constraint, whatever the first ones were.
    assert violation["annealed"] < 1e-10
    assert violation["plain"] > 0.1


def test_averaged_logits_ignore_turns():
    model = LeNet(channels=(4, 4), rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (3, 28, 28, 1))
    turned = jax.numpy.rot90(x, axes=(1, 2))
    np.testing.assert_allclose(average_turns(model, turned), average_turns(model, x), atol=1e-5)


def test_images_are_turned_each_by_its_own_angle():
    images = np.broadcast_to(np.arange(16.0).reshape(1, 4, 4, 1), (64, 4, 4, 1))
    batch = {"x": jax.numpy.asarray(images), "y": jax.numpy.zeros(64, int)}
    turned = np.asarray(turn_at_random(batch, jax.random.key(0))["x"])
    corners = turned[:, 0, 0, 0]
    assert set(corners) == {0.0, 3.0, 12.0, 15.0}


def test_the_picture_is_drawn(tmp_path):
    recipe = C4FMNIST(size="smoke")
    recipe.draw(LeNet(channels=(4, 8), rngs=nnx.Rngs(0)), tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 1000
