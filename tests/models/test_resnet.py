"""Residual networks: sizes, statistics, names of axes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import constrainx as cx
from constrainx.models import ResNet, Swin


def count_parameters(make) -> int:
    model = nnx.eval_shape(make)
    return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))


def test_resnet18_has_the_published_number_of_parameters():
    assert count_parameters(lambda: ResNet(stem="imagenet", rngs=nnx.Rngs(0))) == 11_689_512
    assert count_parameters(lambda: ResNet(stem="cifar", rngs=nnx.Rngs(0))) == 11_173_962


@pytest.mark.parametrize(("stem", "side"), [("cifar", 16), ("imagenet", 4)])
def test_stages_halve_the_image_after_the_stem(stem, side):
    model = ResNet(stem=stem, blocks=(1, 1), width=4, rngs=nnx.Rngs(0))
    model.eval()
    shape = jax.eval_shape(lambda: model.features(jnp.ones((2, 32, 32, 3)))).shape
    assert shape == (2, side, side, 8)


def test_no_convolution_in_front_of_a_norm_has_a_bias():
    model = ResNet(blocks=(1, 1), width=4, rngs=nnx.Rngs(0))
    convolutions = [m for _, m in nnx.iter_modules(model) if isinstance(m, nnx.Conv)]
    assert len(convolutions) == 6
    assert all(layer.bias is None for layer in convolutions)


def test_statistics_advance_in_training_only():
    model = ResNet(blocks=(1,), width=4, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (4, 8, 8, 3))
    before = np.array(model.norm.mean[...])
    model.eval()
    model(x)
    np.testing.assert_array_equal(model.norm.mean[...], before)
    model.train()
    model(x)
    assert np.abs(np.asarray(model.norm.mean[...]) - before).max() > 0


@pytest.mark.parametrize(
    "make",
    [
        lambda rngs: ResNet(blocks=(1, 1), width=4, rngs=rngs),
        lambda rngs: Swin(size=16, width=4, depths=(2,), heads=(1,), window=2, rngs=rngs),
    ],
)
def test_kernels_name_their_axes(make):
    """With rules for the names, models are born split over a mesh, masks and optimizer, too."""
    mesh = jax.make_mesh((2,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    rules = [("in", None), ("out", "fsdp")]

    @nnx.jit
    def create():
        model = cx.masks.add_masks(make(nnx.Rngs(0)))
        specs = nnx.get_partition_spec(nnx.state(model))
        nnx.update(model, jax.lax.with_sharding_constraint(nnx.state(model), specs))
        return model

    with jax.set_mesh(mesh), nnx.logical_axis_rules(rules):
        model = create()
    assert model.head.kernel[...].sharding.spec == jax.P(None, "fsdp")
    assert model.head.kernel_mask[...].sharding.spec == jax.P(None, "fsdp")


def test_bad_sizes_are_refused():
    with pytest.raises(ValueError, match="`blocks` must hold at least one block"):
        ResNet(blocks=(2, 0), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="cifar"):
        ResNet(stem="cifra", rngs=nnx.Rngs(0))
