"""Constraints as objects: subclassing, attaching, composing."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import constrainx as cx

KEY = jax.random.key(0)


class PeriodicIn2Pi(cx.Constraint):
    def residual(self, model, batch, *, key):
        return model(batch["x"] + 2 * jnp.pi) - model(batch["x"])


class Sine(nnx.Module):
    def __call__(self, x):
        return jnp.sin(x)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(1, 8, rngs=rngs)
        self.blocks = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(2)])
        self.last = nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, x):
        x = nnx.tanh(self.first(x))
        for block in self.blocks:
            x = nnx.tanh(block(x))
        return self.last(x)


BATCH = {"x": jnp.linspace(-3, 3, 8)[:, None]}


def parameters(model):
    return nnx.state(model, nnx.Param)


def test_a_subclass_with_a_residual_is_a_constraint():
    constraint = PeriodicIn2Pi(gamma=0.1)
    assert constraint.label == "periodic-in2-pi"
    assert constraint.violation(Sine(), BATCH, KEY) < 1e-6
    assert constraint.violation(Net(nnx.Rngs(0)), BATCH, KEY) > 1e-2


def test_constraints_attached_to_any_module_are_found_in_copies_of_the_model():
    model = Net(nnx.Rngs(0))
    cx.attach(model, PeriodicIn2Pi())
    cx.attach(model.blocks[1], cx.Orthogonality(of=lambda m: m.kernel[...]))
    cx.attach(model.last, cx.UnitNorm(of=lambda m: m.kernel[...], name="length"))
    for copy in (model, nnx.clone(model), nnx.merge(*nnx.split(model))):
        found = cx.constraints_of(copy)
        assert [(f.path, f.constraint.label) for f in found] == [
            ((), "periodic-in2-pi"),
            (("last",), "length"),
            (("blocks", 1), "orthogonality"),
        ]
        assert "PeriodicIn2Pi" in str(copy)
        rows = cx.compose(copy)(parameters(copy), BATCH, KEY)
        assert {name: row.shape for name, row in rows.items()} == {
            "periodic-in2-pi": (8,),
            "length": (1,),
            "orthogonality": (36,),
        }
    # Nothing to train, save or compute comes with them.
    plain = Net(nnx.Rngs(0))
    assert jax.tree.structure(nnx.state(plain)) == jax.tree.structure(nnx.state(model))
    text = [str(jax.make_jaxpr(lambda x, m=m: m(x))(BATCH["x"])) for m in (plain, model)]
    assert text[0] == text[1]


def test_attached_constraints_are_found_under_jit():
    model = cx.attach(Net(nnx.Rngs(0)), PeriodicIn2Pi())

    @nnx.jit
    def count(model):
        return jnp.asarray(len(cx.constraints_of(model)))

    assert count(model) == 1


def test_violations_are_zero_exactly_where_constraints_hold():
    model = Net(nnx.Rngs(0))
    rotation = jnp.linalg.qr(jax.random.normal(KEY, (8, 8)))[0]
    model.blocks[0].kernel[...] = rotation
    model.last.kernel[...] = model.last.kernel[...] / jnp.linalg.norm(model.last.kernel[...])
    orthogonal = cx.Orthogonality(of=lambda m: m.blocks[0].kernel[...])
    unit = cx.UnitNorm(of=lambda m: m.last.kernel[...])
    bounded = cx.AtMost(1.001, of=lambda m, batch, key: jnp.sum(m.last.kernel[...] ** 2))
    for constraint in (orthogonal, unit, bounded):
        assert constraint.violation(model, BATCH, KEY) < 1e-6
    model.blocks[0].kernel[...] = 1.1 * rotation
    model.last.kernel[...] = 1.1 * model.last.kernel[...]
    for constraint in (orthogonal, unit, bounded):
        assert constraint.violation(model, BATCH, KEY) > 1e-2


def test_a_residual_may_be_any_pytree():
    class Both(cx.Constraint):
        def residual(self, model, batch, *, key):
            return {"a": model(batch["x"]), "b": [jnp.float32(2.0), jnp.ones((2, 3))]}

    model = Net(nnx.Rngs(0))
    rows = cx.compose(Both(), model=model)(parameters(model), BATCH, KEY)["both"]
    assert rows.shape == (8 + 1 + 6,)


REDUCTIONS = {
    "none": 8,
    "norm": 8,
    "mean": 1,
    "rms": 1,
    cx.Norm(groups=4): 4,
    cx.Sketch(rows=5): 5,
}


@pytest.mark.parametrize("reduce", REDUCTIONS, ids=str)
def test_each_reduction_makes_the_rows_it_promises(reduce):
    model = Net(nnx.Rngs(0))
    constraint = PeriodicIn2Pi(reduce=reduce)
    composed = cx.compose(constraint, model=model)
    rows = composed(parameters(model), BATCH, KEY)["periodic-in2-pi"]
    assert rows.shape == (REDUCTIONS[reduce],)
    residual = np.asarray(constraint.residual(model, BATCH, key=KEY))[:, 0]
    expected = {
        "none": residual,
        "norm": np.abs(residual),
        "mean": [residual.mean()],
        "rms": [np.sqrt((residual**2).mean())],
        cx.Norm(groups=4): np.sqrt((residual.reshape(4, 2) ** 2).mean(axis=1)),
    }
    if reduce in expected:
        np.testing.assert_allclose(rows, expected[reduce], rtol=1e-5)
    else:
        keys = jax.random.split(KEY, 400)
        draws = jax.vmap(
            lambda k: jnp.sum(composed(parameters(model), BATCH, k)["periodic-in2-pi"] ** 2)
        )(keys)
        error = np.std(draws) / np.sqrt(len(draws))
        assert abs(np.mean(draws) - np.mean(residual**2)) < 4 * error


@pytest.mark.parametrize("reduce", REDUCTIONS, ids=str)
def test_reductions_have_finite_gradients_at_zero(reduce):
    class Zero(cx.Constraint):
        def residual(self, model, batch, *, key):
            return model(batch["x"]) - model(batch["x"])

    model = Net(nnx.Rngs(0))
    composed = cx.compose(Zero(reduce=reduce), model=model)

    @jax.jit
    def run(params):
        gradient = jax.grad(lambda p: jnp.sum(composed(p, BATCH, KEY)["zero"]))(params)
        update = jax.tree.map(jnp.ones_like, params)
        return gradient, cx.project(update, composed, params, batch=BATCH, key=KEY)

    gradient, step = run(parameters(model))
    assert all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in jax.tree.leaves(gradient))
    assert all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in jax.tree.leaves(step.update))


def test_wrt_moves_no_other_parameter_bit_for_bit():
    model = Net(nnx.Rngs(0))
    only_last = PeriodicIn2Pi(wrt=nnx.PathContains("last"), gamma=1.0, reduce="rms")
    composed = cx.compose(only_last, model=model)
    params = parameters(model)
    update = jax.tree.map(lambda leaf: 0.1 * jnp.ones_like(leaf), params)
    for solver in ("gram", cx.LSMR()):
        step = jax.jit(
            lambda p, s=solver: cx.project(update, composed, p, batch=BATCH, key=KEY, solver=s)
        )(params)
        moved = {
            path[0].key
            for (path, new), old in zip(
                jax.tree_util.tree_leaves_with_path(step.update),
                jax.tree.leaves(update),
                strict=True,
            )
            if np.any(np.asarray(new) != np.asarray(old))
        }
        assert moved == {"last"}


def test_each_constraint_follows_its_own_start_every_and_gamma():
    model = Net(nnx.Rngs(0))
    first = PeriodicIn2Pi(name="a", reduce="rms", start=3, every=2, gamma=1.0)
    second = cx.UnitNorm(
        of=lambda m: m.last.kernel[...], name="b", gamma=optax.linear_schedule(0.0, 1.0, 10)
    )
    composed = cx.compose(first, second, model=model)
    params = parameters(model)
    zero = jax.tree.map(jnp.zeros_like, params)

    @jax.jit
    def change(step):
        result = cx.project(zero, composed, params, batch=BATCH, key=KEY, step=step)
        rows = jax.jvp(lambda p: composed(p, BATCH, KEY), (params,), (result.update,))[1]
        return result, rows

    for step in (0, 2, 3, 4, 5):
        result, moved = change(step)
        acts = step in (3, 5)
        assert bool(result.reports["a"].active) == acts
        if acts:
            np.testing.assert_allclose(moved["a"], -result.rows["a"], rtol=1e-3)
        else:
            np.testing.assert_array_equal(result.multipliers["a"], [0.0])
        np.testing.assert_allclose(moved["b"], -step / 10 * result.rows["b"], rtol=1e-3, atol=1e-6)
    assert set(result.rows) == set(result.multipliers) == set(result.reports) == {"a", "b"}


@pytest.mark.parametrize("solver", ["gram", cx.LSMR(rtol=1e-5)], ids=str)
def test_a_step_at_which_no_constraint_acts_leaves_the_update_alone(solver):
    """Its violation is still reported; at the other steps it acts as if it always did."""
    model = Net(nnx.Rngs(0))
    params = parameters(model)
    update = jax.tree.map(jnp.ones_like, params)

    def steps(**when):
        composed = cx.compose(PeriodicIn2Pi(reduce="rms", **when), model=model)
        return jax.jit(
            lambda step: cx.project(
                update, composed, params, batch=BATCH, key=KEY, step=step, solver=solver
            )
        )

    late, always = steps(start=3, every=2), steps()
    for step in range(7):
        found, wanted = late(step), always(step)
        if step in (3, 5):
            for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
        else:
            jax.tree.map(np.testing.assert_array_equal, found.update, update)
            (report,) = found.reports.values()
            (same,) = wanted.reports.values()
            np.testing.assert_allclose(report.violation, same.violation, rtol=1e-5)
            assert (report.active, report.resolved, report.iterations) == (False, True, 0)


@pytest.mark.parametrize("reduce", ["none", cx.Norm(groups=2)], ids=str)
def test_a_constraint_on_some_examples_ignores_the_others(reduce):
    model = Net(nnx.Rngs(0))
    some = cx.compose(PeriodicIn2Pi(reduce=reduce, examples=4), model=model)
    part = {"x": BATCH["x"][:4]}
    all_of_part = cx.compose(PeriodicIn2Pi(reduce=reduce), model=model)
    zero = jax.tree.map(jnp.zeros_like, parameters(model))
    steps = [
        jax.jit(lambda p, b, c=composed: cx.project(zero, c, p, batch=b, key=KEY))(
            parameters(model), batch
        )
        for composed, batch in ((some, BATCH), (all_of_part, part))
    ]
    for mine, other in zip(jax.tree.leaves(steps[0]), jax.tree.leaves(steps[1]), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-7)


def test_contradicting_constraints_are_named_and_the_step_is_finite():
    model = Net(nnx.Rngs(0))

    def length(value, name):
        @dataclasses.dataclass(frozen=True)
        class Length(cx.Constraint):
            def residual(self, model, batch, *, key):
                return jnp.sum(model.last.kernel[...] ** 2) - value

        return Length(name=name, gamma=1.0)

    fine = cx.UnitNorm(of=lambda m: m.first.kernel[...], name="fine", gamma=1.0)
    optimizer = cx.constrain(
        optax.adam(1e-2), (length(1.0, "one"), fine, length(2.0, "two")), model=model
    )
    params = parameters(model)
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    for _ in range(20):
        gradients = jax.tree.map(jnp.ones_like, params)
        updates, state = update(gradients, state, params)
        params = optax.apply_updates(params, updates)
    assert all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in jax.tree.leaves(params))
    (sentence,) = cx.contradictions(state)
    assert "'one', 'two'" in sentence
    assert "fine" not in sentence
    assert abs(float(jnp.sum(params["first"]["kernel"][...] ** 2)) - 1.0) < 1e-3


def test_constraints_of_the_same_name_are_numbered():
    model = Net(nnx.Rngs(0))
    unit = cx.UnitNorm(of=lambda m: m.last.kernel[...])
    assert cx.compose(unit, unit, model=model).names == ("unit-norm", "unit-norm-2")
    # Not the name of a third, which would then share its reports.
    second = dataclasses.replace(unit, name="unit-norm-2")
    for order in itertools.permutations((unit, unit, second)):
        names = cx.compose(*order, model=model).names
        assert sorted(names) == ["unit-norm", "unit-norm-2", "unit-norm-3"]
        assert names[order.index(second)] == "unit-norm-2"


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("argument", "wrong"),
    [
        ("gamma", [-1.0, NAN, INF, -INF, np.float32(NAN), "1", None, True, 1j, jnp.ones(2)]),
        ("tolerance", [-1, NAN, INF, np.float64(NAN), "1", None, True]),
        ("start", [-1, 0.5, NAN, "1", None, True, jnp.arange(2)]),
        ("every", [0, -1, 1.5, NAN, "1", None, True]),
        ("examples", [0, -1, 2.5, NAN, "1", True]),
    ],
)
def test_numbers_that_make_no_sense_are_refused_by_name(argument, wrong):
    for value in wrong:
        with pytest.raises(ValueError, match=rf"`PeriodicIn2Pi\({argument}=...\)` must be a"):
            PeriodicIn2Pi(**{argument: value})


@pytest.mark.parametrize("to", [int, np.int32, np.uint8, np.array, jnp.asarray])
def test_integers_of_any_library_are_accepted(to):
    found = PeriodicIn2Pi(start=to(3), every=to(2), examples=to(4), reduce=cx.Norm(groups=to(2)))
    assert found == PeriodicIn2Pi(start=3, every=2, examples=4, reduce=cx.Norm(groups=2))
    assert type(found.start) is type(found.every) is type(found.examples) is int


@pytest.mark.parametrize("to", [int, np.float32, np.float64, np.float16, np.array, jnp.bfloat16])
def test_numbers_of_any_library_are_accepted(to):
    found = PeriodicIn2Pi(gamma=to(1), tolerance=to(2))
    assert found == PeriodicIn2Pi(gamma=1.0, tolerance=2.0)
    assert hash(found) == hash(PeriodicIn2Pi(gamma=1.0, tolerance=2.0))
    assert type(found.gamma) is type(found.tolerance) is float


@pytest.mark.parametrize("make", [lambda n: cx.Norm(groups=n), lambda n: cx.Sketch(rows=n)])
@pytest.mark.parametrize("wrong", [0, -1, 1.5, "2", True])
def test_reductions_refuse_row_counts_that_make_no_sense(make, wrong):
    with pytest.raises(ValueError, match=r"=...\)` must be an integer of at least 1"):
        make(wrong)


def test_a_traced_number_is_refused():
    with pytest.raises(ValueError, match="must be a finite number"):
        jax.jit(lambda gamma: PeriodicIn2Pi(gamma=gamma).gamma)(0.1)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: PeriodicIn2Pi(reduce="nrom"), ValueError, "Did you mean 'norm'"),
        (lambda: PeriodicIn2Pi(reduce=3), TypeError, "reduce"),
        (lambda: cx.attach(Net(nnx.Rngs(0)), PeriodicIn2Pi), TypeError, "call it to make one"),
        (lambda: cx.attach(Net(nnx.Rngs(0)), 3), TypeError, "instances of `Constraint`"),
        (lambda: cx.attach(3, PeriodicIn2Pi()), TypeError, "nnx.Module"),
        (
            lambda: cx.Constraint().residual(None, None, key=KEY),
            NotImplementedError,
            "needs a method `residual",
        ),
        (
            lambda: cx.compose(PeriodicIn2Pi()),
            ValueError,
            "needs the model",
        ),
        (
            lambda: cx.compose(PeriodicIn2Pi(reduce=cx.Norm(groups=3)), model=Net(nnx.Rngs(0)))(
                parameters(Net(nnx.Rngs(0))), BATCH, KEY
            ),
            ValueError,
            "must divide the batch",
        ),
    ],
)
def test_wrong_arguments_are_refused_with_a_hint(make, error, message):
    with pytest.raises(error, match=message):
        make()
