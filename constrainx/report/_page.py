"""One HTML page with plots, a table, and what the runs were."""

from __future__ import annotations

import base64
import html
import json
import math
import pathlib
import re
import statistics
from collections.abc import Sequence

from constrainx.report._plots import (
    COLORS,
    DASHES,
    FIGURES,
    MARKERS,
    Shown,
    arrange_panels,
    draw_panels,
    find_constraints,
    find_evaluated,
    name_folders,
    shorten_names,
)
from constrainx.report._runs import ReportError, Row, Run, as_number, load, read_series
from constrainx.report._settings import find_differences
from constrainx.report._sorting import SORT
from constrainx.runtime import (
    constraint_metric,
    parse_relative_metric,
    parse_violation_metric,
    relative_metric,
    violation_metric,
)

_STYLE = """
:root{color-scheme:light dark}
body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:0 auto;padding:1rem}
h1{font-size:1.5rem}h2{font-size:1.2rem;margin-top:2rem}h3{font-size:1rem;overflow-wrap:anywhere}
.scroll{overflow-x:auto}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:.9rem}
td{white-space:nowrap}
th,td{padding:.35rem .7rem;text-align:right;border-bottom:1px solid #8886;vertical-align:bottom}
th:first-child{text-align:left;position:sticky;left:0;background:Canvas;min-width:8rem;
max-width:45vw;overflow-wrap:anywhere}
thead th{font-weight:600}tbody th{font-weight:400}
.swatch{display:inline-block;width:.7em;height:.7em;border-radius:50%;margin-right:.5em}
img{max-width:100%;height:auto;background:#fff;border-radius:6px}
pre{overflow-x:auto;font-size:.85rem;padding:.6rem;border:1px solid #8886;border-radius:6px}
summary{cursor:pointer}
.sortable thead th{cursor:pointer}.sortable thead th:hover{text-decoration:underline}
th[aria-sort=ascending]::after{content:" ▴"}th[aria-sort=descending]::after{content:" ▾"}
.pictures{display:flex;flex-wrap:wrap;gap:1rem}.pictures figure{margin:0;flex:1 1 20rem}
"""


_HIGHER_IS_BETTER = frozenset(
    {"acc", "accuracy", "auc", "bleu", "f1", "iou", "precision", "psnr", "r2", "recall", "score"}
    | {"ssim", "top1", "top5"}
)


def write(runs: Sequence[pathlib.Path], *, out: pathlib.Path) -> pathlib.Path:
    """Writes plots that show all runs together, and one page that holds everything.

    Args:
        runs: The folders of the runs; one that is given twice is shown once.
        out: The folder to write to, which is created if there is none. It gets `report.html`, and
            those of `loss.png`, `violation.png`, `metrics.png`, `solver.png` and `time.png` that
            have data to show.

    Returns:
        The path of the page.

    Raises:
        ReportError: If there are no runs, one cannot be read, or `out` cannot be written to.
    """
    folders = list({pathlib.Path(run).resolve(): pathlib.Path(run) for run in runs}.values())
    if not folders:
        raise ReportError("`runs` must name at least one run, got none: give the folder of a run.")
    loaded = [load(folder) for folder in folders]
    names = name_folders([folder.resolve() for folder in folders])
    shown = [
        Shown(
            run,
            name,
            label,
            color=COLORS[index % len(COLORS)],
            dashes=DASHES[index // len(COLORS) % len(DASHES)],
            marker=MARKERS[index % len(MARKERS)],
        )
        for index, (run, name, label) in enumerate(
            zip(loaded, names, shorten_names(names), strict=True)
        )
    ]
    page = out / "report.html"
    try:
        out.mkdir(parents=True, exist_ok=True)
        if page.exists():  # Plots of an older report must not be taken for those of this one.
            for name in FIGURES:
                (out / f"{name}.png").unlink(missing_ok=True)
        images = {}
        for name, panels in arrange_panels(loaded).items():
            if panels:
                path = out / f"{name}.png"
                draw_panels(panels, shown, path=path)
                images[name] = path.read_bytes()
        # A lone surrogate, which JSON allows, cannot be encoded.
        page.write_text(_make_page(shown, images), encoding="utf-8", errors="replace")
    except OSError as error:
        raise ReportError(
            f"`out` must be a folder that can be written to, got {out}: {error.strerror}. Choose "
            "another one."
        ) from error
    return page


def _make_table(shown: Sequence[Shown]) -> str:
    runs = [one.run for one in shown]
    columns: list[tuple[str, list[str]]] = [
        ("steps", [f"{max(_steps(run), default=0):.0f}" for run in runs])
    ]
    columns.append(("last loss", [_last_value(run.train, "loss") for run in runs]))
    constraints = find_constraints(runs)
    for key in find_evaluated(runs):
        if parse_violation_metric(key) is None and parse_relative_metric(key) not in constraints:
            best, word = (max, "highest") if _is_higher_better(key) else (min, "lowest")
            figures = [read_series(run.evaluation, key)[1] for run in runs]
            finite = [[value for value in some if math.isfinite(value)] for some in figures]
            columns.append(
                (f"{key}, {word}", [_format_figure(best(some)) if some else "–" for some in finite])
            )
            columns.append((f"{key}, last", [_last_value(run.evaluation, key) for run in runs]))
    for name in constraints:
        trained, evaluated = constraint_metric(name, "violation"), violation_metric(name)
        relative = relative_metric(name)
        for word, cells in (
            ("training", [_last_value(run.train, trained) for run in runs]),
            ("evaluation", [_last_value(run.evaluation, evaluated) for run in runs]),
            ("relative to the output", [_last_value(run.evaluation, relative) for run in runs]),
        ):
            if set(cells) != {"–"}:
                columns.append((f"violation of {name}, last, {word}", cells))
    columns.append(("steps/s, median", [_median_rate(run) for run in runs]))
    columns.append(("total time", [_format_duration(run) for run in runs]))
    head = "".join(f'<th scope="col">{html.escape(heading)}</th>' for heading, _ in columns)
    body = "".join(
        f'<tr><th scope="row">{_label_run(one)}</th>'
        + "".join(f"<td>{html.escape(cells[index])}</td>" for _, cells in columns)
        + "</tr>\n"
        for index, one in enumerate(shown)
    )
    return (
        '<div class="scroll"><table class="sortable">\n<thead><tr><th scope="col">run</th>'
        f"{head}</tr></thead>\n"
        f"<tbody>\n{body}</tbody></table></div>"
    )


def _make_certificates(shown: Sequence[Shown]) -> list[str]:
    """A table of the constraints of every run that was certified."""
    certified = [one for one in shown if isinstance(one.run.certificate.get("constraints"), dict)]
    if not certified:
        return []
    fields = ("mean", "upper", "largest", "where", "relative", "share", "share_upper", "tolerance")
    headings = ["mean", "bound on the mean", "largest", "at", "relative to the output"]
    headings += ["share above tolerance", "bound on the share", "tolerance", "met"]
    body = []
    for one in certified:
        step = as_number(one.run.certificate.get("step"))
        for name, found in one.run.certificate["constraints"].items():
            found = found if isinstance(found, dict) else {}
            cells = [_format_found(found.get(field)) for field in fields]
            cells.append("yes" if found.get("met") is True else "<strong>no</strong>")
            label = f"{_label_run(one)}, step {step:.0f}: {html.escape(str(name))}"
            body.append(
                f'<tr><th scope="row">{label}</th>'
                + "".join(f"<td>{cell}</td>" for cell in cells)
                + "</tr>\n"
            )
    head = "".join(f'<th scope="col">{heading}</th>' for heading in headings)
    return [
        "<h2>Constraints on held-out data</h2>",
        f'<div class="scroll"><table>\n<thead><tr><th scope="col">constraint</th>{head}</tr>'
        f"</thead>\n<tbody>\n{''.join(body)}</tbody></table></div>",
    ]


def _make_differences(shown: Sequence[Shown]) -> list[str]:
    """A table of the settings in which the runs differ."""
    differences = find_differences([one.run.config for one in shown])
    if not differences:
        return []
    head = "".join(f'<th scope="col">{_label_run(one)}</th>' for one in shown)
    body = "".join(
        f'<tr class="setting"><th scope="row">{html.escape(name)}</th>'
        + "".join(f"<td>{html.escape(value)}</td>" for value in values)
        + "</tr>\n"
        for name, values in differences.items()
    )
    return [
        "<h2>Settings that differ</h2>",
        '<div class="scroll"><table>\n<thead><tr class="setting"><th scope="col">setting</th>'
        f"{head}</tr></thead>\n<tbody>\n{body}</tbody></table></div>",
    ]


def _make_pictures(shown: Sequence[Shown]) -> list[str]:
    """What the recipes drew of their results, beside each other."""
    figures = [
        f'<figure><img alt="{html.escape(one.name)}" src="{_embed(one.run.picture)}">'
        f"<figcaption>{_label_run(one)}</figcaption></figure>"
        for one in shown
        if one.run.picture is not None
    ]
    if not figures:
        return []
    return ["<h2>Results</h2>", '<div class="pictures">', *figures, "</div>"]


def _embed(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


def _format_found(value: object) -> str:
    return "–" if value is None else _format_figure(as_number(value))


def _label_run(one: Shown) -> str:
    swatch = f'<span class="swatch" style="background:{one.color}"></span>'
    return swatch + html.escape(one.name)


def _steps(run: Run) -> list[float]:
    return [row["step"] for row in (*run.train, *run.evaluation)]


def _is_higher_better(key: str) -> bool:
    return not _HIGHER_IS_BETTER.isdisjoint(re.split(r"[^a-z0-9]+", key.lower()))


def _format_figure(value: float) -> str:
    return f"{value:.4g}" if not math.isnan(value) else "NaN"


def _last_value(rows: Sequence[Row], key: str) -> str:
    values = [as_number(row[key]) for row in rows if key in row]
    return _format_figure(values[-1]) if values else "–"


def _median_rate(run: Run) -> str:
    # The median, because the first line includes compilation.
    rates = [rate for rate in read_series(run.train, "steps_per_second")[1] if math.isfinite(rate)]
    return _format_figure(statistics.median(rates)) if rates else "–"


def _format_duration(run: Run) -> str:
    total = max(_add_up_time(run.train), _add_up_time(run.evaluation))
    if total <= 0:
        return "–"
    if total < 60:
        return f"{total:.1f} s"
    minutes = round(total / 60)
    if minutes < 60:
        return f"{int(total // 60)} min {int(total % 60)} s"
    return f"{minutes // 60} h {minutes % 60} min"


def _add_up_time(rows: Sequence[Row]) -> float:
    """The time of the last line, plus that before each resume that restarted the clock."""
    total = last = 0.0
    for time in read_series(rows, "time")[1]:
        if math.isfinite(time):
            if time < last:
                total += last
            last = time
    return total + last


def _make_page(shown: Sequence[Shown], images: dict[str, bytes]) -> str:
    title = "Report: " + ", ".join(one.name for one in shown[:3]) + (", …" if shown[3:] else "")
    parts = [
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width,initial-scale=1">',
        f"<title>{html.escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>",
        f"<h1>{'Training run' if len(shown) == 1 else f'{len(shown)} training runs'}</h1>",
        _make_table(shown),
        *_make_certificates(shown),
        *_make_pictures(shown),
    ]
    for name, image in images.items():
        parts.append(
            f'<h2>{FIGURES[name]}</h2>\n<img alt="{FIGURES[name]} by step" src="{_embed(image)}">'
        )
    parts += _make_differences(shown)
    parts.append("<h2>Runs</h2>")
    for one in shown:
        parts.append(f"<h3>{_label_run(one)}</h3>")
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
    return "\n".join([*parts, f"<script>{SORT}</script>", "</body>\n</html>\n"])
