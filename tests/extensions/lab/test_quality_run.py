"""`qat bench quality` on a tiny teacher: rows, table, pictures; what is finished is kept."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from cache_case import teacher
from quality_case import call, make_teacher_and_texts, write
from torch.nn import functional as F

from qat.errors import QatError
from qat.evaluate.divergence import exact_divergence
from qat.extensions.decode.rollout import OwnRow
from qat.extensions.lab import jobs
from qat.extensions.lab.config import QualityConfig
from qat.extensions.lab.quality import run
from qat.extensions.lab.quality.job import heartbeat_facts, own_batches, run_job
from qat.extensions.lab.quality.plan import QualityJob, read_quality
from qat.extensions.lab.quality.prepare import resolve
from qat.extensions.lab.quality.run import Failure, run_jobs
from qat.logs import JsonLines, read_json_lines
from qat.models.load import load_model
from qat.nn.quant_linear import QuantLinear


@pytest.fixture
def place(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run, "run_jobs", in_this_process)
    make_teacher_and_texts()
    return tmp_path


def in_this_process(
    jobs: list[QualityJob], devices, at_once, after_each
) -> tuple[list[Failure], dict[str, str]]:
    """Do what `run_jobs` does, without the seconds that a process takes to start."""
    failures = []
    for job in jobs:
        try:
            run_job(job)
        except QatError as error:
            failures.append(Failure(job.name, job.seed, str(error), job.log))
        after_each(failures)
    return failures, {}


@pytest.mark.parametrize("count", [3, 40])
def test_own_words_are_judged_as_a_text_is(count: int) -> None:
    student, beside = teacher(seed=1), teacher(seed=2)
    rows = [OwnRow([5, 6, 7 + n, 3][: 3 + n % 2], 1 + n % 2) for n in range(count)]
    kl, tokens = 0.0, 0
    for ids, begin in rows:
        with torch.no_grad():
            log_q, log_p = (
                model.model(torch.tensor([ids])).logits[0, begin - 1 : -1].log_softmax(-1)
                for model in (student, beside)
            )
        kl += F.kl_div(log_q, log_p, log_target=True, reduction="sum").item()
        tokens += len(ids) - begin
    found = exact_divergence(student, beside, own_batches(rows))
    assert found.num_tokens == tokens and found.kl_nats == pytest.approx(kl / tokens, rel=1e-4)


@pytest.mark.slow
def test_schemes_of_own_words_are_rows_of_the_table(place: Path, monkeypatch) -> None:
    own = {"teacher": "teacher", "on_policy": 1.0, "rollout_tokens": 6}
    write(
        {"name": "cached"},
        {"name": "own words", "train": own},
        {"name": "half and half", "train": {**own, "on_policy": 0.5}},
        {"name": "cached, then own words", "stages": [{}, own]},
        generate_prompts=[],
        generate_chats=3,
    )
    assert call(monkeypatch) == 0
    rows = read_json_lines(Path("out/results.jsonl"))
    by_name = {row["recipe"]: row for row in rows}
    assert len(by_name) == 5 and by_name["teacher"]["kl_own_nats"] < 1e-6
    assert all(row["kl_own_nats"] > 0 for row in rows if row["recipe"] != "teacher")
    assert len({row["tokens"] for row in rows}) == 2  # the teacher's none, and the same for all
    lines = read_json_lines(next(Path("out/runs").glob("half*/stage1/metrics.jsonl")))
    trained = [line for line in lines if line["kind"] == "train"]
    assert all(line["own_tokens"] > 0 and line["tail_nats"] > 0 for line in trained)
    assert "| KL own words |" in Path("out/quality.md").read_text()


def codebooks_of(student: Path) -> set[str]:
    modules = load_model(str(student)).model.modules()
    return {linear.spec.codebook for linear in modules if isinstance(linear, QuantLinear)}


@pytest.mark.slow
def test_rows_a_table_and_pictures(place: Path, monkeypatch, capsys) -> None:
    write(
        {"name": "trained"},
        {"name": "converted", "train": False, "convert": {"for": ["gguf"]}},
        {
            "name": "staged",
            "convert": {"to": "q4a4"},
            "cache": {"top_k": 4},
            "stages": [
                {"learn": "scales", "max_steps": 1},
                {"convert": {"to": "q2a4", "base": "teacher"}, "mlp_only": True},
            ],
        },
        {"name": "rounded", "method": "rtn", "train": {"group_size": 16}},
        seeds=[0, 1],
    )
    assert call(monkeypatch) == 0
    printed = capsys.readouterr().out
    last = json.loads(printed.splitlines()[-1])
    assert last["out"] == "out" and last["kl_nats"] > 0
    rows = read_json_lines(Path("out/results.jsonl"))
    assert len(rows) == 2 * (1 + 2 + 1 + 2 + 1)  # texts x (teacher + seeds of each recipe)
    for row in rows:
        assert row["commit"] and row["device"] == "cpu" and row["workers"] == 1
        assert row["kd_nats"] >= 0 and 0 <= row["repeated_frac"] <= 1 < row["ppl"]
        assert (row["kl_nats"] < 1e-6) == (row["recipe"] == "teacher")
        assert row["seconds"] >= 0 and (row["seconds"] > 0) == (row["steps"] > 0)
    by_name = {row["recipe"]: row for row in rows}
    assert by_name["teacher"]["ppl"] == by_name["teacher"]["teacher_ppl"]
    assert by_name["staged"]["steps"] == 3 and by_name["staged"]["tokens"] == 3 * 2 * 16
    assert 2 < by_name["staged"]["linear_bits"] < 5 < by_name["teacher"]["linear_bits"]
    assert by_name["staged"]["linear_bits"] < by_name["staged"]["bits_per_weight"] < 12
    assert by_name["converted"]["megabytes"] < by_name["teacher"]["megabytes"]
    page = Path("out/quality.md").read_text()
    order = [line.split("|")[1].strip() for line in page.splitlines() if line.startswith("|")]
    assert order[2] == "teacher" and order[3] == last["best"] and len(order) == 7
    for name in ("kl_bits.svg", "kl_seconds.svg", "results.json"):
        assert Path("out", name).stat().st_size > 0
    assert len(list(Path("out/caches").iterdir())) == 2
    # one is for llama.cpp, which holds no learned levels
    found = [codebooks_of(path) for path in Path("out/students").iterdir()]
    assert sorted(map(len, found)) == [1, 1, 1] and sorted("lut" in each for each in found) == [
        0,
        1,
        1,
    ]
    runs = list(Path("out/runs").glob("*/stage*/run.json"))
    assert len(runs) == 2 + 2 * 2 and not list(Path("out/runs").glob("**/trainer"))


@pytest.mark.slow
def test_what_is_finished_is_kept(place: Path, monkeypatch, capsys) -> None:
    write({"name": "a"})
    assert call(monkeypatch) == 0
    before = {path: path.stat().st_mtime_ns for path in Path("out/rows").iterdir()}
    write({"name": "a"}, {"name": "b", "train": {"learn": "scales"}})  # a recipe more
    assert call(monkeypatch) == 0
    after = {path: path.stat().st_mtime_ns for path in Path("out/rows").iterdir()}
    assert before.items() <= after.items() and len(after) == len(before) + 1
    write({"name": "a", "train": {"lr": 0.02}})  # another recipe of that name
    assert call(monkeypatch) == 0
    assert len(list(Path("out/rows").iterdir())) == len(after) + 1
    assert {row["recipe"] for row in read_json_lines(Path("out/results.jsonl"))} == {"teacher", "a"}
    capsys.readouterr()
    write({"name": "a"}, max_steps=4)
    assert call(monkeypatch) == 1
    error = capsys.readouterr().err
    assert "out=out holds results of 'case' with another settings, expected those of" in error
    Path("judge.jsonl").write_text('{"text": "the dog saw the cat and the mat"}\n')
    write({"name": "a"})
    assert call(monkeypatch) == 1
    assert "with another texts" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(
    ("where", "is_saved"),
    [
        ("qat.extensions.lab.quality.job.heartbeat_facts", True),
        ("qat.train.saver.Saver.save", False),  # it begins anew
    ],
)
def test_a_job_that_was_stopped_goes_on(
    place: Path, monkeypatch, where: str, is_saved: bool
) -> None:
    write({"name": "a"}, max_steps=2)

    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(where, stop)
        assert call(patch) == 130
    (stage,) = Path("out/runs").glob("a-s0-*/stage1")
    metrics = (stage / "metrics.jsonl").read_bytes()
    assert metrics and (stage / "latest").exists() == is_saved
    assert call(monkeypatch) == 0
    assert not is_saved or (stage / "metrics.jsonl").read_bytes() == metrics  # trained once
    assert {row["recipe"] for row in read_json_lines(Path("out/results.jsonl"))} == {"teacher", "a"}


@pytest.mark.slow
def test_a_recipe_on_equal_time_runs_alone_and_stays(place: Path, monkeypatch) -> None:
    """The recipe that sets the time is timed but not run; rows stay when other recipes run."""
    seconds = {"slow": 3.0, "fast": 1.0}
    monkeypatch.setattr(
        "qat.extensions.lab.quality.prepare.time_plan", lambda _, plan: [[seconds[plan.name]]]
    )
    fast = {"name": "fast", "train": {"lr": 0.1}, "equal_time_to": "slow"}
    write({"name": "slow"}, fast, {"name": "third"}, max_steps=1)

    def found(only: str) -> dict[str, int]:
        assert call(monkeypatch, "--only", only) == 0
        rows = read_json_lines(Path("out/results.jsonl"))
        return {row["recipe"]: row["steps"] for row in rows}

    assert found("fast") == {"teacher": 0, "fast": 3}
    monkeypatch.setattr(
        "qat.extensions.lab.quality.prepare.time_plan", lambda *_: pytest.fail("timed twice")
    )
    assert found("third") == {"teacher": 0, "fast": 3, "third": 1}
    # with its time known and its rows there, nothing is converted for it again
    shutil.rmtree(Path("out/students"))
    assert found("fast") == {"teacher": 0, "fast": 3, "third": 1}
    assert not Path("out/students").exists()


@pytest.mark.slow
def test_step_times_are_those_of_training(place: Path) -> None:
    from qat.extensions.lab.quality.prepare import STRETCHES, Workspace, time_plan

    baseline = {"method": "reference", "train": {"group_size": 16}}
    write({"name": "a"}, {"name": "b", **baseline})
    workspace = Workspace(read_quality(Path("recipe.toml")), Path("out"), "cpu")
    ours, reference = plans = resolve(workspace.recipe)
    workspace.claim()
    workspace.build_caches(plans)
    workspace.convert(plans, plans, {})
    (stretches,) = time_plan(workspace, ours)
    assert len(stretches) == STRETCHES - 1 and all(0 < step_s < 10 for step_s in stretches)
    ((step_s,),) = time_plan(workspace, reference)
    assert 0 < step_s < 10


@pytest.mark.slow
def test_a_job_that_fails_leaves_the_others_alone(place: Path, monkeypatch, capsys) -> None:
    """The jobs run in two processes, side by side."""
    write({"name": "good", "train": False})
    assert call(monkeypatch) == 0  # the teacher is judged here, which saves a process
    monkeypatch.setattr(run, "run_jobs", run_jobs)
    recipes = {"name": "bad", "train": {"sample_prompt": ""}}, {"name": "better", "train": False}
    write(*recipes, convert={"to": "q4a4", "group_size": 16})
    assert call(monkeypatch, "--workers", "2") == 1
    captured = capsys.readouterr()
    assert "1 jobs failed, expected none; the first, 'bad' with seed 0, said" in captured.err
    assert "sample_prompt='' holds no token" in captured.err and "better" in captured.out
    assert "Failed: bad, seed 0: sample_prompt=" in Path("out/quality.md").read_text()
    rows = read_json_lines(Path("out/results.jsonl"))
    assert {row["recipe"]: row["workers"] for row in rows} == {"teacher": 1, "better": 2}


@pytest.mark.usefixtures("undrawn")
def test_a_recipe_that_cannot_be_made_is_a_row(place: Path, monkeypatch, capsys) -> None:
    """The error comes before the first cache is built; recipes that depend on it are not made."""
    little = {"name": "little", "train": False, "convert": {"bits_budget": 1.5}}
    follows = {"name": "follows", "equal_time_to": "little"}
    good = {"name": "good", "train": False}
    with monkeypatch.context() as patched:
        patched.setattr("qat.extensions.lab.quality.prepare.build_cache", None)
        write({**little, "name": "alone"})
        assert call(patched) == 1
        assert "no recipe can be made; the first, 'alone': bits_budget=1.5" in (
            capsys.readouterr().err
        )
        assert not Path("out").exists()
    write({**little, "train": {}}, follows, good)
    assert call(monkeypatch) == 0
    captured = capsys.readouterr()
    assert "little" in captured.out and "cannot be made" in captured.out
    page = Path("out/quality.md").read_text()
    (row,) = (line for line in page.splitlines() if line.startswith("| little"))
    assert "bits_budget=1.5, but all weights" in row and row.count("|") == page.splitlines()[
        4
    ].count("|")
    assert "equal_time_to='little' cannot be made" in page
    assert {each["recipe"] for each in read_json_lines(Path("out/results.jsonl"))} == {
        "teacher",
        "good",
    }


def test_jobs_of_all_devices_share_the_cores(place: Path, monkeypatch) -> None:
    write({"name": "a"}, {"name": "b", "train": False})
    recipe = read_quality(Path("recipe.toml"))
    monkeypatch.setattr("qat.extensions.lab.quality.run.cores", lambda: 64)
    monkeypatch.setattr("torch.get_num_threads", lambda: 64)
    config = QualityConfig(workers=4)
    jobs = run.make_jobs(recipe, resolve(recipe), out=Path("out"), config=config, num_devices=4)
    assert len(jobs) == 3 and {job.threads for job in jobs} == {4}


def test_seconds_leave_out_the_compiler(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "heartbeat-rank0.jsonl")
    for step, step_s, peak_gib in ((10, 5.0, 1.0), (20, 0.1, 3.0), (30, 0.2, 2.0), (40, 0.9, 2.0)):
        lines.write(step=step, step_s=step_s, peak_gib=peak_gib)
    lines.close()
    seconds, peak_gib = heartbeat_facts(tmp_path, 40)
    assert seconds == pytest.approx(40 * 0.2) and peak_gib == 3.0


@pytest.mark.slow
def test_conversions_run_side_by_side(place: Path, monkeypatch) -> None:
    """Each conversion runs in its own process and writes the bytes of a sequential one."""
    gone = {"name": "gone", "train": False, "convert": {"calibration": "gone.txt"}}
    four, two = (
        {"name": name, "train": False, "convert": {"to": name}} for name in ("q4a4", "q2a2")
    )
    write(gone, four, two)
    monkeypatch.setattr(run, "run_jobs", run_jobs)
    begun = []
    popen = jobs.subprocess.Popen
    monkeypatch.setattr(
        jobs.subprocess,
        "Popen",
        lambda words, **more: begun.append(words[-1]) or popen(words, **more),
    )
    assert call(monkeypatch, "--workers", "2") == 0
    assert "calibration=gone.txt is no file" in Path("out/quality.md").read_text()
    logs = list(Path("out/logs").glob("convert-*.log"))
    assert len(logs) == 3
    order = [Path(job).name for job in begun if job.endswith(".json")]
    is_conversion = [name.startswith("convert-") for name in order]
    assert is_conversion[:3] == [True] * 3 and len(order) == 3 + 3  # the teacher and two recipes
    found = {row["recipe"] for row in read_json_lines(Path("out/results.jsonl"))}
    assert found == {"teacher", "q4a4", "q2a2"}
    beside = students()
    assert len(beside) == 2
    Path("out").rename("beside")
    monkeypatch.setattr(run, "run_jobs", in_this_process)
    assert call(monkeypatch) == 0
    assert students() == beside


def students() -> dict[str, bytes]:
    found = Path("out/students").glob("*/model.safetensors")
    return {path.parent.name: path.read_bytes() for path in found}
