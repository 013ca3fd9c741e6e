"""The device table: names as drivers report them, peaks as data sheets state them."""

import pytest

from qat.errors import ConfigError
from qat.models.cost import DEVICES, device_called, devices_named


@pytest.mark.parametrize(
    ("reported", "name"),
    [
        ("Tesla T4", "T4"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA A10", "A10"),
        ("NVIDIA A100-SXM4-40GB", "A100-40"),
        ("NVIDIA A100-PCIE-40GB", "A100-40"),
        ("NVIDIA A100-SXM4-80GB", "A100-80"),
        ("NVIDIA A100 80GB PCIe", "A100-80"),
        ("NVIDIA GeForce RTX 3090", "RTX3090"),
        ("NVIDIA GeForce RTX 4090", "RTX4090"),
        ("NVIDIA GeForce RTX 5090", "RTX5090"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA B200", "B200"),
        ("TPU v5 lite", "TPU-v5e"),
        ("TPU v6 lite", "TPU-v6e"),
        ("NVIDIA L40S", None),
        ("NVIDIA A10G", None),
        ("cpu", None),
    ],
)
def test_reported_names_find_their_entry(reported: str, name: str | None) -> None:
    found = device_called(reported)
    assert (found and found.name) == name


def test_every_device_can_train_in_its_dtype() -> None:
    for device in DEVICES:
        assert device.peak_flops(device.dtype) > 1e13
        assert device.bandwidth > 1e11
        assert 10 < device.memory_gib < 200


def test_a_t4_has_neither_bf16_nor_tf32() -> None:
    (device,) = devices_named(("t4",))
    assert device.peak_flops("bf16") is None and device.peak_flops("tf32") is None
    assert device.dtype == "fp16"


def test_no_names_mean_all_and_a_wrong_one_lists_the_known() -> None:
    assert devices_named(()) == DEVICES
    with pytest.raises(ConfigError, match="plan=h300 is no device of the table; choose among T4,"):
        devices_named(("h200", "h300"))
