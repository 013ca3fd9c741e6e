"""What the driver tells of a GPU, from a library made up for it."""

import ctypes

import pytest

from qat.backend import nvml
from qat.backend.nvml import UNKNOWN, gpu_health


class Library:
    """Answers as the driver's library does: 0 and a value behind the pointer, or an error code."""

    def __init__(self, failing: tuple[str, ...] = ()) -> None:
        self.asked: list[object] = []
        self._failing = failing

    def __getattr__(self, name: str):
        return lambda *arguments: self._answer(name, arguments)

    def _answer(self, name: str, arguments: tuple) -> int:
        if name in self._failing:
            return 3
        if name == "nvmlDeviceGetHandleByUUID":
            self.asked.append(arguments[0])
        elif name == "nvmlDeviceGetUtilizationRates":
            arguments[1]._obj.gpu = 97
        elif name != "nvmlInit_v2":
            arguments[-1]._obj.value = {"nvmlDeviceGetPowerUsage": 512_500}.get(name, 61)
        return 0


def test_values_come_in_their_units(monkeypatch) -> None:
    library = Library()
    monkeypatch.setattr(ctypes, "CDLL", lambda _: library)
    found = gpu_health("00-11")
    assert found == {"gpu_util_pct": 97, "gpu_power_w": 512.5, "gpu_temp_c": 61}
    assert library.asked == [b"GPU-00-11"]


@pytest.mark.parametrize("name", ["nvmlInit_v2", "nvmlDeviceGetHandleByUUID"])
def test_a_gpu_that_is_not_found_tells_nothing(monkeypatch, name: str) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: Library((name,)))
    assert gpu_health("00-11") == UNKNOWN


def test_what_one_device_does_not_tell_is_unknown(monkeypatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: Library(("nvmlDeviceGetPowerUsage",)))
    assert gpu_health("00-11") == {**UNKNOWN, "gpu_util_pct": 97, "gpu_temp_c": 61}


def test_without_a_driver_nothing_is_known(monkeypatch) -> None:
    monkeypatch.setattr(nvml, "LIBRARY", "libthere-is-no-such-thing.so.9")
    assert gpu_health("00-11") == UNKNOWN
