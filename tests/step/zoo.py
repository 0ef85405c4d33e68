"""Many kinds of layers, with real parameters, for tests of Jacobians."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from constrainx.constraints import masks
from constrainx.models import MLP


class Layer(NamedTuple):
    """Parameters, and a function of them and of examples."""

    parameters: Any
    apply: Any
    inputs: tuple[int, ...]


ZOO: dict[str, Any] = {}
# Where layers compute in a lower precision than that of their parameters.
ROUNDED: set[str] = set()
# How many kernels are factored, or written as products with patches, if all are that can be.
FACTORED: dict[str, int] = {}


def layer(*inputs, factored=0, rounded=False):
    """Adds a function (rngs, dtype) ↦ (parameters or module, apply) to the zoo."""

    def add(build):
        name = build.__name__
        ZOO[name] = functools.partial(_make, build, inputs)
        FACTORED[name] = factored
        if rounded:
            ROUNDED.add(name)
        return build

    return add


def _make(build, inputs, dtype):
    made, apply = build(nnx.Rngs(0), dtype)
    if not isinstance(made, nnx.Module):
        return Layer(made, apply, inputs)
    graph, parameters, rest = nnx.split(made, nnx.Param, ...)
    return Layer(parameters, lambda p, x: apply(nnx.merge(graph, p, rest, copy=True), x), inputs)


def call(module, x):
    return module(x)


def matrix(rngs, dtype, *shape):
    return jax.random.normal(rngs(), shape, dtype) / 2


@layer(3, factored=2)
def mlp(rngs, dtype):
    model = MLP((3, 5, 4), rngs=rngs)
    return jax.tree.map(lambda leaf: leaf.astype(dtype), model), call


@layer(4, factored=1)
def kernel_shared_by_two_layers(rngs, dtype):
    return matrix(rngs, dtype, 4, 4), lambda w, x: jnp.tanh(x @ w) @ w


@layer(4)
def kernel_and_its_transpose(rngs, dtype):
    return matrix(rngs, dtype, 4, 3), lambda w, x: jnp.tanh(x @ w) @ w.T


@layer(4)
def kernel_as_activation(rngs, dtype):
    return matrix(rngs, dtype, 4, 4), lambda w, x: x @ (w @ w)


@layer(4)
def kernel_with_a_penalty(rngs, dtype):
    return matrix(rngs, dtype, 4, 3), lambda w, x: x @ w + jnp.sum(w**2)


@layer(4, factored=1)
def vector_times_kernel(rngs, dtype):
    return matrix(rngs, dtype, 4, 3), lambda w, x: x[0] @ w


@layer(3, 4)
def attention(rngs, dtype):
    model = nnx.MultiHeadAttention(
        num_heads=2, in_features=4, decode=False, param_dtype=dtype, rngs=rngs
    )
    return model, call


@layer(4, factored=1)
def normalised(rngs, dtype):
    model = nnx.Sequential(
        nnx.LayerNorm(4, param_dtype=dtype, rngs=rngs),
        nnx.Linear(4, 4, param_dtype=dtype, rngs=rngs),
        nnx.RMSNorm(4, param_dtype=dtype, rngs=rngs),
        nnx.GroupNorm(4, num_groups=2, param_dtype=dtype, rngs=rngs),
        nnx.BatchNorm(4, use_running_average=True, param_dtype=dtype, rngs=rngs),
    )
    return model, call


@layer(3)
def embedding(rngs, dtype):
    model = nnx.Embed(5, 4, param_dtype=dtype, rngs=rngs)
    return model, lambda m, x: m.attend(jnp.tanh(m((x > 0).astype(jnp.int32))))


@layer(6, 2, factored=2)
def convolutions_in_one_dimension(rngs, dtype):
    model = nnx.Sequential(
        nnx.Conv(2, 3, (3,), padding="CIRCULAR", param_dtype=dtype, rngs=rngs),
        jnp.tanh,
        nnx.Conv(3, 2, (2,), strides=2, padding="CAUSAL", param_dtype=dtype, rngs=rngs),
    )
    return model, call


@layer(5, 5, 2, factored=2)
def convolutions_in_two_dimensions(rngs, dtype):
    model = nnx.Sequential(
        nnx.Conv(2, 3, (3, 2), strides=(2, 1), padding="SAME", param_dtype=dtype, rngs=rngs),
        jnp.tanh,
        nnx.Conv(3, 2, (2, 2), kernel_dilation=(1, 2), padding="VALID", param_dtype=dtype,
                 rngs=rngs),
    )  # fmt: skip
    return model, call


@layer(4, 4, factored=1)
def grouped_convolutions(rngs, dtype):
    model = nnx.Sequential(
        nnx.Conv(4, 4, (3,), feature_group_count=4, param_dtype=dtype, rngs=rngs),
        jnp.tanh,
        nnx.Conv(4, 6, (2,), feature_group_count=2, param_dtype=dtype, rngs=rngs),
        nnx.Conv(6, 2, (1,), param_dtype=dtype, rngs=rngs),
    )
    return model, call


@layer(4, 2)
def transposed_convolutions(rngs, dtype):
    model = nnx.Sequential(
        nnx.ConvTranspose(2, 3, (3,), strides=2, param_dtype=dtype, rngs=rngs),
        jnp.tanh,
        nnx.ConvTranspose(
            3, 2, (2,), padding="CIRCULAR", transpose_kernel=True, param_dtype=dtype, rngs=rngs
        ),
        jnp.tanh,
        nnx.Conv(2, 2, (2,), input_dilation=2, padding=((1, 0),), param_dtype=dtype, rngs=rngs),
    )
    return model, call


@layer(4, 4, factored=1)
def kernel_shared_by_two_convolutions(rngs, dtype):
    def apply(w, x):
        def convolve(x, strides):
            return jax.lax.conv_general_dilated(
                x, w, strides, "SAME", dimension_numbers=("NWC", "WIO", "NWC")
            )

        return convolve(jnp.tanh(convolve(x, (1,))), (2,))

    return matrix(rngs, dtype, 3, 4, 4), apply


@layer(2, 3)
def kernel_as_image(rngs, dtype):
    def apply(w, x):
        return jax.lax.conv_general_dilated(w, x, (1,), "SAME")

    return matrix(rngs, dtype, 1, 2, 5), apply


@layer(3, 2)
def lstm(rngs, dtype):
    return nnx.RNN(nnx.LSTMCell(2, 3, param_dtype=dtype, rngs=rngs)), call


@layer(3, 2)
def gru(rngs, dtype):
    return nnx.RNN(nnx.GRUCell(2, 3, param_dtype=dtype, rngs=rngs)), call


@layer(3, factored=2)
def unrolled_recurrence(rngs, dtype):
    def apply(p, x):
        state = x
        for _ in range(3):
            state = jnp.tanh(state @ p["w"] + x @ p["u"])
        return state

    return {"w": matrix(rngs, dtype, 3, 3), "u": matrix(rngs, dtype, 3, 3)}, apply


@layer(3, factored=6)
def low_rank_adaptation(rngs, dtype):
    inner = nnx.Linear(4, 3, param_dtype=dtype, rngs=rngs)
    model = nnx.Sequential(
        nnx.LoRALinear(3, 4, lora_rank=2, param_dtype=dtype, lora_param_dtype=dtype, rngs=rngs),
        jnp.tanh,
        nnx.LoRA(4, 2, 3, base_module=inner, dtype=dtype, param_dtype=dtype, rngs=rngs),
    )
    # The second factors begin at zero, where the first have no gradient.
    for one in (model.layers[0].lora, model.layers[2]):
        one.lora_b[...] = matrix(rngs, dtype, *one.lora_b.shape)
        one.lora_a[...] = one.lora_a[...].astype(dtype)
    return model, call


class Wrapped(nnx.Module):
    """A dense layer that is called twice through a transformation."""

    def __init__(self, transform, dtype, rngs):
        self.transform = transform
        self.dense = nnx.Linear(3, 3, param_dtype=dtype, rngs=rngs)

    def __call__(self, x):
        run = self.transform(lambda dense, x: jnp.tanh(dense(x)))
        return run(self.dense, run(self.dense, x))


@layer(3, factored=1)
def inside_remat(rngs, dtype):
    return Wrapped(nnx.remat, dtype, rngs), call


@layer(3, factored=1)
def inside_jit(rngs, dtype):
    return Wrapped(nnx.jit, dtype, rngs), call


@layer(3, factored=2)
def jit_inside_remat_with_a_policy(rngs, dtype):
    @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable)
    def inner(p, x):
        return jnp.tanh(jax.jit(lambda w, x: jnp.sin(x @ w))(p["w"], x) @ p["v"])

    # The second call hands in the first kernel alone, under another name.
    p = {"w": matrix(rngs, dtype, 3, 3), "v": matrix(rngs, dtype, 3, 3)}
    return p, lambda p, x: inner(p, x) + jax.jit(lambda x, w: x @ w)(x, p["w"])


@layer(3)
def jit_that_hands_the_kernel_out(rngs, dtype):
    def apply(w, x):
        y, kernel = jax.jit(lambda w, x: (x @ w, w))(w, x)
        return y + jnp.sum(kernel**2)

    return matrix(rngs, dtype, 3, 3), apply


@layer(3, factored=1)
def grad_of_a_remat(rngs, dtype):
    def potential(p, x):
        return jnp.sum(jax.checkpoint(lambda w, x: jnp.tanh(x @ w))(p["w"], x) ** 2)

    p = {"w": matrix(rngs, dtype, 3, 3), "v": matrix(rngs, dtype, 3, 3)}
    return p, lambda p, x: jax.grad(potential, argnums=1)(p, x) @ p["v"]


@layer(3, factored=1)
def derivative_along_a_direction(rngs, dtype):
    def apply(w, x):
        return jax.jvp(lambda x: jnp.tanh(x @ w), (x,), (jnp.cos(x),))[1]

    return matrix(rngs, dtype, 3, 3), apply


@layer(3)
def scan_over_layers(rngs, dtype):
    @nnx.vmap(in_axes=0, out_axes=0)
    def make(key):
        return nnx.Linear(3, 3, param_dtype=dtype, rngs=nnx.Rngs(key))

    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    def run(dense, x):
        return jnp.tanh(dense(x))

    return make(jax.random.split(rngs(), 3)), lambda m, x: run(m, x)


@layer(3)
def kernel_inside_loops(rngs, dtype):
    def apply(p, x):
        x = jax.lax.fori_loop(0, 2, lambda _, x: jnp.tanh(x @ p["loop"]), x)
        x = jax.lax.cond(x[0, 0] > 0, lambda x: x @ p["cond"], jnp.sin, x)
        fixed = jax.lax.stop_gradient(p["cond"])
        return (
            x
            + jax.lax.while_loop(
                lambda state: state[0] < 2,
                lambda state: (state[0] + 1, state[1] @ fixed),
                (0, fixed),
            )[1].sum()
        )

    return {"loop": matrix(rngs, dtype, 3, 3), "cond": matrix(rngs, dtype, 3, 3)}, apply


@jax.custom_vjp
def backwards_doubled(w, x):
    return x @ w


def _forward(w, x):
    return x @ w, (w, x)


def _backward(residuals, cotangent):
    w, x = residuals
    return 2 * x.T @ cotangent, cotangent @ w.T


backwards_doubled.defvjp(_forward, _backward)


@jax.custom_jvp
def forwards_tripled(w, x):
    return x @ w


@forwards_tripled.defjvp
def _tripled(primals, tangents):
    (w, x), (dw, dx) = primals, tangents
    return x @ w, 3 * (x @ dw) + dx @ w


@layer(3, factored=1)
def custom_derivatives(rngs, dtype):
    def apply(p, x):
        x = jnp.tanh(backwards_doubled(p["a"], x))
        return forwards_tripled(p["b"], jnp.tanh(x @ p["c"]))

    return {name: matrix(rngs, dtype, 3, 3) for name in "abc"}, apply


@layer(3)
def straight_through_inside_jit(rngs, dtype):
    # The value does not depend on the kernel, but the derivative does.
    binary = jax.jit(lambda w: masks.straight_through(jnp.zeros_like(w) + 0.5, jnp.sin(w)))
    return matrix(rngs, dtype, 3, 3), lambda w, x: x @ binary(w)


@layer(3, factored=1)
def stopped_gradients(rngs, dtype):
    def apply(p, x):
        x = jnp.tanh(x @ jax.lax.stop_gradient(p["frozen"]))
        return jax.lax.stop_gradient(x) @ p["head"]

    return {"frozen": matrix(rngs, dtype, 3, 3), "head": matrix(rngs, dtype, 3, 3)}, apply


@layer(5, 3)
def einsum_layers(rngs, dtype):
    model = nnx.Sequential(
        nnx.Einsum("nta,hab->nthb", (2, 3, 4), (2, 4), param_dtype=dtype, rngs=rngs),
        jnp.tanh,
        nnx.Einsum("nthb,hbc->ntc", (2, 4, 3), param_dtype=dtype, rngs=rngs),
    )
    return model, call


@layer(3)
def kernel_on_the_left(rngs, dtype):
    return matrix(rngs, dtype, 4, 3), lambda w, x: jnp.einsum("oi,bi->bo", w, x)


@layer(3, factored=2, rounded=True)
def layers_in_bfloat16(rngs, dtype):
    model = nnx.Sequential(
        nnx.Linear(3, 4, dtype=jnp.bfloat16, param_dtype=dtype, rngs=rngs),
        jnp.tanh,
        nnx.Linear(4, 3, dtype=jnp.bfloat16, param_dtype=dtype, rngs=rngs),
    )
    return model, lambda m, x: m(x).astype(dtype)


@layer(4, 2, factored=1, rounded=True)
def convolution_in_bfloat16(rngs, dtype):
    model = nnx.Conv(2, 3, (2,), dtype=jnp.bfloat16, param_dtype=dtype, rngs=rngs)
    return model, lambda m, x: m(x).astype(dtype)


@layer(3, factored=1, rounded=True)
def product_in_a_wider_type(rngs, dtype):
    def apply(w, x):
        narrow = [leaf.astype(jnp.bfloat16) for leaf in (x, w)]
        return jnp.matmul(*narrow, preferred_element_type=jnp.float32).astype(dtype)

    return matrix(rngs, dtype, 3, 4), apply


@layer(3)
def kernel_rounded_and_widened(rngs, dtype):
    # JAX rounds the gradient to bfloat16 here, to the last bit.
    return matrix(rngs, dtype, 3, 4), lambda w, x: x @ w.astype(jnp.bfloat16).astype(x.dtype)


@layer(3)
def kernel_in_eight_bits(rngs, dtype):
    def apply(w, x):
        return x @ w.astype(jnp.float8_e4m3fn).astype(x.dtype)

    return matrix(rngs, dtype, 3, 4), apply


@layer(3, factored=1)
def complex_activations(rngs, dtype):
    def apply(p, x):
        phase = jnp.exp(1j * (x @ p["in"]).astype(jnp.result_type(dtype, jnp.float32)))
        product = phase @ p["out"].astype(phase.dtype)
        return (product.real + 2 * product.imag).astype(dtype)

    return {"in": matrix(rngs, dtype, 3, 4), "out": matrix(rngs, dtype, 4, 3)}, apply


@layer(4, 2)
def complex_convolution(rngs, dtype):
    def apply(w, x):
        wide = jnp.result_type(dtype, jnp.float32)
        phase = jnp.exp(1j * x.astype(wide))
        product = jax.lax.conv_general_dilated(
            phase, w.astype(phase.dtype), (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
        )
        return jnp.abs(product).astype(dtype)

    return matrix(rngs, dtype, 2, 2, 3), apply


@layer(3, factored=1)
def kernel_as_integer(rngs, dtype):
    def apply(p, x):
        levels = (8 * p["quantised"]).astype(jnp.int32) + (9 * p["whole"]).astype(jnp.int32)
        cast = p["cast"].astype(jnp.int32).astype(x.dtype)
        return jnp.tanh(x @ p["plain"]) @ levels.astype(x.dtype) + x @ cast

    names = ("quantised", "whole", "cast", "plain")
    return {name: matrix(rngs, dtype, 3, 3) for name in names}, apply


@layer(3, factored=1)
def kernels_of_no_width(rngs, dtype):
    def apply(p, x):
        return (x @ p["down"]) @ p["up"] + x @ p["full"] + jnp.sum(x[:, :0] @ p["empty"])

    shapes = {"down": (3, 0), "up": (0, 2), "full": (3, 2), "empty": (0, 0)}
    return {name: matrix(rngs, dtype, *shape) for name, shape in shapes.items()}, apply


@layer(4, 2, factored=1)
def convolutions_of_no_width(rngs, dtype):
    def apply(p, x):
        convolve = functools.partial(
            jax.lax.conv_general_dilated,
            window_strides=(1,), padding="VALID", dimension_numbers=("NWC", "WIO", "NWC"),
        )  # fmt: skip
        short = convolve(x, p["long"])  # longer than the input: no positions
        return convolve(convolve(x, p["down"]), p["up"]) + convolve(x, p["full"]) + jnp.sum(short)

    shapes = {"down": (1, 2, 0), "up": (1, 0, 3), "full": (1, 2, 3), "long": (5, 2, 3)}
    return {name: matrix(rngs, dtype, *shape) for name, shape in shapes.items()}, apply


@layer(3)
def masked_weights(rngs, dtype):
    model = masks.add_masks(MLP((3, 4, 2), rngs=rngs), initial=0.6)
    model = jax.tree.map(lambda leaf: leaf.astype(dtype), model)
    return model, lambda m, x: masks.sample(m, jax.random.key(1))(x)


@layer(3, factored=2)
def unused_parameter(rngs, dtype):
    p = {"used": matrix(rngs, dtype, 3, 3), "dead": matrix(rngs, dtype, 3, 3)}
    return p, lambda p, x: jax.jit(lambda w, v, x: (x @ w, x @ v))(p["used"], p["dead"], x)[0]
