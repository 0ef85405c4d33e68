"""The guard: what a step would keep is finite, or the step is not taken."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import constrainx as cx

from .problems import Counter, Noisy, Recorder, arrays, assert_same_state, counter, trainer

BAD = 4


class Linear(nnx.Module):
    def __init__(self):
        self.layer = nnx.Linear(3, 2, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.layer(x)


def with_outlier(size):
    """Batches with one large number, at one step."""

    def make():
        for step, batch in enumerate(arrays().from_step(0)):
            x = batch["x"].copy()
            if step == BAD:
                x[3, 1] = size
            yield {**batch, "x": x}

    return cx.data.from_iterable(make, batch=8)


CASES = {
    "optimizer state": {"model": Linear, "size": 1e12},
    "batch statistics": {"model": Noisy, "size": 1e20},
}


def make_trainer(case, **options):
    model, size = CASES[case]["model"](), CASES[case]["size"]
    return trainer(model=model, data=with_outlier(size), ema=0.9, **options)


@pytest.mark.parametrize("case", CASES)
def test_what_would_stay_infinite_stops_the_run_and_spares_the_checkpoint(tmp_path, case):
    options = {"steps": 12, "save_every": 3, "run": tmp_path / "run"}
    bad = make_trainer(case, **options)
    with pytest.raises(cx.NonFiniteError, match=f"step {BAD} was not finite: {case}"):
        bad.fit()
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["3"]
    good = make_trainer(case, steps=BAD)
    good.fit()
    assert_same_state(bad.state._replace(health=good.state.health), good.state)
    saved = make_trainer(case, **options)
    assert saved.restore() == 3
    for leaf in jax.tree.leaves(saved.state._replace(constraints=())):
        assert np.isfinite(np.asarray(leaf, np.float32)).all()


@pytest.mark.parametrize("case", CASES)
def test_what_would_stay_infinite_can_be_skipped(case):
    recorder = Recorder()
    skipping = make_trainer(case, steps=8, on_nonfinite="skip", callbacks=[recorder])
    assert skipping.fit().step == 8
    assert recorder.events[-1][1].startswith(f"step {BAD} was not finite: {case}")
    for leaf in jax.tree.leaves((skipping.state.optimizer, skipping.state.rest)):
        assert np.isfinite(np.asarray(leaf, np.float32)).all()


def steep(model, batch):
    """Zero, with an infinite gradient, at the value that `Counter` starts from."""
    return jnp.sqrt(model.value[...] * jnp.mean(batch["x"]))


def test_a_sign_does_not_hide_an_infinite_moment():
    lion = counter(loss=steep, optimizer=optax.lion(0.1), steps=3)
    with pytest.raises(cx.NonFiniteError, match="step 0 was not finite: optimizer state"):
        lion.fit()
    assert float(lion.state.parameters["value"]) == 0


class Unbounded(cx.Constraint):
    """A residual of 1e18."""

    def residual(self, model, batch, *, key):
        return jnp.reshape(1e18 * (1 + 0 * model.value[...]), (1,))


def test_an_infinite_multiplier_is_found():
    method = cx.Lagrangian(1e-3, rate=1e21)
    run = counter(constraints=[Unbounded()], method=method, steps=2)
    with pytest.raises(cx.NonFiniteError, match="multipliers"):
        run.fit()


class Masked(Counter):
    """Keeps a mask of −∞, as attention does."""

    def __init__(self):
        super().__init__()
        self.mask = nnx.Variable(jnp.array([0.0, -jnp.inf]))


def remember_best():
    """Keeps the least norm of a gradient so far, which is infinite at first."""

    def update(gradients, state, params=None):
        del params
        return gradients, {"least": jnp.minimum(state["least"], optax.tree.norm(gradients)[None])}

    return optax.GradientTransformation(lambda _: {"least": jnp.full((1,), jnp.inf)}, update)


def test_what_is_infinite_from_the_start_may_be():
    optimizer = optax.chain(remember_best(), optax.sgd(1.0))
    assert counter(model=Masked(), optimizer=optimizer, steps=3).fit().step == 3


@pytest.mark.parametrize("part", ["parameters", "optimizer", "ema"])
@pytest.mark.parametrize("on_nonfinite", ["stop", "skip"])
def test_a_checkpoint_that_is_not_finite_is_not_continued(tmp_path, part, on_nonfinite):
    options = {"run": tmp_path / "run", "ema": 0.9, "on_nonfinite": on_nonfinite}
    first = trainer(steps=2, **options)
    spoilt = jax.tree.map(lambda leaf: leaf * jnp.inf, getattr(first.state, part))
    first._progress.state = first.state._replace(**{part: spoilt}, step=first.state.step + 1)
    with first._open(first._folder) as opened:
        opened.checkpoints.save(1, first.state, about={}, metrics={})
        opened.checkpoints.wait()
    second = trainer(steps=2, **options)
    second.restore(strict=False)
    with pytest.raises(cx.NonFiniteError, match=rf"step 1 .* not finite: {part}") as error:
        second.fit()
    assert "is good" not in str(error.value)
    assert "earlier checkpoint" in str(error.value)


def test_frozen_weights_are_not_read_again():
    """A step that keeps them as they are need not look at them."""
    frozen = trainer(model=Linear(), wrt=lambda path, _: "bias" in path, steps=1)
    rows = next(itertools.islice(arrays().from_step(0), 1))
    text = jax.jit(frozen._program).lower(frozen.state, {}, rows).as_text()
    assert "reduce" in text
    sums = [line for line in text.splitlines() if "stablehlo.reduce" in line]
    assert not any("tensor<3x2xf32>, tensor<f32>" in line for line in sums)
