"""`qat run` and `qat demo`: one engine, every stage once, whatever stops it."""

import html
import itertools
import json
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from contextlib import redirect_stdout
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import without_extras
from cache_case import TOKENIZER, texts
from cli_case import call
from tiny import tiny_model
from transformers import ViTConfig

from qat.cli import run_verb
from qat.cli.demo import demo
from qat.cli.run import Pipeline, Run, RunConfig
from qat.convert.forecast import shipped_sizes
from qat.errors import ConfigError, ExportError, QatError, Stopped
from qat.export.model import weight_bytes
from qat.export.targets import shipping_to
from qat.hooks import hooks
from qat.models.checkpoint import load_checkpoint
from qat.models.directory import resolve
from qat.observe.page import Written

FEW = {"--max-steps": 4, "--sequence-length": 16, "--device": "cpu", "--dtype": "fp32"}
STAGES = ("cache", "convert", "train", "eval", "export")
needs_gguf = pytest.mark.skipif("gguf" not in hooks("qat.targets"), reason="no extension writes it")


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A model with its tokenizer, and a text."""
    place = tmp_path_factory.mktemp("run")
    tiny_model(num_hidden_layers=1).save_pretrained(place / "model")
    TOKENIZER.save_pretrained(place / "model")
    (place / "texts.txt").write_text("\n\n".join(texts(150)))
    (place / "empty.txt").write_text("")
    (place / "one.txt").write_text("only one line")
    (place / "rows.jsonl").write_text('{"text": "a text"}\n')
    (place / "recipe.toml").write_text(
        "[convert]\ngroup_size = 16\ncalibration-sequences = 8\n[train]\nbatch_size = 4\n"
    )
    return place


def words(place: Path, out: Path, *more: object) -> list[str]:
    flags = {"--data": place / "texts.txt", "--out": out, **FEW}
    flags |= dict(zip(more[::2], more[1::2], strict=True))
    return ["run", str(place / "model"), *(str(word) for pair in flags.items() for word in pair)]


def go(place: Path, out: Path, *more: object) -> dict:
    return run_verb(words(place, out, *more), place / "recipe.toml")


@pytest.fixture(scope="module")
def finished(place: Path) -> Path:
    with (place / "said").open("w") as said, redirect_stdout(said):
        go(place, place / "finished")
    return place / "finished"


def test_it_makes_all_that_it_says(finished: Path) -> None:
    assert (finished.parent / "said").read_text().count("ships to ") == 1
    recipe = tomllib.loads((finished / "recipe.toml").read_text())
    assert recipe.keys() == {"run", *STAGES}
    assert recipe["train"]["max_steps"] == 4 and recipe["convert"]["group_size"] == 16
    assert recipe["cache"]["held_out"] == 0.2 and recipe["cache"]["num_sequences"] == 16
    exams = json.loads((finished / "eval.json").read_text())
    assert [*exams] == ["teacher", "converted", "trained"]
    assert exams["trained"]["megabytes"] < exams["teacher"]["megabytes"]
    (target,) = recipe["run"]["for"]
    shipping = shipping_to((target,))
    for name in ("converted", "trained"):  # each student's own, as the file that it becomes
        directory = Path(resolve(str(finished / name)))
        sizes = shipped_sizes(directory, None, shipping).rounded()
        keys = ("megabytes", "bits_per_weight", "linear_bits")
        assert [exams[name][key] for key in keys] == [*sizes.values()][1:]
        if shipping.count_file is not None:  # not without extensions
            written = weight_bytes(finished / "export" / target) / 1e6
            assert exams[name]["megabytes"] == pytest.approx(written, rel=0.05)
    assert exams["trained"]["step"] in range(5) and "step" not in exams["converted"]
    assert (finished / "student").read_text() in ("trained\n", "converted\n")
    assert load_checkpoint(Path(resolve(str(finished)))) is not None
    assert any((finished / "export" / target).iterdir())
    page = (finished / "report.html").read_text()
    for found in exams.values():  # the page shows what the terminal does
        assert f"<td>{found['top1_frac']:.1%}</td><td>{found['kl_nats']:.4f}</td>" in page
    sample = json.loads((finished / "samples.json").read_text())
    assert [*sample["texts"]] == ["teacher", "converted", "trained"]
    assert f"<b>prompt</b>  {html.escape(sample['prompt'])}" in page
    assert "<h1>model, trained on texts.txt</h1>" in page


def test_a_second_call_does_nothing_again(finished: Path, place: Path, capsys) -> None:
    before = {p: p.stat().st_mtime_ns for p in finished.rglob("*.safetensors")}
    found = go(place, finished)
    assert found["kl_nats"]["teacher"] == 0
    assert found["megabytes"] == [round(weight_bytes(each) / 1e6, 3) for each in found["exports"]]
    said = " ".join(capsys.readouterr().out.split())
    for stage in STAGES:
        assert f"{stage}: done before" in said or f"{stage} trained: done before" in said
    assert {p: p.stat().st_mtime_ns for p in finished.rglob("*.safetensors")} == before


def test_its_recipe_is_one(finished: Path, place: Path, monkeypatch) -> None:
    again = ["--recipe", str(finished / "recipe.toml"), "run", "--out", str(finished)]
    assert call(monkeypatch, *again) == 0


def test_other_settings_of_what_is_done_are_refused(finished, place) -> None:
    for more, message in (
        (["--to", "q4a4"], r"\[convert\] to='q4a4', but that stage is done in .* with 'q2a4'"),
        (["--max-steps", 9], r"\[train\] max_steps=9, but that stage is done"),
        (["--sequence-length", 8], r"\[cache\] sequence_length=8, but that stage is done"),
        (["--data", "other.txt"], r"\[run\] data='other.txt', but that stage is done"),
        (["--for", "mlx"], r"\[run\] for=\['mlx'\], but that stage is done"),
        (["--lr", 0.5], r"\[train\] lr=0.5, but that stage is done"),
        (["--max-steps", 0], r"\[train\] .*max_steps"),
    ):
        with pytest.raises(ConfigError, match=message):
            go(place, finished, *more)


def test_a_recipe_sets_no_stage_against_another(place: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text('[train]\ncache_dir = "elsewhere"\n')
    with pytest.raises(ConfigError, match=r"\[train\] cache_dir is for 'qat run' itself to say"):
        run_verb(words(place, tmp_path / "out"), recipe)
    assert not (tmp_path / "out").exists()


WRONG = {
    "--to q2b4": "to=q2b4 is neither a file nor a preset",
    "--device cuda:9": "device=cuda:9, but",
    "--device cpux": "device=cpux is unknown",
    "--data nowhere.txt": "data=nowhere.txt is no file",
    "--data {place}/empty.txt": "empty.txt",
    "--data {place}/one.txt": "is one document",
    "--teacher {place}/nobody": "nobody does not exist",
    "--teacher http://host/v1 --teacher-model x": "is a server",
    "--loss tial": "tial",
    "--loss sampled": "the cache has top_k=64 and draws=0",
    "--lr -1": "lr=",
    "--sequence-length 99999": "reads at most",
    "--for packed --group-size 7": "7",
    "--bits-budget 0": "bits_budget=",
    "--embedding-bits 5": "embedding",
    "--text-field body --format plain --data {place}/rows.jsonl": "body",
    "--for gguf --learn lora,scales": "gguf holds no adapters",
    "--for gguf --to v2a4": "gguf",
    "--held-out 0": "held_out=0",
    "--max-steps 0": "max_steps",
}


@pytest.mark.parametrize(
    ("flags", "is_dry"),
    [
        pytest.param(flags, is_dry, marks=[needs_gguf] * ("gguf" in flags))
        for flags, is_dry in zip(WRONG, itertools.cycle([False, True]))
    ],
)
def test_a_refused_call_writes_nothing(place: Path, tmp_path, flags: str, *, is_dry: bool) -> None:
    given = flags.format(place=place).split()
    more = ["--group-size", "16"] if "--group-size" not in given else []
    call = ["run", str(place / "model"), "--out", str(tmp_path / "out"), *given, *more]
    call += [w for k, v in FEW.items() if k not in given for w in (k, str(v))]
    call += ["--data", str(place / "texts.txt")] if "--data" not in given else []
    with pytest.raises(QatError, match=re.escape(WRONG[flags])) as refused:
        run_verb([*call, *["--dry-run"] * is_dry])
    assert str(refused.value).count("\n") == 0
    assert not [*tmp_path.iterdir()]


def test_a_misspelt_model_and_one_that_is_no_language_model(place: Path, tmp_path: Path) -> None:
    image = tmp_path / "image"
    ViTConfig().save_pretrained(image)
    for model, message in ((tmp_path / "modle", "does not exist"), (image, "image")):
        given = ["--data", str(place / "texts.txt"), "--out", str(tmp_path / "out")]
        with pytest.raises(QatError, match=message):
            run_verb(["run", str(model), *given])
    assert [path.name for path in tmp_path.iterdir()] == ["image"]


def test_a_dry_run_says_sizes_and_writes_nothing(place: Path, tmp_path: Path) -> None:
    found = run_verb([*words(place, tmp_path / "out"), "--dry-run"], place / "recipe.toml")
    assert found["source_megabytes"] > found["megabytes"] > 0 and found["steps"] == 4
    assert found["bits_per_weight"] >= found["linear_bits"] > 2 and "packed" in found["ships_to"]
    assert found["minutes"] >= 0 and found["memory_gib"] >= 0
    assert not [*tmp_path.iterdir()]


@pytest.mark.usefixtures("no_extensions")
def test_without_the_extension_that_writes_gguf_a_student_stays_packed(place, tmp_path) -> None:
    found = run_verb([*words(place, tmp_path / "out"), "--dry-run"], place / "recipe.toml")
    assert found["for"] == ["packed"] and found["ships_to"] == ["packed", "dense"]


def test_flags_of_a_stage_reach_it(place: Path, tmp_path: Path) -> None:
    flags = ["--lr", 0.5, "--batch-size", 3, "--embedding-bits", 4, "--seed", 7, "--top-k", 8]
    pipeline = Pipeline("run", tmp_path / "out")
    config = RunConfig(
        data=str(place / "texts.txt"), device="cpu", group_size=16,
        **dict(zip([f[2:].replace("-", "_") for f in flags[::2]], flags[1::2], strict=True)),
    )  # fmt: skip
    made = Run(pipeline, str(place / "model"), config=config, targets=(), tables={})
    train, cache = made.configs["train"], made.configs["cache"]
    assert (train.lr, train.batch_size, train.seed) == (0.5, 3, 7)
    assert (cache.top_k, cache.seed, cache.batch_size) == (8, 0, 0)
    assert made.configs["convert"].embedding_bits == 4
    # the length that follows the data is measured once, and told to the stage
    assert made.configs["cache"].sequence_length == made.text.sequence_length > 0
    assert {made.configs[stage].device for stage in ("cache", "convert", "train")} == {"cpu"}


def test_a_device_is_of_one_call(finished: Path, place: Path) -> None:
    recipe = (finished / "recipe.toml").read_text()
    with pytest.raises(ConfigError, match="device=cuda:9"):
        (finished / "eval.json").rename(finished / "aside")
        try:
            go(place, finished, "--device", "cuda:9")
        finally:
            (finished / "aside").rename(finished / "eval.json")
    assert (finished / "recipe.toml").read_text() == recipe


@pytest.mark.parametrize(
    ("after", "student"), [(0.2, "trained"), (0.3, "trained"), (0.4, "converted")]
)
def test_the_better_student_is_exported(tmp_path: Path, after: float, student: str) -> None:
    exams = {name: {"kl_nats": kl} for name, kl in (("converted", 0.3), ("trained", after))}
    (tmp_path / "eval.json").write_text(json.dumps(exams))
    (tmp_path / "trained").mkdir()
    (tmp_path / "trained/metrics.json").write_text(json.dumps({"best_step": 12}))
    said = []
    made = object.__new__(Run)
    made.pipeline = SimpleNamespace(out=tmp_path, exams=lambda: exams, say=said.append)
    line = made._choose(tmp_path / "trained")
    assert made.student == student and (tmp_path / "student").read_text() == f"{student}\n"
    assert ("step 12" in line) == (student == "trained")


def test_advice_names_only_flags_that_are_taken(tmp_path: Path) -> None:
    pipeline = Pipeline("run", tmp_path / "out")
    assert pipeline.advised("lower --batch-size", "train") == "lower --batch-size"
    assert "batch_size below [cache]" in pipeline.advised("lower --batch-size", "cache")
    assert "goes on" in pipeline.advised("go on with --resume", "train")
    assert pipeline.advised("choose another --out", "train") == "choose another --out"


@pytest.mark.parametrize(
    ("recipe", "message", "is_behind"),
    [
        ("[run]\nlrr = 1\n", "[run] has no key 'lrr'", True),
        ("[runn]\nlr = 1\n", "no verb is called [runn]; did you mean 'run'?", False),
        ("[train]\nlrr = 1\n", "[train] has no key 'lrr'; did you mean 'lr'?", False),
        ("[train]\ntrust_remote_code = true\n", "which runs code of others", True),
        ("[run\n", "is not TOML", True),
        ('[run]\ndata = "nowhere.txt"\n', "nowhere.txt", False),
        ('[run]\ndata = "nowhere.txt"\n', "nowhere.txt", True),
    ],
)
def test_a_recipe_is_checked_and_read_wherever_it_stands(
    place: Path, tmp_path: Path, monkeypatch, capsys, recipe: str, message: str, is_behind: bool
) -> None:
    (tmp_path / "r.toml").write_text(recipe)
    run = ["run", place / "model", "--out", tmp_path / "out"]
    given = ["--recipe", tmp_path / "r.toml"]
    assert call(monkeypatch, *(run + given if is_behind else given + run)) == 1
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1 and "--data is missing" not in said
    assert not (tmp_path / "out").exists()


def test_a_directory_of_others_is_refused_and_stays(place: Path, tmp_path, monkeypatch) -> None:
    mine = tmp_path / "mine" / "thesis" / "thesis.txt"
    mine.parent.mkdir(parents=True)
    mine.write_text("ten years of work")
    (tmp_path / "mine" / "demo.txt").write_text("x")
    for verb in (words(place, tmp_path / "mine"), ["demo", "--out", str(tmp_path / "mine")]):
        with pytest.raises(ConfigError, match="mine is not empty"):
            run_verb(verb)
    assert mine.read_text() == "ten years of work"
    assert call(monkeypatch, "demo", "--out", tmp_path / "new", "--steps", 0) == 1
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "number", [*(pytest.param(n, marks=pytest.mark.slow) for n in (0, 1, 2)), 3, 4], ids=STAGES
)
def test_stopped_behind_any_stage_it_goes_on(
    finished, place, tmp_path, monkeypatch, number
) -> None:
    real, verb, out = run_verb, STAGES[number], tmp_path / "out"

    def stopped(tokens: list[str], **unparsed: object) -> dict:
        found = real(tokens, **unparsed)
        if tokens[0] == verb:
            raise KeyboardInterrupt
        return found

    shutil.copytree(finished, out)
    for name in ("cache", "converted", "trained", "eval.json", "export")[number:]:
        shutil.rmtree(out / name) if (out / name).is_dir() else (out / name).unlink()
    with monkeypatch.context() as patch:
        patch.setattr(import_module("qat.cli.run"), "run_verb", stopped)
        with pytest.raises(Stopped, match=f"stage {verb}.* was stopped; the same command goes on"):
            real(words(place, out), place / "recipe.toml")
    monkeypatch.setattr("qat.observe.page.write_report", lambda runs, page: Written(page, []))
    go(place, out)
    (exported,) = finished.glob("export/*/model.*")
    for file in (finished / "converted/model.safetensors", exported):
        assert (out / file.relative_to(finished)).read_bytes() == file.read_bytes()
    ours, theirs = (json.loads((each / "eval.json").read_text()) for each in (out, finished))
    assert ours["trained"]["kl_nats"] == theirs["trained"]["kl_nats"]


@pytest.mark.slow
def test_it_needs_no_extra(place: Path, tmp_path: Path) -> None:
    alone = Path(without_extras.__file__)
    command = [sys.executable, "-W", "error", alone, "--recipe", place / "recipe.toml"]
    command += words(place, tmp_path / "out", "--for", "dense")
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert (tmp_path / "out/export/dense/model.safetensors").is_file()
    assert (tmp_path / "out/report.html").is_file()


@needs_gguf
def test_a_library_that_a_target_needs_is_asked_for_before_any_work(
    place: Path, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ExportError, match=r"^gguf does not load .*; run: .*\[ship\]"):
        go(place, tmp_path / "out", "--for", "gguf")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_killed_at_any_moment_it_goes_on(finished: Path, place: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-m", "qat", *words(place, out), "--recipe", place / "recipe.toml"]
    for seconds in (8, 14):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(seconds)
        process.send_signal(signal.SIGKILL)
        process.wait()
    go(place, out)
    file = "export/gguf/model.gguf"
    assert (out / file).read_bytes() == (finished / file).read_bytes()


@pytest.mark.slow
def test_the_demo_goes_on_and_says_what_its_page_says(place: Path, tmp_path) -> None:
    short = partial(demo, out=tmp_path / "demo", teacher=place / "model", sequences=200)
    found = short(steps=4)
    assert [*found["kl_nats"]] == ["teacher", "converted", "trained"]
    page = found["report"].read_text()
    for name, kl in found["kl_nats"].items():
        assert f"<td>{name}</td>" in page and f"<td>{kl:.4f}</td>" in page
    assert short(steps=4)["kl_nats"] == found["kl_nats"]
    with pytest.raises(ConfigError, match=r"\[demo\] steps=5, but that stage is done"):
        short(steps=5)
