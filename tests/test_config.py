"""Typed settings: strict, frozen, fingerprinted, and with messages a user can act on."""

import pytest
from pydantic import Field, ValidationError

from qat.config import Settings, fingerprint
from qat.errors import ConfigError


class Inner(Settings):
    size: int = Field(2, ge=1)


class Outer(Settings):
    name: str
    inner: Inner = Inner()


def test_settings_are_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Inner().size = 3


def test_mistakes_are_one_line_with_name_and_value() -> None:
    for values, message in (
        ({}, "recipe: name: Field required"),
        ({"name": "a", "nmae": 1}, "recipe: nmae is unknown; did you mean 'name'"),
        ({"name": "a", "inner": {"size": 0}}, "recipe: inner.size=0: Input should be greater"),
        ({"name": 1, "inner": {"size": "x"}}, "name=1: .*; inner.size='x': "),
    ):
        with pytest.raises(ConfigError, match=message) as caught:
            Outer.parse(values, "recipe")
        assert "\n" not in str(caught.value)
    assert Outer.parse({"name": "a", "inner": {"size": 3}}, "recipe").inner.size == 3


def test_fingerprint_changes_exactly_with_the_fields() -> None:
    same = Outer(name="a"), Outer(name="a", inner=Inner(size=2))
    assert same[0].fingerprint() == same[1].fingerprint()
    assert len(same[0].fingerprint()) == 12
    assert Outer(name="b").fingerprint() != same[0].fingerprint()
    assert Outer(name="a", inner=Inner(size=3)).fingerprint() != same[0].fingerprint()


def test_fingerprint_ignores_the_order_of_keys_and_is_stable() -> None:
    assert fingerprint({"a": 1, "b": 2}) == fingerprint({"b": 2, "a": 1})
    assert fingerprint({"a": 1, "b": 2}) == "3ff4022eda96"


def test_a_number_beyond_every_computer_is_refused() -> None:
    class Steps(Settings):
        max_steps: int

    with pytest.raises(ConfigError, match=f"max_steps={10**30}, expected a number of at most"):
        Steps.parse({"max_steps": 10**30}, "recipe.toml")
