"""The table of what the preflight found."""

from qat.cli.train import show_findings
from qat.train.preflight import LESS_MEMORY, Checked, RunFinding


def test_no_flag_is_broken_on_a_narrow_terminal(capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    reason = "memory runs out before the end of the run"
    found = RunFinding("save_every_off", "error", "attention=something_long", reason, LESS_MEMORY)
    show_findings(Checked([found], None, is_long=True))
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= 80
    for flag in (
        "save_every_off",
        "--batch-size",
        "--grad-accum-steps,",
        "--gradient-checkpointing",
    ):
        assert flag in said
