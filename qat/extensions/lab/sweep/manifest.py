"""The manifest of a sweep: where, from which code and by which commands its runs were made."""

from collections.abc import Sequence

from qat.extensions.lab.pages import markdown_table
from qat.extensions.lab.sweep.plan import SweepRun

FORMAT = 2
"""Version of the manifest: the second has sessions, devices and links."""
VERSIONS = ("python", "torch", "triton", "transformers", "cuda", "driver")
CHANGED = {True: ", with changes that are in no commit", False: "", None: ", changes unknown"}

Facts = dict[str, object]


def entry(run: SweepRun, status: str) -> Facts:
    """Return what the manifest says about a run, with links to those of its files that exist."""
    files = {"row": run.row, "log": run.log, "telemetry": run.telemetry, "failure": run.failure}
    links = {
        name: path.relative_to(run.out).as_posix() for name, path in files.items() if path.exists()
    }
    place = {"label": run.label, "group": run.group, "repeat": run.repeat}
    return {**place, "status": status, "files": links}


def devices(rows: Sequence[Facts]) -> dict[str, int]:
    """Return for each device the most ranks of a run that used it."""
    found: dict[str, int] = {}
    for row in rows:
        if (name := row.get("device")) is not None:
            found[name] = max(found.get(name, 0), row.get("ranks") or 1)
    return found


def session_lines(sessions: Sequence[Facts], rows: Sequence[Facts]) -> list[str]:
    """Return paragraphs of the page about the commands that ran, the code and the machine."""
    used = ", ".join(f"{count} x {name}" for name, count in devices(rows).items()) or "none yet"
    lines = []
    for each in sessions:
        versions = ", ".join(f"{name} {each[name]}" for name in VERSIONS if each.get(name))
        lines.append(
            f"{each['time']}: `{each['command']}`, commit {each['commit']} of {each['branch']}"
            f"{CHANGED[each['dirty']]}; {versions}; {each['gpus']} GPUs, {each['cpu']}."
        )
        variables = each["variables"]
        if variables:
            shown = " ".join(f"{name}={value}" for name, value in variables.items())
            lines.append(f"Environment: `{shown}`")
    return [f"Devices: {used}.", *lines]


def settings_table(runs: Sequence[SweepRun]) -> list[str]:
    """Return the settings that all groups share, and a table of those that differ."""
    groups = {run.group: run.settings for run in runs}
    names = list(dict.fromkeys(name for each in groups.values() for name in each))
    differ = [name for name in names if len({repr(each.get(name)) for each in groups.values()}) > 1]
    first = next(iter(groups.values()))
    shared = ", ".join(f"{name} = {first[name]!r}" for name in names if name not in differ)
    found = [f"Settings of all groups: {shared}."] if shared else []
    if differ:
        body = [
            [group, *(str(each.get(name, "-")) for name in differ)]
            for group, each in groups.items()
        ]
        found.append(markdown_table(("group", *differ), body).rstrip())
    return found


def files_table(entries: Sequence[Facts]) -> str:
    """Return a table of all runs with links to their files."""
    body = [
        [
            str(each["group"]),
            str(each["repeat"]),
            str(each["status"]),
            " ".join(f"[{name}]({path})" for name, path in each["files"].items()) or "-",
        ]
        for each in entries
    ]
    return markdown_table(("group", "repeat", "status", "files"), body).rstrip()
