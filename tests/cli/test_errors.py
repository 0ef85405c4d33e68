"""What a user can fix is one sentence; a bug keeps its traceback."""

import shutil
import subprocess
import sys

import pytest

from constrainx.errors import ArgumentError
from constrainx.recipes import RecipeError

SMOKE = ("--size", "smoke", "--devices", "1")
RECIPE = """
import dataclasses
from typing import ClassVar
import jax.numpy as jnp, numpy as np, optax
from flax import nnx
import constrainx as cx
from constrainx.recipes import Recipe

@dataclasses.dataclass(frozen=True, kw_only=True)
class Mine(Recipe):
    name: ClassVar[str] = "mine"

    def trainer(self, **options):
        BUG
        return cx.Trainer(
            model=nnx.Linear(WIDTH, 1, rngs=nnx.Rngs(0)),
            loss=lambda model, batch: jnp.mean(model(batch["x"]) ** 2),
            optimizer=optax.sgd(0.1),
            data=cx.data.arrays({"x": np.ones((8, 2), np.float32)}, batch=4),
            steps=2,
            **self.settings(**options),
        )
"""


@pytest.fixture
def write_recipe(tmp_path):
    def write(*, bug="pass", width=2):
        path = tmp_path / "mine.py"
        path.write_text(RECIPE.replace("BUG", bug).replace("WIDTH", str(width)))
        return path

    return write


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["quikstart"], "quickstart"),
        (["quickstart", "--epochs", "0"], "at least 1"),
        (["quickstart", "--epoch", "3"], "--epochs"),
        (["quickstart", "--out", "/proc/nowhere"], "cannot be written to"),
        (["train", "o3-inertai"], "Did you mean 'o3-inertia'"),
        (["train", "missing.py"], "there is no file missing.py"),
        (["train", "o3-inertia", "--method", "nulspace"], "Did you mean 'nullspace'"),
        (["train", "o3-inertia", "--widht", "3"], "--width"),
        (["train", "o3-inertia", *SMOKE, "--run", "/proc/nowhere"], "cannot be written to"),
        (["train", "o3-inertia", *SMOKE, "--batch", "33", "--devices", "2"], "use 32 or 34"),
        (["train", "o3-inertia", *SMOKE, "--rows", "7"], "must divide the batch"),
        (["train", "o3-inertia", *SMOKE, "--distributed", "here"], "HOST:PORT,PROCESSES,INDEX"),
        (["resume", "nowhere"], "is not a run folder"),
        (["eval", "nowhere"], "is not a run folder"),
        (["report", "nowhere"], "nowhere"),
        (["compare", "o3-inertia", "--methods", "plane"], "Did you mean 'plain'"),
        (["compare", "o3-inertia", "--seeds", "0"], "at least 1"),
        (["data", "prepare", "fashion_mnits"], "Did you mean 'fashion_mnist'"),
        (["data", "prepare"], "name the data set"),
    ],
)
def test_errors_say_what_to_do(constrainx, arguments, message):
    code, text = constrainx(*arguments)
    assert code not in (0, None)
    assert message in text
    assert "Traceback" not in text


def test_a_damaged_checkpoint_is_one_sentence(finished, tmp_path):
    """In a process of its own, because Orbax and TensorStore print from their threads."""
    run = shutil.copytree(finished, tmp_path / "run")
    (damaged,) = (run / "checkpoints/16/state/d").iterdir()
    damaged.write_bytes(damaged.read_bytes()[:3])
    command = [sys.executable, "-m", "constrainx", "eval", str(run)]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 1
    assert "is damaged. The one before is of step 8" in ended.stderr
    assert len(ended.stderr.strip().splitlines()) == 1
    code = subprocess.run([*command, "--fallback"], capture_output=True, text=True).returncode
    assert code == 0


def test_a_recipe_without_methods_trains(constrainx, write_recipe):
    code, text = constrainx("train", write_recipe(), "--devices", 1, "--run", "run")
    assert code == 0
    assert "finished at step 2" in text


def test_a_value_error_of_a_recipe_keeps_its_traceback(write_recipe, tmp_path):
    path = write_recipe(bug='raise ValueError("a bug of mine")')
    command = [sys.executable, "-m", "constrainx", "validate", str(path)]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert ended.returncode == 1
    assert "Traceback" in ended.stderr
    assert f'File "{path}"' in ended.stderr
    assert "ValueError: a bug of mine" in ended.stderr


@pytest.mark.parametrize("command", [("validate",), ("train", "--run", "run")])
def test_a_shape_error_of_a_recipe_keeps_its_traceback(constrainx, write_recipe, command):
    name, *options = command
    with pytest.raises(TypeError, match="dot_general") as raised:
        constrainx(name, write_recipe(width=3), "--devices", 1, *options)
    assert any(entry.path.name == "mine.py" for entry in raised.traceback)


@pytest.mark.parametrize(
    ("bug", "error", "message"),
    [
        (
            "cx.lstsq(lambda v: jnp.ones((3, 5)) @ v, jnp.ones(3), like=jnp.zeros(4))",
            TypeError,
            r"called `matvec` with a vector like `like`, float32\[4\]",
        ),
        (
            """
        class Own(cx.Constraint):
            def residual(self, model, batch, *, key):
                return {}["scale"] * model(batch["x"])
        cx.compose(Own(), model=nnx.Linear(2, 1, rngs=nnx.Rngs(0)))(
            nnx.state(nnx.Linear(2, 1, rngs=nnx.Rngs(0)), nnx.Param), {"x": np.ones((8, 2))}
        )""",
            KeyError,
            r"'own' looked up 'scale', and the batch has \['x'\]",
        ),
    ],
    ids=["in a matvec", "in a residual"],
)
def test_an_error_inside_a_function_of_the_user_keeps_its_traceback(
    constrainx, write_recipe, bug, error, message
):
    with pytest.raises(error, match=message) as raised:
        constrainx("validate", write_recipe(bug=bug), "--devices", 1)
    assert any(entry.path.name == "mine.py" for entry in raised.traceback)


def test_a_misspelt_option_is_one_sentence(constrainx):
    code, text = constrainx("train", "o3-inertia", *SMOKE, "--widht", "3")
    assert code == 1
    assert text.startswith("error: `constrainx train o3-inertia` has no option `--widht`.")
    assert "Did you mean '--width'?" in text
    assert len(text.strip().splitlines()) == 1


@pytest.mark.parametrize("position", [0, 2, 4])
def test_traceback_may_be_anywhere_on_the_line(constrainx, position):
    arguments = ["train", "o3-inertia", "--widht", "3"]
    arguments.insert(position, "--traceback")
    with pytest.raises(ArgumentError, match="--width"):
        constrainx(*arguments)


def test_traceback_is_shown_for_a_user_error_in_a_run(constrainx, write_recipe):
    assert constrainx("train", write_recipe(), "--devices", 1, "--run", "run")[0] == 0
    code, text = constrainx("train", write_recipe(), "--devices", 1, "--run", "run")
    assert (code, "Traceback" in text) == (1, False)
    with pytest.raises(Exception, match="holds a run already"):
        constrainx("train", write_recipe(), "--devices", 1, "--run", "run", "--traceback")


def test_markup_in_an_error_is_shown_as_it_is(constrainx):
    code, text = constrainx("train", "[/b]:smile:")
    assert code == 1
    assert "'[/b]:smile:'" in text


@pytest.mark.parametrize(
    ("source", "message"),
    [("", "found none"), (RECIPE.replace('name: ClassVar[str] = "mine"', "pass"), "has no name")],
)
def test_a_file_without_a_proper_recipe_says_so(constrainx, tmp_path, source, message):
    (tmp_path / "mine.py").write_text(source.replace("BUG", "pass"))
    with pytest.raises(RecipeError, match=message):
        constrainx("validate", "mine.py", "--traceback")


def test_markup_and_line_ends_in_a_name_are_shown_as_they_are(constrainx, write_recipe):
    path = write_recipe()
    path.write_text(path.read_text().replace('"mine"', '"mine [/b]\\n:smile:"'))
    code, text = constrainx("validate", path, "--devices", 1)
    assert code == 0
    assert "mine [/b] :smile: default: 3 parameters" in text


def test_a_copy_that_cannot_be_written_is_one_sentence(constrainx):
    code, text = constrainx("cp", "o3-inertia", "/proc/nowhere/mine.py")
    assert code == 1
    assert "cannot be written" in text
