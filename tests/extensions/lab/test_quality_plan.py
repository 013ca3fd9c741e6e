"""A quality recipe is checked whole before anything runs, and every mistake is one line."""

import math
from pathlib import Path

import families
import pytest
import tomli_w

from qat.errors import ConfigError, DataError
from qat.extensions.lab.quality.plan import (
    QualityPlan,
    QualityRecipe,
    convert_config,
    read_quality,
    shared_out,
    train_config,
)
from qat.extensions.lab.quality.prepare import (
    check_shapes,
    measure,
    resolve,
    time_key,
    to_time,
    with_equal_time,
)

RECIPES = Path(__file__).parents[3] / "speedrun" / "recipes"
BASE = {
    "name": "case",
    "teacher": "TEACHER",
    "sequence_length": 64,
    "max_steps": 10,
    "batch_size": 8,
    "texts": {"distil": "learn.jsonl", "report": {"own": "judge.jsonl"}},
    "convert": {"to": "q2a4"},
    "recipes": [{"name": "ours"}],
}


@pytest.fixture
def place(tmp_path: Path, monkeypatch) -> Path:
    (tmp_path / "learn.jsonl").write_text('{"text": "one"}\n')
    (tmp_path / "judge.jsonl").write_text('{"text": "two"}\n')
    monkeypatch.chdir(tmp_path)
    return tmp_path


def plans(*recipes: dict, **values: object) -> list[QualityPlan]:
    found = QualityRecipe.parse({**BASE, "recipes": list(recipes), **values}, "case")
    return resolve(found)


def test_tables_of_the_file_are_defaults(place: Path) -> None:
    (plan,) = plans({"name": "a", "train": {"lr": 0.5}}, train={"lr": 0.1, "loss": "sampled"},
                    cache={"draws": 9})  # fmt: skip
    config = train_config(plan.stages[0], Path("cache"), seed=3, device="cpu")
    assert (config.lr, config.loss, config.seed, config.device) == (0.5, "sampled", 3, "cpu")
    assert (config.batch_size, config.max_steps, config.eval_every) == (8, 10, 10)
    assert plan.cache == {"draws": 9} and plan.seeds == (0,) and plan.steps == 10


def test_conversions_calibrate_on_the_cache_unless_told(place: Path) -> None:
    own, none, text = plans(
        {"name": "own"},
        {"name": "none", "convert": {"calibration": False}},
        {"name": "text", "convert": {"calibration": "other.txt", "base": "teacher"}},
    )
    found = [convert_config(plan.convert, Path("c")) for plan in (own, none, text)]
    assert [config.calibration for config in found] == ["c", None, "other.txt"]
    assert found[2].base == "TEACHER"


def test_a_teacher_of_images_and_text_has_shapes_too(place: Path) -> None:
    families.saved("LlavaForConditionalGeneration", place / "TEACHER")
    recipe = QualityRecipe.parse(BASE, "case")
    made, unmade = check_shapes(recipe, resolve(recipe))
    assert [plan.name for plan in made] == ["ours"] and not unmade


def test_stages_share_what_is_left(place: Path) -> None:
    stages = [{"mlp_only": True, "max_steps": 4}, {"convert": {"to": "q2a2"}}, {}]
    (plan,) = plans({"name": "a", "stages": stages})
    assert [stage.steps for stage in plan.stages] == [4, 3, 3]
    assert [stage.convert for stage in plan.stages] == [None, {"to": "q2a2"}, None]
    assert [stage.steps for stage in plan.with_steps(5).stages] == [2, 2, 1]
    assert shared_out(10, [1, 1, 1]) == [3, 4, 3]
    assert shared_out(1, [1, 1]) == [1, 1] and shared_out(5, []) == []
    # what only converts or rounds takes no step, and one seed
    both = plans({"name": "c", "train": False}, {"name": "r", "method": "rtn"}, seeds=[4, 5])
    assert [(plan.steps, plan.seeds) for plan in both] == [(0, (4,))] * 2


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ({"learning": 1}, "recipes.0.learning: Extra inputs are not permitted"),
        ({"train": {"nope": 1}}, "recipe 'a': train: nope is unknown"),
        ({"convert": {"to": "q9"}}, "recipe 'a': to=q9 is neither a file nor a preset"),
        ({"convert": {"for": ["q9"]}}, "recipe 'a': for=['q9'] of a conversion, expected a list"),
        ({"convert": {"for": "gguf"}}, "recipe 'a': for='gguf' of a conversion, expected a list"),
        ({"cache": {"top_k": 0}}, "top_k=0 and draws=0 keep nothing"),
        ({"cache": {"seed": 1}}, "recipe 'a': seed=1 is not to be chosen here"),
        ({"train": {"max_steps": 5}}, "recipe 'a': max_steps=5 is not to be chosen here; expected"),
        ({"train": {"loss": "sampled"}}, "loss=sampled reads the teacher's draws"),
        ({"train": {"loss": "kl"}}, "loss=kl reads every word of the teacher"),
        ({"train": False, "stages": [{}]}, "recipe 'a' has train and stages; keep one of them"),
        ({"stages": [{"max_steps": 4}]}, "recipe 'a': its stages take 4 steps, expected 10 in all"),
        ({"stages": [{"max_steps": 10}, {}]}, "its stages take 10 steps, expected 10 in all and"),
        ({"stages": [{"max_steps": math.nan}, {}]}, "max_steps=nan of a stage, expected a whole"),
        ({"stages": [{"max_steps": "9"}, {}]}, "max_steps='9' of a stage, expected a whole number"),
        ({"stages": [{"convert": 7}]}, "convert=7 of a stage, expected a table of settings"),
        ({"train": {"grad_accum_steps": 0}}, "grad_accum_steps=0: Input should be greater than 0"),
        ({"method": "magic"}, "recipe 'a': no method is called 'magic'; expected one that there"),
        ({"method": "rtn", "convert": {"to": "q4a4"}}, "'a' has stages or convert, which method"),
        ({"method": "rtn", "train": {"x": 1}}, "recipe 'a': x is unknown"),
        ({"method": "rtn", "train": {"kv": "int8"}}, "recipe 'a': kv=int8 is given for method=rtn"),
        ({"equal_time_to": "b"}, "'a' has equal_time_to='b'; expected another recipe of this file"),
        ({"equal_time_to": "a", "max_steps": 3}, "'a' has equal_time_to beside train = false or"),
    ],
)
def test_a_mistake_is_one_line(place: Path, recipe: dict, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        plans({"name": "a", **recipe})
    assert message in str(error.value) and "\n" not in str(error.value)


def test_names_are_unique(place: Path) -> None:
    with pytest.raises(ConfigError, match="recipes: 2 are called 'a'; expected a name of its own"):
        plans({"name": "a"}, {"name": "b"}, {"name": "a"})


def test_equal_time_needs_two_that_train(place: Path) -> None:
    with pytest.raises(ConfigError, match="10 and 0 steps; expected two that train; drop it"):
        plans({"name": "a", "equal_time_to": "b"}, {"name": "b", "train": False})


@pytest.mark.parametrize("text", ["learn.jsonl", "./learn.jsonl", "copy.jsonl", "calibrate.txt"])
def test_texts_are_disjoint(place: Path, text: str) -> None:
    (place / "copy.jsonl").write_bytes((place / "learn.jsonl").read_bytes())
    (place / "calibrate.txt").write_text("some text")
    texts = {"distil": "learn.jsonl", "calibration": "calibrate.txt", "report": {"x": text}}
    with pytest.raises(ConfigError, match=r"texts.report.x=\S+ is \(part of\) texts\.\w+=.*; expe"):
        plans({"name": "a"}, texts=texts)


def test_a_text_in_the_directory_that_is_learned_from_is_not_disjoint(place: Path) -> None:
    texts = {"distil": str(place), "report": {"x": "judge.jsonl"}}
    with pytest.raises(ConfigError, match="is .part of. texts.distil"):
        plans({"name": "a"}, texts=texts)


def test_a_missing_text_is_found_first(place: Path) -> None:
    texts = {**BASE["texts"], "report": {"x": "missing.jsonl"}}
    with pytest.raises(DataError, match="missing.jsonl"):
        plans({"name": "a"}, texts=texts)


def test_a_file_of_recipes(place: Path) -> None:
    path = place / "recipe.toml"
    path.write_text(tomli_w.dumps(BASE))
    assert read_quality(path).recipes[0].name == "ours"
    path.write_text("name = ")
    with pytest.raises(ConfigError, match="is not TOML .*, expected a quality recipe; mend that"):
        read_quality(path)
    with pytest.raises(ConfigError, match="No such file or directory; expected a TOML file; check"):
        read_quality(place / "none.toml")


def test_committed_recipes_can_be_read() -> None:
    for path in sorted(RECIPES.glob("quality_*.toml")):
        assert read_quality(path).recipes, path


def test_the_tiny_recipe_runs_from_the_repository(monkeypatch) -> None:
    monkeypatch.chdir(RECIPES.parents[1])
    assert len(resolve(read_quality(RECIPES / "quality_tiny.toml"))) == 5


def test_equal_time_turns_a_clock_into_steps(place: Path) -> None:
    """10 steps of 2 s are 20 s: two stages of 1 s and 3 s a step, half of the steps each, get 10;
    a clock that slows down by the same for all changes nothing, for they take turns."""
    found = plans(
        {"name": "slow"},
        {"name": "stages", "stages": [{"lr": 0.1}, {"lr": 0.2}], "equal_time_to": "slow"},
        {"name": "fast", "train": {"lr": 0.3}, "equal_time_to": "slow"},
        {"name": "other", "train": {"lr": 0.4}},
    )
    seconds = {"slow": [2.0], "stages": [1.0, 3.0], "fast": [0.5]}
    asked = []

    def timer(plan: QualityPlan) -> list[list[float]]:
        asked.append(plan.name)
        return [[step, step, 100.0] for step in seconds[plan.name]]

    needed = to_time(found)
    times = measure(needed, timer)
    assert asked == ["slow", "stages", "fast", "fast", "stages", "slow"]
    assert times[time_key(found[0])] == [2.0]
    steps = {plan.name: plan.steps for plan in with_equal_time(found, times)}
    assert steps == {"slow": 10, "stages": 10, "fast": 40, "other": 10}
