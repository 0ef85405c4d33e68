"""The figures that a plan is made of, each against a closed form."""

import jax
import jax.numpy as jnp
import pytest

from constrainx.plan import (
    TARGETS,
    Collective,
    Flops,
    count_flops,
    estimate_time,
    find_largest,
    parse_mesh,
)


def flops_of(function, *shapes):
    arguments = [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]
    return count_flops(jax.make_jaxpr(function)(*arguments))


def test_products_and_convolutions_are_counted():
    assert flops_of(lambda a, b: a @ b, (8, 16), (16, 4)).once == {"tf32": 2 * 8 * 16 * 4}

    def convolve(x, kernel):
        layout = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, kernel, (2, 2), "SAME", dimension_numbers=layout)

    forward = 2 * (5 * 4 * 4 * 7) * (3 * 3 * 6)
    shapes = (5, 8, 8, 6), (3, 3, 6, 7)
    assert flops_of(convolve, *shapes).once == {"tf32": forward}
    # The gradients of kernel and input take as much each; padding and stride blur the count.
    gradient = jax.grad(lambda x, k: jnp.sum(convolve(x, k) ** 2), argnums=(0, 1))
    assert flops_of(gradient, *shapes).once["tf32"] == pytest.approx(3 * forward, rel=0.35)


def test_loops_count_by_their_length_or_by_iteration():
    def scan(a):
        return jax.lax.scan(lambda x, _: (x @ a, None), a, length=7)[0]

    def iterate(a):
        return jax.lax.while_loop(lambda x: jnp.sum(x) < 9, lambda x: x @ a, a)

    once = 2 * 4**3
    assert flops_of(scan, (4, 4)).once == {"tf32": 7 * once}
    assert flops_of(iterate, (4, 4)) == Flops({}, {"tf32": once})
    branch = flops_of(lambda a: jax.lax.cond(a[0, 0] > 0, lambda: a @ a, lambda: a), (4, 4))
    assert branch.once == {"tf32": once}


def test_precision_decides_the_kind():
    exact = flops_of(lambda a: jnp.matmul(a, a, precision="highest"), (4, 4))
    assert {*exact.once} == {"float32"}
    half = flops_of(lambda a: a.astype(jnp.bfloat16) @ a.astype(jnp.bfloat16), (4, 4))
    assert {*half.once} == {"half"}


def test_time_is_work_over_rates():
    h100 = TARGETS["h100"]
    reduce = Collective(
        kind="all-reduce", shape="f32[]", bytes=450 * 10**6, group=8,
        crosses_hosts=False, times=1, is_iterated=False,
    )  # fmt: skip
    found = estimate_time(
        h100,
        devices=8,
        flops=Flops({"half": 8 * 989e12}, {}),
        moved=(335 * 10**9, 335 * 10**9),
        collectives=[reduce],
        iterations=2,
    )
    assert found.compute == pytest.approx(1.0)
    assert found.memory == pytest.approx(0.3)
    assert found.links == pytest.approx(2 * 7 / 8 * 1e-3)
    assert found.seconds == found.compute + found.links


@pytest.mark.parametrize(
    ("fixed", "per_example"), [(1000, 7), (1000, 0.1), (0, 100), (7999, 1), (9000, 1)]
)
def test_the_largest_batch_is_found_in_few_trials(fixed, per_example):
    trials = []

    def measure(batch):
        trials.append(batch)
        return fixed + per_example * batch

    found = find_largest(measure, limit=8000, unit=8, start=64)
    best = int(max(8000 - fixed, 0) / per_example) // 8 * 8
    assert best * 0.95 - 8 <= found <= best
    assert len(trials) <= 9, trials


def test_a_mesh_is_completed():
    assert parse_mesh(None, devices=8) == {"data": 8, "fsdp": 1}
    assert parse_mesh("fsdp=8", devices=8) == {"data": 1, "fsdp": 8}
    assert parse_mesh("data=2", devices=8) == {"data": 2, "fsdp": 4}
    with pytest.raises(ValueError, match=r"must have 8 devices, got 3 × 2"):
        parse_mesh("data=3,fsdp=2", devices=8)
    with pytest.raises(ValueError, match=r"'fdsp'. Did you mean 'fsdp'"):
        parse_mesh("fdsp=2", devices=8)
