"""What a constraint may cost on many devices, read from the compiled program."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import constrainx as cx
from constrainx.models import MLP
from constrainx.plan import TARGETS, make_plan
from constrainx.plan._hlo import Module, find_arrays

# The kernel of the first layer is just large enough to be split.
WIDTHS = (64, 256, 1)
KERNEL = 64 * 256 * 4


@dataclasses.dataclass(frozen=True)
class UnitColumns(cx.Constraint):
    """As many rows as the first layer has outputs, so many that LSMR solves them."""

    def residual(self, model, batch, *, key):
        return jnp.sum(model.layers[0].kernel[...] ** 2, axis=0) - 1


def loss_of_masked(model, batch, key):
    return jnp.mean((cx.masks.sample(model, key)(batch["x"]) - batch["y"]) ** 2)


def loss(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def make_model():
    return MLP(WIDTHS, rngs=nnx.Rngs(0))


MODELS = {
    "masks": (lambda: cx.masks.add_masks(make_model()), loss_of_masked, cx.MaskBudget(0.5)),
    "columns": (make_model, loss, UnitColumns(reduce="none", gamma=0.1)),
}


@pytest.fixture(scope="module", params=["masks", "columns"])
def name(request):
    return request.param


@pytest.fixture(scope="module", params=[1, 8], ids=["data", "fsdp"])
def fsdp(request):
    return request.param


@pytest.fixture(scope="module")
def trainer(name, fsdp):
    make, loss, constraint = MODELS[name]
    x = np.zeros((16, WIDTHS[0]), np.float32)
    return cx.Trainer(
        model=nnx.eval_shape(make),
        loss=loss,
        optimizer=optax.adam(1e-3),
        data=cx.data.arrays({"x": x, "y": x[:, :1]}, batch=16),
        steps=1,
        constraints=[constraint],
        devices=cx.Devices(8, fsdp=fsdp),
    )


@pytest.fixture(scope="module")
def plan(trainer):
    return make_plan(trainer, TARGETS["cpu"])


def test_constraints_on_parameters_add_scalars_and_rows(plan, name):
    row = 4 if name == "masks" else 4 * WIDTHS[1]
    assert all(one.bytes <= row for one in plan.added), plan.added


def test_nothing_in_the_loop_is_as_large_as_a_parameter(plan, name):
    iterated = [one for one in plan.collectives if one.is_iterated]
    assert all(one.bytes <= 4 * WIDTHS[1] for one in iterated), iterated
    if plan.mesh["fsdp"] == 1:
        # Every device has all parameters and rows of its own, and needs nobody.
        assert not iterated
    elif name == "columns":
        assert iterated  # the test would pass if loops were not found


def test_masks_and_moments_stay_split_like_their_weights(trainer, plan, fsdp):
    compiled = trainer.lower().compile()
    (state, *_), _ = compiled.input_shardings
    new, *_ = compiled.output_shardings
    shape = (64, 256 // fsdp)
    for shardings in (state, new):
        pairs = zip(jax.tree.leaves(trainer.state), jax.tree.leaves(shardings), strict=True)
        split = [found.shard_shape(leaf.shape) for leaf, found in pairs if leaf.size == 64 * 256]
        assert {*split} == {shape}
        # The weights with two moments, and the same for masks.
        assert len(split) in (3, 6)
    if fsdp > 1:
        assert plan.state_held < plan.state / 4


def test_vectors_of_a_solve_stay_split_like_their_weights(trainer, name, fsdp):
    if name != "columns" or fsdp == 1:
        pytest.skip("nothing is iterated, or nothing split")
    module = Module(trainer.lower().compile().as_text())
    loops = [
        one.instruction.shape
        for one in module.walk()
        if one.instruction.opcode == "while"
        and "known_trip_count" not in one.instruction.attributes
    ]
    carried = [shape for loop in loops for shape in find_arrays(loop)]
    assert "f32[64,32]" in carried
    assert "f32[64,256]" not in carried
