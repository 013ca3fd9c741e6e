"""The report: what it reads, what it shows, and that it asks no server for anything."""

import base64
import json
import re
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from observe.synthetic import write_conversion, write_lines, write_pipeline, write_run

from qat.convert.config import REPORT_NAME
from qat.errors import CheckpointError
from qat.observe.charts import DARK, STYLE, conversion_charts, in_dark, run_charts, size_charts
from qat.observe.page import COLUMNS, Written, run_table, with_unique_labels, write_report
from qat.observe.runs import Module, TrainingRun, read_directory, read_exam
from qat.observe.summary import Result, uses_of


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "runs" / "first")


@pytest.fixture
def conversion(tmp_path: Path) -> Path:
    return write_conversion(tmp_path / "checkpoints" / "q2")


def test_run_is_read_by_kind(run: Path) -> None:
    first = read_directory(run)
    assert isinstance(first, TrainingRun)
    assert (len(first.steps), len(first.evals), len(first.heartbeats)) == (200, 5, 20)
    assert first.lowest("kl_tail_nats") == min(row["kl_tail_nats"] for row in first.evals)
    assert first.peak_gib() == 1.5
    assert first.lowest("never_measured") is None


def test_warm_up_does_not_count_as_speed(run: Path) -> None:
    beats = [{"step": i, "tokens_per_s": speed} for i, speed in enumerate([1.0, 100.0, 102.0])]
    first = read_directory(run)
    assert TrainingRun(**{**vars(first), "heartbeats": beats}).tokens_per_s() == 102.0
    assert TrainingRun(**{**vars(first), "heartbeats": []}).tokens_per_s() is None


def test_module_knows_its_kind_layer_and_error() -> None:
    module = Module(
        name="model.layers.13.mlp.up_proj", bits=2, bits_per_weight=2.5, relative_error=0.3
    )
    assert (module.kind, module.layer, module.error) == ("up_proj", 13, 0.3)
    assert module.model_copy(update={"weighted_error": 0.2}).error == 0.2


def test_a_table_is_in_no_layer(tmp_path: Path) -> None:
    directory = write_conversion(tmp_path / "q2")
    report = json.loads((directory / REPORT_NAME).read_text())
    table = {"name": "model.embed_tokens", "weighted_error": 0.9, "seconds": 1.0}
    report["modules"].append(report["modules"][0] | table)
    (directory / REPORT_NAME).write_text(json.dumps(report))
    by_layer, by_bits = conversion_charts(read_directory(directory))
    assert b"embed_tokens" not in by_layer.render("svg")
    assert b"embed_tokens" in by_bits.render("svg")
    html = write_report([directory], tmp_path / "page.html").page.read_text("utf-8")
    assert "worst, embed_tokens<" in html and "All 43 linears and tables" in html


def test_bits_of_vectors_are_named_as_such(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    directory = write_conversion(tmp_path / "v2")
    report = json.loads((directory / REPORT_NAME).read_text())
    for module in report["modules"]:
        module |= {"bits": 2, "vector_size": 4} if ".mlp." in module["name"] else {"bits": 2.5}
    (directory / REPORT_NAME).write_text(json.dumps(report))
    chart = conversion_charts(read_directory(directory))[0]
    assert chart.caption.endswith("shows its bits; v4: vectors of 4 weights.")
    drawn = chart.render("svg").decode()
    assert "up_proj (2 bit v4)" in drawn and "q_proj (2.5 bit)" in drawn
    request.getfixturevalue("undrawn")
    html = write_report([directory], tmp_path / "page.html").page.read_text("utf-8")
    assert "<td>2, vectors of 4</td>" in html and "<td>2.5</td>" in html


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """A page about a run and a conversion, which is only read."""
    place = tmp_path_factory.mktemp("report")
    directories = [write_run(place / "runs/first"), write_conversion(place / "checkpoints/q2")]
    return write_report(directories, place / "out" / "page.html")


def test_page_is_self_contained(written: Written) -> None:
    html = written.page.read_text(encoding="utf-8")
    assert not re.search(r"""(src|href|srcset)=["'](?!data:)""", html)
    assert "@import" not in html and "url(" not in html and "<script" not in html
    for picture in re.findall(r"data:image/svg\+xml;base64,([A-Za-z0-9+/=]+)", html):
        assert base64.b64decode(picture).startswith(b"<?xml")


def test_page_shows_what_was_measured(written: Written) -> None:
    html = written.page.read_text("utf-8")
    for text in ("first", "q2a4", "2.98", "0123abc", "Return &lt;the&gt; list.", "max_steps = 200"):
        assert text in html
    assert html.count("<tr><td>model.layers.") == 42


@pytest.mark.usefixtures("undrawn")
def test_page_says_how_to_use_the_checkpoint_that_is_there(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    for pointer, step in (("latest", 200), ("best", 150)):
        (run / pointer).write_text(f"checkpoints/step-{step:06}\n")
    (run / "checkpoints/step-000200").mkdir(parents=True)  # the best one was not copied
    html = write_report([run], tmp_path / "page.html").page.read_text("utf-8")
    assert f"vllm serve {run}/checkpoints/step-000200</pre>" in html
    (run / "latest").unlink()
    assert "vllm serve" not in write_report([run], tmp_path / "page.html").page.read_text("utf-8")


def test_pictures_lie_beside_the_page(written: Written) -> None:
    names = {path.name for path in written.pictures}
    assert names == {
        "page-loss.png",
        "page-held-out.png",
        "page-perplexity.png",
        "page-speed.png",
        "page-q2-layers.png",
        "page-q2-bits.png",
    }
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written.pictures)
    assert not list(written.page.parent.glob(".*"))


def test_same_input_gives_the_same_page(written: Written, tmp_path: Path) -> None:
    place = written.page.parents[1]
    directories = [place / "runs/first", place / "checkpoints/q2"]
    again = write_report(directories, tmp_path / "page.html")
    assert again.page.read_bytes() == written.page.read_bytes()


@pytest.mark.usefixtures("undrawn")
def test_run_without_evaluations_or_heartbeats_has_a_page(tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    row = {"kind": "train", "step": 1, "loss_nats": 1.0}
    (bare / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    written = write_report([bare], tmp_path / "report.html")
    assert [path.name for path in written.pictures] == ["report-loss.png"]


def test_lowest_of_several_is_marked(run: Path, tmp_path: Path) -> None:
    better = read_directory(write_run(tmp_path / "better", floor=0.1))
    table = run_table([read_directory(run), better])
    assert [cell["best"] for cell in table[1]] == [i in (3, 4, 6) for i in range(len(COLUMNS))]
    assert not any(cell["best"] for cell in table[0])
    assert not any(cell["best"] for cell in run_table([better])[0])


def test_equal_names_are_told_apart(run: Path, conversion: Path) -> None:
    sources = [read_directory(run), read_directory(run), read_directory(conversion)]
    assert [each.label for each in with_unique_labels(sources)] == ["first", "first (2)", "q2"]


def test_the_dark_dress_is_what_would_be_drawn_in_it(run: Path, monkeypatch) -> None:
    chart = run_charts([read_directory(run)])[0]
    light = chart.render("svg")
    colors = {"text.color": "ink", "axes.labelcolor": "muted", "axes.edgecolor": "grid"}
    colors |= {"axes.facecolor": "paper", "figure.facecolor": "paper", "grid.color": "grid"}
    colors |= {"xtick.color": "muted", "ytick.color": "muted", "legend.labelcolor": "ink"}
    for key, name in colors.items():
        monkeypatch.setitem(STYLE, key, getattr(DARK, name))
    assert in_dark(light) == chart.render("svg") != light


def test_names_are_drawn_letter_by_letter(tmp_path: Path) -> None:
    names = ["x$x^{$", "_hidden"]
    found = [read_directory(write_run(tmp_path / name, steps=10)) for name in names]
    drawn = run_charts(found)[0].render("svg").decode()
    assert "<!-- x$x^{$ -->" in drawn and "<!--  _hidden -->" in drawn


def test_a_conversion_that_quantized_nothing_has_a_page(conversion: Path, tmp_path: Path) -> None:
    path = conversion / "convert_report.json"
    nothing = {"bits_per_weight": 16.0, "linear_bits": None, "modules": []}
    path.write_text(json.dumps({**json.loads(path.read_text()), **nothing}))
    written = write_report([conversion], tmp_path / "report.html")
    assert written.pictures == [] and "All 0 linears" in written.page.read_text("utf-8")


def page_of(directory: Path, out: Path) -> str:
    return write_report([directory], out / "page.html").page.read_text("utf-8")


@pytest.mark.usefixtures("undrawn")
def test_a_page_begins_with_model_text_date_and_size(tmp_path: Path) -> None:
    html = page_of(write_pipeline(tmp_path / "run"), tmp_path)
    assert "<h1>Qwen3-0.6B, trained on chats.jsonl</h1>" in html
    assert re.search(r"<p class=\"muted\">\d{1,2} [A-Z][a-z]+ 20\d\d</p>", html)
    assert "11.6 \u2192 2.60 MB" in html and "4.4 times smaller" in html
    assert "0.237 \u2192 0.150" in html and "49.3 \u2192 54.6 \u2192 51.5" in html
    assert html.index("What came out") < html.index("How to use it") < html.index("Health")


@pytest.mark.usefixtures("undrawn")
def test_health_is_folded_unless_something_is_wrong(run: Path, tmp_path: Path) -> None:
    (run / "run.json").write_text(json.dumps({"forced": []}))
    html = page_of(run, tmp_path)
    assert re.search(r"<details class=\"card\">\n<summary>Health: all \d+ checks are ok", html)
    (run / "run.json").write_text(json.dumps({"forced": ["disk"]}))
    html = page_of(run, tmp_path)
    assert re.search(r"<details class=\"card\" open>\n<summary class=\"look\">Health: 1 of", html)


@pytest.mark.usefixtures("undrawn")
def test_a_student_that_is_not_smaller_is_a_warning_at_the_top(tmp_path: Path) -> None:
    html = page_of(write_pipeline(tmp_path / "run", megabytes=12.0), tmp_path)
    assert 'class="warning card"' in html and "times smaller" not in html
    assert 'class="warning card"' not in page_of(write_pipeline(tmp_path / "small"), tmp_path)


def test_distance_is_drawn_against_size() -> None:
    results = [Result("teacher", 11.5, 0.0), Result("conv", 2.6, 0.24), Result("trained", 2.6, 0.1)]
    (chart,) = size_charts(results)
    drawing = chart.render("svg").decode()
    assert "<!-- teacher, 11.5 MB -->" in drawing and "<!-- trained, 2.6 MB -->" in drawing
    axes = Figure().subplots()
    size_charts([*results[:2], Result("same", 2.6, 0.24)])[0].paint(axes)
    heights = [each.get_position()[1] for each in axes.texts if each.get_text()]
    assert len(set(heights[1:])) == 2  # names of one place do not cover each other
    assert size_charts(results[1:]) == [] == size_charts([Result("teacher"), *results[1:]])


def test_commands_are_quoted_and_fit_the_checkpoint(tmp_path: Path) -> None:
    checkpoint = tmp_path / "my model"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text('{"model_type": "qwen3"}')
    commands = uses_of(checkpoint, has_export=False)
    assert commands[1] == f"vllm serve '{checkpoint}'" and len(commands) == 3
    (checkpoint / "config.json").write_text('{"nsa": {"window": 4}}')  # no engine opens it
    assert not any("vllm" in command for command in uses_of(checkpoint, has_export=True))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("samples.json", '{"prompt": "x", "texts": 3}'),
        ("samples.json", "[]"),
        ("eval.json", '{"teacher": {"ppl": "<script>"}}'),
        ("recipe.toml", "run = 3"),
    ],
)
def test_damaged_files_of_a_pipeline_are_named(tmp_path: Path, name: str, text: str) -> None:
    pipeline = write_pipeline(tmp_path / "run")
    (pipeline / name).write_text(text)
    with pytest.raises(CheckpointError, match=name):
        write_report([pipeline], tmp_path / "page.html")


def drawn(runs: list[Path], name: str) -> str:
    (chart,) = (c for c in run_charts([read_directory(run) for run in runs]) if c.name == name)
    return chart.render("svg").decode()


def test_a_run_on_draws_shows_their_cross_entropy(run: Path) -> None:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        if row.pop("kd_nats", None) is not None:
            row["sampled_ce_nats"] = 2 + row.pop("kl_tail_nats")
    write_lines(run / "metrics.jsonl", rows)
    charts = {chart.name: chart for chart in run_charts([read_directory(run)])}
    assert charts["held-out"].title == "Held-out cross-entropy with the teacher's draws"
    assert drawn([run], "held-out").count("<use ") > 5  # its points


def test_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere is not there, expected a run or"):
        write_report([tmp_path / "nowhere"], tmp_path / "report.html")


def test_foreign_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="neither metrics.jsonl nor convert_report"):
        write_report([tmp_path], tmp_path / "report.html")
    (tmp_path / "recipe.toml").write_text("")
    with pytest.raises(CheckpointError, match="goes on"):
        write_report([tmp_path], tmp_path / "report.html")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("recipe.toml", "train = 3"),
        ("run.json", '{"cache_settings": []}'),
        ("run.json", "[]"),
        ("metrics.jsonl", "{broken\n"),
        ("metrics.jsonl", '{"kind": "eval", "step": 0, "ppl": "<script>"}\n'),
        ("metrics.jsonl", '{"kind": "eval", "step": [], "ppl": 3}\n'),
    ],
)
def test_files_that_no_run_wrote_are_one_line(run: Path, tmp_path: Path, name, text) -> None:
    (run / name).write_text(text)
    with pytest.raises(CheckpointError, match="damaged"):
        write_report([run], tmp_path / "report.html")


def test_damaged_conversion_is_named(conversion: Path, tmp_path: Path) -> None:
    (conversion / "convert_report.json").write_text('{"source": "x"}')
    with pytest.raises(CheckpointError, match="convert_report.json is damaged: plan"):
        write_report([conversion], tmp_path / "report.html")


@pytest.mark.usefixtures("undrawn")
def test_verb_writes_into_the_first_directory(run: Path) -> None:
    from qat.cli.report import report

    result = report(run)
    assert result["page"] == run / "report.html"
    assert len(result["pictures"]) == 4


def test_a_run_alone_has_a_title_of_its_model_and_text(run: Path, tmp_path: Path) -> None:
    info = json.loads((run / "run.json").read_text())
    info |= {"teacher": "checkpoints/tiny-qwen3", "cache_settings": {"data": "stdlib"}}
    (run / "run.json").write_text(json.dumps(info))
    assert "<h1>tiny-qwen3, trained on stdlib</h1>" in page_of(run, tmp_path)


def test_models_write_side_by_side_after_one_prompt(tmp_path: Path) -> None:
    html = page_of(write_pipeline(tmp_path / "run"), tmp_path)
    assert "Return &lt;i&gt;" in html and "bytes &lt;b&gt;read&lt;/b&gt;" in html
    assert re.findall(r"<h3>(\w+)</h3><pre>", html) == ["teacher", "converted", "trained"]


def test_hashes_are_short_and_few(run: Path, tmp_path: Path) -> None:
    marks = [f"15:{number:016x}" for number in range(64)]
    info = {"judged": marks, "student_fingerprint": "10adf6aa49a8e414d028766b1e0ee871"}
    (run / "run.json").write_text(json.dumps(info))
    html = page_of(run, tmp_path)
    assert marks[0] not in html and "64 held-out sequences" in html
    assert "<td>10adf6aa49a8</td>" in html


def test_sizes_of_older_reports_are_read(tmp_path: Path) -> None:
    path = write_pipeline(tmp_path / "out")
    files = {name: path / name for name in ("eval.json", "converted/convert_report.json")}
    for file in files.values():  # as version 0.2 wrote them
        text = file.read_text().replace('"bits_per_weight": 3.6', '"whole_bits_per_weight": 3.6')
        file.write_text(text.replace('"linear_bits"', '"bits_per_weight"'))
    found = read_directory(path / "converted")
    assert (found.bits_per_weight, found.linear_bits) == (3.6, 2.98)
    student = read_exam(path)["trained"]
    assert (student["bits_per_weight"], student["linear_bits"]) == (3.6, 2.5)
