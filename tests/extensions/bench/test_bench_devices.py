"""The device table: names as drivers report them, peaks as data sheets state them."""

import pytest

from qat.errors import ConfigError
from qat.models.devices import DEVICES, device_called, devices_named

REPORTED = [
    ("NVIDIA A10", "A10"),
    ("NVIDIA A100-SXM4-40GB", "A100-40"),
    ("NVIDIA A100-SXM4-80GB", "A100-80"),
    ("NVIDIA A100 80GB PCIe", "A100-80"),
    ("NVIDIA H100 PCIe", "H100-PCIe"),
    ("NVIDIA H100 80GB HBM3", "H100"),
    ("TPU v5 lite", "TPU-v5e"),
    ("Tesla V100-SXM2-16GB", "V100-16"),
    ("Tesla V100-SXM2-32GB", "V100-32"),
    ("Tesla V100-PCIE-32GB", "V100-PCIe"),
    ("NVIDIA L40S", "L40S"),
    ("NVIDIA RTX A6000", "A6000"),
    ("NVIDIA RTX 6000 Ada Generation", "RTX6000-Ada"),
    ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX6000-PRO"),
    ("NVIDIA L40", None),
    ("NVIDIA A10G", None),
    ("cpu", None),
]


def test_reported_names_find_their_entry() -> None:
    for reported, name in REPORTED:
        found = device_called(reported)
        assert (found and found.name) == name, reported


def test_geforce_boards_accumulate_in_fp32_at_half_rate() -> None:
    boards = devices_named(("rtx4090", "rtx5090", "rtx6000-ada", "rtx6000-pro"))
    geforce, professional = boards[:2], boards[2:]
    for board, full in zip(geforce, professional, strict=True):  # of one chip each
        assert 2 * board.peak_flops("bf16") == pytest.approx(full.peak_flops("bf16"), rel=0.2)


@pytest.mark.parametrize("name", ["t4", "v100-16", "v100-32", "v100-pcie"])
def test_older_cards_have_neither_bf16_nor_tf32(name: str) -> None:
    (device,) = devices_named((name,))
    assert device.peak_flops("bf16") is None and device.peak_flops("tf32") is None
    assert device.dtype == "fp16"


def test_no_names_mean_all_and_a_wrong_one_lists_the_known() -> None:
    assert devices_named(()) == DEVICES
    said = r"plan=h300 is no device of the table; choose among T4,.*; did you mean H[12]00"
    with pytest.raises(ConfigError, match=said):
        devices_named(("h200", "h300"))
    with pytest.raises(ConfigError, match=r"did you mean H100\?"):
        devices_named(("h10",))
