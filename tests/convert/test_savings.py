"""What one more flag would save: as much as it then does."""

from pathlib import Path

import pytest
from tiny import save_tiny

from qat.convert.checkpoint import convert_checkpoint
from qat.convert.config import ConvertConfig
from qat.convert.quantize import QuantizeReport
from qat.export.targets import shipping_to


def converted(
    place: Path, name: str, targets: tuple[str, ...] = (), **values: object
) -> QuantizeReport:
    config = ConvertConfig(**{"to": "q2a4", "device": "cpu", **values})
    shipping = shipping_to(targets)
    return convert_checkpoint(str(place / "float"), config, place / name, shipping).of_file()


def flags(report: QuantizeReport) -> dict[str, float]:
    return {saving.flag: saving.megabytes for saving in report.savings}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("savings")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
    save_tiny(place / "float", "llama", **sizes)
    return place


@pytest.mark.parametrize("targets", [(), ("gguf",)])
def test_a_flag_saves_what_was_said(place: Path, targets: tuple[str, ...], tmp_path: Path) -> None:
    name = "_".join(("two", *targets))
    report = converted(place, name, targets)
    said = flags(report)
    assert [*said] == ["--embedding-bits 2", "--to q2a2"]
    for flag, megabytes in said.items():
        key, value = flag.removeprefix("--").split()
        change = {"embedding_bits": 2} if key == "embedding-bits" else {"to": value}
        less = converted(place, f"{name}_{value}", targets, **change)
        assert report.megabytes - less.megabytes == pytest.approx(megabytes, rel=1e-6)


def test_only_what_targets_hold_and_what_saves_something_is_said(place: Path) -> None:
    report = converted(place, "dense weights", ("compressed-tensors",))
    assert not any("embedding" in flag for flag in flags(report))
    report = converted(place, "least", ("gguf",), to="q2a2", embedding_bits=2)
    assert flags(report) == {}
    report = converted(place, "float tables", to="q4a4_a8", embedding_bits=16)
    first, second = flags(report)
    assert first == "--embedding-bits 8" and second.endswith("_a8")


def test_floats_that_were_asked_for_are_offered_nothing(place: Path) -> None:
    assert flags(converted(place, "floats", to="float")) == {}
