"""`constrainx data bench`."""

import re

SMOKE = ("--size", "smoke", "--devices", "1")


def test_bench_prints_examples_a_second_and_where_they_wait(constrainx):
    code, text = constrainx("data", "bench", "l0-cifar10", *SMOKE, "--seconds", "0.2")
    assert code == 0
    first, *_ = text.splitlines()
    rate = re.fullmatch(
        r"l0-cifar10, size smoke, batch 16: ([\d,]+) examples a second, read as in training "
        r"\(\d+ batches\)\.",
        first,
    )
    assert rate
    assert int(rate[1].replace(",", "")) > 0
    cells = dict(re.findall(r"^(\w+) +[\d.,]+ +([\d.]+)% *$", text, re.MULTILINE))
    assert list(cells) == ["reading", "RandomCrop", "RandomFlip", "placing", "together"]
    assert abs(sum(map(float, cells.values())) - 200) < 0.5


def test_bench_places_batches_on_all_devices_and_says_if_they_were_few(constrainx):
    options = ("--size", "smoke", "--devices", "2", "--batch", "64", "--seconds", "1e-6")
    code, text = constrainx("data", "bench", "l0-cifar10", *options)
    assert code == 0
    assert "batch 64" in text
    assert "Only 1 batches: --seconds 6e-06 is surer." in text


def test_bench_without_a_recipe_says_what_is_missing(constrainx):
    code, text = constrainx("data", "bench")
    assert code == 1
    assert "`constrainx data bench` needs RECIPE as its first argument" in text
    code, text = constrainx("data", "--data-dir", "here", "bench", "l0-cifar10")
    assert code == 1
    assert "constrainx data bench RECIPE" in text
    code, text = constrainx("data", "bench", "l0-cifar10", "--help")
    assert code == 0
    assert "--seconds" in text
    assert "--batch" in text
