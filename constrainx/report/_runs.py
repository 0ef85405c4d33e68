"""Reads the folders that training runs leave behind."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

from constrainx.errors import UserError

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
        train: The lines of kind "train" that hold after all resumes, by step.
        evaluation: The lines of kind "eval" that hold after all resumes, by step.
        events: All lines of kind "event", in the order of the file.
    """

    name: str
    config: Row
    environment: Row
    train: list[Row]
    evaluation: list[Row]
    events: list[Row]


def load(run: pathlib.Path) -> Run:
    """Reads a run's folder.

    A last line that a crash cut off is ignored. A resume drops what came before it in the file and
    lies beyond its step, and of two lines of the same kind and step the later one holds.

    Args:
        run: The folder, which holds `metrics.jsonl`.

    Returns:
        The run.

    Raises:
        ReportError: If there is no such folder, it is not a run's, or a file in it is broken.
    """
    run = pathlib.Path(run)
    if not run.exists():
        raise ReportError(f"`runs`: {run} does not exist; give the folder of a training run.")
    metrics = run / "metrics.jsonl"
    if not metrics.is_file():
        found = _nearest(run)
        fix = f"did you mean {found}?" if found else "give the folder that holds that file."
        raise ReportError(f"`runs`: {run} is not a run folder, it has no metrics.jsonl; {fix}")
    kept: dict[tuple[str, float], Row] = {}
    events: list[Row] = []
    for row in _rows(metrics):
        if row["kind"] == "event":
            events.append(row)
            if str(row.get("message", "")).lower().startswith("resumed"):
                kept = {key: old for key, old in kept.items() if old["step"] <= row["step"]}
        else:
            kept[row["kind"], row["step"]] = row
    if not kept and not events:
        raise ReportError(
            f"`runs`: {metrics} is empty, a complete line was wanted; the run ended before it "
            "logged anything: leave it out or run it again."
        )
    rows = sorted(kept.values(), key=lambda row: row["step"])
    return Run(
        name=printable(run.resolve().name),
        config=_object(run / "config.json"),
        environment=_object(run / "environment.json"),
        train=[row for row in rows if row["kind"] == "train"],
        evaluation=[row for row in rows if row["kind"] == "eval"],
        events=events,
    )


def _nearest(folder: pathlib.Path) -> pathlib.Path | None:
    if folder.is_file():
        return folder.parent if (folder.parent / "metrics.jsonl").is_file() else None
    level = [folder]
    for _ in range(4):  # Deeper than this is somebody's home, not a folder of runs.
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


def _rows(path: pathlib.Path) -> Iterable[Row]:
    # Bytes, because a crash may cut a character in two.
    lines = [
        (number, line)
        for number, line in enumerate(path.read_bytes().split(b"\n"), start=1)
        if line.strip()
    ]
    for number, line in lines:
        try:
            row = json.loads(line)
        except ValueError as error:
            if number == lines[-1][0]:
                return
            raise ReportError(
                f"{path}, line {number}: not JSON ({error}), an object was wanted; "
                "repair or remove that line."
            ) from error
        step = row.get("step") if isinstance(row, dict) else None
        if not math.isfinite(as_number(step)) or row.get("kind") not in ("train", "eval", "event"):
            raise ReportError(
                f"{path}, line {number}: got {json.dumps(row)[:80]}, wanted an object with a "
                'number as "step" and "train", "eval" or "event" as "kind"; repair or remove '
                "that line."
            )
        yield row


def _object(path: pathlib.Path) -> Row:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise ReportError(
            f"{path}: not JSON ({error}), an object was wanted; repair or remove it."
        ) from error
    if not isinstance(content, dict):
        raise ReportError(
            f"{path}: got {json.dumps(content)[:80]}, an object was wanted; repair or remove it."
        )
    return content


def printable(text: str) -> str:
    return "".join(
        letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text
    )


def as_number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def series(rows: Sequence[Row], key: str | None) -> tuple[list[float], list[float]]:
    """The steps and values of a field; NaN where it is there, but not a finite number."""
    points = [
        (float(row["step"]), as_number(row[key])) for row in rows if key is not None and key in row
    ]
    return [step for step, _ in points], [
        value if math.isfinite(value) else math.nan for _, value in points
    ]
