"""`qat train` with followers, as a user meets it."""

import shutil
from pathlib import Path

import pytest
from cli_case import call
from train_case import flags, make_place


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_place(tmp_path_factory.mktemp("train-followed"), layers=1)


def test_followers_are_no_part_of_the_recipe(place: Path, tmp_path, monkeypatch, capsys) -> None:
    out, recipe = tmp_path / "run", tmp_path / "recipe.toml"
    words = [*flags(place, max_steps=2), "--out", out]
    recipe.write_text("[train]\ntensorboard = true\nwandb_project = 'mine'\n")
    assert call(monkeypatch, "--recipe", recipe, "train", place / "student", *words) == 0
    assert [*(out / "tracking" / "tensorboard").iterdir()]
    assert "tensorboard" not in (out / "recipe.toml").read_text()
    # the run goes on with others or with none
    assert call(monkeypatch, "train", place / "student", *words, "--resume") == 0
    recipe.write_text("[train]\ntensorbord = true\n")
    assert call(monkeypatch, "--recipe", recipe, "train", place / "student", *words) == 1
    assert "did you mean 'tensorboard'?" in capsys.readouterr().err


@pytest.mark.usefixtures("undrawn")
def test_the_same_command_goes_on_where_the_machine_was_lost(
    place: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    out, folder = tmp_path / "run", tmp_path / "Drive"
    folder.mkdir()
    words = [*flags(place, max_steps=2), "--out", out, "--gdrive-dir", folder, "--resume"]
    assert call(monkeypatch, "train", place / "student", *words) == 0
    before = {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}
    shutil.rmtree(out)
    assert call(monkeypatch, "train", place / "student", *words[:-1]) == 1
    assert "go on with it by --resume, choose another --out" in capsys.readouterr().err
    assert call(monkeypatch, "train", place / "student", *words) == 0
    for name in ("metrics.jsonl", "recipe.toml", "best", "latest", "training.csv"):
        assert (out / name).read_bytes() == before[name]
