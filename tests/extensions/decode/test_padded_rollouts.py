"""Own words of a student whose teacher has a head of another size."""

import sys
from pathlib import Path

import pytest
from padded_case import SIZES, make_pair
from tiny import VOCAB

from qat.data.reader import TeacherCache
from qat.extensions.decode.step import DecodeStep


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("is_copied", [True, False])
def test_own_words_are_those_of_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, int], is_copied: bool
) -> None:
    pair = make_pair(tmp_path, sizes)
    if not is_copied:
        monkeypatch.setattr(DecodeStep, "fits", lambda _student: False)
    found = {}
    for name in ("common", "all"):
        if name == "all":
            monkeypatch.setattr(TeacherCache, "check_student", lambda *_: sys.maxsize)
        beside = {"teacher": str(pair.place / "teacher"), "on_policy": 0.5}
        trainer = pair.trainer(tmp_path / name, **beside)
        (batch,) = trainer.step_batches(0)
        found[name] = batch.input_ids[-trainer.config.own_rows :]
        if name == "common":
            assert trainer.take_step([batch], 0).grad_norm.isfinite()
    assert found["common"].max() < VOCAB
    assert (found["all"].max() >= VOCAB) == (trainer.student.config.vocab_size > VOCAB)
