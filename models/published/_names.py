"""What torchvision, timm and transformers call the arrays of our models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

from constrainx.errors import ArgumentTypeError, check_choice
from constrainx.models._resnet import ResNet
from constrainx.models._swin import Swin

Layout: TypeAlias = Literal["torchvision", "timm", "transformers"]
Kind: TypeAlias = Literal["convolution", "matrix", "as it is"]


class Name(NamedTuple):
    """An array of ours, and what it is called elsewhere.

    Attributes:
        ours: its path in the model, such as ``head.kernel``.
        theirs: its name in a published file; several names for arrays that are one of ours,
            joined along their first axis.
        kind: whether it is transposed, and how.
    """

    ours: str
    theirs: tuple[str, ...]
    kind: Kind


def names_of(model: Any, layout: Layout) -> list[Name]:
    """The names of all arrays of a model in one of the published layouts."""
    check_choice("layout", layout, get_args(Layout), owner="names_of")
    if isinstance(model, ResNet):
        return list(_name_resnet(model, layout))
    if isinstance(model, Swin):
        return list(_name_swin(model, layout))
    raise ArgumentTypeError(
        f"the layout of {layout} is known for `ResNet` and `Swin`, got {type(model).__name__}. "
        "Load the weights of others with `read_pickled` or safetensors, and assign them by hand; "
        "`constrainx export` without `--layout` writes those of any model."
    )


def _name_resnet(model: ResNet, layout: Layout) -> Iterator[Name]:
    is_transformers = layout == "transformers"
    if is_transformers:
        stem = "resnet.embedder.embedder"
        yield _convolution("first", f"{stem}.convolution")
        yield from _batch_norm("norm", f"{stem}.normalization")
    else:
        yield _convolution("first", "conv1")
        yield from _batch_norm("norm", "bn1")
    for i, stage in enumerate(model.stages):
        for j, block in enumerate(stage):
            ours = f"stages.{i}.{j}"
            for number, part in enumerate(("first", "second")):
                if is_transformers:
                    theirs = f"resnet.encoder.stages.{i}.layers.{j}.layer.{number}"
                    convolution, norm = f"{theirs}.convolution", f"{theirs}.normalization"
                else:
                    theirs = f"layer{i + 1}.{j}"
                    convolution, norm = f"{theirs}.conv{number + 1}", f"{theirs}.bn{number + 1}"
                yield _convolution(f"{ours}.{part}", convolution)
                yield from _batch_norm(f"{ours}.{part}_norm", norm)
            if block.has_shortcut:
                if is_transformers:
                    theirs = f"resnet.encoder.stages.{i}.layers.{j}.shortcut"
                    convolution, norm = f"{theirs}.convolution", f"{theirs}.normalization"
                else:
                    theirs = f"layer{i + 1}.{j}.downsample"
                    convolution, norm = f"{theirs}.0", f"{theirs}.1"
                yield _convolution(f"{ours}.shortcut", convolution)
                yield from _batch_norm(f"{ours}.shortcut_norm", norm)
    yield from _linear("head", "classifier.1" if is_transformers else "fc")


def _name_swin(model: Swin, layout: Layout) -> Iterator[Name]:
    stem, stem_norm, norm, head = {
        "torchvision": ("features.0.0", "features.0.2", "norm", "head"),
        "timm": ("patch_embed.proj", "patch_embed.norm", "norm", "head.fc"),
        "transformers": (
            "swin.embeddings.patch_embeddings.projection",
            "swin.embeddings.norm",
            "swin.layernorm",
            "classifier",
        ),
    }[layout]
    yield _convolution("patches", stem)
    yield Name("patches.bias", (f"{stem}.bias",), "as it is")
    yield from _norm("patches_norm", stem_norm)
    for i, stage in enumerate(model.stages):
        if stage.merges:
            merge = {
                "torchvision": f"features.{2 * i}",
                "timm": f"layers.{i}.downsample",
                "transformers": f"swin.encoder.layers.{i - 1}.downsample",
            }[layout]
            yield from _norm(f"stages.{i}.merge.norm", f"{merge}.norm")
            yield Name(f"stages.{i}.merge.linear.kernel", (f"{merge}.reduction.weight",), "matrix")
        for j in range(len(stage.blocks)):
            yield from _name_block(i, j, layout)
    yield from _norm("norm", norm)
    yield from _linear("head", head)


def _name_block(i: int, j: int, layout: Layout) -> Iterator[Name]:
    ours = f"stages.{i}.blocks.{j}"
    theirs = {
        "torchvision": f"features.{2 * i + 1}.{j}",
        "timm": f"layers.{i}.blocks.{j}",
        "transformers": f"swin.encoder.layers.{i}.blocks.{j}",
    }[layout]
    norms, attention, project, dense, qkv = {
        "torchvision": (("norm1", "norm2"), "attn", "attn.proj", ("mlp.0", "mlp.3"), None),
        "timm": (("norm1", "norm2"), "attn", "attn.proj", ("mlp.fc1", "mlp.fc2"), None),
        "transformers": (
            ("layernorm_before", "layernorm_after"),
            "attention.self",
            "attention.output.dense",
            ("intermediate.dense", "output.dense"),
            ("query", "key", "value"),
        ),
    }[layout]
    parts = [f"{theirs}.{attention}.{part}" for part in qkv or ("qkv",)]
    yield from _norm(f"{ours}.attention_norm", f"{theirs}.{norms[0]}")
    yield from _linear(f"{ours}.attention.qkv", *parts)
    table = f"{theirs}.{attention}.relative_position_bias_table"
    yield Name(f"{ours}.attention.position_bias", (table,), "as it is")
    yield from _linear(f"{ours}.attention.project", f"{theirs}.{project}")
    yield from _norm(f"{ours}.dense_norm", f"{theirs}.{norms[1]}")
    yield from _linear(f"{ours}.expand", f"{theirs}.{dense[0]}")
    yield from _linear(f"{ours}.contract", f"{theirs}.{dense[1]}")


def _convolution(ours: str, theirs: str) -> Name:
    return Name(f"{ours}.kernel", (f"{theirs}.weight",), "convolution")


def _linear(ours: str, *theirs: str) -> Iterator[Name]:
    yield Name(f"{ours}.kernel", tuple(f"{name}.weight" for name in theirs), "matrix")
    yield Name(f"{ours}.bias", tuple(f"{name}.bias" for name in theirs), "as it is")


def _norm(ours: str, theirs: str) -> Iterator[Name]:
    yield Name(f"{ours}.scale", (f"{theirs}.weight",), "as it is")
    yield Name(f"{ours}.bias", (f"{theirs}.bias",), "as it is")


def _batch_norm(ours: str, theirs: str) -> Iterator[Name]:
    yield from _norm(ours, theirs)
    yield Name(f"{ours}.mean", (f"{theirs}.running_mean",), "as it is")
    yield Name(f"{ours}.var", (f"{theirs}.running_var",), "as it is")
