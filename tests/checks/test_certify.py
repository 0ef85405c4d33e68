"""Certificates against violations computed one by one, and bounds against SciPy and simulation."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from scipy import stats

import constrainx as cx
from constrainx.checks import bound_mean, bound_share
from constrainx.models import MLP
from constrainx.trainers import score_matching

X = np.random.default_rng(0).normal(size=(21, 3)).astype(np.float32)
POINTS = jnp.asarray(X)


class Odd(cx.Constraint):
    def residual(self, model, batch, *, key):
        return model(-batch["x"]) + model(batch["x"])


@dataclasses.dataclass(frozen=True)
class SmallNearDraws(cx.Constraint):
    """Looks at random points alone."""

    def residual(self, model, batch, *, key):
        return model(jax.random.normal(key, (4, 3)))


def network(width=4, out=2):
    return MLP((3, width, out), activation=jax.nn.softplus, rngs=nnx.Rngs(0))


def by_hand(model):
    """The violations of `Odd`, an example at a time, in NumPy."""
    values = np.asarray(model(POINTS) + model(-POINTS), np.float64)
    return np.sqrt(np.mean(values**2, axis=1))


@pytest.mark.parametrize(
    ("batch", "devices"), [(21, 1), (8, 4)], ids=["whole", "padded, 4 devices"]
)
def test_violations_are_those_of_single_examples(batch, devices):
    model = network()
    tolerance = float(np.median(by_hand(model)))
    found = cx.certify(
        model, Odd(tolerance=tolerance), cx.data.arrays({"x": X}, batch=batch), devices=devices
    )["odd"]
    wanted = by_hand(model)
    assert (found.unit, found.count, found.nonfinite) == ("example", 21, 0)
    np.testing.assert_allclose(
        [found.mean, found.largest], [wanted.mean(), wanted.max()], rtol=1e-5
    )
    assert found.where == wanted.argmax()
    assert found.share == pytest.approx(np.mean(wanted > tolerance), abs=1.5 / 21)
    exact = stats.binomtest(round(found.share * 21), 21, alternative="less").proportion_ci(0.95)
    assert found.share_upper == pytest.approx(exact.high)
    assert found.upper >= wanted.mean() + 1.72 * wanted.std(ddof=1) / np.sqrt(21)
    assert not found.met


def test_whether_it_is_met_is_decided_by_the_bound():
    model, data = network(), {"x": X}
    found = cx.certify(model, Odd(), data, devices=1)["odd"]
    between = (found.mean + found.upper) / 2
    assert not cx.certify(model, Odd(tolerance=between), data, devices=1).met
    assert cx.certify(model, Odd(tolerance=1.001 * found.upper), data, devices=1).met
    strict = cx.certify(model, Odd(tolerance=1.001 * found.upper), data, devices=1, share=0.1)
    assert not strict.met


def test_a_constraint_on_the_parameters_is_exact():
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    constraint = cx.UnitNorm(of=lambda m: m.kernel[...], axis=0)
    found = cx.certify(cx.attach(model, constraint), devices=1)["unit-norm"]
    wanted = np.sqrt(np.mean((np.sum(np.asarray(model.kernel) ** 2, axis=0) - 1) ** 2))
    assert (found.unit, found.count, found.where) == ("parameters", 1, None)
    assert found.mean == found.upper == found.largest == pytest.approx(wanted, rel=1e-6)
    assert (found.share, found.share_upper, found.met) == (1, 1, False)


def test_a_constraint_that_draws_points_gets_fresh_draws():
    found = cx.certify(network(), SmallNearDraws(), devices=1, draws=40)["small-near-draws"]
    again = cx.certify(network(), SmallNearDraws(), devices=1, draws=40, seed=1)
    assert (found.unit, found.count) == ("draw", 40)
    assert found.largest > found.mean > 0
    assert again["small-near-draws"].mean != found.mean


def test_a_bound_on_the_mean_over_a_batch_is_about_batches():
    model = network()
    losses = np.sum(np.asarray(model(POINTS), np.float64) ** 2, axis=1)
    wanted = np.maximum([losses[i : i + 4].mean() - 0.3 for i in range(0, 20, 4)], 0)

    def of_each(model, batch, key):
        return jnp.sum(model(batch["x"]) ** 2, axis=1)

    def of_all(model, batch, key):
        return jnp.mean(of_each(model, batch, key))

    for constraint in (cx.AtMost(0.3, of_all), cx.AtMost(0.3, of_each, reduce="mean")):
        found = cx.certify(model, constraint, {"x": X}, batch=4, devices=1)["at-most"]
        assert (found.unit, found.count) == ("batch", 5)
        np.testing.assert_allclose([found.mean, found.largest], [wanted.mean(), wanted.max()], 1e-5)
        assert "1 examples were left out" in found.remarks[-1]


def test_an_inequality_counts_what_exceeds_it():
    model = network()
    outputs = np.asarray(model(POINTS), np.float64)[:, 0]
    constraint = cx.AtMost(0.1, lambda m, b, key: m(b["x"])[:, 0])
    found = cx.certify(model, constraint, {"x": X}, devices=1)["at-most"]
    assert found.mean == pytest.approx(np.maximum(outputs - 0.1, 0).mean(), rel=1e-5)
    assert found.share == np.mean(outputs - 0.1 > 1e-3)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_is_never_met(value):
    x = X.copy()
    x[7] = value
    certificate = cx.certify(network(), Odd(tolerance=1e9), {"x": x}, devices=1)
    found = certificate["odd"]
    assert (found.nonfinite, found.where, found.met) == (1, 7, False)
    assert np.isnan(found.mean)
    assert certificate.as_record()["constraints"]["odd"]["mean"] is None
    assert "1 of 21 violations are not finite, the first at 7" in str(certificate)


def test_a_smaller_output_has_a_smaller_violation_but_the_same_relative_one():
    model = network(out=3)
    constraint = cx.Equivariance(cx.groups.SpecialOrthogonal(3))
    before = cx.certify(model, constraint, {"x": X}, devices=1)["equivariance"]
    last = model.layers[-1]
    for variable in (last.kernel, last.bias):
        variable[...] = variable[...] * 1e-2
    after = cx.certify(model, constraint, {"x": X}, devices=1)["equivariance"]
    assert after.mean == pytest.approx(1e-4 * before.mean, rel=1e-4)
    assert after.relative == pytest.approx(before.relative, rel=1e-4)
    assert before.relative > 0.01


@pytest.mark.parametrize("probes", [None, 4000])
def test_the_scale_of_a_jacobian_makes_the_normalised_asymmetry(probes):
    model = network(out=3)
    jacobian = jax.vmap(jax.jacfwd(lambda x: model(x[None])[0]))(POINTS[:1])
    constraint = cx.JacobianSymmetry(probes=probes)
    batch, key = {"x": POINTS[:1]}, jax.random.key(0)
    relative = constraint.violation(model, batch, key) / constraint.scale(model, batch, key)
    wanted = score_matching.normalised_asymmetry(jacobian)[0]
    assert relative == pytest.approx(float(wanted), rel=1e-5 if probes is None else 0.1)


def test_the_model_stays_in_training_mode_and_is_measured_in_evaluation_mode():
    model = nnx.Sequential(
        nnx.Linear(3, 4, use_bias=False, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(1))
    )
    model.train()
    found = cx.certify(model, Odd(), {"x": X}, devices=1)["odd"]
    assert found.largest == 0
    assert not model.layers[1].deterministic


def test_a_table_fits_80_columns_whatever_the_names():
    model = cx.attach(network(), Odd(name="a name of many words " * 6), Odd(name="two\nlines"))
    text = str(cx.certify(model, data={"x": X}, devices=1))
    assert max(map(len, text.splitlines())) <= 80
    assert "two lines" in text


def test_the_bound_on_a_mean_holds_as_often_as_it_says():
    rng = np.random.default_rng(0)
    samples = rng.lognormal(sigma=1.0, size=(1500, 100))
    holds = np.mean([bound_mean(sample) >= np.exp(0.5) for sample in samples])
    student = samples.mean(1) + stats.t.ppf(0.95, 99) * samples.std(1, ddof=1) / 10
    assert np.mean(student >= np.exp(0.5)) < 0.9 < 0.92 < holds < 0.97


def test_the_bound_on_a_share_is_that_of_clopper_and_pearson():
    for hits, count in [(0, 10), (3, 10), (10, 10), (1, 1000)]:
        exact = stats.binomtest(hits, count, alternative="less").proportion_ci(0.9, method="exact")
        assert bound_share(hits, count, confidence=0.9) == pytest.approx(exact.high)


def test_violations_with_long_tails_get_a_remark():
    x = X.copy()
    x[3] *= 1e4

    class Square(cx.Constraint):
        def residual(self, model, batch, *, key):
            return model(batch["x"])

    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    found = cx.certify(model, Square(), {"x": x}, devices=1)["square"]
    assert "too few for the bound on the mean" in found.remarks[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"confidence": 1.0}, "at least 0.5 and below 1"),
        ({"share": 2.0}, "between 0 and 1"),
        ({"data": X}, "dictionary of arrays"),
        ({"constraints": cx.compose(lambda p: p)}, "plain function"),
        ({"constraints": ()}, "nothing to constrain"),
    ],
)
def test_mistakes_are_errors(arguments, message):
    arguments = {"constraints": Odd(), "data": {"x": X}, **arguments}
    with pytest.raises(cx.UserError, match=message):
        cx.certify(network(), devices=1, **arguments)
