"""The health of a GPU as its driver reports it, with a fake management library."""

import logging
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from qat.backend import nvidia
from qat.backend.nvidia import UNKNOWN, gpu_health, gpu_samples


class Missing(Exception):
    """The error that the library raises for anything it cannot do."""


class Library:
    """A fake `pynvml` in which the functions named in `failing` fail."""

    NVMLError, NVML_TEMPERATURE_GPU, NVML_CLOCK_SM, nvmlMemory_v2 = Missing, 0, 1, 2

    def __init__(self, *failing: str) -> None:
        self.asked: list[str] = []
        self._failing = failing

    def __getattr__(self, name: str):
        return lambda *arguments: self._answer(name, arguments)

    def _answer(self, name: str, arguments: tuple) -> object:
        if name in self._failing:
            raise Missing(name)
        if name == "nvmlDeviceGetHandleByUUID":
            self.asked.append(arguments[0])
        answers = {
            "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=97, memory=3),
            "nvmlDeviceGetPowerUsage": 512_500,
            "nvmlDeviceGetTemperature": 61,
            "nvmlDeviceGetCount": 2,
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=3 * 2**20),
            "nvmlDeviceGetClockInfo": 1980,
        }
        return answers.get(name)


@pytest.fixture(autouse=True)
def anew() -> Iterator[None]:
    nvidia._management_library.cache_clear()
    yield
    nvidia._management_library.cache_clear()


KNOWN = {"gpu_util_pct": 97, "gpu_power_w": 512.5, "gpu_temp_c": 61}


@pytest.mark.parametrize(
    ("failing", "expected"),
    [
        ((), KNOWN),
        (("nvmlInit",), UNKNOWN),
        (("nvmlDeviceGetHandleByUUID",), UNKNOWN),
        (("nvmlDeviceGetPowerUsage",), {**KNOWN, "gpu_power_w": None}),
    ],
)
def test_values_come_in_their_units_or_not_at_all(monkeypatch, failing, expected) -> None:
    library = Library(*failing)
    monkeypatch.setitem(sys.modules, "pynvml", library)
    assert gpu_health("00-11") == expected
    assert library.asked == ([] if expected is UNKNOWN else ["GPU-00-11"])


@pytest.mark.skipif(nvidia.present() is not None, reason="has a GPU")
def test_without_a_driver_nothing_is_known() -> None:
    assert gpu_health("00-11") == UNKNOWN


def test_a_missing_library_is_said_once(monkeypatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with caplog.at_level(logging.WARNING):
        assert gpu_health("00-11") == gpu_health("00-11") == UNKNOWN
    (record,) = caplog.records
    assert "nvidia-ml-py is not installed; install it with:" in record.message


def test_every_gpu_is_sampled_and_none_where_nobody_tells(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Library("nvmlDeviceGetClockInfo"))
    first, second = gpu_samples()
    assert first == {"gpu": 0, **KNOWN, "gpu_mem_mib": 3, "gpu_clock_mhz": None}
    assert second == {**first, "gpu": 1}
    for name in ("nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex"):
        nvidia._management_library.cache_clear()
        monkeypatch.setitem(sys.modules, "pynvml", Library(name))
        assert gpu_samples() == []
