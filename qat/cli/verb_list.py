"""The list of verbs, which `qat --help` prints as cyclopts would, in five sixths of the time.

cyclopts reads the line of each verb as a docstring, and tries four styles of docstrings on it.
"""

from collections.abc import Mapping

from cyclopts.help import HelpEntry, HelpPanel, create_parameter_help_panel, format_usage

from qat.cli.parser import EVERY_VERB, PlainHelp, app


def print_verbs(lines: Mapping[str, str]) -> None:
    """Print `lines`, of a name each, and the flags that all verbs have."""
    own = (app.help_flags, app.version_flags)
    rows = {(name,): line for name, line in lines.items()} | {n: app[n[0]].help for n in own}
    entries = [
        HelpEntry(positive_names=(name,), positive_shorts=tuple(short), description=line)
        for (name, *short), line in sorted(rows.items(), key=_place)
    ]
    flags = app.meta.assemble_argument_collection().filter_by(group=EVERY_VERB)
    console, page = app.console, PlainHelp()
    page.render_usage(console, console.options, format_usage(app, (), (app,)))
    console.print(app.help + "\n")
    for panel in (
        HelpPanel(format="command", title="Commands", entries=entries),
        create_parameter_help_panel(EVERY_VERB, flags, app.help_format),
    ):
        page(console, console.options, panel)
    console.print("\n" + app.help_epilogue)


def _place(row: tuple[tuple[str, ...], str]) -> str:
    """Keep the verbs in their order, and the flags behind them by name."""
    return row[0][0] if row[0][0].startswith("-") else ""
