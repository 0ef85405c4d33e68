"""Turns the folders that training runs leave behind into plots, a table and one HTML page."""

from __future__ import annotations

import base64
import dataclasses
import html
import json
import math
import os
import pathlib
import re
import statistics
import warnings
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, NullLocator, ScalarFormatter

Row = dict[str, Any]
_Dashes = Literal["-", "--", ":", "-."]

# Okabe and Ito's colours, which colour-blind readers can tell apart, without the yellow (too faint
# on white) and with grey for black (which vanishes on a dark page).
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#6B6B6B")
_DASHES: tuple[_Dashes, ...] = ("-", "--", ":", "-.")
_MARKERS = ("o", "s", "^", "D")
_FIGURES = {
    "loss": "Loss",
    "violation": "Violation of the constraints",
    "metrics": "Evaluation",
    "solver": "Solver iterations",
    "time": "Time",
}
_HIGHER_IS_BETTER = frozenset(
    {"acc", "accuracy", "auc", "bleu", "f1", "iou", "precision", "psnr", "r2", "recall", "score"}
    | {"ssim", "top1", "top5"}
)
_STYLE = """
:root{color-scheme:light dark}
body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:0 auto;padding:1rem}
h1{font-size:1.5rem}h2{font-size:1.2rem;margin-top:2rem}h3{font-size:1rem;overflow-wrap:anywhere}
.scroll{overflow-x:auto}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:.9rem}
th,td{padding:.35rem .7rem;text-align:right;border-bottom:1px solid #8886;vertical-align:bottom}
th:first-child{text-align:left;position:sticky;left:0;background:Canvas;min-width:8rem;
max-width:45vw;overflow-wrap:anywhere}
thead th{font-weight:600}tbody th{font-weight:400}
.swatch{display:inline-block;width:.7em;height:.7em;border-radius:50%;margin-right:.5em}
img{max-width:100%;height:auto;background:#fff;border-radius:6px}
pre{overflow-x:auto;font-size:.85rem;padding:.6rem;border:1px solid #8886;border-radius:6px}
summary{cursor:pointer}
"""


class ReportError(ValueError):
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


@dataclasses.dataclass(frozen=True)
class _Shown:
    """A run with the name and the looks that it keeps throughout the page."""

    run: Run
    name: str
    label: str
    color: str
    dashes: _Dashes
    marker: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Panel:
    """One pair of axes: a field of the training lines, of the evaluation lines, or of both."""

    title: str
    train: str | None = None
    evaluation: str | None = None
    scale: Literal["log", "wide", "zero", "share"]


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
        name=_printable(run.resolve().name),
        config=_object(run / "config.json"),
        environment=_object(run / "environment.json"),
        train=[row for row in rows if row["kind"] == "train"],
        evaluation=[row for row in rows if row["kind"] == "eval"],
        events=events,
    )


def write(runs: Sequence[pathlib.Path], *, out: pathlib.Path) -> pathlib.Path:
    """Writes the plots of all runs, laid over each other, and a page that holds everything.

    Args:
        runs: The folders of the runs; one that is given twice is shown once.
        out: The folder to write to, which is made if need be: `report.html`, and of `loss.png`,
            `violation.png`, `metrics.png`, `solver.png` and `time.png` those that have data.

    Returns:
        The path of the page.

    Raises:
        ReportError: If there are no runs, one cannot be read, or `out` cannot be written to.
    """
    folders = list({pathlib.Path(run).resolve(): pathlib.Path(run) for run in runs}.values())
    if not folders:
        raise ReportError("`runs` is empty, at least one was wanted; give the folder of a run.")
    loaded = [load(folder) for folder in folders]
    names = _distinct([folder.resolve() for folder in folders])
    shown = [
        _Shown(
            run,
            name,
            label,
            color=_COLORS[index % len(_COLORS)],
            dashes=_DASHES[index // len(_COLORS) % len(_DASHES)],
            marker=_MARKERS[index % len(_MARKERS)],
        )
        for index, (run, name, label) in enumerate(
            zip(loaded, names, _shortened(names), strict=True)
        )
    ]
    page = out / "report.html"
    try:
        out.mkdir(parents=True, exist_ok=True)
        if page.exists():  # An older report's plots must not pass for this one's.
            for name in _FIGURES:
                (out / f"{name}.png").unlink(missing_ok=True)
        images = {}
        for name, panels in _panels(loaded).items():
            if panels:
                path = out / f"{name}.png"
                _draw(panels, shown, path=path)
                images[name] = path.read_bytes()
        # A lone surrogate, which JSON allows, cannot be encoded.
        page.write_text(_page(shown, images), encoding="utf-8", errors="replace")
    except OSError as error:
        raise ReportError(
            f"`out`: {out} cannot be written to ({error.strerror}), a folder was wanted; "
            "choose another one."
        ) from error
    return page


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
        if not math.isfinite(_number(step)) or row.get("kind") not in ("train", "eval", "event"):
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


def _printable(text: str) -> str:
    return "".join(
        letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text
    )


def _distinct(folders: Sequence[pathlib.Path]) -> list[str]:
    """The folders' names, with as many of their parents as it takes to tell them apart."""
    for depth in range(1, max(len(folder.parts) for folder in folders) + 1):
        names = ["/".join(folder.parts[-depth:]) for folder in folders]
        if len(set(names)) == len(names):
            break
    return [_printable(name) for name in names]


def _shortened(names: Sequence[str]) -> list[str]:
    """The names with the words that all of them begin with replaced by an ellipsis."""
    words = [re.split(r"(?<=[-_./ ])", name) for name in names]
    common = 0
    # The last word stays, so that no name is left empty.
    while common < min(map(len, words)) - 1 and len({some[common] for some in words}) == 1:
        common += 1
    if len(names) == 1 or common == 0:
        return list(names)
    return ["…" + "".join(some[common:]) for some in words]


def _panels(runs: Sequence[Run]) -> dict[str, list[_Panel]]:
    constraints = _constraints(runs)
    panels = {
        "loss": [_Panel(title="training loss", train="loss", scale="log")],
        "violation": [
            _Panel(
                title=name,
                train=f"constraints/{name}/violation",
                evaluation=f"violation/{name}",
                scale="log",
            )
            for name in constraints
        ],
        "metrics": [
            _Panel(title=key, evaluation=key, scale="wide")
            for key in _evaluated(runs)
            if not key.startswith("violation/")
        ],
        "solver": [
            _Panel(title=name, train=f"constraints/{name}/iterations", scale="zero")
            for name in constraints
        ],
        "time": [
            _Panel(title="steps per second", train="steps_per_second", scale="zero"),
            _Panel(title="share of time spent waiting for data", train="data_wait", scale="share"),
        ],
    }
    return {
        name: [panel for panel in group if any(_values(panel, run) for run in runs)]
        for name, group in panels.items()
    }


def _constraints(runs: Sequence[Run]) -> list[str]:
    """The names of the constraints, in the order in which they first appear."""
    fields = dict.fromkeys(key for run in runs for row in run.train for key in row)
    found = [re.fullmatch(r"constraints/(.+)/(violation|iterations)", key) for key in fields]
    trained = [match[1] for match in found if match]
    evaluated = [key for key in _evaluated(runs) if key.startswith("violation/")]
    return list(dict.fromkeys([*trained, *(key.removeprefix("violation/") for key in evaluated)]))


def _evaluated(runs: Sequence[Run]) -> list[str]:
    """The figures that evaluations recorded, in the order in which they first appear."""
    return list(
        dict.fromkeys(
            key
            for run in runs
            for row in run.evaluation
            for key, value in row.items()
            if key not in ("step", "time", "kind")
            and (value is None or isinstance(value, int | float))
        )
    )


def _series(rows: Sequence[Row], key: str | None) -> tuple[list[float], list[float]]:
    """The steps and values of a field; NaN where it is there, but not a finite number."""
    points = [
        (float(row["step"]), _number(row[key])) for row in rows if key is not None and key in row
    ]
    return [step for step, _ in points], [
        value if math.isfinite(value) else math.nan for _, value in points
    ]


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def _values(panel: _Panel, run: Run) -> list[float]:
    values = _series(run.train, panel.train)[1] + _series(run.evaluation, panel.evaluation)[1]
    return [value for value in values if math.isfinite(value)]


def _draw(panels: Sequence[_Panel], shown: Sequence[_Shown], *, path: pathlib.Path) -> None:
    columns = 1 if len(panels) <= 4 else 2
    rows = math.ceil(len(panels) / columns)
    entries = _legend(panels, shown)
    longest = max((len(label) for label, _ in entries), default=0)
    legend_columns = max(1, min(4, len(entries), 84 * columns // (longest + 8)))
    legend_rows = math.ceil(len(entries) / legend_columns)
    # Agg draws at most 2¹⁶ pixels.
    height = min((3.4 if rows == 1 else 2.4 * rows) + 0.22 * legend_rows, 400.0)
    with warnings.catch_warnings():  # Names may hold letters that the font lacks.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        figure = Figure(figsize=(7.0 * columns**0.5, height), layout="constrained")
        grid = figure.subplots(rows, columns, squeeze=False, sharex=True)
        for index, axes in enumerate(grid.flat):
            if index >= len(panels):
                axes.set_visible(False)
                continue
            _fill(axes, panels[index], shown)
            if index + columns >= len(panels):
                axes.set_xlabel("step")
                axes.tick_params(labelbottom=True)
        if entries:
            # A label that begins with an underscore would be left out, so they are set afterwards.
            legend = figure.legend(
                [handle for _, handle in entries],
                [str(number) for number in range(len(entries))],
                loc="outside upper left",
                ncols=legend_columns,
                frameon=False,
                fontsize=9,
            )
            for text, (label, _) in zip(legend.get_texts(), entries, strict=True):
                text.set_text(label)
                text.set_parse_math(False)  # A dollar in a name is a dollar.
        figure.savefig(path, dpi=150, metadata={"Software": None})


def _legend(panels: Sequence[_Panel], shown: Sequence[_Shown]) -> list[tuple[str, Line2D]]:
    entries = []
    if len(shown) > 1:
        for one in shown:
            line = Line2D([], [], color=one.color, linestyle=one.dashes, linewidth=2)
            entries.append((one.label, line))
    runs = [one.run for one in shown]
    if any(
        panel.train and any(_series(run.evaluation, panel.evaluation)[0] for run in runs)
        for panel in panels
    ):
        dark = "#333333"
        entries.append(("training", Line2D([], [], color=dark, linewidth=1.3)))
        marker = Line2D([], [], color=dark, linestyle="", marker="o", markersize=5)
        entries.append(("evaluation", marker))
    return entries


def _fill(axes: Axes, panel: _Panel, shown: Sequence[_Shown]) -> None:
    for one in shown:
        steps, values = _series(one.run.train, panel.train)
        finite = [False, *map(math.isfinite, values), False]
        # A point without neighbours has no line to be seen by.
        alone = [
            index
            for index in range(len(values))
            if finite[index + 1] and not finite[index] and not finite[index + 2]
        ]
        axes.plot(
            steps, values, color=one.color, linestyle=one.dashes, linewidth=1.3, alpha=0.85,
            marker=".", markevery=alone,
        )  # fmt: skip
        axes.plot(
            *_series(one.run.evaluation, panel.evaluation), color=one.color,
            linestyle="" if panel.train else one.dashes, linewidth=1.3, marker=one.marker,
            markersize=5, markeredgecolor="white", markeredgewidth=0.6,
        )  # fmt: skip
    values = [value for one in shown for value in _values(panel, one.run)]
    low, high = min(values), max(values)
    if low > 0 and (panel.scale == "log" or (panel.scale == "wide" and high > 100 * low)):
        axes.set_yscale("log")
        if high < 10 * low:  # Too few powers of ten to read the axis by.
            axes.yaxis.set_major_locator(MaxNLocator(5))
            axes.yaxis.set_major_formatter(ScalarFormatter(useOffset=False))
            axes.yaxis.set_minor_locator(NullLocator())
    elif panel.scale in ("zero", "share"):
        axes.set_ylim(bottom=min(0.0, low), top=1.08 * high if high > 0 else 1.0)
    if panel.scale == "share":
        axes.yaxis.set_major_formatter(lambda share, _: f"{100 * share:g}%")
    axes.set_title(_printable(panel.title), loc="left", fontsize=10, parse_math=False)
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=9, which="both")


def _table(shown: Sequence[_Shown]) -> str:
    runs = [one.run for one in shown]
    columns: list[tuple[str, list[str]]] = [
        ("steps", [f"{max(_steps(run), default=0):.0f}" for run in runs])
    ]
    columns.append(("last loss", [_last(run.train, "loss") for run in runs]))
    for key in _evaluated(runs):
        if not key.startswith("violation/"):
            best, word = (max, "highest") if _is_higher_better(key) else (min, "lowest")
            figures = [_series(run.evaluation, key)[1] for run in runs]
            finite = [[value for value in some if math.isfinite(value)] for some in figures]
            columns.append(
                (f"{key}, {word}", [_figure(best(some)) if some else "–" for some in finite])
            )
            columns.append((f"{key}, last", [_last(run.evaluation, key) for run in runs]))
    for name in _constraints(runs):
        for word, cells in (
            ("training", [_last(run.train, f"constraints/{name}/violation") for run in runs]),
            ("evaluation", [_last(run.evaluation, f"violation/{name}") for run in runs]),
        ):
            if set(cells) != {"–"}:
                columns.append((f"violation of {name}, last, {word}", cells))
    columns.append(("steps/s, median", [_rate(run) for run in runs]))
    columns.append(("total time", [_duration(run) for run in runs]))
    head = "".join(f'<th scope="col">{html.escape(heading)}</th>' for heading, _ in columns)
    body = "".join(
        f'<tr><th scope="row">{_named(one)}</th>'
        + "".join(f"<td>{html.escape(cells[index])}</td>" for _, cells in columns)
        + "</tr>\n"
        for index, one in enumerate(shown)
    )
    return (
        f'<div class="scroll"><table>\n<thead><tr><th scope="col">run</th>{head}</tr></thead>\n'
        f"<tbody>\n{body}</tbody></table></div>"
    )


def _named(one: _Shown) -> str:
    swatch = f'<span class="swatch" style="background:{one.color}"></span>'
    return swatch + html.escape(one.name)


def _steps(run: Run) -> list[float]:
    return [row["step"] for row in (*run.train, *run.evaluation)]


def _is_higher_better(key: str) -> bool:
    return not _HIGHER_IS_BETTER.isdisjoint(re.split(r"[^a-z0-9]+", key.lower()))


def _figure(value: float) -> str:
    return f"{value:.4g}" if not math.isnan(value) else "NaN"


def _last(rows: Sequence[Row], key: str) -> str:
    values = [_number(row[key]) for row in rows if key in row]
    return _figure(values[-1]) if values else "–"


def _rate(run: Run) -> str:
    # The median, because the first line counts the compilation in.
    rates = [rate for rate in _series(run.train, "steps_per_second")[1] if math.isfinite(rate)]
    return _figure(statistics.median(rates)) if rates else "–"


def _duration(run: Run) -> str:
    total = max(_elapsed(run.train), _elapsed(run.evaluation))
    if total <= 0:
        return "–"
    if total < 60:
        return f"{total:.1f} s"
    minutes = round(total / 60)
    if minutes < 60:
        return f"{int(total // 60)} min {int(total % 60)} s"
    return f"{minutes // 60} h {minutes % 60} min"


def _elapsed(rows: Sequence[Row]) -> float:
    """The time of the last line, added up over resumes if these start the clock anew."""
    total = last = 0.0
    for time in _series(rows, "time")[1]:
        if math.isfinite(time):
            if time < last:
                total += last
            last = time
    return total + last


def _page(shown: Sequence[_Shown], images: dict[str, bytes]) -> str:
    title = "Report: " + ", ".join(one.name for one in shown[:3]) + (", …" if shown[3:] else "")
    parts = [
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width,initial-scale=1">',
        f"<title>{html.escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>",
        f"<h1>{'Training run' if len(shown) == 1 else f'{len(shown)} training runs'}</h1>",
        _table(shown),
    ]
    for name, image in images.items():
        data = base64.b64encode(image).decode()
        parts.append(
            f"<h2>{_FIGURES[name]}</h2>\n"
            f'<img alt="{_FIGURES[name]} by step" src="data:image/png;base64,{data}">'
        )
    parts.append("<h2>Runs</h2>")
    for one in shown:
        parts.append(f"<h3>{_named(one)}</h3>")
        for word, content in (("Config", one.run.config), ("Environment", one.run.environment)):
            text = json.dumps(content, indent=2, ensure_ascii=False) if content else "not recorded"
            parts.append(
                f"<details><summary>{word}</summary><pre>{html.escape(text)}</pre></details>"
            )
        events = "".join(
            f"<li>step {event['step']:.0f}: {html.escape(str(event.get('message', '')))}</li>\n"
            for event in one.run.events
        )
        parts.append(f"<ul>\n{events}</ul>" if events else "<p>No events.</p>")
    return "\n".join([*parts, "</body>\n</html>\n"])
