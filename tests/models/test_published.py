"""Published weights, read without PyTorch, against the logits of the libraries that wrote them."""

import os
import pathlib
import pickle
import subprocess
import zipfile

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

import constrainx as cx
from constrainx.models import ResNet, Swin
from constrainx.models.published import (
    load_weights,
    name_arrays,
    names_of,
    read_pickled,
    save_weights,
)

HERE = pathlib.Path(__file__).parent / "published"
LAYOUTS = ("torchvision", "timm", "transformers")


def small_swin(**settings) -> Swin:
    sizes = {"size": 16, "patch": 2, "width": 4, "depths": (2, 3), "heads": (1, 2), "window": 2}
    return Swin(**{**sizes, "classes": 3, **settings}, rngs=nnx.Rngs(0))


def small_resnet() -> ResNet:
    return ResNet(stem="imagenet", blocks=(1, 2), width=4, classes=3, rngs=nnx.Rngs(0))


def compute_logits(model, images) -> np.ndarray:
    model.eval()
    return np.asarray(jax.jit(lambda x: model(x))(np.moveaxis(images, 1, -1)))


@pytest.fixture(scope="module")
def expected():
    return np.load(HERE / "logits.npz")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_swin_computes_what_the_library_of_its_weights_computes(layout, expected):
    name = f"swin-{layout}"
    model = load_weights(small_swin(), HERE / f"{name}.safetensors")
    np.testing.assert_allclose(
        compute_logits(model, expected["image"]), expected[name], atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize("file", ["resnet-transformers.pth", "resnet-transformers-old.pth"])
def test_resnet_computes_what_the_library_of_its_weights_computes(file, expected):
    model = load_weights(small_resnet(), HERE / file)
    np.testing.assert_allclose(
        compute_logits(model, expected["large"]),
        expected["resnet-transformers"],
        atol=1e-4,
        rtol=1e-4,
    )


@pytest.mark.parametrize("make", [small_swin, small_resnet])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_saved_weights_load_again(make, layout, tmp_path):
    model, again = make(), make()
    state = nnx.state(model)
    nnx.update(
        model, jax.tree.map(lambda leaf: leaf + 1 if leaf.dtype == "float32" else leaf, state)
    )
    save_weights(model, tmp_path / "weights.safetensors", layout=layout)
    load_weights(again, tmp_path / "weights.safetensors", layout=layout)
    stored = (nnx.Param, nnx.BatchStat)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(again, stored), nnx.state(model, stored))


@pytest.mark.parametrize("make", [small_swin, small_resnet])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_array_of_a_model_has_one_name(make, layout):
    model = make()
    paths = nnx.to_flat_state(nnx.state(model, (nnx.Param, nnx.BatchStat))).paths
    ours = [name.ours for name in names_of(model, layout)]
    theirs = [name for found in names_of(model, layout) for name in found.theirs]
    assert sorted(ours) == sorted(".".join(map(str, path)) for path in paths)
    assert len(theirs) == len(set(theirs))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_written_names_and_indices_are_those_of_the_library(layout):
    published = load_file(HERE / f"swin-{layout}.safetensors")
    written = name_arrays(load_weights(small_swin(), HERE / f"swin-{layout}.safetensors"), layout)
    assert written.keys() == published.keys()
    for name, array in published.items():
        np.testing.assert_array_equal(written[name], array, strict=True)


def test_masks_are_not_dropped_in_silence(tmp_path):
    model = cx.masks.add_masks(small_resnet())
    with pytest.raises(ValueError, match=r"no name for first\.kernel_mask, .*masks\.export"):
        save_weights(model, tmp_path / "weights.safetensors", layout="timm")
    save_weights(cx.masks.export(model), tmp_path / "weights.safetensors", layout="timm")


def test_weights_of_another_size_are_refused_and_change_nothing():
    model = small_swin(classes=4)
    before = jax.tree.map(np.array, nnx.state(model, nnx.Param))
    wider = Swin(
        size=16,
        patch=2,
        width=8,
        depths=(2, 3),
        heads=(1, 2),
        window=2,
        classes=3,
        rngs=nnx.Rngs(0),
    )
    with pytest.raises(ValueError, match=r"does not fit this Swin: patch_embed.proj.weight is"):
        load_weights(wider, HERE / "swin-timm.safetensors")
    deeper = Swin(
        size=16,
        patch=2,
        width=4,
        depths=(2, 4),
        heads=(1, 2),
        window=2,
        classes=3,
        rngs=nnx.Rngs(0),
    )
    with pytest.raises(ValueError, match=r"layers\.1\.blocks\.3\.norm1\.weight is missing"):
        load_weights(deeper, HERE / "swin-timm.safetensors")
    shallower = Swin(
        size=16,
        patch=2,
        width=4,
        depths=(2, 2),
        heads=(1, 2),
        window=2,
        classes=3,
        rngs=nnx.Rngs(0),
    )
    with pytest.raises(ValueError, match=r"layers\.1\.blocks\.2.* has no place in the model"):
        load_weights(shallower, HERE / "swin-timm.safetensors")
    with pytest.raises(ValueError, match=r"head\.fc\.weight"):
        load_weights(model, HERE / "swin-timm.safetensors")
    jax.tree.map(np.testing.assert_array_equal, nnx.state(model, nnx.Param), before)


def test_a_new_head_keeps_its_weights():
    model = Swin(
        size=16,
        patch=2,
        width=4,
        depths=(2, 3),
        heads=(1, 2),
        window=2,
        classes=7,
        rngs=nnx.Rngs(0),
    )
    head = np.array(model.head.kernel[...])
    load_weights(model, HERE / "swin-timm.safetensors", new_head=True)
    np.testing.assert_array_equal(model.head.kernel[...], head)
    fitting = load_weights(small_swin(), HERE / "swin-timm.safetensors")
    np.testing.assert_array_equal(model.patches.kernel[...], fitting.patches.kernel[...])


def test_names_of_older_files_are_known(tmp_path):
    arrays = load_file(HERE / "swin-timm.safetensors")
    older = {
        name.replace("layers.1.downsample", "layers.0.downsample").replace("head.fc.", "head."): a
        for name, a in arrays.items()
    }
    save_file(older, tmp_path / "older.safetensors")
    model = load_weights(small_swin(), tmp_path / "older.safetensors")
    fitting = load_weights(small_swin(), HERE / "swin-timm.safetensors")
    found, expected = nnx.state(model, nnx.Param), nnx.state(fitting, nnx.Param)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


class _Evil:
    def __reduce__(self):
        return os.system, ("touch was-run",)


class _EvilSubprocess:
    def __reduce__(self):
        return subprocess.check_call, (["touch", "was-run"],)


@pytest.mark.parametrize("evil", [_Evil(), _EvilSubprocess(), {"a": [_Evil()]}])
def test_a_pickle_that_would_run_code_is_refused(evil, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with zipfile.ZipFile("evil.pth", "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(evil))
    pathlib.Path("old.pth").write_bytes(pickle.dumps(evil))
    for file in ("evil.pth", "old.pth"):
        with pytest.raises(ValueError, match=r"would call (posix.system|subprocess.check_call)"):
            read_pickled(file)
    assert not pathlib.Path("was-run").exists()


def test_damaged_files_are_refused(tmp_path):
    whole = (HERE / "resnet-transformers.pth").read_bytes()
    for count in (0, 100, len(whole) // 2, len(whole) - 1):
        (tmp_path / "half.pth").write_bytes(whole[:count])
        with pytest.raises(ValueError, match=r"half\.pth"):
            read_pickled(tmp_path / "half.pth")
    old = (HERE / "resnet-transformers-old.pth").read_bytes()
    (tmp_path / "half.pth").write_bytes(old[: len(old) // 2])
    with pytest.raises(ValueError, match=r"half\.pth"):
        read_pickled(tmp_path / "half.pth")
    (tmp_path / "half.safetensors").write_bytes(b"no")
    with pytest.raises(ValueError, match="cannot be read as safetensors"):
        load_weights(small_swin(), tmp_path / "half.safetensors")
    with pytest.raises(ValueError, match="there is no file"):
        read_pickled(tmp_path / "none.pth")


def test_models_without_published_weights_are_refused():
    with pytest.raises(TypeError, match="known for `ResNet` and `Swin`, got Linear"):
        names_of(nnx.Linear(1, 1, rngs=nnx.Rngs(0)), "timm")
    with pytest.raises(ValueError, match="none of the names"):
        load_weights(small_resnet(), HERE / "swin-timm.safetensors")
