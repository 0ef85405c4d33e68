"""Models and weights of a run, without the trainer that made them."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.flax import load_file

import constrainx as cx
from constrainx.recipes import export_weights
from tests.trainers.problems import Net, Noisy, arrays, trainer


def test_load_fills_a_model_and_puts_it_into_evaluation_mode(tmp_path):
    run = tmp_path / "run"
    first = trainer(model=Noisy(), steps=2, run=run, ema=0.5)
    first.fit()
    x = next(iter(arrays().from_step(0)))["x"]
    for average, wanted in ((True, first.trained), (False, first.model)):
        model = Noisy()
        assert cx.load(run, model, average=average) is model
        wanted.eval()
        np.testing.assert_array_equal(model(x), wanted(x))
        np.testing.assert_array_equal(model(x), model(x))  # no dropout
    with pytest.raises(cx.CheckpointError, match=r"hidden.bias is missing there; norm.mean is"):
        cx.load(run, Net(width=5))
    with pytest.raises(cx.CheckpointError, match=r"monitors no metric"):
        cx.load(run, Noisy(), step="best")
    with pytest.raises(cx.CheckpointError, match=r"has no complete checkpoint"):
        cx.load(tmp_path)


def test_exported_weights_have_the_zeros_of_their_masks(tmp_path):
    model = cx.masks.add_masks(Net(), initial=lambda w: (w > 0).astype(jnp.float32))
    assert export_weights(model, tmp_path / "pruned.safetensors") == 4
    pruned = load_file(tmp_path / "pruned.safetensors")
    kernel = np.asarray(model.hidden.kernel[...])
    np.testing.assert_array_equal(pruned["hidden.kernel"], np.maximum(kernel, 0))
    assert export_weights(model, tmp_path / "all.safetensors", prune=False) == 6
    kept = load_file(tmp_path / "all.safetensors")
    np.testing.assert_array_equal(kept["hidden.kernel"], kernel)
    np.testing.assert_array_equal(kept["hidden.kernel_mask"], kernel > 0)
    half = nnx.Linear(2, 2, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    export_weights(half, tmp_path / "half.safetensors")
    found = load_file(tmp_path / "half.safetensors")["kernel"]
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(found, half.kernel[...])
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(cx.UserError, match="could not be written"):
        export_weights(half, tmp_path / "file" / "half.safetensors")
