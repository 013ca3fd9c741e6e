"""The hook: when the extension is loaded, and what the core gets of it."""

import subprocess
import sys

import pytest

from qat.extensions.bench.config import BenchConfig
from qat.extensions.bench.student import open_student
from qat.extensions.nsa.kernels.config import PRESETS
from qat.extensions.nsa.swap import nsa_config
from qat.models import attention

DENSE = """
import sys
import qat.convert.convert
import qat.generate.text
import qat.python
from qat.models.attention import read_attention
read_attention("dense")
print(*(name for name in sys.modules if name.startswith("qat.extensions")))
"""
NAMES = """
import sys
from qat.errors import ConfigError
from qat.models.attention import read_attention
for name in ("nas", "pyproject.toml"):
    try:
        read_attention(name)
    except ConfigError as error:
        print(error)
print(read_attention("nsa").mode, "torch" in sys.modules)
"""


def output_of(script: str) -> list[str]:
    command = [sys.executable, "-c", script]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


@pytest.mark.slow
def test_dense_attention_loads_no_extension() -> None:
    assert output_of(DENSE) == [""]


def test_a_name_is_read_before_torch_is_imported() -> None:
    wrong, not_settings, right = output_of(NAMES)
    assert "did you mean nsa?" in wrong and "pyproject.toml" in not_settings
    assert right == "residual False"


def test_a_student_of_a_benchmark_attends_as_named() -> None:
    dense = open_student("tiny", BenchConfig(device="cpu")).model
    sparse = open_student("tiny", BenchConfig(device="cpu", attention="nsa-merged")).model
    assert nsa_config(dense) is None and nsa_config(sparse) == PRESETS["nsa-merged"]


def test_the_same_attention_again_changes_nothing() -> None:
    model = open_student("tiny", BenchConfig(device="cpu", attention="nsa")).model
    before = model.state_dict().keys()
    attention.change_attention(model, PRESETS["nsa"])
    assert model.state_dict().keys() == before and attention.is_all_sparse(model.config)
    attention.change_attention(model, None)
    assert not attention.attends_sparsely(model)
    attention.change_attention(model, None)
    assert len(model.state_dict()) < len(before)
