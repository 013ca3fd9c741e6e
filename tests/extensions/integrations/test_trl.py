"""What trl's trainer reads of a student is what it computes with."""

from pathlib import Path

import pytest
from cache_case import TOKENIZER
from loop_case import with_tables
from tiny import tiny_model

import qat
from qat.errors import ConfigError

trl = pytest.importorskip("trl")
from qat.integrations.trl import QatDistillationTrainer  # noqa: E402


@pytest.mark.usefixtures("short_fits")
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
def test_a_quantized_head_is_refused(tmp_path: Path) -> None:
    student = qat.prepare(with_tables(), None)
    args = trl.DistillationConfig(str(tmp_path), use_cpu=True, bf16=False, report_to="none")
    with pytest.raises(ConfigError, match="embedding_bits=16"):
        QatDistillationTrainer(student, tiny_model(), args, processing_class=TOKENIZER)
