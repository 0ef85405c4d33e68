"""The recipes of sparse networks: what they export, and their data by TFDS."""

import dataclasses
import io

import numpy as np
import pytest
import tensorflow_datasets
from flax import nnx
from PIL import Image as Picture

from constrainx import masks
from constrainx.errors import UserError
from constrainx.recipes.l0_cifar10 import L0CIFAR10, make_synthetic
from constrainx.recipes.l0_imagenet import L0ImageNet
from constrainx.recipes.l0_svhn import L0SVHN


def encode(image) -> bytes:
    file = io.BytesIO()
    Picture.fromarray(image).save(file, format="PNG")
    return file.getvalue()


class Cifar10(tensorflow_datasets.core.GeneratorBasedBuilder):
    """A few images in the layout of the real data set."""

    name = "cifar10"
    VERSION = tensorflow_datasets.core.Version("3.0.2")

    def _info(self):
        features = tensorflow_datasets.features
        return self.dataset_info_from_configs(
            features=features.FeaturesDict(
                {
                    "image": features.Image(shape=(32, 32, 3)),
                    "label": features.ClassLabel(num_classes=10),
                }
            )
        )

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples(80), "test": self._generate_examples(32)}

    def _generate_examples(self, count):
        made = make_synthetic(count)
        pixels = np.round(np.clip(64 + 48 * made["x"], 0, 255)).astype(np.uint8)
        for i in range(count):
            yield i, {"image": encode(pixels[i]), "label": int(made["y"][i])}


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tfds")
    Cifar10(data_dir=folder, file_format="array_record").download_and_prepare()
    return folder


def test_real_images_are_pruned_to_the_density_that_is_reported(data_dir, monkeypatch):
    monkeypatch.setenv("TFDS_DATA_DIR", str(data_dir))
    recipe = L0CIFAR10(size="smoke", images="cifar10", limit=None, epochs=2, devices=1)
    result = recipe.trainer(progress=False).fit()
    exported = masks.export(result.model)
    kernels = [weight[...] for path, weight in _kernels(exported)]
    zeros = sum(int((kernel == 0).sum()) for kernel in kernels)
    size = sum(kernel.size for kernel in kernels)
    assert 1 - zeros / size == pytest.approx(0.1, abs=1e-3)
    assert result.metrics["density"] == pytest.approx(1 - zeros / size, abs=1e-6)
    assert 0 <= recipe.measure(result.model)["recalibrated error"] <= 1


def _kernels(model):
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return [(p, v) for p, v in zip(flat.paths, flat.leaves, strict=True) if p[-1] == "kernel"]


def test_settings_can_be_chosen_without_the_test_images(data_dir, monkeypatch):
    monkeypatch.setenv("TFDS_DATA_DIR", str(data_dir))
    train, held_out = L0CIFAR10(images="cifar10", validate=True)._load()
    everything, _ = L0CIFAR10(images="cifar10")._load()
    assert (len(train["y"]), len(held_out["y"])) == (72, 8)
    np.testing.assert_array_equal(np.concatenate([train["x"], held_out["x"]]), everything["x"])


def test_digits_are_not_mirrored():
    assert L0CIFAR10().flips
    assert not L0SVHN().flips


def test_full_size_is_swin_s():
    recipe = L0ImageNet(data="synthetic")
    assert (recipe.width, recipe.depths, recipe.batch) == (96, (2, 2, 18, 2), 1024)
    assert recipe.precision == "bfloat16"


def test_a_pattern_of_a_transformer_is_exported_as_it_is():
    recipe = L0ImageNet(size="smoke", pattern="2:4", devices=1)
    result = recipe.trainer(progress=False).fit()
    exported = masks.export(result.model)
    kernel = np.asarray(exported.stages[0].blocks[0].attention.project.kernel[...])
    groups = kernel.reshape(-1, 4, kernel.shape[-1])
    np.testing.assert_array_equal((groups != 0).sum(axis=1), 2)
    assert result.metrics["density"] == 0.5


def test_the_density_follows_from_the_pattern():
    recipe = L0CIFAR10(size="smoke", pattern="1:4")
    assert recipe.density == 0.25
    assert recipe.but(method="gradual").density == 0.25
    assert dataclasses.replace(L0CIFAR10(), pattern="2:4").density == 0.5
    assert L0CIFAR10.from_config(recipe.config).density == 0.25
    with pytest.raises(UserError, match="how many of how many"):
        L0CIFAR10(pattern="half")


@pytest.mark.parametrize("method", ["learned", "gradual", "paper"])
def test_a_pattern_and_another_density_are_refused(method):
    with pytest.raises(UserError, match=r"leave `density` out"):
        L0CIFAR10(size="smoke", method=method, pattern="2:4", density=0.1)
