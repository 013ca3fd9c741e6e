"""Extensions are found by their entry points."""

import importlib
import tomllib
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from qat import hooks
from qat.backend.base import Backend
from qat.backend.device import on, select
from qat.cli.train import train
from qat.convert.config import ConvertConfig, check_asked
from qat.convert.importing import load_importer
from qat.data.opening import open_cache
from qat.data.sources import open_source
from qat.errors import ConfigError
from qat.evaluate.config import EvalConfig
from qat.export.targets import load_target, target_names
from qat.models.attention import read_attention, sparse_attention
from qat.observe.config import TrackConfig
from qat.train.config import TrainConfig
from qat.train.launch import LaunchConfig
from qat.train.start import check_rollouts

RUN, TRACKED = TrainConfig(cache_dir="cache"), TrackConfig(tensorboard=True)
SOAKED = LaunchConfig(soak=40)


@pytest.mark.usefixtures("no_extensions")
@pytest.mark.parametrize(
    ("load", "name"),
    [
        (lambda name: hooks.extension("qat.verbs", name), "lab"),
        (load_importer, "anemll"),
        (load_target, "anemll"),
        (select, "xla"),
        (read_attention, "nsa"),
        (lambda _: train("q2", config=RUN, out=Path("run"), tracking=TRACKED), "trackers"),
        (lambda _: train("q2", config=RUN, out=Path("run"), launch=SOAKED), "lab"),
        (lambda name: sparse_attention(SimpleNamespace(**{name: {"mode": "merged"}})), "nsa"),
        (lambda name: check_rollouts(0.5, 8, None, "cpu"), "decode"),
        (lambda name: open_cache(f"s3://bucket/{name}"), "streams"),
        (lambda name: check_asked(ConvertConfig(**{name: True})), "rotate"),
        (lambda _: EvalConfig(tasks="arc_easy").check_named(), "suite"),
        (lambda name: open_source(f"{name}.txt:1,more.txt:1"), "mixtures"),
    ],
    ids=(
        "verb importer target device attention followers soak checkpoint rows cache rotation tasks "
        "mixture"
    ).split(),
)
def test_a_missing_extension_is_named_and_how_to_install_it(
    load: Callable[[str], object], name: str
) -> None:
    with pytest.raises(ConfigError, match=f"{name!r} is not installed.*pip install"):
        load(name)


@pytest.mark.usefixtures("no_extensions")
def test_targets_without_their_extension_are_left_out() -> None:
    assert target_names() == ("packed", "dense")


def test_a_device_that_torch_does_not_know_comes_from_an_extension(monkeypatch) -> None:
    point = EntryPoint("xla", "qat.extensions.xla.backend", "qat.devices")
    monkeypatch.setattr(hooks, "entry_points", lambda group: (point,))
    hooks.hooks.cache_clear()
    try:
        assert type(on(torch.device("xla"))) is point.load().KIND
        assert type(on(torch.device("meta"))) is Backend
    finally:
        hooks.hooks.cache_clear()


def test_the_projects_entry_points_lead_somewhere() -> None:
    importlib.import_module("qat.cli")  # it loads those of qat.verbs, which import it
    project = Path(__file__).parents[1] / "pyproject.toml"
    groups = tomllib.loads(project.read_text(encoding="utf-8"))["project"]["entry-points"]
    for group in (each for each in groups if each.startswith("qat.")):
        for name, value in groups[group].items():
            assert EntryPoint(name, value, group).load() is not None


def test_entry_points_of_another_version_are_one_line(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "whole_extension.py").write_text("import a_library_that_is_not_here\n")
    monkeypatch.syspath_prepend(tmp_path)
    for module in ("qat.extensions.gone", "qat.gone.verb"):
        point = EntryPoint("gone", module, "qat.targets")
        monkeypatch.setattr(hooks, "hooks", lambda group, point=point: {point.name: point})
        with pytest.raises(ConfigError, match=f"{module}, .*expected .*pip install"):
            load_target("gone")
    with pytest.raises(ModuleNotFoundError, match="a_library_that_is_not_here"):
        hooks.load(EntryPoint("whole", "whole_extension", "qat.targets"))
