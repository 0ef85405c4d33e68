"""Equivariance as a constraint on kernels: against rotated inputs, and a dense average."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import constrainx as cx
from constrainx.constraints.representations import Image, Permute, Regular, Trivial, Vector
from constrainx.models import LeNet

C4, D4 = cx.groups.Cyclic(4), cx.groups.Dihedral(4)
TURNS = (("first", Image(), Regular()), ("second", Regular(), Regular()))


def small_lenet(**settings) -> LeNet:
    sizes = {"size": 8, "channels": (4, 4), "hidden": (6,), "classes": 3}
    return LeNet(**{**sizes, **settings}, rngs=nnx.Rngs(0))


def measure_asymmetry(function, group, output, shape) -> float:
    """The largest relative difference over all elements, on a random image."""
    x = jax.random.normal(jax.random.key(1), shape)
    worst = 0.0
    for g in group.elements:
        turned = function(jax.vmap(lambda a, g=g: Image()(group, int(g), a))(x))
        expected = jax.vmap(lambda a, g=g: output(group, int(g), a))(function(x))
        difference = jnp.linalg.norm(turned - expected) / jnp.linalg.norm(expected)
        worst = max(worst, float(difference))
    return worst


@pytest.mark.parametrize(("group", "output"), [(C4, Regular()), (D4, Regular()), (C4, Image())])
def test_features_turn_with_the_image(group, output):
    model = small_lenet(channels=(8, 8))
    constraint = cx.EquivariantKernels(
        group, (("first", Image(), output), ("second", output, output))
    )
    shape = (2, 8, 8, 1)
    assert measure_asymmetry(model.features, group, output, shape) > 0.1
    constraint.impose(model)
    assert measure_asymmetry(model.features, group, output, shape) < 1e-5


def test_a_dense_layer_commutes_with_permutations():
    """What is left of a 4×4 kernel is a multiple of the identity and one of all ones."""
    layer = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    group = cx.groups.Permutation(4)
    model = nnx.Sequential(layer)
    path = next(".".join(map(str, p)) for p, m in nnx.iter_modules(model) if m is layer)
    cx.EquivariantKernels(group, ((path, Permute(), Permute()),)).nearest(model)
    kernel = np.asarray(layer.kernel[...])
    diagonal, rest = kernel[0, 0], kernel[0, 1]
    expected = np.full((4, 4), rest) + (diagonal - rest) * np.eye(4)
    np.testing.assert_allclose(kernel, expected, atol=1e-6)


def test_a_dense_layer_on_vectors_is_a_multiple_of_rotations():
    layer = nnx.Linear(2, 2, use_bias=False, rngs=nnx.Rngs(0))
    model = nnx.Dict(layer=layer)
    before = np.array(layer.kernel[...])
    cx.EquivariantKernels(C4, (("layer", Vector(), Vector()),)).nearest(model)
    mean = [np.linalg.matrix_power(np.array([[0, -1], [1, 0]]), k) for k in range(4)]
    # The layer is x ↦ x K, so that its matrix is Kᵀ.
    expected = sum(r @ before.T @ r.T for r in mean) / 4
    np.testing.assert_allclose(layer.kernel[...].T, expected, atol=1e-6)


def test_a_dense_layer_commutes_with_matrices_of_ones_own():
    """The symmetries of a triangle leave multiples of the identity, by Schur's lemma."""
    cos, sin = -0.5, np.sqrt(0.75)
    turn, mirror = np.array([[cos, -sin], [sin, cos]]), np.diag([1.0, -1.0])
    triangle = cx.groups.MatrixGroup.generated_by([turn, mirror])
    model = nnx.Dict(layer=nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
    before = np.asarray(model.layer.kernel[...])
    model.layer.bias.set_value(jnp.ones(2))
    cx.EquivariantKernels(triangle, (("layer", Vector(), Vector()),)).nearest(model)
    assert triangle.order == 6
    expected = np.trace(before) / 2 * np.eye(2)
    np.testing.assert_allclose(model.layer.kernel[...], expected, atol=1e-6)
    np.testing.assert_allclose(model.layer.bias[...], 0, atol=1e-6)


def test_the_nearest_kernel_is_the_dense_projection():
    """Against the projector on the null space of K ↦ K − g·K, computed densely."""
    model = small_lenet()
    constraint = cx.EquivariantKernels(C4, TURNS)
    kernel = model.second.kernel[...]

    def residual(flat):
        copy = nnx.clone(model)
        copy.second.kernel.set_value(flat.reshape(kernel.shape))
        return constraint.residual(copy, None, key=jax.random.key(0))["second.kernel"].ravel()

    J = np.asarray(jax.jacobian(residual)(kernel.ravel()), np.float64)
    projected = kernel.ravel() - np.linalg.pinv(J) @ (J @ np.asarray(kernel.ravel(), np.float64))
    constraint.nearest(model)
    np.testing.assert_allclose(model.second.kernel[...].ravel(), projected, atol=1e-5)


def test_imposing_keeps_the_size_of_kernels():
    model = small_lenet()
    before = [jnp.linalg.norm(layer.kernel[...]) for layer in (model.first, model.second)]
    cx.EquivariantKernels(C4, TURNS).impose(model)
    after = [jnp.linalg.norm(layer.kernel[...]) for layer in (model.first, model.second)]
    np.testing.assert_allclose(after, before, rtol=1e-5)


def take_steps(model, constraint, method, *, steps=3, extra=()):
    tx = cx.constrain(optax.adam(1e-2), (constraint, *extra), model=model, method=method)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    x = jax.random.normal(jax.random.key(0), (4, 8, 8, 1))

    @nnx.jit
    def step(model, optimizer):
        grads = nnx.grad(lambda m: jnp.mean((m(x) - 1) ** 2))(model)
        optimizer.update(model, grads)

    for _ in range(steps):
        step(model, optimizer)
    return cx.reports(optimizer.opt_state)


@pytest.mark.parametrize(
    ("placement", "gamma"), [("twice", 1.0), ("update", 0.3), ("gradient", 0.3)]
)
def test_the_closed_form_takes_the_step_of_a_solver(placement, gamma):
    constraint = cx.EquivariantKernels(C4, TURNS, gamma=gamma)
    closed, solved = small_lenet(), small_lenet()
    first = take_steps(closed, constraint, cx.NullSpace(placement=placement))
    solver = cx.LSMR(rtol=1e-7)
    second = take_steps(solved, constraint, cx.NullSpace(placement=placement, solver=solver))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5),
        nnx.state(closed, nnx.Param),
        nnx.state(solved, nnx.Param),
    )
    name = "equivariant-kernels"
    np.testing.assert_allclose(first[name].violation, second[name].violation, atol=1e-6)
    assert int(first[name].iterations) == 0
    assert bool(first[name].resolved)


def test_training_stays_on_the_constraint():
    model = small_lenet()
    constraint = cx.EquivariantKernels(C4, TURNS)
    constraint.impose(model)
    reports = take_steps(model, constraint, "nullspace", steps=50)
    assert measure_asymmetry(model.features, C4, Regular(), (2, 8, 8, 1)) < 1e-5
    assert bool(reports["equivariant-kernels"].met)


@pytest.mark.parametrize("apart", [True, False])
def test_a_second_constraint_holds_beside_it(apart):
    """On other weights each is corrected by itself; on the same ones a solver takes both."""
    model = small_lenet()
    constraint = cx.EquivariantKernels(C4, TURNS)
    name = "head" if apart else "second"
    bias = (lambda m: m.head[0].bias[...]) if apart else (lambda m: m.second.bias[...])
    unit = cx.UnitNorm(bias, gamma=1.0, wrt=lambda path, _: path[0] == name and path[-1] == "bias")
    model.second.bias.set_value(jnp.arange(4.0) / 10)
    model.head[0].bias.set_value(jnp.arange(6.0) / 10)
    if not apart:
        unit = cx.UnitNorm(bias, gamma=1.0, wrt=constraint.wrt)
    reports = take_steps(model, constraint, "nullspace", steps=12, extra=(unit,))
    assert measure_asymmetry(model.features, C4, Regular(), (2, 8, 8, 1)) < 1e-3
    assert abs(float(jnp.linalg.norm(bias(model))) - 1) < 1e-3
    assert (int(reports["equivariant-kernels"].iterations) == 0) == apart


def test_a_constraint_acts_from_its_start_on():
    model = small_lenet()
    constraint = cx.EquivariantKernels(C4, TURNS, start=2)
    take_steps(model, constraint, "nullspace", steps=2)
    assert measure_asymmetry(model.features, C4, Regular(), (2, 8, 8, 1)) > 0.1
    take_steps(model, constraint, "nullspace", steps=3)
    assert measure_asymmetry(model.features, C4, Regular(), (2, 8, 8, 1)) < 1e-4


class Pooled(nnx.Module):
    """Two convolutions, with anything between them."""

    def __init__(self, between, **second):
        self.between = between
        rngs = nnx.Rngs(0)
        self.first = nnx.Conv(1, 4, (3, 3), rngs=rngs)
        self.second = nnx.Conv(4, 4, (3, 3), rngs=rngs, **second)

    def __call__(self, x):
        return self.second(self.between(self.first(x)))


def test_what_does_not_commute_is_named():
    constraint = cx.EquivariantKernels(C4, TURNS)
    image = jnp.ones((1, 8, 8, 1))

    def check(model, image=image):
        constraint.check(model, lambda m: m(image))

    check(Pooled(nnx.relu))
    check(Pooled(lambda x: nnx.max_pool(x, (2, 2), strides=(2, 2))))
    with pytest.raises(ValueError, match="'first' and 'second' does not commute"):
        check(Pooled(lambda x: nnx.max_pool(x, (2, 2), strides=(2, 2))), jnp.ones((1, 7, 7, 1)))
    with pytest.raises(ValueError, match="'first' and 'second' does not commute"):
        check(Pooled(lambda x: x * jnp.arange(4.0)))
    with pytest.raises(ValueError, match=r"the layer 'second' does not commute .* stride"):
        check(Pooled(nnx.relu, strides=2))
    with pytest.raises(ValueError, match=r"'second' .* pads one side"):
        check(Pooled(nnx.relu, padding=((1, 1), (0, 1))))
    with pytest.raises(ValueError, match="does not run 'second'"):
        constraint.check(Pooled(nnx.relu), lambda m: m.first(image))
    with pytest.raises(ValueError, match=r"the layer 'second' does not commute .* square"):
        check(Pooled(nnx.relu, strides=(2, 1)))
    with pytest.raises(ValueError, match="what follows the layer 'second' does not commute"):
        constraint.check(Pooled(nnx.relu), lambda m: m(image)[:, :4, :4])


def test_norms_that_training_would_make_differ_are_named():
    """As they are built they commute: scales are all one, statistics all alike."""
    constraint, image, rngs = cx.EquivariantKernels(C4, TURNS), jnp.ones((1, 8, 8, 1)), nnx.Rngs(0)
    plain = nnx.LayerNorm(4, use_scale=False, use_bias=False, rngs=rngs)
    constraint.check(Pooled(plain), lambda m: m(image))
    for norm in (nnx.LayerNorm(4, use_bias=False, rngs=rngs), nnx.BatchNorm(4, rngs=rngs)):
        model = Pooled(norm)
        before = nnx.state(model)
        match = f"'first' and 'second' .* because of 'between', a {type(norm).__name__}"
        with pytest.raises(ValueError, match=match):
            constraint.check(model, lambda m: m(image))
        jax.tree.map(np.testing.assert_array_equal, nnx.state(model), before)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layers": ()}, "names no layer"),
        ({"layers": ((1, 2),)}, "needs a path, an input and an output"),
        ({"layers": (("first", Image(), 3),)}, "needs two representations, got 3"),
        ({"reduce": "norm"}, "has no use"),
        ({"group": cx.groups.Orthogonal(2)}, "must be a finite group"),
        ({"layers": (("frist", Image(), Image()),)}, "Did you mean 'first'"),
        ({"layers": (("first", Trivial(), Image()),)}, "is a convolution"),
        ({"layers": (("head", Trivial(), Trivial()),)}, "must be an `nnx.Conv` or `nnx.Linear`"),
    ],
)
def test_mistakes_are_named(settings, message):
    with pytest.raises((ValueError, TypeError), match=message):
        cx.EquivariantKernels(**{"group": C4, "layers": TURNS, **settings}).nearest(small_lenet())


def test_groups_of_matrices_that_are_not_orthogonal_are_refused():
    shear = cx.groups.MatrixGroup.generated_by([np.array([[1.0, 1.0], [0.0, -1.0]])])
    model = nnx.Dict(layer=nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match="whose matrices are not orthogonal"):
        cx.EquivariantKernels(shear, (("layer", Vector(), Vector()),)).nearest(model)


def test_large_groups_are_averaged_in_a_loop():
    group = cx.groups.Permutation(4)
    model = nnx.Dict(layer=nnx.Linear(4, 4, use_bias=False, rngs=nnx.Rngs(0)))
    before = np.asarray(model.layer.kernel[...])
    every = [np.eye(4)[list(p)] for p in itertools.permutations(range(4))]
    expected = sum(p.T @ before @ p for p in every) / 24
    cx.EquivariantKernels(group, (("layer", Permute(), Permute()),)).nearest(model)
    np.testing.assert_allclose(model.layer.kernel[...], expected, atol=1e-6)
