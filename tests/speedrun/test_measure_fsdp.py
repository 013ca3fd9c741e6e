"""The step whose latent weights `fully_shard` divides learns what ours learns."""

from functools import partial
from pathlib import Path

import pytest
from ranks_case import run_ranks

from qat.ranks import Ranks

SPEEDRUN = Path(__file__).parents[2] / "speedrun"


@pytest.mark.slow
def test_both_ways_have_the_same_loss_and_gradients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(SPEEDRUN))
    monkeypatch.syspath_prepend(str(SPEEDRUN / "research"))
    import measure_fsdp
    from speed_case import EXACT, LATENT, settled

    values = {"batch_size": 2, "seq_len": 16, "top_k": 8, "steps": 1, "form": "layer"}
    values |= {"latent_dtype": "bf16", "gradient_checkpointing": True, "device": "cpu"}
    config = settled(**LATENT, **EXACT, **values)

    def act(ranks: Ranks) -> list:
        found = []
        for name in ("ours", "fully_shard"):
            norms = []
            make = partial(measure_fsdp.subject, name=name, norms=norms, ranks=ranks)
            timing = measure_fsdp.timed("tiny", config, ranks, make)
            found.append([timing.loss_nats, norms[-1].item()])
        return found

    for (loss, norm), (their_loss, their_norm) in run_ranks(2, act, tmp_path):
        assert loss == their_loss
        # theirs are rounded to bfloat16 before they are summed
        assert norm == pytest.approx(their_norm, rel=1e-3) and norm > 0
