"""Students in MLX: what the script measures of a tiny one."""

from argparse import Namespace
from pathlib import Path

import pytest
from quantized import tiny_quantized
from tiny import tiny_tokenizer

from qat.models.checkpoint import save_checkpoint
from qat.quant.spec import LutSpec

pytest.importorskip("mlx_lm", exc_type=ImportError)


@pytest.mark.slow
def test_in_float32_mlx_says_what_we_say(tmp_path: Path) -> None:
    from measure_mlx import WORDS, engine, measure

    spec = LutSpec(bits=3, codebook="seq", group_size=32, scale_bits=8)
    save_checkpoint(tiny_quantized("qwen3", spec), tiny_tokenizer(), tmp_path / "student")
    (tmp_path / "text").write_text("the cat sat on the mat and the dog saw the cat " * 20)
    sizes = Namespace(sequences=2, length=24)
    found = measure(str(tmp_path / "student"), tmp_path / "text", sizes, engine())
    assert (found.bits, found.same, found.float32.agrees) == (3, WORDS, 1.0)
    assert abs(found.float32.kl) < 1e-9
    assert found.float32.kl < found.bfloat16.kl
