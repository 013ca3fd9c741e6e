"""The meaning of a sweep's recipe, and the message for every mistake in one."""

from itertools import product
from pathlib import Path

import pytest

from qat.errors import ConfigError
from qat.extensions.lab.sweep.plan import StepsConfig, make_groups, make_runs, read_sweep

FOLDER = Path(__file__).parents[3] / "speedrun" / "recipes"
RECIPES = sorted(FOLDER.glob("sweep_*.toml"))

BASE = """
name = "s"
student = "tiny"
"""


def read(tmp_path: Path, text: str, *, tiny: bool = False, base: str = BASE, changes=()):
    path = tmp_path / "r.toml"
    path.write_text(base + text)
    return read_sweep(path, tiny=tiny, changes=changes)


def names(recipe) -> list[str]:
    return [group.name for group in make_groups(recipe)]


def test_groups_meet_every_point_of_the_product_in_turns(tmp_path: Path) -> None:
    text = """
repeats = 2
[settings]
steps = 3
[product]
batch_size = [4, 8]
[[groups]]
name = "plain"
[[groups]]
name = "ckpt"
settings = { gradient_checkpointing = true, steps = 5 }
"""
    recipe = read(tmp_path, text)
    groups = make_groups(recipe)
    assert names(recipe) == [
        "plain batch_size=4",
        "plain batch_size=8",
        "ckpt batch_size=4",
        "ckpt batch_size=8",
    ]
    assert groups[3].settings == {"steps": 5, "gradient_checkpointing": True, "batch_size": 8}
    runs = make_runs(recipe, groups, tmp_path)
    assert [(run.repeat, run.group) for run in runs[3:6]] == [
        (0, "ckpt batch_size=8"),
        (1, "plain batch_size=4"),
        (1, "plain batch_size=8"),
    ]
    assert len({run.label for run in runs}) == len(runs) == 8


def test_the_tiny_variant_stands_over_the_rest(tmp_path: Path) -> None:
    text = """
student = "qwen3-0.6b"
[settings]
steps = 200
loss = "tail"
[product]
batch_size = [64, 128]
[tiny]
student = "tiny"
repeats = 1
settings = { steps = 1 }
product = { batch_size = [2] }
"""
    recipe = read(tmp_path, text, tiny=True, base='name = "s"\n')
    assert (recipe.student, recipe.repeats) == ("tiny", 1)
    assert recipe.settings == {"steps": 1, "loss": "tail"} and names(recipe) == ["batch_size=2"]
    assert read(tmp_path, text, base='name = "s"\n').student == "qwen3-0.6b"


def test_any_key_changes_from_the_command_line(tmp_path: Path) -> None:
    text = """
[settings]
steps = 200
[product]
ranks = [1]
[[groups]]
name = "a 1.5"
[tiny]
settings = { steps = 1 }
"""
    changes = ["settings.steps=20", "repeats=7", "student=qwen3-0.6b", "product.ranks=[1, 2]"]
    changes += ["groups.a 1.5.loss=tail", "settings.loss='kl,tail'", "stop_on_error=true"]
    recipe = read(tmp_path, text, tiny=True, changes=changes)
    assert recipe.settings == {"steps": 20, "loss": "kl,tail"}
    assert (recipe.repeats, recipe.student, recipe.stop_on_error) == (7, "qwen3-0.6b", True)
    assert recipe.product == {"ranks": [1, 2]} and recipe.groups[0].settings == {"loss": "tail"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("settings.stepz=20", r"'stepz', expected a key.*did you mean 'steps'"),
        ("repeat=1", r"'repeat', expected a key.*did you mean 'repeats'"),
        ("repeats=no", r"repeats='no'"),
        ("steps", r"set=steps, expected a key of the recipe and its value; write it"),
        ("student.steps=1", r"set=student.steps=1, expected a key of the recipe and its value"),
        (
            "groups.b.steps=1",
            r"'b' is no group of the recipe, expected groups.*; use 'a'",
        ),
        ("product.batch_size=4", r"'4' is no list, expected the values.*'product.ranks=\[1,2\]'"),
        ("product.batch_size=[4", r"'\[4' is no list"),
        ("name=", "name=''"),
    ],
)
def test_a_change_of_no_key_is_refused(tmp_path: Path, change: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, '[[groups]]\nname = "a"\n', changes=[change])


def test_one_length_of_a_bucket_may_be_a_number(tmp_path: Path) -> None:
    text = '[settings]\nlayout = "buckets"\nseq_len = 32\n'
    recipe = read(tmp_path, text, changes=["settings.bucket_lengths=32"])
    (group,) = make_groups(recipe)
    assert StepsConfig.parse(group.settings, "group").buckets == (32,)


def test_a_run_is_known_by_what_it_does(tmp_path: Path) -> None:
    recipe = read(tmp_path, "[product]\nbatch_size = [4, 8]\n")
    first, second, *_ = make_runs(recipe, make_groups(recipe), tmp_path)
    (elsewhere, *_) = make_runs(recipe, make_groups(recipe), tmp_path / "other")
    assert first.key == elsewhere.key != second.key
    strict = make_runs(recipe, make_groups(recipe), tmp_path, strict=True)
    assert strict[0].key != first.key


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("repeat = 2\n", "has 'repeat', expected a key that it knows; did you mean 'repeats'?"),
        ("[settings]\nbatch_sze = 2\n", r"\[settings\] has 'batch_sze'.*'batch_size'"),
        ("[product]\nlearning = [1]\n", r"\[product\] has 'learning'.*'learn'"),
        ("[tiny]\nrepeat = 2\n", r"\[tiny\] has 'repeat'.*'repeats'"),
        ('[[groups]]\nname = "a"\nsettings = { compil = "on" }\n', "group 'a' has 'compil'"),
        ("[product]\nbatch_size = []\n", "product.batch_size is empty, expected values to compare"),
        ("[settings]\nplan = true\n", "has 'plan', expected a key that it knows"),
        (
            '[[groups]]\nname = "a"\n[[groups]]\nname = "a"\n',
            "2 are called 'a'; expected a name of its own for each; rename all but one",
        ),
        (
            '[product]\nsteps = [1]\n[[groups]]\nname = "a"\nsettings = { steps = 2 }\n',
            r"group 'a' and \[product\] both set 'steps'",
        ),
        (
            "[settings]\nsteps = 2\n[product]\nsteps = [1, 3]\n",
            r"\[settings\] and \[product\] both set 'steps', .*product.steps=\[1, 3\]",
        ),
        ('[settings]\nlayout = "buckets"\nbucket_lengths = "a"\n', "bucket_lengths='a': expected"),
        ('verb = "command"\n', "verb='command' needs a command"),
        ('command = ["x"]\n', "verb='bench' needs a student and no command"),
        ('tiny = "x"\n', "tiny='x', expected a table of keys over the others"),
        ("name = 1 2\n", "is not TOML"),
        ("repeats = 0\n", "repeats=0: "),
        ('baseline = "b"\n[product]\nbatch_size = [4, 8]\n', "baseline='b' is no group"),
        ("[product]\nbatch_size = [4, 4]\n", "2 are called 'batch_size=4'"),
        ("[product]\nbatch_size = [0]\n", "group 'batch_size=0': batch_size=0: "),
        ('verb = "command"\ncommand = ["{x}"]\nstudent = ""\n', "has a place for 'x'"),
    ],
)
def test_mistakes_in_a_recipe(text: str, message: str, tmp_path: Path) -> None:
    base = 'name = "s"\n' if "student" in text else BASE
    with pytest.raises(ConfigError, match=message):
        make_groups(read(tmp_path, text, base=base))


def test_committed_recipes_come_down_to_runs() -> None:
    for recipe, tiny in product(RECIPES, (False, True)):
        assert len(make_groups(read_sweep(recipe, tiny=tiny))) > 1, recipe
