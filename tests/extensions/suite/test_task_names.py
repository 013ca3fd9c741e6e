"""Names of tasks, read from the text of lm-eval's files, and refused before the harness is."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from qat.errors import ConfigError
from qat.evaluate.config import EvalConfig
from qat.extensions.suite import task_names

HARNESS = {
    "arc/easy.yaml": "tag:\n  - ai2_arc\n  # both of them\n  - sciences\ntask: arc_easy # easy\n",
    "arc/hard.yaml": "include: easy.yaml\ntask: 'arc_challenge'\nmetric_list:\n  - metric: acc\n",
    "_template": '"task": "hellaswag"\noutput_type: multiple_choice\n',
    "all.yaml": "group: all_of_it\ntask:\n  - arc_easy\n  - hellaswag\n",
}
"""Files of a harness: a tag and a list of tags, quoted keys, an included file, a group."""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a directory with a user's task; the harness has four files."""
    (tmp_path / "tasks" / "arc").mkdir(parents=True)
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "mine.yaml").write_text("task: mine\n")
    for name, text in HARNESS.items():
        (tmp_path / "tasks" / name).write_text(text)
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(task_names, "find_spec", lambda _: spec)
    monkeypatch.setattr(task_names, "is_installed", lambda _: True)
    task_names._harness_names.cache_clear()
    return tmp_path / "own"


def test_known_tasks_pass(own: Path) -> None:
    names = "mine, arc_challenge,hellaswag,ai2_arc,sciences,all_of_it"
    EvalConfig(tasks=names, tasks_dir=own).check_named()


@pytest.mark.parametrize(
    ("tasks", "folder", "message"),
    [
        ("hellaswag,arc_esy", None, "'arc_esy', but lm-eval knows no .*; did you mean arc_easy"),
        ("mine", None, "'mine', but lm-eval knows no such task among its 6"),
        ("acc", "own", "'acc'.* among its 6; see 'lm-eval ls tasks'"),
        ("mine", "nowhere", "tasks_dir=.*nowhere is not there"),
    ],
)
def test_unknown_tasks_are_refused(own: Path, tasks: str, folder: str | None, message: str) -> None:
    place = folder and own.with_name(folder)
    with pytest.raises(ConfigError, match=message):
        EvalConfig(tasks=tasks, tasks_dir=place).check_named()


def test_without_the_library_it_says_how_to_install_it(own: Path, monkeypatch) -> None:
    monkeypatch.setattr(task_names, "is_installed", lambda _: False)
    with pytest.raises(ConfigError, match=r"lm-eval is not installed.*; run: .*\[eval\]"):
        EvalConfig(tasks="mine", tasks_dir=own).check_named()
