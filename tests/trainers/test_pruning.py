"""Pruning in the trainer: resumed in every phase, on one device and on eight."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import constrainx as cx
from constrainx import masks
from constrainx.models import MLP

from .problems import assert_same_state

STEPS = 20
PHASES = masks.Phases(density=0.25, steps=STEPS)
X = np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)


def make_trainer(*, pattern=None, draw=False, devices=1, **options):
    phases = masks.Phases(density=0.5, steps=STEPS) if pattern else PHASES
    model = MLP((8, 16, 4), rngs=nnx.Rngs(0))
    rate = optax.cosine_decay_schedule(1e-2, STEPS)
    optimizer = cx.prune(model, optax.adam(rate), phases, learning_rate=rate, pattern=pattern)

    def loss(model, batch, key):
        seen = masks.sample(model, key) if draw else masks.top(model)
        return jnp.mean(jnp.square(seen(batch["x"]) - batch["x"][:, :4]))

    return cx.Trainer(
        model=model,
        loss=loss,
        optimizer=optimizer,
        data=cx.data.arrays({"x": X}, batch=16),
        steps=options.pop("steps", STEPS),
        devices=devices,
        logging=cx.Logging(progress=False),
        **options,
    )


@pytest.mark.parametrize("half", [1, 2, 3, 8, 14, 15, 18])
def test_a_run_resumes_bit_for_bit_in_every_phase(tmp_path, half):
    assert (PHASES.first, PHASES.last) == (2, 14)
    whole = make_trainer(draw=True)
    whole.fit()
    make_trainer(draw=True, steps=half, run=tmp_path / "run").fit()
    second = make_trainer(draw=True, run=tmp_path / "run")
    assert second.restore() == half
    result = second.fit()
    assert_same_state(second.state, whole.state)
    pruned = masks.export(result.model)
    assert float(masks.realised_density(pruned)) == 0.25


@pytest.mark.parametrize("pattern", [None, "2:4"])
@pytest.mark.parametrize("devices", [cx.Devices(8), cx.Devices(8, fsdp=8), cx.Devices(8, fsdp=2)])
def test_eight_devices_prune_like_one(devices, pattern):
    one = make_trainer(pattern=pattern).fit().model
    eight = make_trainer(pattern=pattern, devices=devices).fit().model
    for path in ("kernel", "kernel_mask"):
        for mine, other in zip(one.layers, eight.layers, strict=True):
            np.testing.assert_allclose(
                getattr(mine, path)[...], getattr(other, path)[...], atol=2e-5
            )
    assert float(masks.realised_density(masks.export(eight))) == (0.5 if pattern else 0.25)


def test_masks_stay_in_float32_in_a_bfloat16_step():
    seen = {}

    def loss(model, batch):
        seen["mask"], seen["kernel"] = (model.kernel_mask.dtype, model.kernel.dtype)
        return jnp.mean(jnp.square(masks.top(model)(batch["x"]))).astype(jnp.float32)

    trainer = cx.Trainer(
        model=masks.add_masks(nnx.Linear(8, 4, rngs=nnx.Rngs(0))),
        loss=loss,
        optimizer=optax.sgd(0.1),
        data=cx.data.arrays({"x": X}, batch=16),
        steps=1,
        precision="bfloat16",
        devices=1,
        logging=cx.Logging(progress=False),
    )
    trainer.validate()
    assert seen == {"mask": jnp.float32, "kernel": jnp.bfloat16}
    assert jax.tree.leaves(trainer.state.parameters)[0].dtype == jnp.float32
