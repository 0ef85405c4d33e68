"""Data sets in the layout of TFDS: written here, read back by the real code, no TensorFlow."""

import contextlib
import importlib
import io
import itertools
import os
import pathlib
import shutil
import subprocess
import sys

import grain
import jax
import numpy as np
import pytest
import tensorflow_datasets
from PIL import Image
from tensorflow_datasets.core import registered

from constrainx import data
from constrainx.errors import ArgumentError, UserError

EXAMPLES = 22


def png(number):
    buffer = io.BytesIO()
    Image.fromarray(np.full((2, 2), number, np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


with registered.skip_registration():

    class Numbers(tensorflow_datasets.core.GeneratorBasedBuilder):
        """Example i is an image of brightness i, a vector of i and the number i."""

        name = "numbers"
        VERSION = tensorflow_datasets.core.Version("1.2.0")
        # There are no checksums beside this file. TFDS would look for them with
        # importlib_resources, which it does not install.
        code_path = None

        def _info(self):
            features = {
                "image": tensorflow_datasets.features.Image(shape=(2, 2, 1)),
                "vector": tensorflow_datasets.features.Tensor(shape=(3,), dtype=np.float32),
                "label": tensorflow_datasets.features.Scalar(np.int64),
            }
            return tensorflow_datasets.core.DatasetInfo(
                builder=self,
                features=tensorflow_datasets.features.FeaturesDict(features),
                # Otherwise TFDS writes in an order of its own.
                disable_shuffling=True,
            )

        def _split_generators(self, dl_manager):
            return {
                "train": self._generate_examples(EXAMPLES),
                "test": self._generate_examples(5),
            }

        def _generate_examples(self, count):
            for i in range(count):
                vector = np.full(3, i, np.float32)
                yield i, {"image": png(i), "vector": vector, "label": i}


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("data")
    Numbers(data_dir=directory, file_format="array_record").download_and_prepare()
    return directory


class Noise(grain.transforms.RandomMap):
    def random_map(self, element, rng):
        return {**element, "noise": rng.normal()}


class Halve(grain.transforms.Map):
    def map(self, element):
        return {**element, "vector": element["vector"] / 2}


def double_label(element):
    return {**element, "label": 2 * element["label"]}


def take(batches, count, step=0, **options):
    with contextlib.closing(batches.from_step(step, **options)) as iterator:
        return list(itertools.islice(iterator, count))


def join(parts):
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)


def assert_same(found, wanted):
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


def numbers(data_dir, **options):
    options = {"batch": 8, "data_dir": data_dir, "transforms": (Noise(),), **options}
    return data.tfds("numbers", options.pop("split", "train"), **options)


def test_examples_arrive_as_they_were_written(data_dir):
    plain = numbers(data_dir, transforms=(), shuffle=False)
    assert (plain.examples, plain.batch) == (EXAMPLES, 8)
    first, *_, last = take(plain, 3)
    np.testing.assert_array_equal(first["label"], np.arange(8))
    np.testing.assert_array_equal(first["image"][:, 1, 1, 0], np.arange(8))
    np.testing.assert_array_equal(first["vector"][:, 2], np.arange(8))
    assert first["vector"].dtype == np.float32
    # 22 examples in batches of 8: the third straddles the epochs.
    np.testing.assert_array_equal(last["label"], [16, 17, 18, 19, 20, 21, 0, 1])


def test_every_example_comes_once_per_epoch_and_in_a_new_order(data_dir):
    stream = join(take(numbers(data_dir), 11))["label"]
    epochs = stream.reshape(4, EXAMPLES)
    for epoch in epochs:
        assert sorted(epoch) == list(range(EXAMPLES))
    assert len({tuple(epoch) for epoch in epochs}) == 4


@pytest.mark.parametrize("processes", [2, 4])
def test_the_global_batch_does_not_depend_on_the_number_of_processes(data_dir, processes):
    batches = numbers(data_dir)
    whole = take(batches, 6, step=1)
    parts = [take(batches, 6, step=1, process=p, processes=processes) for p in range(processes)]
    for wanted, found in zip(whole, zip(*parts, strict=True), strict=True):
        assert all(len(leaf) == 8 // processes for leaf in jax.tree.leaves(found))
        assert_same(join(found), wanted)
    with pytest.raises(ValueError, match=r"multiple of the 3 processes.* got 8"):
        batches.from_step(0, processes=3)


@pytest.mark.parametrize("buffer", [0, 1, 6])
def test_starting_at_a_later_step_continues_the_same_stream(data_dir, buffer):
    whole = take(numbers(data_dir), 9)
    for step in (1, 2, 6):
        assert_same(take(numbers(data_dir, buffer=buffer), 3, step), whole[step : step + 3])


def test_starting_at_a_later_step_skips_earlier_examples(data_dir):
    seen = []

    def watched(element):
        seen.append(int(element["label"]))
        return element

    batches = numbers(data_dir, transforms=(watched,), buffer=0)
    found = take(batches, 1, step=10**12)
    assert sorted(seen) == sorted(found[0]["label"])


def test_workers_yield_the_same_batches(data_dir):
    options = {"transforms": (double_label, Noise(), DrawLabel(), AddNeighbour())}
    whole = take(numbers(data_dir, **options), 9)
    with_workers = numbers(data_dir, workers=2, **options)
    assert_same(take(with_workers, 5, step=3), whole[3:8])


def test_transforms_come_in_order(data_dir):
    def shift(element):
        return {**element, "label": element["label"] + 1}

    options = {"transforms": (double_label, shift, Halve()), "shuffle": False}
    found = take(numbers(data_dir, **options), 1)[0]
    np.testing.assert_array_equal(found["label"], 2 * np.arange(8) + 1)
    np.testing.assert_array_equal(found["vector"][:, 0], np.arange(8) / 2)


def test_random_transforms_are_reproducible_and_never_the_same(data_dir):
    noise = join(take(numbers(data_dir), 11))["noise"]
    assert len(set(noise)) == 4 * EXAMPLES
    np.testing.assert_array_equal(noise, join(take(numbers(data_dir), 11))["noise"])
    assert not set(noise) & set(join(take(numbers(data_dir, seed=1), 11))["noise"])

    twice = take(numbers(data_dir, transforms=(Noise(), rename, Noise())), 1)[0]
    assert not set(twice["noise"]) & set(twice["first"])


def rename(element):
    return {**element, "first": element["noise"]}


@pytest.mark.parametrize("batch", [4, 11, 32])
@pytest.mark.parametrize("processes", [1, 2])
def test_one_pass_has_each_example_once(data_dir, batch, processes):
    if batch % processes:
        batch += 1
    batches = numbers(data_dir, transforms=(Noise(), double_label))
    parts = [
        list(batches.once(batch=batch, process=p, processes=processes)) for p in range(processes)
    ]
    whole = join([join(found) for found in zip(*parts, strict=True)])
    assert len(whole["mask"]) == batch * -(-EXAMPLES // batch)
    assert whole["mask"].dtype == np.float32
    np.testing.assert_array_equal(whole["mask"], np.arange(len(whole["mask"])) < EXAMPLES)
    # In order and with the transforms, but without the random ones.
    np.testing.assert_array_equal(whole["label"][:EXAMPLES], 2 * np.arange(EXAMPLES))
    np.testing.assert_array_equal(whole["label"][EXAMPLES:], 2 * (EXAMPLES - 1))
    assert "noise" not in whole


def test_a_part_of_a_split_can_be_read(data_dir):
    assert numbers(data_dir, split="train[:50%]").examples == EXAMPLES // 2
    assert numbers(data_dir, split="train[20:]+test").examples == 7


def test_unknown_splits_and_wrong_arguments_are_named(data_dir):
    with pytest.raises(ValueError, match=r"train, test; got 'tset\[:3\]'\. .*'test'\?"):
        numbers(data_dir, split="tset[:3]")
    with pytest.raises(ValueError, match=r"`workers` must be .* got -1"):
        numbers(data_dir, workers=-1)
    with pytest.raises(TypeError, match=r"`transforms` must be .* got 3"):
        numbers(data_dir, transforms=(3,))
    with pytest.raises(TypeError, match=r"got <class .*Halve'>"):
        numbers(data_dir, transforms=(Halve,))

    class Odd(grain.transforms.Filter):
        def filter(self, element):
            return element["label"] % 2 == 1

    with pytest.raises(TypeError, match=r"must keep every example"):
        numbers(data_dir, transforms=(Odd(),))


@pytest.mark.parametrize("name", ["mnist", "no_such_name"])
def test_missing_data_names_the_command_that_prepares_it(tmp_path, name):
    with pytest.raises(data.DataNotFoundError, match=f"`constrainx data prepare {name}`") as error:
        data.tfds(name, "train", batch=8, data_dir=tmp_path)
    assert isinstance(error.value, FileNotFoundError)
    assert str(tmp_path) in str(error.value)


def test_the_data_directory_may_come_from_the_environment(data_dir, monkeypatch, tmp_path):
    monkeypatch.setenv("TFDS_DATA_DIR", str(data_dir))
    assert data.tfds("numbers", "test", batch=1).examples == 5
    monkeypatch.delenv("TFDS_DATA_DIR")
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(data.DataNotFoundError, match=f"{tmp_path}/tensorflow_datasets"):
        data.tfds("numbers", "test", batch=1)


def test_tensorflow_is_never_imported_and_tfds_only_when_used(data_dir, tmp_path):
    installed = tmp_path / "tensorflow" / "__init__.py"
    installed.parent.mkdir()
    installed.write_text("raise SystemExit('somebody imports TensorFlow')")
    script = f"""
import sys
import constrainx.data
assert "tensorflow_datasets" not in sys.modules
batches = constrainx.data.tfds("numbers", "train", batch=4, data_dir={str(data_dir)!r})
print(next(batches.from_step(0))["image"].shape)
sys.modules["tensorflow_datasets"] = None
try:
    constrainx.data.tfds("numbers", "train", batch=4)
except ImportError as error:
    print(error)
"""
    path = os.pathsep.join([str(tmp_path), str(pathlib.Path(data.__file__).parents[2])])
    run = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True,
    )  # fmt: skip
    assert "(4, 2, 2, 1)" in run.stdout, run.stderr
    assert "pip install 'constrainx[data]'" in run.stdout, run.stderr


def test_prepared_data_sets_are_listed(data_dir, tmp_path):
    (row,) = data.list_prepared(data_dir)
    assert row.name == "numbers"
    assert row.splits == {"train": EXAMPLES, "test": 5}
    assert row.path == data_dir / "numbers" / "1.2.0"
    assert row.bytes > 0
    assert data.list_prepared(tmp_path) == []
    assert data.prepare("numbers", data_dir) == row


def test_files_without_random_access_are_refused(data_dir, tmp_path):
    shutil.copytree(data_dir, tmp_path, dirs_exist_ok=True)
    info = tmp_path / "numbers" / "1.2.0" / "dataset_info.json"
    info.write_text(info.read_text().replace("array_record", "tfrecord"))
    with pytest.raises(ValueError, match=r"stored as tfrecord.*`constrainx data prepare numbers`"):
        numbers(tmp_path)
    with pytest.raises(data.PreparationError, match=r"stored as tfrecord before.* Delete"):
        data.prepare("numbers", tmp_path)


@pytest.fixture
def offline():
    """Data sets that cannot be prepared, known to TFDS by their names for one test."""

    class Unreachable(Numbers):
        name = "unreachable_numbers"

        def _split_generators(self, dl_manager):
            raise ConnectionError("no route to host")

    class Heavy(Numbers):
        name = "heavy_numbers"

        def _split_generators(self, dl_manager):
            importlib.import_module("a_package_that_is_not_there")

    registry = registered._DATASET_REGISTRY
    added = {cls.name: cls for cls in (Unreachable, Heavy)}
    registry.update(added)
    yield
    for name in added:
        del registry[name]


def test_failures_to_prepare_say_what_to_do(offline, tmp_path):
    with pytest.raises(data.PreparationError) as error:
        data.prepare("unreachable_numbers", tmp_path)
    for part in ("no route to host", "on one that can", f"{tmp_path}/unreachable_numbers/"):
        assert part in str(error.value)
    with pytest.raises(data.PreparationError) as error:
        data.prepare("heavy_numbers", tmp_path)
    assert "pip install a_package_that_is_not_there" in str(error.value)
    # A failure leaves nothing that looks prepared.
    assert data.list_prepared(tmp_path) == []
    with pytest.raises(data.DataNotFoundError):
        data.tfds("heavy_numbers", "train", batch=1, data_dir=tmp_path)


@pytest.mark.parametrize(
    ("wrong", "right"), [("fashon_mnist", "fashion_mnist"), ("cifar_10", "cifar10")]
)
def test_an_unknown_name_suggests_the_nearest(tmp_path, wrong, right):
    with pytest.raises(ValueError, match=f"got '{wrong}'. Did you mean '{right}'"):
        data.prepare(wrong, tmp_path)


def test_examples_of_different_shapes_are_refused(data_dir):
    def cut(example):
        return {"vector": example["vector"][: 1 + example["label"] % 2]}

    with pytest.raises(ArgumentError, match=r"same shapes.*`transforms`"):
        take(numbers(data_dir, transforms=(cut,), buffer=0), 1)


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def garble(path):
    content = np.frombuffer(path.read_bytes(), np.uint8).copy()
    written = np.flatnonzero(content)
    middle = written[len(written) // 4 : len(written) // 2]
    content[middle] ^= 0x55
    path.write_bytes(content.tobytes())


@pytest.mark.parametrize("damage", [cut, pathlib.Path.unlink, lambda path: path.write_bytes(b"")])
@pytest.mark.parametrize("file", ["dataset_info.json", "features.json", "*train.array_record*"])
def test_a_half_written_data_set_is_one_sentence(data_dir, tmp_path, file, damage):
    shutil.copytree(data_dir, tmp_path / "data")
    (path,) = (tmp_path / "data/numbers/1.2.0").glob(file)
    damage(path)
    with pytest.raises(UserError, match=r"Prepare it with|Delete that directory") as raised:
        next(data.tfds("numbers", "train", batch=2, data_dir=tmp_path / "data").from_step(0))
    assert len(str(raised.value).splitlines()) == 1


def test_a_damaged_record_is_one_sentence(data_dir, tmp_path):
    shutil.copytree(data_dir, tmp_path / "data")
    (path,) = (tmp_path / "data/numbers/1.2.0").glob("*train.array_record*")
    garble(path)
    batches = data.tfds("numbers", "train", batch=EXAMPLES, data_dir=tmp_path / "data")
    for read in (lambda: next(batches.from_step(0)), lambda: list(batches.once(batch=EXAMPLES))):
        with pytest.raises(data.DamagedDataError, match=r"example \d+ of 'train' cannot be read"):
            read()


def test_a_damaged_data_set_does_not_hide_the_others(data_dir, tmp_path, caplog):
    for name in ("numbers", "others"):
        shutil.copytree(data_dir / "numbers", tmp_path / name)
    cut(tmp_path / "others/1.2.0/dataset_info.json")
    with caplog.at_level("WARNING", logger="constrainx"):
        assert [found.name for found in data.list_prepared(tmp_path)] == ["numbers"]
    assert "'others'" in caplog.text


def draw_label(batch, draws):
    """Each example's own random number, as a figure."""
    return {**batch, "drawn": draws.uniform(1)[:, 0]}


class DrawLabel(data.transforms.Transform):
    def apply(self, batch, draws):
        return draw_label(batch, draws)


class AddNeighbour(data.transforms.Transform):
    mixes = True

    def apply(self, batch, draws):
        other = batch["label"].reshape(-1, 2)[:, ::-1].reshape(-1)
        return {**batch, "other": other}


@pytest.mark.parametrize("shuffle", [True, False])
def test_transforms_of_batches_see_the_example_and_its_epoch(data_dir, shuffle):
    """They come to the same as for arrays, whatever the processes, the step and the order."""
    options = {"seed": 5, "transforms": [double_label, DrawLabel(), AddNeighbour()]}
    batches = numbers(data_dir, batch=9, shuffle=shuffle, **options)
    whole = join(take(batches, 5))
    for position in range(45):
        example = whole["label"][position] // 2
        draws = data.transforms.Draws(
            seed=5, epochs=np.array([position // EXAMPLES]), examples=np.array([example])
        )
        assert whole["drawn"][position] == draws.fold_in(0).uniform(1)[0, 0]
        if position < 44:
            assert whole["other"][position] == whole["label"][position ^ 1]
    parts = [take(batches, 3, step=2, process=p, processes=3) for p in range(3)]
    assert_same(
        join([part[i] for i in range(3) for part in parts]), {k: v[18:] for k, v in whole.items()}
    )
    once = next(batches.once(batch=4))
    assert sorted(once) == ["image", "label", "mask", "vector"]


def vary_size(example):
    number = int(example["label"])
    return {"x": np.zeros((3 + number % 4, 5, 1), np.uint8) + number, "y": example["label"]}


def test_images_of_many_sizes_are_cropped_to_one(data_dir):
    crop = data.transforms.RandomResizedCrop(4)
    batches = numbers(data_dir, transforms=[vary_size, crop, data.transforms.RandomFlip()])
    (batch,) = take(batches, 1)
    assert batch["x"].shape == (8, 4, 4, 1)
    np.testing.assert_array_equal(
        batch["x"], np.zeros((8, 4, 4, 1)) + batch["y"][:, None, None, None]
    )
    assert next(batches.once(batch=4))["x"].shape == (4, 4, 4, 1)
    with pytest.raises(ArgumentError, match="RandomResizedCrop"):
        take(numbers(data_dir, transforms=[vary_size, DrawLabel()]), 1)
    with pytest.raises(ArgumentError, match="must come last"):
        numbers(data_dir, transforms=[crop, vary_size])
