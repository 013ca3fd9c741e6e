"""Hooks for extensions, which are found by entry points; the core imports no extension.

| group            | what an entry point names                                      |
|------------------|----------------------------------------------------------------|
| `qat.verbs`      | a verb of `qat`, or a function that adds verbs to `qat bench`  |
| `qat.cache`      | a verb of `qat cache`                                          |
| `qat.decoding`   | a module that continues texts from packed weights              |
| `qat.attention`  | a module that computes attention from a part of the past       |
| `qat.plans`      | a module that compiles a training step for absent devices      |
| `qat.sweeps`     | a function that runs a recipe of measurements in turns         |
| `qat.soaks`      | a function that compares the first steps of a run with bounds  |
| `qat.reports`    | a function that `qat report` writes something else by          |
| `qat.suites`     | a module that judges models on tasks of lm-eval                |
| `qat.sections`   | a function that writes a section of the report about a file    |
| `qat.devices`    | a module with `open_backend()` and `KIND`, a class of devices  |
| `qat.importers`  | a reader of another system's caches and checkpoints            |
| `qat.flags`      | a module with `FLAGS` of another system, and their `PAGE`      |
| `qat.corpora`    | a function that reads rows which are still being sampled       |
| `qat.runs`       | a class like `Run` of `qat run`, for runs of another course    |
| `qat.caches`     | a function that opens a cache elsewhere, or in another order   |
| `qat.rows`       | a module that reads data sets of a hub, and Parquet files      |
| `qat.chats`      | a module that reads chats with tools, and checks how they read |
| `qat.mixtures`   | a module that reads several texts in turns, by their shares    |
| `qat.rotations`  | a function that rotates a float model before it is quantized   |
| `qat.keepers`    | a function that makes a student of a model's own levels        |
| `qat.teachers`   | a module whose `ServedTeacher` asks a teacher on a server      |
| `qat.targets`    | a module that writes an export target                          |
| `qat.publish`    | model cards; repositories of a hub, pulled and pushed to       |
| `qat.python`     | a function of `import qat`: `qat.prepare`                      |
| `qat.followers`  | a module that sends runs to trackers and folders               |

An extension lies in `qat/extensions/NAME`; another distribution may declare entry points too.
"""

from functools import cache
from importlib.metadata import EntryPoint, entry_points

from qat.errors import ConfigError

HOW_TO_INSTALL = (
    "install it with: pip install --force-reinstall --no-deps qat-distill, or -e . in a clone"
)


@cache
def hooks(group: str) -> dict[str, EntryPoint]:
    """Return the entry points of `group` by name; nothing is imported before `load`."""
    return {each.name: each for each in entry_points(group=group)}


def extension(group: str, name: str) -> object:
    """Import and return what the extension `name` offers to `group`.

    Raises:
        ConfigError: the extension is not installed.
    """
    found = hooks(group).get(name)
    if found is None:
        raise ConfigError(
            f"the extension {name!r} is not installed ({group} has "
            f"{', '.join(sorted(hooks(group))) or 'none'}); {HOW_TO_INSTALL}"
        )
    return load(found)


def load(point: EntryPoint) -> object:
    """Import and return what `point` names.

    Raises:
        ConfigError: its module is gone, as after a checkout of another version.
    """
    try:
        return point.load()
    except ModuleNotFoundError as error:
        if not f"{point.module}.".startswith(f"{error.name}."):
            raise
        raise ConfigError(
            f"{point.group} names {point.module}, which this version does not have, expected what "
            f"was installed and these files to be of one version; {HOW_TO_INSTALL}"
        ) from None
