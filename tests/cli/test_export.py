"""`constrainx export`, and `cx.load` by the recipe of a run."""

import jax
import numpy as np
from flax import nnx
from safetensors.numpy import load_file

import constrainx as cx
from constrainx.models import ResNet
from constrainx.models.published import load_weights
from constrainx.runtime import StoredCheckpoints

RECIPE = """
import dataclasses
from typing import ClassVar
import numpy as np, optax
from flax import nnx
import constrainx as cx
from constrainx.models import ResNet
from constrainx.recipes import Recipe
from constrainx.trainers.classification import cross_entropy

@dataclasses.dataclass(frozen=True, kw_only=True)
class Residual(Recipe):
    name: ClassVar[str] = "residual"

    def trainer(self, **options):
        rng = np.random.default_rng(0)
        images = rng.normal(size=(4, 8, 8, 3)).astype(np.float32)
        model = ResNet(blocks=(1,), width=2, classes=3, rngs=nnx.Rngs(0))
        return cx.Trainer(
            model=cx.masks.add_masks(model, initial=0.5),
            loss=lambda model, batch, key: cross_entropy(cx.masks.sample(model, key), batch).mean(),
            optimizer=optax.sgd(0.1),
            data=cx.data.arrays({"x": images, "y": np.array([0, 1, 2, 0])}, batch=4),
            steps=2,
            constraints=[cx.MaskBudget(0.5)],
            **self.settings(**options),
        )
"""


def test_export_writes_what_is_in_the_checkpoint(constrainx, finished, tmp_path):
    path = tmp_path / "out" / "weights.safetensors"
    code, text = constrainx("export", finished, "--to", path)
    assert code == 0, text
    found = load_file(path)
    stored = StoredCheckpoints(finished / "checkpoints").read_arrays(16, "parameters.")
    assert {f"parameters.{name}" for name in found} >= set(stored)
    for name, array in stored.items():
        np.testing.assert_array_equal(found[name.removeprefix("parameters.")], array)
    code, text = constrainx("export", finished, "--to", tmp_path / "weights.pt")
    assert code == 1
    assert "must end in .safetensors" in text
    assert type(cx.load(finished, step=8)).__module__.startswith("constrainx.models")


def test_export_in_a_published_layout_loads_as_published_weights(constrainx, tmp_path):
    (tmp_path / "residual.py").write_text(RECIPE)
    code, text = constrainx("train", "residual.py", "--devices", 1, "--run", "run")
    assert code == 0, text
    trained = cx.masks.export(cx.load("run", recipe="residual.py"))
    images = np.random.default_rng(1).normal(size=(2, 8, 8, 3)).astype(np.float32)
    expected = jax.jit(lambda x: trained(x))(images)
    for layout in ("timm", "transformers"):
        code, text = constrainx("export", "run", "--layout", layout, "--recipe", "residual.py")
        assert code == 0, text
        model = ResNet(blocks=(1,), width=2, classes=3, rngs=nnx.Rngs(1))
        load_weights(model, tmp_path / f"run/weights-{layout}.safetensors", layout=layout)
        model.eval()
        np.testing.assert_array_equal(jax.jit(lambda x, m=model: m(x))(images), expected)
    kept = load_file(tmp_path / "run/weights-timm.safetensors")["layer1.0.conv1.weight"]
    assert kept.shape == (2, 2, 3, 3)
    assert 0 < np.count_nonzero(kept) < kept.size
    export = ("export", "run", "--recipe", "residual.py", "--layout", "timm", "--masks", "keep")
    code, text = constrainx(*export)
    assert code == 1
    assert "has no place for masks" in " ".join(text.split())


def test_a_model_without_a_published_layout_is_refused(constrainx, finished):
    code, text = constrainx("export", finished, "--layout", "timm")
    assert code == 1
    assert "the layout of timm is known for `ResNet` and `Swin`, got MLP" in " ".join(text.split())
    assert not (finished / "weights-timm.safetensors").exists()
