"""setup.sh in bash and zsh, on machines of every kind that are made of directories and variables.

The clone, its environment and `qat` are stand-ins; what runs for real is the shell code.
"""

import json
import os
import pty
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

SPEEDRUN = Path(__file__).parents[2] / "speedrun"
STATE = {
    "bash": 'set +o; shopt -p; trap -p; declare -F; alias; umask; pwd; printf "%q\\n" "$IFS"; '
    "compgen -v | sort",
    "zsh": "setopt; trap; print -lo ${(k)functions}; alias; umask; pwd; print -r -- ${(q)IFS}; "
    "print -lo ${(k)parameters}",
}
"""Commands that print what a script could change in the shell that sources it."""
SHELLS = [
    pytest.param(
        name,
        marks=pytest.mark.skipif(not shutil.which(name), reason=f"{name} is not installed"),
    )
    for name in ("bash", "zsh")
]
FAKE_QAT = """#!/bin/bash
echo "$*" >>"$QAT_LOG"
found() { printf '{"path": "%s", "kind": "%s", "format": "%s"}\\n' "$@"; }
case "$1 $2 $3" in
"hub pull L64") mkdir -p caches/L64; touch caches/L64/manifest.json; found caches/L64 cache qat ;;
"hub pull q2") mkdir -p checkpoints/q2; echo '{"quantization_config": {"bits": 2}}' \\
    >checkpoints/q2/config.json; touch checkpoints/q2/model.safetensors
    found checkpoints/q2 checkpoint qat ;;
"hub pull old_cache") mkdir -p caches/old_cache; touch caches/old_cache/shard.pt
    found caches/old_cache cache anemll ;;
"hub pull old_q4") mkdir -p checkpoints/old_q4; touch checkpoints/old_q4/model.pt
    found checkpoints/old_q4 checkpoint anemll ;;
"cache import"*) [ -z "${IMPORT_FAILS:-}" ] || exit 1; mkdir -p "$5"
    echo '{"has_tail": false}' >"$5/manifest.json" ;;
"convert "*) mkdir -p "$6"; touch "$6/model.safetensors"
    echo '{"quantization_config": {"bits": 2}}' >"$6/config.json" ;;
*) echo "qat: no cache or checkpoint is named $3" >&2; exit 1 ;;
esac
"""
FAKE_PIP = """#!/bin/bash
if [ "$1 $2" = "-m pip" ]; then
    echo "$*" >>"$QAT_LOG"
    [ -z "${PIP_FAILS:-}" ] || exit 1
    case "$*" in
    *--index-url*) [ -z "${NO_INDEX:-}" ] || exit 1; rm -rf "$PYTHONPATH/torch"*
        mkdir -p "$PYTHONPATH/torch-$BROUGHT.dist-info"
        echo "Version: $BROUGHT" >"$PYTHONPATH/torch-$BROUGHT.dist-info/METADATA" ;;
    *) cp "$FAKE_QAT" "$(dirname "$0")/qat" ;;
    esac
elif [ "$1 $2" = "-m venv" ]; then
    echo "$*" >>"$QAT_LOG"
    mkdir -p "${@: -1}/bin"
    cp "$0" "${@: -1}/bin/python"
elif [ "$1" = -c ] && [[ "$2" == *'get_path("scripts")'* || "$2" == *'get_path("purelib")'* ]]; then
    echo "$PYTHON_HOME"
elif [ "$1 $2" != "-c import pip" ]; then
    exec REAL -S "$@"
fi
"""


def write_program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


@dataclass
class Machine:
    """A clone with an environment in it, a home directory, and what the environment says."""

    root: Path
    variables: dict[str, str] = field(default_factory=dict)

    @property
    def clone(self) -> Path:
        return self.root / "my clone"

    @property
    def home(self) -> Path:
        return self.root / "home"

    def run(self, *command: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess:
        environment = {
            "HOME": str(self.home),
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "QAT_SETUP_PREFIX": str(self.root),
            "QAT_LOG": str(self.root / "log"),
            **self.variables,
        }
        return subprocess.run(
            command,
            cwd=cwd or self.clone,
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
        )

    def source(self, shell: str, arguments: str = "", after: str = "", before: str = "") -> str:
        """Standard output of a shell that sources setup.sh and goes on."""
        quiet = ("-f",) if shell == "zsh" else ("--norc",)
        script = f'{before}\nsource "{self.clone}/speedrun/setup.sh" {arguments}\n{after}'
        done = self.run(shell, *quiet, "-c", script, cwd=self.root)
        self.said = done.stderr
        return done.stdout

    def log(self) -> list[str]:
        log = self.root / "log"
        return log.read_text().splitlines() if log.exists() else []

    def folder(self, *parts: str) -> Path:
        path = self.root.joinpath(*parts)
        path.mkdir(parents=True)
        return path


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    clone = tmp_path / "my clone"
    made = Machine(tmp_path)
    made.home.mkdir()
    for name in ("setup.sh", "setup_machine.sh", "setup_env.sh", "constraints.txt"):
        (clone / "speedrun").mkdir(parents=True, exist_ok=True)
        shutil.copy(SPEEDRUN / name, clone / "speedrun")
    (clone / "pyproject.toml").write_text("")
    (clone / "qat/backend").mkdir(parents=True)
    shutil.copy(SPEEDRUN.parent / "qat/backend/nvidia.py", clone / "qat/backend")
    write_program(clone / ".venv/bin/qat", FAKE_QAT)
    write_program(clone / ".venv/bin/python", f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    install = 'source speedrun/setup_env.sh; installation_hash base >"$MARK-base"'
    assert made.run("bash", "-c", install).returncode == 0
    return made


SHOW = 'echo "status=$?"; echo "cache=$CACHE_DIR"; echo "checkpoint=$CHECKPOINT"; command -v qat'


@pytest.mark.parametrize("shell", SHELLS)
def test_fetches_once_and_exports(machine: Machine, shell: str) -> None:
    expected = [
        "status=0",
        f"cache={machine.clone}/caches/L64",
        f"checkpoint={machine.clone}/checkpoints/q2",
        f"{machine.clone}/.venv/bin/qat",
    ]
    twice = "source 'my clone/speedrun/setup.sh' L64 q2; " + SHOW + "; echo $PATH"
    lines = machine.source(shell, "L64 q2", SHOW + "; " + twice).splitlines()
    assert lines[:4] == lines[4:8] == expected
    assert lines[8].count(".venv/bin") == 1
    assert machine.log() == ["hub pull L64", "hub pull q2"]
    assert "CACHE_DIR=" in machine.said
    assert 'next: qat train "$CHECKPOINT" --cache-dir "$CACHE_DIR" --mlp-only' in machine.said


@pytest.mark.parametrize("shell", SHELLS)
def test_leaves_nothing_in_the_shell(machine: Machine, shell: str) -> None:
    state = STATE[shell]
    before = f"export CACHE_DIR= CHECKPOINT=\n{{ {state}; }} >before"
    for arguments in ("L64", "nope", "L64 q2 --force", "--what"):
        machine.source(shell, arguments, f"{{ {state}; }} >after", before)
        was, now = ((machine.root / name).read_text() for name in ("before", "after"))
        assert len(was.splitlines()) > 50
        assert set(now.splitlines()) == set(was.splitlines())


@pytest.mark.parametrize(
    ("shell", "options"),
    [
        ("bash", "set -eu -o pipefail"),
        ("bash", "set -o posix; set -f; IFS=/; export CDPATH=/ SHELLOPTS"),
        pytest.param("zsh", "set -eu -o pipefail", marks=SHELLS[1].marks),
        pytest.param("zsh", "emulate sh; setopt KSH_ARRAYS GLOB_SUBST", marks=SHELLS[1].marks),
    ],
)
def test_works_in_shells_set_otherwise(machine: Machine, shell: str, options: str) -> None:
    again = f'source "{machine.clone}/speedrun/setup.sh"'
    out = machine.source(
        shell,
        "L64",
        f'echo "$CACHE_DIR"; {again} && echo on; {again} nope || echo failed; echo on',
        options,
    )
    assert out == f"{machine.clone}/caches/L64\non\nfailed\non\n"


FAILURES = {
    "nope": "no cache or checkpoint is named nope",
    "./nowhere": "./nowhere is not a directory; expected one, or a name of qat hub list",
    "--fast": "'--fast' is not a flag of setup.sh; expected: source speedrun/setup.sh",
    "a b c": "found 3 names; expected: source speedrun/setup.sh",
    "./home": "home holds no manifest.json, *.safetensors or run.json",
    "L64 old_cache": "expected one cache and one checkpoint",
}


@pytest.mark.parametrize("shell", SHELLS)
def test_a_failure_returns(machine: Machine, shell: str) -> None:
    for arguments, message in FAILURES.items():
        out = machine.source(shell, arguments, 'echo "status=$? cache=${CACHE_DIR-none}"')
        assert out == "status=1 cache=none\n"
        assert message in machine.said


@pytest.mark.parametrize("shell", [*SHELLS, "sh"])
def test_executed_it_prints_the_exports(machine: Machine, shell: str) -> None:
    done = machine.run(shell, "speedrun/setup.sh", "L64", "q2")
    assert done.returncode == 0
    assert done.stdout.splitlines() == [
        f"export PATH='{machine.clone}/.venv/bin':\"$PATH\"",
        f"export CACHE_DIR='{machine.clone}/caches/L64'",
        f"export CHECKPOINT='{machine.clone}/checkpoints/q2'",
    ]
    assert "source speedrun/setup.sh" in done.stderr
    assert machine.run(shell, "speedrun/setup.sh", "nope").returncode == 1


def test_a_plain_shell_that_sources_it_goes_on(machine: Machine) -> None:
    done = machine.run("sh", "-c", "if . speedrun/setup.sh; then :; fi; echo on")
    assert done.stdout.splitlines()[-1] == "on"


@pytest.mark.parametrize("shell", SHELLS)
def test_a_directory_with_odd_letters(machine: Machine, shell: str) -> None:
    odd = machine.folder('it\'s a $HOME "[model]"')
    (odd / "model.safetensors").touch()
    out = machine.source(shell, '"$odd"', 'echo "$CHECKPOINT"', 'odd=$(echo "$PWD"/it*)')
    assert out == f"{odd}\n"


def test_force_fetches_again(machine: Machine) -> None:
    machine.source("bash", "L64")
    machine.source("bash", "L64 --force")
    assert machine.log() == ["hub pull L64", "hub pull L64 --force"]


def test_imports_the_reference_formats(machine: Machine) -> None:
    clone = machine.clone
    machine.variables["IMPORT_FAILS"] = "1"
    assert machine.source("bash", "old_cache old_q4", "echo $?") == "1\n"
    assert "not imported, as said above; that was: qat 'cache' 'import'" in machine.said
    del machine.variables["IMPORT_FAILS"]
    out = machine.source("bash", "old_cache old_q4", "echo $CACHE_DIR; echo $CHECKPOINT")
    assert out.splitlines() == [f"{clone}/caches/old_cache", f"{clone}/checkpoints/old_q4"]
    assert (clone / "caches/old_cache.anemll/shard.pt").exists()
    cache, q4 = clone / "caches/old_cache", clone / "checkpoints/old_q4"
    assert machine.log() == [
        "hub pull old_cache",
        f"cache import {cache}.anemll --out {cache}",
        f"cache import {cache}.anemll --out {cache}",
        "hub pull old_q4",
        f"convert {q4}.anemll --from anemll --out {q4}",
    ]
    assert "--mlp-only --loss candidates --out" in machine.said


PLATFORMS = {
    "colab with Drive": ({"COLAB_RELEASE_TAG": "x"}, "content/drive/MyDrive", "Colab"),
    "macOS": ({}, "home/Library/CloudStorage/GoogleDrive-a@b.c/My Drive", "macOS"),
    "rclone": ({}, "home/gdrive", "plain machine"),
    "RunPod": ({"RUNPOD_POD_ID": "x"}, "workspace", "RunPod"),
    "GDRIVE_PATH": ({"GDRIVE_PATH": "ROOT/my drive"}, "my drive", "plain machine"),
}


@pytest.mark.parametrize("platform", PLATFORMS)
def test_finds_the_drive(machine: Machine, platform: str) -> None:
    variables, folder, name = PLATFORMS[platform]
    drive = machine.folder(folder)
    (drive / "qwen3_caches").mkdir()
    for key, value in variables.items():
        machine.variables[key] = value.replace("ROOT", str(machine.root))
    with_running_python(machine)
    machine.source("bash", "L64")
    assert f"qat: {name}, {drive}\n" in machine.said
    assert machine.log()[-1] == f"hub pull L64 --drive {drive}"


def test_a_bucket_is_a_drive(machine: Machine) -> None:
    machine.variables["GCS_BUCKET"] = "mine"
    install = 'source speedrun/setup_env.sh; installation_hash remote >"$MARK-remote"'
    assert machine.run("bash", "-c", install).returncode == 0  # what reads a bucket
    machine.source("bash", "L64")
    assert machine.log() == ["hub pull L64 --drive gs://mine"]


@pytest.mark.parametrize(
    ("variables", "folder", "status", "said", "log"),
    [
        ({"GDRIVE_PATH": "/no/such"}, None, 1, "GDRIVE_PATH=/no/such is not a directory", []),
        ({"GDRIVE_PATH": "here"}, "here", 0, "", ["hub pull L64 --drive ROOT/here"]),
        ({}, "home/gdrive", 0, "gdrive is empty: mount it with rclone", ["hub pull L64"]),
    ],
)
def test_a_drive_that_is_named_or_not_mounted(
    machine: Machine, variables: dict, folder: str | None, status: int, said: str, log: list
) -> None:
    machine.variables |= variables
    if folder is not None:
        machine.folder(folder)
    assert machine.source("bash", "L64", "echo $?") == f"{status}\n"
    assert said in machine.said
    assert machine.log() == [line.replace("ROOT", str(machine.root)) for line in log]


def with_running_python(machine: Machine) -> Path:
    """A `python3` first on PATH, as on Colab; where it keeps its packages and programs."""
    here = machine.root / "python home"
    write_program(here / "python3", FAKE_PIP.replace("REAL", sys.executable))
    machine.variables |= {
        "PATH": f"{here}:/usr/bin:/bin",
        "PYTHON_HOME": str(here),
        "FAKE_QAT": str(machine.clone / ".venv/bin/qat"),
    }
    return here


@pytest.fixture
def colab(machine: Machine) -> Machine:
    with_running_python(machine)
    machine.folder("content")
    machine.variables["COLAB_RELEASE_TAG"] = "x"
    return machine


def test_colab_installs_into_the_running_python(colab: Machine) -> None:
    out = colab.source("bash", "L64", "command -v qat")
    assert out == f"{colab.variables['PYTHON_HOME']}/qat\n"
    assert "Drive is not mounted: Files (left) > Mount Drive" in colab.said
    colab.source("bash", "L64")
    install, pull = colab.log()
    assert install.endswith(f" -c {colab.clone}/speedrun/constraints.txt -e {colab.clone}")
    assert pull == "hub pull L64"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_installing_says_its_size_first_and_shows_progress_on_a_terminal(
    colab: Machine, is_terminal: bool
) -> None:
    reader, terminal = pty.openpty()
    try:
        where = f" 2>{os.ttyname(terminal)}" if is_terminal else ""
        setup = f'source "{colab.clone}/speedrun/setup.sh"'
        done = colab.run("bash", "-c", setup + where, cwd=colab.root)
        said = os.read(reader, 65536).decode() if is_terminal else done.stderr
    finally:
        os.close(reader)
        os.close(terminal)
    assert re.search(r"installing for .*: about [\d.]+ GB on disk.* minutes, once", said)
    assert re.search(r"installed in \d+ s", said)
    (install,) = colab.log()
    assert ("-qq" in install) != is_terminal


def test_colab_keeps_another_torch_than_ours(colab: Machine) -> None:
    with_torch(colab, "2.10.0+cu128")
    colab.source("bash")
    (install,) = colab.log()
    assert install.endswith(f" torch==2.10.0+cu128 -e {colab.clone}")


def test_no_network(colab: Machine) -> None:
    colab.variables["PIP_FAILS"] = "1"
    assert colab.source("bash", "L64", "echo $?") == "1\n"
    assert "installing failed, as said above; without a network: 'pip download" in colab.said


def with_torch(machine: Machine, version: str, sees: bool = True, cuda: str = "'12.8'") -> None:
    """A torch for every Python of the machine."""
    site = machine.folder("site")
    machine.variables["PYTHONPATH"] = str(site)
    if version:
        (site / "torch").mkdir()
        (site / f"torch-{version}.dist-info").mkdir()
        (site / f"torch-{version}.dist-info" / "METADATA").write_text(f"Version: {version}\n")
        (site / "torch" / "__init__.py").write_text(
            f"__version__ = '{version}'\nclass cuda:\n    is_available = lambda: {sees}\n"
        )
        (site / "torch" / "version.py").write_text(
            f"__version__ = '{version}'\ncuda = {cuda}\nhip = None\n"
        )


def with_gpu(machine: Machine, driver: str, capability: str = "8.0") -> None:
    """A driver and a GPU, and Pythons that can make an environment; .venv is not there yet."""
    here = with_running_python(machine)
    for name in ("python", "python3.13"):
        shutil.copy(here / "python3", here / name)
    write_program(here / "nvidia-smi", f"#!/bin/sh\necho '{driver}, {capability}'\n")
    program = shutil.copy(machine.clone / ".venv/bin/qat", machine.root / "qat of the environment")
    machine.variables["FAKE_QAT"] = str(program)
    shutil.rmtree(machine.clone / ".venv")


WHEELS = "--force-reinstall --index-url https://download.pytorch.org/whl"
"""Flags with which torch is installed for a driver."""


@pytest.mark.parametrize(
    ("driver", "capability", "fetched", "brought", "pinned"),
    [
        ("535.104.05", "8.0", "cu126 torch -c CLONE/constraints", "2.13.0+cu126", "-c"),
        ("570.86.10", "12.0", "cu128 torch<2.12", "2.11.0+cu128", "torch==2.11.0+cu128"),
    ],
)
def test_torch_is_one_that_the_driver_runs(
    machine: Machine, driver: str, capability: str, fetched: str, brought: str, pinned: str
) -> None:
    with_gpu(machine, driver, capability)
    with_torch(machine, "")
    machine.variables["BROUGHT"] = brought
    assert machine.source("bash", "", "echo $?; command -v qat").startswith("0\n")
    made, torch, package = machine.log()
    assert made == f"-m venv --clear {machine.clone}/.venv"
    expected = f"{WHEELS}/{fetched}".replace("CLONE", f"{machine.clone}/speedrun")
    assert expected in torch
    assert f" {pinned}" in package and package.endswith(f" -e {machine.clone}")
    index = fetched.split()[0]
    assert f"fetching the torch that its driver runs ({index}, some GB)" in machine.said
    machine.source("bash")
    assert len(machine.log()) == 3, "all was there"


@pytest.mark.parametrize(
    ("version", "sees", "why"),
    [
        ("2.8.0+cu126", True, "its torch 2.8.0+cu126 is older than 2.9, which qat needs"),
        ("2.12.0+cpu", False, "its torch 2.12.0+cpu sees no GPU"),
    ],
)
def test_a_torch_that_does_not_serve_is_not_built_on(
    machine: Machine, version: str, sees: bool, why: str
) -> None:
    with_gpu(machine, "580.65.06")
    with_torch(machine, version, sees)
    machine.variables["BROUGHT"] = "2.13.0+cu130"
    machine.source("bash")
    assert f"not built on python: {why}; .venv gets a torch of its own" in machine.said
    made, torch, _ = machine.log()
    assert "system-site" not in made and f"{WHEELS}/cu130 " in torch


def test_the_torch_of_an_image_is_built_on(machine: Machine) -> None:
    with_gpu(machine, "535.104.05")
    with_torch(machine, "2.10.0+cu126")
    machine.source("bash")
    made, package = machine.log()
    assert made == f"-m venv --clear --system-site-packages {machine.clone}/.venv"
    assert package.endswith(f" torch==2.10.0+cu126 -e {machine.clone}")


def test_where_the_index_cannot_be_reached_pip_finds_a_torch(machine: Machine) -> None:
    with_gpu(machine, "535.104.05")
    with_torch(machine, "")
    machine.variables["NO_INDEX"] = "1"
    assert machine.source("bash", "", "echo $?") == "0\n"
    assert "not fetched, as said above; going on with the torch that pip finds" in machine.said
    assert machine.log()[-1].endswith(f"constraints.txt -e {machine.clone}")


def test_another_torch_in_the_image_installs_again(machine: Machine) -> None:
    with_gpu(machine, "535.104.05")
    with_torch(machine, "2.10.0+cu126")
    machine.source("bash")
    shutil.rmtree(machine.root / "site")
    with_torch(machine, "2.11.0+cu126")
    machine.source("bash")
    assert machine.log()[-1].endswith(f" torch==2.11.0+cu126 -e {machine.clone}")


def test_a_gpu_that_idles_is_said_each_time(machine: Machine) -> None:
    write_program(machine.root / "bin/nvidia-smi", "#!/bin/sh\necho 535.104.05, 8.0\n")
    machine.variables["PATH"] = f"{machine.root / 'bin'}:/usr/bin:/bin"
    with_torch(machine, "2.13.0+cu130", cuda="'13.0'")
    environment = machine.clone / ".venv/bin/python"
    environment.write_text(environment.read_text().replace(" -S", ""))
    again = 'source speedrun/setup_env.sh; installation_hash base >"$MARK-base"'
    assert machine.run("bash", "-c", again).returncode == 0
    machine.source("bash")
    assert machine.log() == []
    (line,) = (line for line in machine.said.splitlines() if "NVIDIA" in line)
    assert "(driver 535.104.05), but torch 2.13.0+cu130 needs driver 580 or newer" in line
    assert line.endswith("--index-url https://download.pytorch.org/whl/cu126")


def test_an_environment_of_the_users_own_is_kept(machine: Machine) -> None:
    own = machine.root / "own"
    shutil.copytree(machine.clone / ".venv/bin", own)
    shutil.rmtree(machine.clone / ".venv")
    package = machine.clone / "qat"
    (package / "__init__.py").touch()
    machine.variables |= {"PATH": f"{own}:/usr/bin:/bin", "PYTHONPATH": str(machine.clone)}
    assert machine.source("bash", "L64", "command -v qat") == f"{own}/qat\n"
    assert not (machine.clone / ".venv").exists()


def suggested(machine: Machine, q4: str = "q4", **reports: dict) -> str:
    """Return what is suggested for a cache and a 4-bit student with these reports."""
    cache, student = machine.folder("cache"), machine.folder(q4)
    (cache / "manifest.json").touch()
    (student / "model.safetensors").touch()
    (student / "config.json").write_text('{"quantization_config": {"bits": 4}}')
    for name, report in reports.items():
        (student / f"{name}_report.json").write_text(json.dumps(report))
    machine.source("bash", "./cache ./q4*")
    return machine.said


@pytest.mark.parametrize("reports", [{"convert": "source"}, {"import": "base"}, {}])
def test_the_suggested_conversion_names_the_float_model(machine: Machine, reports: dict) -> None:
    said = suggested(machine, **{n: {key: "Qwen/Qwen3-0.6B"} for n, key in reports.items()})
    base = "Qwen/Qwen3-0.6B" if reports else "FLOAT_MODEL"
    line = f"""qat convert "$CHECKPOINT" --to q2a4 --base '{base}' --calibration "$CACHE_DIR" """
    assert f"next: {line}--for mlx,gguf --out checkpoints/q2_init\n" in said


@pytest.mark.parametrize("base", ["\x1b[2J\x1b]0;owned\x07x", "a\nb", 3, None])
def test_a_foreign_report_commands_no_terminal(machine: Machine, base: object) -> None:
    said = suggested(machine, "q4\x1b[2J", convert={"source": base})
    assert "--base 'FLOAT_MODEL'" in said and "\x1b" not in said
