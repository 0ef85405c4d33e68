"""A trainer that polishes when training has ended."""

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import constrainx as cx

from . import problems


class Even(cx.Constraint):
    def residual(self, model, batch, *, key):
        return model(-batch["x"]) - model(batch["x"])


def make_trainer(run=None, **options):
    return cx.Trainer(
        model=problems.Net(width=16),
        loss=problems.squared,
        optimizer=optax.adam(1e-2),
        data=problems.arrays(),
        constraints=[Even(reduce="norm")],
        evaluation=problems.arrays(),
        run=run,
        devices=2,
        logging=cx.Logging(progress=False),
        **options,
    )


def ravel(model):
    state = nnx.as_pure(nnx.state(model, nnx.Param))
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(state)])


def test_the_result_is_polished_and_a_run_resumes_as_if_it_were_not(tmp_path):
    polish = cx.Polish(batches=2, tolerance=1e-5)
    result = make_trainer(tmp_path / "a", steps=4, polish=polish).fit()
    assert result.polished.met
    found = result.polished["even"]
    assert found.rows == 2 * problems.BATCH * 2
    assert found.after <= 1e-5 < found.before
    # The metrics are those of the model that is returned.
    x = problems.X
    squares = np.asarray((result.model(-x) - result.model(x)) ** 2)
    violation = np.mean(np.sqrt(np.mean(squares.reshape(-1, problems.BATCH * 2), axis=1)))
    assert result.metrics["violation/even"] == pytest.approx(violation, rel=1e-4)
    assert found.held_out_after == pytest.approx(violation, rel=1e-4)

    again = make_trainer(tmp_path / "a", steps=6, polish=polish)
    again.restore()
    trained = ravel(again.trained)
    assert not np.array_equal(trained, ravel(result.model))
    again.fit()
    straight = make_trainer(steps=6)
    straight.fit()
    np.testing.assert_array_equal(ravel(again.trained), ravel(straight.trained))


def test_a_trainer_without_constraints_has_nothing_to_polish():
    trainer = cx.Trainer(
        model=problems.Net(),
        loss=problems.squared,
        optimizer=optax.sgd(0.1),
        data=problems.arrays(),
        steps=1,
        devices=1,
    )
    with pytest.raises(cx.UserError, match="this trainer has none"):
        trainer.run_polish()
