"""Reads the folders that training runs leave behind."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

from constrainx.errors import UserError, suggest
from constrainx.runtime import parse_resume, read_object

Row = dict[str, Any]


class ReportError(UserError, ValueError):
    """A run that cannot be read, or a report that cannot be written."""


@dataclasses.dataclass(frozen=True)
class Run:
    """What a training run recorded.

    Attributes:
        name: The name of the run's folder.
        config: The contents of `config.json`, empty if there is none.
        environment: The contents of `environment.json`, empty if there is none.
        train: The lines of kind "train" by step, without those that a resume replaced.
        evaluation: The lines of kind "eval", likewise.
        events: All lines of kind "event", in the order of the file.
        certificate: What `constrainx certify` found, empty if it was not called.
        picture: What the recipe drew of its result, a PNG; None if it drew nothing.
    """

    name: str
    config: Row
    environment: Row
    train: list[Row]
    evaluation: list[Row]
    events: list[Row]
    certificate: Row = dataclasses.field(default_factory=dict)
    picture: bytes | None = None


def load(run: pathlib.Path) -> Run:
    """Reads a run's folder.

    A last line that a crash cut off is ignored. Where a run was resumed, earlier lines of steps
    after the resume are dropped. If two lines have the same kind and step, the later one counts.

    Args:
        run: The folder, which holds `metrics.jsonl`.

    Returns:
        The run.

    Raises:
        ReportError: If there is no such folder, it is not a run's, or a file in it is broken.
    """
    run = pathlib.Path(run)
    if not run.exists():
        raise ReportError(f"`runs` must be folders of training runs, and {run} does not exist.")
    metrics = run / "metrics.jsonl"
    if not metrics.is_file():
        found = _find_run_near(run)
        fix = suggest(found) if found else " Give the folder that holds that file."
        raise ReportError(
            f"`runs` must be folders of training runs, and {run} has no metrics.jsonl.{fix}"
        )
    kept: dict[tuple[str, float], Row] = {}
    events: list[Row] = []
    for row in _read_rows(metrics):
        if row["kind"] == "event":
            events.append(row)
            if parse_resume(str(row.get("message", ""))) is not None:
                kept = {key: old for key, old in kept.items() if old["step"] <= row["step"]}
        else:
            kept[row["kind"], row["step"]] = row
    if not kept and not events:
        raise ReportError(
            f"`runs` must have logged something, and {metrics} has no complete line: the run ended "
            "too early. Leave it out, or run it again."
        )
    rows = sorted(kept.values(), key=lambda row: row["step"])
    return Run(
        name=replace_unprintable(run.resolve().name),
        config=_read_object(run / "config.json"),
        environment=_read_object(run / "environment.json"),
        train=[row for row in rows if row["kind"] == "train"],
        evaluation=[row for row in rows if row["kind"] == "eval"],
        events=events,
        certificate=_read_certificate(run),
        picture=_read_picture(run / "picture.png"),
    )


def _read_picture(path: pathlib.Path) -> bytes | None:
    try:
        data = path.read_bytes()
    except OSError:  # A picture that cannot be read is no reason to show nothing else.
        return None
    return data if data.startswith(b"\x89PNG") else None


def _read_certificate(run: pathlib.Path) -> Row:
    found = _read_object(run / "result.json").get("certificate")
    return found if isinstance(found, dict) else _read_object(run / "certificate.json")


def _find_run_near(folder: pathlib.Path) -> pathlib.Path | None:
    if folder.is_file():
        return folder.parent if (folder.parent / "metrics.jsonl").is_file() else None
    level = [folder]
    for _ in range(4):  # Searching deeper could mean walking through a home directory.
        below: list[pathlib.Path] = []
        for parent in level:
            try:
                below.extend(sorted(child for child in parent.iterdir() if child.is_dir()))
            except OSError:
                continue
        for child in below:
            if os.path.isfile(child / "metrics.jsonl"):
                return child
        level = below
    return None


def _read_rows(path: pathlib.Path) -> Iterable[Row]:
    # Bytes, because a crash may cut a character in two.
    lines = [
        (number, line.strip(b"\0 \t\r"))  # a power cut may leave zeros behind
        for number, line in enumerate(path.read_bytes().split(b"\n"), start=1)
        if line.strip(b"\0 \t\r")
    ]
    for number, line in lines:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            if number == lines[-1][0]:
                return
            raise ReportError(
                f"{path}, line {number}, must be a JSON object, and is not JSON: {error}. "
                "Repair or remove that line."
            ) from error
        step = row.get("step") if isinstance(row, dict) else None
        if not math.isfinite(as_number(step)) or row.get("kind") not in ("train", "eval", "event"):
            raise ReportError(
                f'{path}, line {number}, must be an object with a number as "step" and '
                f'"train", "eval" or "event" as "kind", got {json.dumps(row)[:80]}. Repair or '
                "remove that line."
            )
        yield row


def _read_object(path: pathlib.Path) -> Row:
    if not path.is_file():
        return {}
    try:
        return read_object(path)
    except ValueError as error:
        raise ReportError(f"{path} is damaged: {error}. Repair or remove it.") from error


def replace_unprintable(text: str) -> str:
    """The text with a replacement character for each character that cannot be displayed."""
    return "".join(
        letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text
    )


def as_number(value: object) -> float:
    """The value, or NaN if it is not a number."""
    return float(value) if isinstance(value, int | float) else math.nan


def read_series(rows: Sequence[Row], key: str | None) -> tuple[list[float], list[float]]:
    """The steps and values of a field, with NaN for values that are not finite numbers."""
    points = [
        (float(row["step"]), as_number(row[key])) for row in rows if key is not None and key in row
    ]
    return [step for step, _ in points], [
        value if math.isfinite(value) else math.nan for _, value in points
    ]
