"""Masks, a budget, a constraint on outputs, and resume, for models built as others build theirs.

The models of bonsai are tried where its sources are on the path: https://github.com/jax-ml/bonsai.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import constrainx as cx
from constrainx.runtime import by_path

BATCH, LENGTH, WIDTH, WORDS = 4, 6, 8, 5


class Scale(nnx.Param):
    """A kind of parameter of its own."""


class Block(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        return x + self.dropout(jnp.tanh(self.dense(x)))


class Decoder(nnx.Module):
    """A language model with one of everything that is found in the models of others."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(WORDS, WIDTH, rngs=rngs)
        self.parts = nnx.Dict(
            {
                "key": nnx.Einsum("btd,dnh->btnh", (WIDTH, 2, 4), rngs=rngs),
                "out": nnx.Einsum("btnh,nhd->btd", (2, 4, WIDTH), rngs=rngs),
            }
        )
        self.layers = nnx.List(
            [
                nnx.Conv(WIDTH, WIDTH, (3,), feature_group_count=WIDTH, rngs=rngs),
                nnx.BatchNorm(WIDTH, rngs=rngs),
            ]
        )
        # Equal blocks as one stack of arrays.
        self.blocks = nnx.split_rngs(splits=3)(nnx.vmap(Block, in_axes=0, out_axes=0))(rngs)
        self.dense = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)
        self.again = self.dense
        self.scale = Scale(jnp.ones(WIDTH))

    def __call__(self, words):
        x = self.embed(words)
        for layer in self.layers:
            x = layer(x)
        key = self.parts["key"](x)
        weights = jax.nn.softmax(jnp.einsum("bihd,bjhd->bhij", key, key))
        x = x + self.parts["out"](jnp.einsum("bhij,bjhd->bihd", weights, key))
        apply = nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        x = apply(x, self.blocks)
        x = self.again(jnp.tanh(self.dense(x))) * self.scale[...]
        return self.embed.attend(x)


def make_decoder():
    return Decoder, lambda model, words, key: model(words), "words"


def make_vit():
    zoo = pytest.importorskip("bonsai.models.vit.modeling")
    config = zoo.ModelConfig(
        image_size=(16, 16),
        patch_size=(8, 8),
        num_channels=3,
        hidden_dim=16,
        attn_dropout_prob=0.1,
        dropout_prob=0.1,
        num_heads=2,
        mlp_dim=32,
        eps=1e-6,
        num_layers=2,
        num_labels=WORDS,
    )
    return (
        lambda: zoo.ViTClassificationModel(config, rngs=nnx.Rngs(0)),
        lambda model, images, key: model(images, rngs=nnx.Rngs(dropout=key)),
        "images",
    )


def make_convnext():
    zoo = pytest.importorskip("bonsai.models.convnext.modeling")
    config = zoo.ModelConfig(
        stage_depths=(1, 2), stage_dims=(8, 16), drop_path_rate=0.2, num_classes=WORDS
    )
    return (
        lambda: zoo.ConvNeXt(config, rngs=nnx.Rngs(0)),
        lambda model, images, key: model(images, rngs=key, train=True),
        "images",
    )


def make_resnet():
    zoo = pytest.importorskip("bonsai.models.resnet.modeling")
    config = zoo.ModelConfig([1, 1, 1, 1], WORDS)
    return lambda: zoo.ResNet(config, rngs=nnx.Rngs(0)), lambda model, x, key: model(x), "images"


def make_qwen3():
    zoo = pytest.importorskip("bonsai.models.qwen3.modeling")
    config = zoo.ModelConfig(
        num_layers=2,
        vocab_size=WORDS,
        emb_dim=16,
        mlp_dim=32,
        num_heads=2,
        head_dim=8,
        num_kv_heads=1,
        rope_theta=10_000,
        rope_scaling_factor=1,
        local_rope_theta=1e4,
        norm_eps=1e-6,
        tie_word_embeddings=True,
    )

    def call(model, words, key):
        cache = zoo.init_cache(config, *words.shape, 0, jnp.float32)
        return model(words, cache=cache, segment_ids=jnp.ones_like(words))

    return lambda: zoo.Qwen3(config, rngs=nnx.Rngs(0)), call, "words"


def make_data(kind):
    generator = np.random.default_rng(0)
    if kind == "words":
        words = generator.integers(0, WORDS, (3 * BATCH, LENGTH + 1))
        return {"x": words[:, :-1], "y": words[:, 1:]}
    images = generator.normal(size=(3 * BATCH, 16, 16, 3)).astype(np.float32)
    return {"x": images, "y": generator.integers(0, WORDS, 3 * BATCH)}


def build(make, call, kind, folder):
    class Centred(cx.Constraint):
        """The mean logit of each example is zero."""

        def residual(self, model, batch, key):
            logits = call(model, batch["x"], key).astype(jnp.float32)
            return jnp.mean(logits.reshape(logits.shape[0], -1), axis=1)

    def loss(model, batch, key):
        masks, dropout = jax.random.split(key)
        logits = call(cx.masks.sample(model, masks), batch["x"], dropout)
        found = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
        return jnp.mean(found)

    model = cx.masks.add_masks(make())
    return cx.Trainer(
        model=model,
        loss=loss,
        optimizer=cx.masks.with_mask_rate(model, optax.adam(1e-2)),
        data=cx.data.arrays(make_data(kind), batch=BATCH),
        steps=3,
        constraints=[cx.MaskBudget(0.5, gamma=0.5), Centred(gamma=0.5)],
        devices=1,
        run=cx.RunFolder(folder, save_every=2),
        logging=cx.Logging(progress=False),
    )


@pytest.mark.parametrize("zoo", [make_decoder, make_vit, make_convnext, make_resnet, make_qwen3])
def test_a_masked_model_trains_under_constraints_and_resumes(zoo, tmp_path):
    make, call, kind = zoo()
    straight = build(make, call, kind, tmp_path / "run")
    straight.fit()
    resumed = build(make, call, kind, tmp_path / "other")
    assert resumed.restore(2, run=tmp_path / "run") == 2
    resumed.fit()
    models = straight.model, resumed.model, cx.masks.add_masks(make())
    first, second, start = (
        by_path(nnx.as_pure(nnx.state(model, nnx.Not(nnx.RngState)))) for model in models
    )
    assert first.keys() == second.keys() == start.keys()
    for name, array in first.items():
        np.testing.assert_array_equal(array, second[name], err_msg=name)
        assert not np.array_equal(array, start[name]), name
    # From 0.9, each step goes half of the way to 0.5.
    density = cx.masks.expected_density(straight.model)
    np.testing.assert_allclose(density, 0.5 + 0.4 / 8, atol=1e-4)
    pruned = cx.masks.export(straight.model, 0.25)
    np.testing.assert_allclose(cx.masks.realised_density(pruned), 0.25, atol=5e-3)
