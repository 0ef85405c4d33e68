"""Swin transformers: sizes, windows, and the same numbers unrolled, as a loop, recomputed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from constrainx.models import Swin
from constrainx.models._windows import join_windows, mask_neighbours, split_windows
from tests.models.test_resnet import count_parameters


def small(**settings) -> Swin:
    sizes = {"size": 16, "patch": 2, "width": 4, "depths": (1, 5), "heads": (1, 2), "window": 2}
    return Swin(**{**sizes, "classes": 3, "rngs": nnx.Rngs(0), **settings})


@pytest.mark.parametrize(
    ("make", "count"),
    [(Swin.tiny, 28_288_354), (Swin.small, 49_606_258), (Swin.base, 87_768_224)],
)
def test_sizes_have_the_published_number_of_parameters(make, count):
    assert count_parameters(lambda: make(rngs=nnx.Rngs(0))) == count


@pytest.mark.parametrize("remat", [False, True])
def test_a_loop_over_blocks_computes_what_they_compute_unrolled(remat):
    x = jax.random.normal(jax.random.key(0), (2, 16, 16, 3))

    def loss(model):
        return jnp.mean(model(x, rngs=nnx.Rngs(dropout=1)) ** 2)

    plain = nnx.jit(nnx.value_and_grad(loss))(small())
    other = nnx.jit(nnx.value_and_grad(loss))(small(scan=True, remat=remat))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), plain, other)


def test_a_loop_makes_the_program_smaller():
    def size(scan):
        model = small(depths=(1, 12), scan=scan, drop_path=0.0)
        return len(str(jax.make_jaxpr(lambda x: model(x))(jnp.ones((1, 16, 16, 3)))))

    assert size(True) < 0.5 * size(False)


def test_windows_are_cut_and_joined():
    x = np.arange(2 * 4 * 6 * 3, dtype=np.float32).reshape(2, 4, 6, 3)
    windows = split_windows(x, 2)
    np.testing.assert_array_equal(windows[0, 1].reshape(2, 2, 3), x[0, :2, 2:4])
    np.testing.assert_array_equal(join_windows(windows, 4, 6), x)


def test_shifted_windows_see_only_what_was_near_in_the_image():
    """Against the distance between tokens before the image was rolled."""
    side, window, shift = 8, 4, 2
    rows, columns = np.indices((side, side))
    rolled = [np.roll(each, (-shift, -shift), (0, 1))[None, :, :, None] for each in (rows, columns)]
    rows, columns = (split_windows(each, window)[0, :, :, 0] for each in rolled)

    def near(each):
        return np.abs(each[:, :, None] - each[:, None, :]) < window

    expected = near(rows) & near(columns)
    np.testing.assert_array_equal(mask_neighbours(side, side, window, shift), expected)


def test_blocks_are_left_out_in_training_only():
    model = small(drop_path=0.9)
    x = jnp.ones((8, 16, 16, 3))
    model.train()
    first = model(x, rngs=nnx.Rngs(dropout=0))
    assert np.ptp(np.asarray(first), axis=0).max() > 1e-6  # each image has a draw of its own
    model.eval()
    assert np.ptp(np.asarray(model(x)), axis=0).max() < 1e-6


def test_means_stay_where_blocks_are_left_out():
    model = small(depths=(1, 1), drop_path=0.5)
    kept = model._draw_kept(20_000, nnx.Rngs(dropout=0))
    np.testing.assert_allclose(kept.mean(-1), 1, atol=0.05)
    np.testing.assert_allclose((kept == 0).mean(-1), [[0, 0], [0.5, 0.5]], atol=0.02)


def test_one_window_that_covers_the_image_does_not_shift():
    model = small(window=8)
    assert [block.attention.shift for block in model.stages[0].blocks] == [0]
    assert [block.attention.window for block in model.stages[1].blocks] == [4] * 5
    assert all(block.attention.shift == 0 for block in model.stages[1].blocks)


def test_bad_sizes_are_refused():
    with pytest.raises(ValueError, match=r"`size=18` does not divide evenly.*multiple of 8"):
        small(size=18)
    with pytest.raises(ValueError, match="3 does not divide 8"):
        small(heads=(1, 3))
    with pytest.raises(ValueError, match="one entry for each stage"):
        small(heads=(1,))
    with pytest.raises(ValueError, match="`drop_path` must be in"):
        small(drop_path=1.0)
    with pytest.raises(ValueError, match="built for images of 16×16, got 32×32"):
        small()(jnp.ones((1, 32, 32, 3)))
