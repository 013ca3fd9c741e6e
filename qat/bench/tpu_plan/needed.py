"""Whether the extra for planning TPUs is there."""

from importlib.util import find_spec

from qat.errors import ConfigError, how_to_install

NEEDED = ("jax", "torchax", "libtpu")


def check_installed() -> None:
    """Refuse to plan without the extra.

    Raises:
        ConfigError: naming what is missing.
    """
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"plan: {', '.join(missing)} not installed, expected the extra for planning TPUs; run: "
            f"{how_to_install('tpu-plan')}"
        )
