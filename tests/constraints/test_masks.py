"""Learnable masks on any model, and the budget on them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from constrainx import masks
from constrainx.constraints._attach import attach, constraints_of
from constrainx.constraints._compose import compose
from constrainx.constraints._mask_budget import MaskBudget
from constrainx.constraints._weights import UnitNorm


def from_numpy(key, shape, dtype, **_):
    """Random weights without a compilation for each shape."""
    generator = np.random.default_rng(np.asarray(jax.random.key_data(key)))
    return jnp.asarray(generator.normal(size=shape) / np.sqrt(np.prod(shape[:-1])), dtype)


class MLP(nnx.Module):
    def __init__(self, rngs, init=from_numpy):
        self.first = nnx.Linear(6, 16, kernel_init=init, rngs=rngs)
        self.second = nnx.Linear(16, 3, kernel_init=init, rngs=rngs)

    def __call__(self, x):
        return self.second(nnx.relu(self.first(x)))


class CNN(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(3, 8, (3, 3), kernel_init=from_numpy, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.head = nnx.Linear(8, 4, kernel_init=from_numpy, rngs=rngs)

    def __call__(self, x):
        x = self.dropout(nnx.relu(self.norm(self.conv(x))))
        return self.head(x.mean(axis=(1, 2)))


class Nested(nnx.Module):
    """Lists of layers, a shared layer, heads with a matrix as bias, and bare parameters."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(5, 6, embedding_init=from_numpy, rngs=rngs)
        self.heads = nnx.LinearGeneral(6, (2, 3), kernel_init=from_numpy, rngs=rngs)
        layers = [nnx.Linear(6, 6, kernel_init=from_numpy, rngs=rngs) for _ in range(2)]
        self.blocks = nnx.List([nnx.Sequential(layer) for layer in layers])
        self.again = self.blocks[0]
        self.loose = nnx.List([nnx.Param(jnp.eye(6))])

    def __call__(self, tokens):
        x = self.heads(self.embed(tokens)).reshape(*tokens.shape, 6)
        for block in (*self.blocks, self.again):
            x = x + nnx.tanh(block(x))
        return x @ self.loose[0][...]


@dataclasses.dataclass(frozen=True)
class Case:
    build: type
    input: jax.Array
    masked: int


def normal(*shape):
    return jnp.asarray(np.random.default_rng(1).normal(size=shape), jnp.float32)


CASES = [
    pytest.param(Case(MLP, normal(5, 6), 144), id="mlp"),
    pytest.param(Case(CNN, normal(5, 8, 8, 3), 248), id="cnn"),
    pytest.param(Case(Nested, jnp.arange(10).reshape(2, 5) % 5, 108), id="nested"),
]
each_model = pytest.mark.parametrize("case", CASES)
KEY = jax.random.key(7)


def varied(model, seed=0):
    """Gives the probabilities different values."""
    generator = np.random.default_rng(seed)
    for _, node in nnx.iter_graph(model):
        if isinstance(node, masks.MaskProbability):
            node[...] = jnp.asarray(generator.uniform(size=node.shape), node.dtype)
    return model


def masked_model(case, seed=0, **options):
    return varied(masks.add_masks(case.build(nnx.Rngs(seed)), **options))


def leaves_of(model, only=nnx.Not(nnx.RngState)):
    return arrays_in(nnx.state(model, only))


def arrays_in(state):
    flat = nnx.to_flat_state(state)
    return dict(zip(flat.paths, (np.asarray(leaf[...]) for leaf in flat.leaves), strict=True))


def params_without_masks(model):
    return leaves_of(model, nnx.All(nnx.Param, nnx.Not(masks.MaskProbability)))


def pairs_of(model):
    """Weights and probabilities by name, found independently of the library's bookkeeping."""
    everything = leaves_of(model, nnx.Param)
    return {
        path: (everything[path], everything[(*path[:-1], f"{path[-1]}_mask")])
        for path in everything
        if (*path[:-1], f"{path[-1]}_mask") in everything
    }


@each_model
def test_add_masks_masks_the_kernels_and_nothing_else(case):
    plain = case.build(nnx.Rngs(0))
    model = case.build(nnx.Rngs(0))
    returned = masks.add_masks(model)
    assert returned is model
    assert type(model) is case.build
    probabilities = leaves_of(model, masks.MaskProbability)
    assert all(path[-1] == "kernel_mask" for path in probabilities)
    assert sum(p.size for p in probabilities.values()) == case.masked
    np.testing.assert_allclose(masks.expected_density(model), 0.9, rtol=1e-5)
    expected, came = params_without_masks(plain), params_without_masks(model)
    assert expected.keys() == came.keys()
    for path in expected:
        np.testing.assert_array_equal(expected[path], came[path])


def test_a_filter_selects_what_is_masked():
    model = masks.add_masks(MLP(nnx.Rngs(0)), nnx.PathContains("second"))
    assert set(leaves_of(model, masks.MaskProbability)) == {
        ("second", "kernel_mask"),
        ("second", "bias_mask"),
    }
    masks.add_masks(model, lambda path, variable: path == ("first", "kernel"), initial=0.5)
    expected = (0.9 * (48 + 3) + 0.5 * 96) / (48 + 3 + 96)
    np.testing.assert_allclose(masks.expected_density(model), expected, rtol=1e-6)


def test_parameters_in_a_list_and_a_dictionary_can_be_masked():
    class Bare(nnx.Module):
        def __init__(self):
            self.stack = nnx.List([nnx.Param(jnp.ones((2, 3))), nnx.Param(2 * jnp.ones((3, 2)))])
            self.named = nnx.Dict(a=nnx.Param(3 * jnp.ones((2, 2))))
            self.tree = nnx.data({"b": [nnx.Param(4 * jnp.ones((2, 2)))]})

        def __call__(self, x):
            x = x @ self.stack[0][...] @ self.stack[1][...] @ self.tree["b"][0][...]
            for name in self.named:
                x = x @ self.named[name][...]
            return x

    model = masks.add_masks(Bare(), nnx.Param, initial=0.0)
    assert masks.expected_density(nnx.clone(model)) == 0
    sampled = masks.sample(model, KEY)
    assert [len(sampled.stack), len(sampled.named)] == [2, 1]
    np.testing.assert_array_equal(sampled(jnp.ones((1, 2))), 0)
    np.testing.assert_array_equal(model(jnp.ones((1, 2))), Bare()(jnp.ones((1, 2))))
    assert masks.realised_density(sampled) == 0
    for leaf in leaves_of(masks.export(model)).values():
        np.testing.assert_array_equal(leaf, 0)


@each_model
def test_probability_one_changes_nothing_and_zero_removes_all(case):
    model = case.build(nnx.Rngs(0))
    before = params_without_masks(model)
    masks.add_masks(model, initial=1.0)
    for same in (masks.sample(model, KEY), masks.deterministic(model)):
        after = leaves_of(same, nnx.Param)
        assert all(np.array_equal(before[path], after[path]) for path in before)
    nothing = masks.sample(masks.add_masks(case.build(nnx.Rngs(0)), initial=0.0), KEY)
    assert masks.realised_density(nothing) == 0


@each_model
def test_a_draw_multiplies_weights_by_zero_or_one(case):
    model = masked_model(case)
    sampled = masks.sample(model, KEY)
    assert type(sampled) is case.build
    assert not masks.has_masks(sampled)
    kept = 0
    drawn = params_without_masks(sampled)
    for path, weight in params_without_masks(model).items():
        if path in pairs_of(model):
            assert np.all((drawn[path] == weight) | (drawn[path] == 0))
            kept += np.sum(drawn[path] != 0)
        else:
            np.testing.assert_array_equal(drawn[path], weight)
    assert 0 < kept < case.masked
    np.testing.assert_allclose(masks.realised_density(model, KEY), kept / case.masked, rtol=1e-6)
    np.testing.assert_allclose(masks.realised_density(sampled), kept / case.masked, rtol=1e-6)
    again = params_without_masks(masks.sample(model, KEY))
    assert all(np.array_equal(drawn[path], again[path]) for path in drawn)


@each_model
def test_straight_through_gradients_are_the_analytic_ones(case):
    model = masked_model(case)
    model.eval()

    def loss(plain):
        return jnp.sum(jnp.sin(plain(case.input)))

    through_the_masks = nnx.jit(nnx.grad(lambda m, key: loss(masks.sample(m, key))))
    gradients = arrays_in(through_the_masks(model, KEY))
    sampled = masks.sample(model, KEY)
    at_sampled = arrays_in(nnx.jit(nnx.grad(loss))(sampled))
    drawn = leaves_of(sampled, nnx.Param)
    for path, (weight, _) in pairs_of(model).items():
        mask = (drawn[path] != 0).astype(weight.dtype)
        np.testing.assert_array_equal(gradients[path], at_sampled[path] * mask)
        mask_path = (*path[:-1], "kernel_mask")
        np.testing.assert_array_equal(gradients[mask_path], at_sampled[path] * weight)
    for path in at_sampled.keys() - pairs_of(model).keys():
        np.testing.assert_array_equal(gradients[path], at_sampled[path])


def test_gradients_pass_outside_of_the_unit_interval():
    model = masks.add_masks(MLP(nnx.Rngs(0)))
    model.first.kernel_mask[...] = jnp.full((6, 16), 1.5)
    model.second.kernel_mask[...] = jnp.full((16, 3), -0.5)
    np.testing.assert_allclose(masks.expected_density(model), 96 / 144, rtol=1e-6)
    assert masks.realised_density(model, KEY) == pytest.approx(96 / 144)
    gradients = nnx.jit(nnx.grad(masks.expected_density))(model)
    np.testing.assert_allclose(gradients["first"]["kernel_mask"][...], 1 / 144, rtol=1e-6)
    np.testing.assert_allclose(gradients["second"]["kernel_mask"][...], 1 / 144, rtol=1e-6)
    x = jnp.ones((2, 6))
    gradients = nnx.jit(nnx.grad(lambda m, key: jnp.sum(masks.sample(m, key)(x))))(model, KEY)
    assert jnp.any(gradients["second"]["kernel_mask"][...] != 0)


def test_forward_mode_agrees_with_reverse_mode():
    model = masked_model(CASES[0].values[0])
    graph, state = nnx.split(model)

    def loss(state):
        return jnp.sum(jnp.sin(masks.sample(nnx.merge(graph, state), KEY)(jnp.ones((2, 6)))))

    @jax.jit
    def both(state):
        direction = jax.tree.map(lambda leaf: jnp.sin(7 * leaf + 1), state)
        _, forward = jax.jvp(loss, (state,), (direction,))
        reverse = jax.tree.map(jnp.vdot, jax.grad(loss)(state), direction)
        return forward, sum(jax.tree.leaves(reverse))

    np.testing.assert_allclose(*both(state), rtol=1e-5)


def test_the_mean_over_draws_is_the_probability():
    model = masked_model(CASES[0].values[0])
    graph, state = nnx.split(model)

    @jax.jit
    @jax.vmap
    def draw(key):
        model = nnx.merge(graph, state)
        sampled = masks.sample(model, key)
        return sampled.first.kernel[...] != 0, masks.realised_density(model, key)

    draws = 4000
    there, density = draw(jax.random.split(KEY, draws))
    # Five standard deviations of a mean of Bernoulli variables.
    tolerance = 5 * 0.5 / np.sqrt(draws)
    np.testing.assert_allclose(there.mean(0), model.first.kernel_mask[...], atol=tolerance)
    expected = masks.expected_density(model)
    np.testing.assert_allclose(density.mean(), expected, atol=tolerance / np.sqrt(144))
    assert density.std() > 0


def test_layers_of_equal_shape_get_different_draws():
    class Twins(nnx.Module):
        def __init__(self, rngs):
            self.a = nnx.Linear(8, 8, rngs=rngs)
            self.b = nnx.Linear(8, 8, rngs=rngs)

    sampled = masks.sample(masks.add_masks(Twins(nnx.Rngs(0)), initial=0.5), KEY)
    assert jnp.any((sampled.a.kernel[...] != 0) != (sampled.b.kernel[...] != 0))


@each_model
@pytest.mark.parametrize("density", [None, 0.0, 0.37, 1.0])
def test_export_is_exactly_sparse_and_of_the_same_class(case, density):
    model = masked_model(case)
    plain = masks.export(model, density)
    assert type(plain) is case.build
    assert not masks.has_masks(plain)
    assert leaves_of(plain).keys() == leaves_of(case.build(nnx.Rngs(0))).keys()

    wanted = float(masks.expected_density(model)) if density is None else density
    count = round(wanted * case.masked)
    pairs, exported = pairs_of(model), leaves_of(plain)
    assert sum(np.count_nonzero(exported[path]) for path in pairs) == count
    np.testing.assert_allclose(masks.realised_density(plain), count / case.masked, rtol=1e-6)
    threshold = np.sort(np.concatenate([p.ravel() for _, p in pairs.values()]))[::-1]
    for path, leaf in exported.items():
        original = leaves_of(model)[path]
        if path in pairs:
            keep = pairs[path][1] > (threshold[count] if count < case.masked else -1)
            np.testing.assert_array_equal(leaf, np.where(keep, original, 0))
            assert not np.any(np.signbit(leaf[~keep]))
        else:
            assert original.tobytes() == leaf.tobytes()


@each_model
def test_export_computes_what_the_deterministic_evaluation_does(case):
    model = masked_model(case)
    model.eval()
    graph, state = nnx.split(model)
    evaluated = jax.jit(lambda s: masks.deterministic(nnx.merge(graph, s))(case.input))(state)
    graph, state = nnx.split(masks.export(model))
    exported = jax.jit(lambda s: nnx.merge(graph, s)(case.input))(state)
    np.testing.assert_array_equal(exported, evaluated)


def test_export_breaks_ties_by_magnitude():
    model = masks.add_masks(MLP(nnx.Rngs(0)))
    plain = masks.export(model, 0.25)
    weights = np.concatenate([w.ravel() for w, _ in pairs_of(model).values()])
    cut = np.sort(np.abs(weights))[::-1][36]
    for layer in ("first", "second"):
        before, after = getattr(model, layer).kernel[...], getattr(plain, layer).kernel[...]
        np.testing.assert_array_equal(after, np.where(np.abs(before) > cut, before, 0))
    same = masks.add_masks(nnx.Linear(4, 4, rngs=nnx.Rngs(0), kernel_init=nnx.initializers.ones))
    expected = (np.arange(16) < 5).reshape(4, 4)
    np.testing.assert_array_equal(masks.export(same, 5 / 16).kernel[...], expected)


def test_export_shares_nothing_and_drops_the_budget():
    model = masked_model(CASES[0].values[0])
    attach(model, MaskBudget(0.5), UnitNorm(of=lambda m: m.first.bias[...]))
    plain = masks.export(model)
    assert [found.constraint.label for found in constraints_of(plain)] == ["unit-norm"]
    assert len(constraints_of(model)) == 2
    plain.first.bias[...] = jnp.ones(16)
    np.testing.assert_array_equal(model.first.bias[...], 0)


def test_initial_probabilities_may_be_a_function_of_the_weights():
    model = masks.add_masks(MLP(nnx.Rngs(0)), initial=lambda w: jnp.abs(w) > 0.2)
    sampled = masks.sample(model, KEY)
    for layer in ("first", "second"):
        before = getattr(model, layer).kernel[...]
        after = getattr(sampled, layer).kernel[...]
        np.testing.assert_array_equal(after, jnp.where(jnp.abs(before) > 0.2, before, 0))


@each_model
def test_split_merge_and_clone_keep_the_masks(case):
    model = masked_model(case)
    for copy in (nnx.merge(*nnx.split(model)), nnx.clone(model)):
        np.testing.assert_array_equal(masks.expected_density(copy), masks.expected_density(model))
        ours = leaves_of(masks.sample(copy, KEY), nnx.Param)
        theirs = leaves_of(masks.sample(model, KEY), nnx.Param)
        assert all(np.array_equal(ours[path], theirs[path]) for path in theirs)
    _, *states = nnx.split(model, masks.MaskProbability, nnx.Param, ...)
    assert sum(leaf.size for leaf in jax.tree.leaves(states[0])) == case.masked
    pure = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(pure))
    # As after a restart: weights from a checkpoint, into a model that was built anew.
    rebuilt = masks.add_masks(case.build(nnx.Rngs(3)), initial=0.1)
    state = nnx.state(rebuilt, nnx.Param)
    nnx.replace_by_pure_dict(state, pure)
    nnx.update(rebuilt, state)
    np.testing.assert_array_equal(masks.expected_density(rebuilt), masks.expected_density(model))
    assert leaves_of(masks.export(rebuilt), nnx.Param).keys() == params_without_masks(model).keys()


def test_batch_statistics_and_dropout_advance_in_the_original():
    model = masked_model(CASES[1].values[0])
    before = np.asarray(model.norm.mean[...])
    count = int(model.dropout.rngs.count[...])

    @nnx.jit
    @nnx.grad
    def gradients(model, key):
        return jnp.mean(jnp.square(masks.sample(model, key)(CASES[1].values[0].input)))

    gradients(model, KEY)
    assert np.any(np.asarray(model.norm.mean[...]) != before)
    assert int(model.dropout.rngs.count[...]) == count + 1
    assert masks.has_masks(model)


def test_probabilities_are_at_least_single_precision():
    layer = nnx.Linear(4, 4, param_dtype=jnp.bfloat16, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    masks.add_masks(layer)
    assert layer.kernel_mask.dtype == jnp.float32
    assert masks.sample(layer, KEY).kernel.dtype == jnp.bfloat16
    assert masks.export(layer).kernel.dtype == jnp.bfloat16
    total = nnx.grad(lambda m, key: masks.sample(m, key)(jnp.ones((1, 4))).sum())
    gradients = nnx.jit(total)(layer, KEY)
    assert gradients["kernel_mask"].dtype == jnp.float32
    np.testing.assert_array_equal(gradients["kernel_mask"][...], layer.kernel[...])


def test_tied_weights_stay_tied_in_a_sampled_model():
    model = MLP(nnx.Rngs(0))
    model.other = nnx.Linear(6, 16, rngs=nnx.Rngs(1))
    model.other.kernel = model.first.kernel
    masks.add_masks(model, initial=0.5)
    sampled = masks.sample(model, KEY)
    assert sampled.other.kernel is sampled.first.kernel
    assert model.other.kernel is model.first.kernel
    assert jnp.any(sampled.first.kernel[...] == 0)


def test_masks_have_the_sharding_of_their_weights():
    mesh = jax.make_mesh((4,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh):
        layer = nnx.Linear(4, 8, kernel_metadata={"out_sharding": (None, "fsdp")}, rngs=nnx.Rngs(0))
        masks.add_masks(layer)
        specification = nnx.get_partition_spec(nnx.state(layer))
    assert specification["kernel_mask"].get_value() == jax.P(None, "fsdp")
    assert layer.kernel_mask[...].sharding == layer.kernel[...].sharding

    placed = nnx.Linear(4, 8, rngs=nnx.Rngs(0))
    placed.kernel[...] = jax.device_put(placed.kernel[...], layer.kernel[...].sharding)
    masks.add_masks(placed)
    assert placed.kernel_mask[...].sharding == layer.kernel[...].sharding
    assert masks.sample(placed, KEY).kernel[...].sharding == layer.kernel[...].sharding
    np.testing.assert_array_equal(
        masks.export(placed, 0.5).kernel[...],
        masks.export(masks.add_masks(nnx.Linear(4, 8, rngs=nnx.Rngs(0))), 0.5).kernel[...],
    )


@pytest.mark.parametrize("inside", [True, False])
def test_export_keeps_weights_where_they_are_on_a_mesh_with_explicit_axes(inside):
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    spec = ("b", "a")

    class Sharded(MLP):
        def __init__(self, metadata):
            options = {"kernel_init": nnx.initializers.lecun_normal(), "rngs": nnx.Rngs(0)}
            self.first = nnx.Linear(6, 16, **metadata, **options)
            self.second = nnx.Linear(16, 3, **options)

    with jax.set_mesh(mesh):
        model = masks.add_masks(Sharded({"kernel_metadata": {"out_sharding": spec}}))
        assert masks.sample(model, KEY).first.kernel[...].sharding.spec == jax.P(*spec)
        if inside:
            plain = masks.export(model, 0.25)
    if not inside:
        plain = masks.export(model, 0.25)
    assert plain.first.kernel[...].sharding == model.first.kernel[...].sharding
    expected = masks.export(masks.add_masks(Sharded({})), 0.25)
    for path, leaf in leaves_of(expected).items():
        np.testing.assert_array_equal(leaves_of(plain)[path], leaf)
    assert masks.realised_density(plain) == 0.25


@pytest.mark.parametrize(
    "where",
    [
        nnx.PathContains("embed"),
        nnx.PathContains("loose"),
        lambda path, variable: variable.ndim >= 2,
    ],
    ids=["embedding", "parameter in a list", "all matrices"],
)
def test_the_density_of_an_exported_model_is_that_of_what_was_masked(where):
    model = Nested(nnx.Rngs(0))
    for leaf in nnx.to_flat_state(nnx.state(model, nnx.Param)).leaves:
        leaf[...] = normal(*leaf.shape)  # which has no zeros
    varied(masks.add_masks(model, where))
    count = sum(p.size for p in leaves_of(model, masks.MaskProbability).values())
    plain, sampled = masks.export(model, 0.5), masks.sample(model, KEY)
    for copy in (plain, nnx.merge(*nnx.split(plain)), nnx.clone(plain)):
        assert masks.realised_density(copy) == pytest.approx(round(0.5 * count) / count)
    assert masks.realised_density(sampled) == masks.realised_density(model, KEY)
    assert masks.realised_density(plain, where=where) == masks.realised_density(plain)
    assert masks.realised_density(plain, where=lambda path, variable: variable.ndim == 1) == 1


def test_an_exported_model_has_the_state_of_a_model_built_without_masks():
    plain, fresh = masks.export(masked_model(CASES[0].values[0])), MLP(nnx.Rngs(0))
    jax.tree.map(lambda a, b: None, nnx.state(plain), nnx.state(fresh))
    nnx.update(fresh, nnx.state(plain))
    # What was masked is not part of the state, so that all kernels count.
    assert masks.realised_density(fresh) == masks.realised_density(plain)


def test_what_was_masked_in_several_rounds_counts():
    model = masks.add_masks(MLP(nnx.Rngs(0)), nnx.PathContains("first"))
    again = masks.add_masks(masks.export(model, 0.0), nnx.PathContains("second"))
    np.testing.assert_allclose(masks.realised_density(masks.export(again, 1.0)), 48 / 163)


def test_matrices_that_were_left_out_are_logged(caplog):
    with caplog.at_level("INFO", logger="constrainx"):
        model = masks.add_masks(Nested(nnx.Rngs(0)))
    (message,) = caplog.messages
    assert "left out embed.embedding, heads.bias, loose.0:" in message
    assert "kernel" not in message
    caplog.clear()
    with caplog.at_level("INFO", logger="constrainx"):
        masks.add_masks(model, lambda path, variable: path[-1] != "kernel" and variable.ndim >= 2)
        lora = nnx.LoRALinear(4, 4, lora_rank=2, rngs=nnx.Rngs(0))
        masks.add_masks(lora)
    (message,) = caplog.messages
    assert "left out lora.lora_a, lora.lora_b" in message


def test_masks_can_be_added_under_eval_shape():
    model = nnx.eval_shape(lambda: masks.add_masks(MLP(nnx.Rngs(0), nnx.initializers.ones)))
    assert model.first.kernel_mask.shape == (6, 16)


def test_budget_is_met_exactly_at_its_target():
    model = masked_model(CASES[1].values[0])
    density = float(masks.expected_density(model))
    met, unmet = MaskBudget(density), MaskBudget(density / 2)
    assert met.residual(model, None, key=KEY) == 0
    assert met.violation(model, None, KEY) == 0
    np.testing.assert_allclose(unmet.residual(model, None, key=KEY), density / 2, rtol=1e-6)
    np.testing.assert_allclose(unmet.violation(model, None, KEY), density / 2, rtol=1e-6)
    over = MaskBudget(0.9)
    np.testing.assert_allclose(over.residual(model, None, key=KEY), density - 0.9, rtol=1e-6)
    np.testing.assert_allclose(over.violation(model, None, KEY), 0.9 - density, rtol=1e-6)


@each_model
def test_budget_moves_all_probabilities_alike_and_nothing_else(case):
    model = attach(masked_model(case), MaskBudget(0.1, gamma=0.5))
    composed = compose(model)
    assert composed.names == ("mask-budget",)
    parameters = nnx.state(model, nnx.Param)
    row = jax.jit(jax.value_and_grad(lambda p: composed(p)["mask-budget"][0]))
    value, gradients = row(parameters)
    np.testing.assert_allclose(value, masks.expected_density(model) - 0.1, rtol=1e-5)
    for path, leaf in arrays_in(gradients).items():
        expected = 1 / case.masked if path[-1] == "kernel_mask" else 0
        np.testing.assert_allclose(leaf, expected, rtol=1e-6)


@pytest.mark.parametrize(("target", "counts"), [(0.1, [0, 0, 1, 1, 1]), (0.9, [1, 1, 1, 0, 0])])
def test_budget_counts_the_probabilities_that_can_come_closer(target, counts):
    layer = masks.add_masks(nnx.Linear(5, 1, rngs=nnx.Rngs(0)))
    layer.kernel_mask[...] = jnp.array([-0.3, 0.0, 0.5, 1.0, 1.4])[:, None]
    budget = MaskBudget(target)
    np.testing.assert_allclose(budget.residual(layer, None, key=KEY), 0.5 - target, rtol=1e-6)
    gradients = nnx.jit(nnx.grad(lambda m: budget.residual(m, None, key=KEY)))(layer)
    np.testing.assert_allclose(gradients["kernel_mask"][:, 0], np.array(counts) / 5, rtol=1e-6)


def test_budget_of_a_part_counts_that_part():
    model = masks.add_masks(MLP(nnx.Rngs(0)), initial=0.25)
    model.second.kernel_mask[...] = jnp.full((16, 3), 0.75)
    attach(model.second, MaskBudget(0.5))
    rows = compose(model)(nnx.state(model, nnx.Param))["mask-budget"]
    np.testing.assert_allclose(rows, [0.25], rtol=1e-6)


def test_training_ends_at_the_target_density():
    target, gamma = 0.3, 0.1
    x = normal(64, 6)
    y = jnp.stack([x[:, 0] - x[:, 1], x[:, 2], jnp.sin(x[:, 0])], axis=1)
    model = attach(masks.add_masks(MLP(nnx.Rngs(0))), MaskBudget(target))
    constraint = compose(model)
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    graph, state = nnx.split((model, optimizer))

    @jax.jit
    def step(state, key):
        model, optimizer = nnx.merge(graph, state)

        def loss(model):
            return jnp.mean(jnp.square(masks.sample(model, key)(x) - y))

        value, gradients = nnx.value_and_grad(loss)(model)
        before = nnx.state(model, nnx.Param)
        before = jax.tree.map(jnp.copy, before)
        optimizer.update(model, gradients)
        # J u = −γ c for the update u that the optimizer made, by the least change to it.
        after = nnx.state(model, nnx.Param)
        c, row = jax.value_and_grad(lambda p: constraint(p)["mask-budget"][0])(before)
        update = jax.tree.map(jnp.subtract, after, before)
        inner = jax.tree.reduce(jnp.add, jax.tree.map(jnp.vdot, row, update))
        square = jax.tree.reduce(jnp.add, jax.tree.map(jnp.vdot, row, row))
        factor = (inner + gamma * c) / square
        nnx.update(model, jax.tree.map(lambda a, r: a - factor * r, after, row))
        return nnx.state((model, optimizer)), (value, c)

    losses = []
    for i in range(100):
        state, (value, _) = step(state, jax.random.fold_in(KEY, i))
        losses.append(float(value))
    model, _ = nnx.merge(graph, state)
    assert masks.expected_density(model) == pytest.approx(target, abs=2e-3)
    assert np.mean(losses[-20:]) < 0.7 * losses[0]
    plain = masks.export(model)
    assert masks.realised_density(plain) == pytest.approx(target, abs=2e-3 + 0.5 / 144)


def test_wrong_arguments_are_refused_with_a_fix():
    plain = MLP(nnx.Rngs(0))
    for function in (masks.expected_density, masks.deterministic, masks.export):
        with pytest.raises(ValueError, match=r"MLP has no masks: call `cx.masks.add_masks"):
            function(plain)
    with pytest.raises(ValueError, match="no masks"):
        masks.sample(plain, KEY)
    with pytest.raises(ValueError, match="no masks"):
        MaskBudget(0.1).residual(plain, None, key=KEY)
    with pytest.raises(ValueError, match="no masks"):
        compose(attach(MLP(nnx.Rngs(0)), MaskBudget(0.1)))(nnx.state(plain, nnx.Param))
    with pytest.raises(ValueError, match=r"selects no parameter.*first\.kernel"):
        masks.add_masks(plain, lambda path, variable: False)
    with pytest.raises(ValueError, match=r"in \[0, 1\], got 1.5"):
        masks.add_masks(plain, initial=1.5)
    with pytest.raises(ValueError, match=r"'first.kernel' of shape \(6, 16\) it gave shape \(\)"):
        masks.add_masks(plain, initial=jnp.mean)
    assert not masks.has_masks(plain)
    model = masks.add_masks(plain)
    with pytest.raises(ValueError, match=r"'first\.kernel' has a mask already"):
        masks.add_masks(model)
    with pytest.raises(ValueError, match="pass its `key`"):
        masks.realised_density(model)
    with pytest.raises(ValueError, match="between 0 and 1, got 10"):
        masks.export(model, 10)
    with pytest.raises(ValueError, match="selects no parameter of this MLP"):
        masks.realised_density(masks.export(model), where=lambda path, variable: False)
    clash = MLP(nnx.Rngs(0))
    clash.second.kernel_mask = 3
    with pytest.raises(ValueError, match="attribute of that name"):
        masks.add_masks(clash)
    assert not masks.has_masks(clash)
    integers = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    integers.kernel = nnx.Param(jnp.ones((2, 2), int))
    with pytest.raises(TypeError, match="'kernel' is int32"):
        masks.add_masks(integers)
    for target in (0.0, -1, 10):
        with pytest.raises(ValueError, match=r"MaskBudget\(target=...\)"):
            MaskBudget(target)
