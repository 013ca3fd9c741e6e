"""`qat --install-completion`, which the list of verbs names without importing it."""

from cyclopts.completion.install import create_install_completion_command

from qat.cli.parser import app

install = create_install_completion_command(app.install_completion, add_to_startup=True)
