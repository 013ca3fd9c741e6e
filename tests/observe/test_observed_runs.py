"""Runs and reports as they are read from a directory, of this version and of older ones."""

from pathlib import Path

from observe.synthetic import write_pipeline

from qat.observe.runs import read_directory, read_exam


def test_sizes_of_older_reports_are_read(tmp_path: Path) -> None:
    path = write_pipeline(tmp_path / "out")
    files = {name: path / name for name in ("eval.json", "converted/convert_report.json")}
    for file in files.values():  # as version 0.2 wrote them
        text = file.read_text().replace('"bits_per_weight": 3.6', '"whole_bits_per_weight": 3.6')
        file.write_text(text.replace('"linear_bits"', '"bits_per_weight"'))
    found = read_directory(path / "converted")
    assert (found.bits_per_weight, found.linear_bits) == (3.6, 2.98)
    student = read_exam(path)["trained"]
    assert (student["bits_per_weight"], student["linear_bits"]) == (3.6, 2.5)
