"""Reports of runs that were made by hand: resumed, cut off, diverged, oddly named."""

import base64
import json
import math
import re
import struct

import pytest

from constrainx import report
from constrainx.report import _plots


def train(step, **fields):
    return {"step": step, "time": step / 100, "kind": "train", "loss": 1 / step, **fields}


def evaluate(step, **fields):
    return {"step": step, "time": step / 100 + 0.5, "kind": "eval", **fields}


def resume_event(step):
    return {"step": step, "kind": "event", "message": f"resumed from step {step}"}


def make(folder, rows, *, tail="", config=None, environment=None):
    folder.mkdir(parents=True)
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "metrics.jsonl").write_text(lines + tail, encoding="utf-8")
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    if environment is not None:
        (folder / "environment.json").write_text(json.dumps(environment))
    return folder


def make_run(folder, *, constraint="O(3)", factor=1.0):
    rows = []
    for step in range(100, 1100, 100):
        fields = {
            "steps_per_second": 10.0 if step == 100 else 100.0 * factor,
            "data_wait": 0.01,
            f"constraints/{constraint}/violation": factor / step,
            f"constraints/{constraint}/met": 0.0,
            f"constraints/{constraint}/resolved": 1.0,
            f"constraints/{constraint}/iterations": 3.0,
        }
        rows.append(train(step, **fields))
        if step % 500 == 0:
            figures = {"error": factor * (0.25 if step == 500 else 0.5), "accuracy": step / 2000}
            rows.append(evaluate(step, **figures, **{f"violation/{constraint}": factor * 0.02}))
    return make(folder, rows, config={"recipe": "o3-inertia"}, environment={"jax": "0.10.2"})


def table(page):
    """The table as {run: {heading: cell}}."""
    text = page.read_text(encoding="utf-8")

    def cells(row):
        return [
            re.sub("<[^>]*>", "", cell) for cell in re.findall(r"<t[hd]\b.*?>(.*?)</t[hd]>", row)
        ]

    head, *body = [cells(row) for row in re.findall(r"<tr>(.*?)</tr>", text, re.DOTALL)]
    return {row[0]: dict(zip(head[1:], row[1:], strict=True)) for row in body}


def images(page):
    sources = re.findall(r'<img [^>]*src="([^"]*)"', page.read_text(encoding="utf-8"))
    assert all(source.startswith("data:image/png;base64,") for source in sources)
    return [base64.b64decode(source.partition(",")[2], validate=True) for source in sources]


def without_images(page):
    return re.sub(r"base64,[^\"]*", "", page.read_text(encoding="utf-8"))


def test_a_run_is_read_as_it_was_written(tmp_path):
    run = report.load(make_run(tmp_path / "one"))
    assert run.name == "one"
    assert run.config == {"recipe": "o3-inertia"}
    assert run.environment == {"jax": "0.10.2"}
    assert [row["step"] for row in run.train] == list(range(100, 1100, 100))
    assert [row["step"] for row in run.evaluation] == [500, 1000]
    assert run.events == []


def test_the_table_shows_the_right_figures(tmp_path):
    page = report.write([make_run(tmp_path / "one")], out=tmp_path / "out")
    assert page == tmp_path / "out" / "report.html"
    assert table(page) == {
        "one": {
            "steps": "1000",
            "last loss": "0.001",
            "error, lowest": "0.25",
            "error, last": "0.5",
            "accuracy, highest": "0.5",
            "accuracy, last": "0.5",
            "violation of O(3), last, training": "0.001",
            "violation of O(3), last, evaluation": "0.02",
            "steps/s, median": "100",
            "total time": "10.5 s",
        }
    }


def test_the_page_embeds_every_plot_and_loads_nothing(tmp_path):
    out = tmp_path / "out"
    page = report.write(
        [make_run(tmp_path / "one"), make_run(tmp_path / "two", factor=2.0)], out=out
    )
    names = ["loss", "violation", "metrics", "solver", "time"]
    assert {path.name for path in out.iterdir()} == {"report.html", *(f"{n}.png" for n in names)}
    assert images(page) == [(out / f"{name}.png").read_bytes() for name in names]
    for image in images(page):
        width, height = struct.unpack(">II", image[16:24])
        assert 900 <= width <= 1600
        assert 450 <= height <= 1600
        assert 10_000 < len(image) < 500_000
    text = without_images(page)
    for word in ("http", "<script ", "<link", "url(", "@import", "fetch("):
        assert word not in text
    assert 'name="viewport"' in text
    assert "color-scheme:light dark" in text
    assert text.count("<details>") == 4
    assert "&quot;recipe&quot;: &quot;o3-inertia&quot;" in text
    assert "&quot;jax&quot;: &quot;0.10.2&quot;" in text


def test_runs_may_have_different_constraints(tmp_path):
    runs = [
        make_run(tmp_path / "a"),
        make_run(tmp_path / "b", constraint="unit/norm", factor=3.0),
    ]
    page = report.write(runs, out=tmp_path / "out")
    figures = table(page)
    assert figures["a"]["violation of O(3), last, evaluation"] == "0.02"
    assert figures["b"]["violation of O(3), last, evaluation"] == "–"
    assert figures["b"]["violation of unit/norm, last, evaluation"] == "0.06"
    assert figures["a"]["violation of unit/norm, last, training"] == "–"
    assert figures["b"]["error, lowest"] == "0.75"


def test_a_resume_drops_earlier_lines_of_later_steps(tmp_path):
    rows = [
        *(train(step, loss=1.0) for step in (100, 200, 300, 400)),
        evaluate(400, error=0.001),
        resume_event(200),
        *(train(step, loss=2.0) for step in (250, 300)),
    ]
    run = report.load(make(tmp_path / "run", rows))
    assert [(row["step"], row["loss"]) for row in run.train] == [
        (100, 1.0), (200, 1.0), (250, 2.0), (300, 2.0)
    ]  # fmt: skip
    assert run.evaluation == []
    page = report.write([tmp_path / "run"], out=tmp_path / "out")
    assert table(page)["run"]["steps"] == "300"
    assert "<li>step 200: resumed from step 200</li>" in page.read_text()


def test_the_later_of_two_lines_of_one_step_counts(tmp_path):
    rows = [train(100, loss=1.0), train(200, loss=1.0), train(100, loss=3.0)]
    run = report.load(make(tmp_path / "run", rows))
    assert [(row["step"], row["loss"]) for row in run.train] == [(100, 3.0), (200, 1.0)]


def test_other_events_drop_nothing(tmp_path):
    event = {"step": 100, "kind": "event", "message": "saved, can be resumed"}
    run = report.load(make(tmp_path / "run", [train(100), train(200), event]))
    assert len(run.train) == 2
    assert run.events == [event]


@pytest.mark.parametrize("tail", ['{"step": 300, "lo', '{"step": 300, "lo\n', "{", "\n\n"])
def test_a_last_line_that_was_cut_off_is_ignored(tmp_path, tail):
    run = report.load(make(tmp_path / "run", [train(100), train(200)], tail=tail))
    assert [row["step"] for row in run.train] == [100, 200]


def test_a_last_line_that_was_cut_within_a_character_is_ignored(tmp_path):
    folder = make(tmp_path / "run", [train(100)])
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write('{"step": 200, "message": "ü'.encode()[:-1])
    assert len(report.load(folder).train) == 1


@pytest.mark.parametrize("restart", [0.0, 2.0])
def test_total_time_adds_up_over_resumes(tmp_path, restart):
    """Whether a resume goes on with the clock of step 200, at 2 seconds, or starts a new one."""
    rows = [train(100), train(200), train(300), resume_event(200), train(300, time=restart + 1)]
    page = report.write([make(tmp_path / "run", rows)], out=tmp_path / "out")
    assert table(page)["run"]["total time"] == "3.0 s"


@pytest.mark.parametrize(
    ("seconds", "text"), [(75.0, "1 min 15 s"), (3720.0, "1 h 2 min"), (3599.9, "1 h 0 min")]
)
def test_long_times_are_readable(tmp_path, seconds, text):
    run = make(tmp_path / "run", [train(100, time=seconds)])
    assert table(report.write([run], out=tmp_path / "out"))["run"]["total time"] == text


def test_values_that_are_not_finite_are_gaps_in_plots_and_named_in_the_table(tmp_path, monkeypatch):
    rows = [
        train(100, loss=0.5),
        train(200, loss=None),
        train(300, loss=math.inf),
        train(400, loss=math.nan),
        evaluate(100, error=0.5),
        evaluate(200, error=math.nan),
    ]
    lines = []
    plot = _plots.Axes.plot
    monkeypatch.setattr(
        _plots.Axes, "plot", lambda *a, **k: lines.append(a[1:]) or plot(*a, **k)
    )  # fmt: skip
    page = report.write([make(tmp_path / "run", rows)], out=tmp_path / "out")
    figures = table(page)["run"]
    assert figures["last loss"] == "NaN"
    assert figures["error, lowest"] == "0.5"
    assert figures["error, last"] == "NaN"
    steps, values = lines[0]
    assert steps == [100, 200, 300, 400]
    assert values[0] == 0.5
    assert all(math.isnan(value) for value in values[1:])


def test_a_point_between_gaps_is_marked(tmp_path):
    losses = [0.5, None, 0.4, 0.3, None, 0.2, None]
    rows = [train(1 + index, loss=loss) for index, loss in enumerate(losses)]
    run = report.load(make(tmp_path / "run", rows))
    axes = _plots.Figure().subplots()
    (panel,) = _plots.arrange_panels([run])["loss"]
    _plots._draw_panel(axes, panel, [_plots.Shown(run, "run", "run", "#000000", "-", "o")])
    line = axes.lines[0]
    assert line.get_marker() == "."
    assert line.get_markevery() == [0, 5]


def test_a_run_that_only_diverged_has_a_table_and_no_plot(tmp_path):
    row = train(1, loss=None, **{"constraints/O(3)/violation": None})
    page = report.write([make(tmp_path / "run", [row])], out=tmp_path / "out")
    assert images(page) == []
    assert table(page)["run"]["last loss"] == "NaN"
    assert table(page)["run"]["violation of O(3), last, training"] == "NaN"


@pytest.mark.parametrize(("losses", "scale"), [((1.0, 0.1), "log"), ((1.0, -0.1), "linear")])
def test_the_scale_is_logarithmic_where_all_is_positive(tmp_path, losses, scale):
    rows = [train(100 * (1 + index), loss=loss) for index, loss in enumerate(losses)]
    run = report.load(make(tmp_path / "run", rows))
    axes = _plots.Figure().subplots()
    (panel,) = _plots.arrange_panels([run])["loss"]
    _plots._draw_panel(axes, panel, [_plots.Shown(run, "run", "run", "#000000", "-", "o")])
    assert axes.get_yscale() == scale


@pytest.mark.parametrize(("low", "high"), [(0.51, 0.512), (1.0, 9.0), (2e-6, 3e-6), (3.0, 3.0)])
def test_a_narrow_logarithmic_axis_can_be_read(tmp_path, monkeypatch, low, high):
    labels = []
    save = _plots.Figure.savefig

    def spy(figure, *arguments, **keywords):
        save(figure, *arguments, **keywords)
        bottom, top = figure.axes[0].get_ylim()
        ticks = figure.axes[0].get_yticklabels()
        labels.extend(t.get_text() for t in ticks if bottom <= t.get_position()[1] <= top)

    monkeypatch.setattr(_plots.Figure, "savefig", spy)
    run = make(tmp_path / "run", [train(1, loss=high), train(2, loss=low)])
    report.write([run], out=tmp_path / "out")
    assert len(set(labels)) == len(labels) >= 2


def test_the_settings_that_differ_are_shown(tmp_path):
    configs = [
        {"recipe": "r", "seed": 0, "keep": {"last": 3, "best": 1}},
        {"recipe": "r", "seed": 1, "keep": {"last": 3, "best": 2}, "<i>": None},
    ]
    runs = [
        make(tmp_path / str(index), [train(1)], config=config)
        for index, config in enumerate(configs)
    ]
    text = without_images(report.write(runs, out=tmp_path / "out"))
    rows = re.findall(r'<tr class="setting"><th scope="row">(.*?)</th>(.*?)</tr>', text)
    assert [(name, re.findall("<td>(.*?)</td>", cells)) for name, cells in rows] == [
        ("&lt;i&gt;", ["–", "null"]),
        ("keep.best", ["1", "2"]),
        ("seed", ["0", "1"]),
    ]
    alone = report.write(runs[:1], out=tmp_path / "alone")
    assert "Settings that differ" not in without_images(alone)


def test_the_pictures_of_recipes_are_shown(tmp_path):
    runs = [make_run(tmp_path / name) for name in ("one", "two", "three")]
    report.write(runs[:1], out=tmp_path / "some")
    picture = (tmp_path / "some" / "loss.png").read_bytes()
    (runs[0] / "picture.png").write_bytes(picture)
    (runs[1] / "picture.png").write_text("<script>")  # no picture
    page = report.write(runs, out=tmp_path / "out")
    assert images(page)[0] == picture
    assert len(images(page)) == 6


def test_odd_names_are_escaped_and_drawn(tmp_path):
    names = ["_<b>&\"'", "a$b$c^{", "日本 🙂", "new\nline", "%s {0}", "\\alpha$"]
    runs = [make_run(tmp_path / name, constraint="<i>$x_{$</i>") for name in names]
    event = {"step": 1, "kind": "event", "message": "<script>alert(1)</script>"}
    config = {"</pre><script>": "\ud800 & <img src=x>"}
    runs.append(make(tmp_path / "last", [train(1), event], config=config))
    page = report.write(runs, out=tmp_path / "out")
    text = without_images(page)
    # One, which sorts the table.
    assert text.count("<script") == text.count("<script>\nfor (const table") == 1
    assert "<b>" not in text
    assert "<i>" not in text
    assert "<img src=x" not in text
    assert "_&lt;b&gt;&amp;&quot;&#x27;" in text
    assert "violation of &lt;i&gt;$x_{$&lt;/i&gt;" in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert "日本 🙂" in text
    assert len(table(page)) == 7


def test_odd_names_reach_the_legend_and_are_not_formulas(tmp_path, monkeypatch):
    seen = []
    ticks = []
    save = _plots.Figure.savefig

    def spy(figure, *arguments, **keywords):
        seen.append([text.get_text() for text in figure.legends[0].get_texts()])
        assert not any(text.get_parse_math() for text in figure.legends[0].get_texts())
        save(figure, *arguments, **keywords)
        ticks.extend(figure.axes[0].get_yticklabels())

    monkeypatch.setattr(_plots.Figure, "savefig", spy)
    runs = [make(tmp_path / name, [train(1), train(1000)]) for name in ("_hidden", "$x$")]
    report.write(runs, out=tmp_path / "out")
    assert seen == [["_hidden", "$x$"]]
    # The powers of ten, on the other hand, are formulas.
    assert all(tick.get_parse_math() for tick in ticks)
    assert any("10^{-1}" in tick.get_text() for tick in ticks)


@pytest.mark.parametrize(
    ("names", "labels"),
    [
        (["o3-inertia-plain", "o3-inertia-null"], ["…plain", "…null"]),
        (["run-1", "run-10"], ["…1", "…10"]),
        (["run", "run-2"], ["run", "run-2"]),
        (["plain", "plan"], ["plain", "plan"]),
        (["o3-inertia-plain"], ["o3-inertia-plain"]),
    ],
)
def test_the_common_beginning_of_names_is_shortened(names, labels):
    assert _plots.shorten_names(names) == labels


def test_runs_of_the_same_name_are_told_apart(tmp_path):
    runs = [
        make_run(tmp_path / "a" / "run"),
        make_run(tmp_path / "b" / "run"),
        tmp_path / "a" / "run",
    ]
    assert set(table(report.write(runs, out=tmp_path / "out"))) == {"a/run", "b/run"}


def test_colours_stay_with_a_run(tmp_path, monkeypatch):
    colors = []
    plot = _plots.Axes.plot

    def spy(axes, steps, *arguments, **keywords):
        if steps:
            colors.append((len(steps), keywords["color"]))
        return plot(axes, steps, *arguments, **keywords)

    monkeypatch.setattr(_plots.Axes, "plot", spy)
    fields = {"steps_per_second": 1.0, "data_wait": 0.1}
    # The first run lacks what the second one's other plots show.
    one = make(tmp_path / "one", [train(1), train(2), train(3)])
    two = make(tmp_path / "two", [train(1, **fields), train(2, **fields)])
    page = report.write([one, two], out=tmp_path / "out")
    first, second = _plots.COLORS[:2]
    assert set(colors) == {(3, first), (2, second)}
    assert f'background:{second}"></span>two' in page.read_text()


def test_many_panels_and_runs_fit(tmp_path):
    figures = {f"figure{number}": number + 1.0 for number in range(9)}
    runs = [
        make(tmp_path / f"run{number:02}", [train(1), train(2), evaluate(2, **figures)])
        for number in range(30)
    ]
    page = report.write(runs, out=tmp_path / "out")
    assert len(table(page)) == 30
    width, height = struct.unpack(">II", images(page)[1][16:24])
    assert width <= 1600
    assert height <= 4000


def test_plots_of_an_older_report_are_removed(tmp_path):
    out = tmp_path / "out"
    report.write([make_run(tmp_path / "one")], out=out)
    report.write([make(tmp_path / "two", [train(1)])], out=out)
    assert {path.name for path in out.iterdir()} == {"report.html", "loss.png"}


def test_config_and_environment_may_be_missing(tmp_path):
    run = report.load(make(tmp_path / "run", [train(1)]))
    assert run.config == run.environment == {}
    page = report.write([tmp_path / "run"], out=tmp_path / "out")
    assert page.read_text().count("not recorded") == 2


def test_a_folder_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(report.ReportError, match=r"`runs` must be .*nowhere does not exist"):
        report.write([tmp_path / "nowhere"], out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_report_of_no_runs_is_refused(tmp_path):
    with pytest.raises(report.ReportError, match="`runs` must name at least one run, got none"):
        report.write([], out=tmp_path)


def test_a_folder_that_is_not_a_run_suggests_one_below_it(tmp_path):
    (tmp_path / "a").mkdir()
    make(tmp_path / "a" / "deep" / "run", [train(1)])
    near = make(tmp_path / "b" / "run", [train(1)])
    with pytest.raises(report.ReportError) as caught:
        report.load(tmp_path)
    assert str(caught.value) == (
        f"`runs` must be folders of training runs, and {tmp_path} has no metrics.jsonl. "
        f"Did you mean '{near}'?"
    )
    with pytest.raises(report.ReportError, match=re.escape(f"Did you mean '{near}'?")):
        report.load(near / "metrics.jsonl")


def test_a_folder_without_runs_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(report.ReportError, match=r"no metrics.jsonl\. Give the folder that holds"):
        report.load(tmp_path)


@pytest.mark.parametrize("tail", ["", "\n\n", '{"step": 1'])
def test_metrics_without_a_complete_line_are_refused(tmp_path, tail):
    folder = make(tmp_path / "run", [], tail=tail)
    with pytest.raises(report.ReportError, match=r"metrics.jsonl has no complete line"):
        report.load(folder)


def test_a_broken_line_before_the_last_is_refused(tmp_path):
    folder = make(tmp_path / "run", [train(1)], tail='{"step": 2, "lo\n' + json.dumps(train(3)))
    with pytest.raises(report.ReportError, match=r"line 2, must be .* not JSON.* Repair or"):
        report.load(folder)


@pytest.mark.parametrize(
    "line", ["[1]", '{"kind": "train"}', '{"step": 1}', '{"step": NaN, "kind": "eval"}', "3"]
)
def test_a_line_without_step_or_kind_is_refused(tmp_path, line):
    folder = make(tmp_path / "run", [train(1)], tail=line + "\n")
    with pytest.raises(report.ReportError) as caught:
        report.load(folder)
    assert "metrics.jsonl, line 2, must be an object" in str(caught.value)
    assert f"got {line}. Repair or remove" in str(caught.value)


@pytest.mark.parametrize("name", ["config.json", "environment.json"])
@pytest.mark.parametrize(("text", "message"), [("{", "not JSON"), ("[1]", r"got \[1\]")])
def test_a_broken_config_or_environment_is_refused(tmp_path, name, text, message):
    folder = make(tmp_path / "run", [train(1)])
    (folder / name).write_text(text)
    with pytest.raises(report.ReportError, match=rf"{name} is damaged: .*{message}.* Repair or"):
        report.load(folder)


@pytest.mark.parametrize("below", ["", "below"])
def test_an_output_folder_that_cannot_be_written_to_is_refused(tmp_path, below):
    run = make_run(tmp_path / "run")
    (tmp_path / "file").write_text("mine")
    out = tmp_path / "file" / below
    with pytest.raises(report.ReportError) as caught:
        report.write([run], out=out)
    message = str(caught.value)
    assert message.startswith(f"`out` must be a folder that can be written to, got {out}: ")
    assert message.endswith("Choose another one.")
    assert (tmp_path / "file").read_text() == "mine"
