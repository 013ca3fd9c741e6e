"""A script's own folder is on the path when it is started, and no other: `speedrun` is not."""

from pathlib import Path


def test_scripts_reach_figures_through_the_module_that_adds_its_folder() -> None:
    scripts = Path(__file__).parent.glob("*.py")
    found = {path.name for path in scripts if "from figures import" in path.read_text("utf-8")}
    assert found - {Path(__file__).name} == {"fault_records.py"}
