"""What NVIDIA's management library, a part of every driver, tells of a GPU while it works."""

import ctypes

LIBRARY = "libnvidia-ml.so.1"
GPU_SENSOR = 0
"""The one thermometer that every GPU has."""
UNKNOWN = dict.fromkeys(("gpu_util_pct", "gpu_power_w", "gpu_temp_c"))


class _Utilization(ctypes.Structure):
    """Share of the last sample period (up to 1 s) in which it was busy, in percent."""

    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


def gpu_health(uuid: str) -> dict[str, float | None]:
    """Load (%), power (W) and temperature (C) of the GPU with this UUID; None where nobody tells.

    Takes milliseconds.
    """
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError:
        return UNKNOWN
    handle = ctypes.c_void_p()
    by_uuid = library.nvmlDeviceGetHandleByUUID
    if library.nvmlInit_v2() or by_uuid(f"GPU-{uuid}".encode(), ctypes.byref(handle)):
        return UNKNOWN
    load, milliwatts, celsius = _Utilization(), ctypes.c_uint(), ctypes.c_uint()
    has_load = not library.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(load))
    has_power = not library.nvmlDeviceGetPowerUsage(handle, ctypes.byref(milliwatts))
    has_heat = not library.nvmlDeviceGetTemperature(handle, GPU_SENSOR, ctypes.byref(celsius))
    return {
        "gpu_util_pct": load.gpu if has_load else None,
        "gpu_power_w": milliwatts.value / 1e3 if has_power else None,
        "gpu_temp_c": celsius.value if has_heat else None,
    }
