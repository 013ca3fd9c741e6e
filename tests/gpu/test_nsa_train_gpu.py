"""Students with sparse attention on a GPU: a compiled run learns, and the fit of gates helps."""

from pathlib import Path

import pytest
import torch
from nsa_train_case import make_sparse_place
from train_case import config

from qat.convert.calibrate import TokenBatch
from qat.extensions.nsa.fit import fit_attention
from qat.extensions.nsa.kernels.config import NSAConfig
from qat.logs import read_json_lines
from qat.models.load import load_model
from qat.train.start import train_student

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
LENGTH = 128
SIZES = NSAConfig(
    compress_block=8,
    compress_stride=4,
    select_block=16,
    num_selected=4,
    window=16,
    select_tile=16,
    backend="reference",
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_sparse_place(tmp_path_factory.mktemp("sparse"), SIZES, LENGTH)


@pytest.mark.parametrize("is_compiled", ["on", "off"])
@pytest.mark.parametrize("recomputes", [False, True])
def test_gates_learn_beside_codes(
    place: Path, tmp_path: Path, is_compiled: str, recomputes: bool
) -> None:
    settings = config(
        place,
        learn="scales,codebook,gates",
        device="cuda",
        dtype="bf16",
        compile=is_compiled,
        gradient_checkpointing=recomputes,
        max_steps=12,
        eval_every=12,
    )
    train_student(settings, str(place / "student"), tmp_path / "run", resume=False)
    lines = read_json_lines(tmp_path / "run" / "metrics.jsonl")
    first, last = (line for line in lines if line["kind"] == "eval")
    assert last["kl_tail_nats"] < first["kl_tail_nats"]
    assert last["nsa_selected_frac"] < first["nsa_selected_frac"] == 1.0
    assert 0 < last["nsa_recall_least_frac"] < 1 and last["nsa_fallbacks"] == 0
    steps = [line for line in lines if line["kind"] == "train"]
    assert all(line["nsa_blocks_read"] == line["nsa_blocks_predicted"] > 1 for line in steps)
    beats = read_json_lines(tmp_path / "run" / "heartbeat-rank0.jsonl")
    assert beats[-1]["fallback"] is None and beats[-1]["compiled"] == (is_compiled == "on")


def test_the_fit_brings_every_layer_closer(place: Path) -> None:
    model = load_model(str(place / "float"), device="cuda", dtype="fp32")
    ids = torch.randint(320, (2, 4, LENGTH), generator=torch.Generator().manual_seed(0))
    batches = [TokenBatch(each, torch.arange(LENGTH).expand(4, -1)) for each in ids]
    for fit in fit_attention(model, batches, steps=30):
        assert fit.error_after < fit.error_before
