"""Counts the shells in which setup.sh does what it says, with the real `qat` and an empty home.

In each: fetch a checkpoint, find it again within two seconds, fail without ending the shell, work
under `set -eu`, leave nothing behind, and print the exports when executed.

python speedrun/measure_setup.py --figures FILE.jsonl
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from figures import ROOT, record

SHELLS = {"bash": ["bash", "--norc"], "zsh": ["zsh", "-f"]}
STATE = {
    "bash": 'set +o; shopt -p; trap -p; declare -F; alias; umask; pwd; printf "%q\\n" "$IFS"; '
    "compgen -v | sort",
    "zsh": "setopt; trap; print -lo ${(k)functions}; alias; umask; pwd; print -r -- ${(q)IFS}; "
    "print -lo ${(k)parameters}",
}
"""Commands that print what a script could change in the shell that sources it."""
FAST_S = 2.0


def main() -> None:
    """Say what held in which shell, and record how many shells are served in full."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--figures", type=Path)
    arguments = parser.parse_args()
    served = sum(is_served(shell) for shell in SHELLS)
    if arguments.figures:
        record(arguments.figures, "setup_script_shells", served, "shells", f">= {len(SHELLS)}")
    raise SystemExit(served < len(SHELLS))


def is_served(shell: str) -> bool:
    """Whether all cases hold in `shell`; prints each."""
    if not shutil.which(shell):
        print(f"{shell}: not installed")
        return False
    with tempfile.TemporaryDirectory(prefix="a clone with spaces ") as folder:
        root = Path(folder)
        for name in ("qat", "speedrun", "pyproject.toml"):
            (root / name).symlink_to(ROOT / name)
        held = {name: case(shell, root) for name, case in CASES.items()}
    for name, is_held in held.items():
        print(f"{shell}: {name}: {'yes' if is_held else 'NO'}")
    return all(held.values())


def fetches(shell: str, root: Path) -> bool:
    """A checkpoint of the registry arrives, and `qat` is on PATH."""
    out = run(shell, root, 'source speedrun/setup.sh tiny; echo "$?"; echo "$CHECKPOINT"; type qat')
    status, checkpoint, qat = out.splitlines()[:3]
    is_there = (Path(checkpoint) / "config.json").is_file()
    return status == "0" and is_there and "not found" not in qat


def finds_it_again(shell: str, root: Path) -> bool:
    """What is there is exported at once."""
    began = time.perf_counter()
    out = run(shell, root, 'source speedrun/setup.sh tiny && echo "$CHECKPOINT"')
    seconds = time.perf_counter() - began
    print(f"{shell}: all was there: {seconds:.2f} s")
    return out == f"{root}/checkpoints/tiny\n" and seconds < FAST_S


def goes_on_after_a_failure(shell: str, root: Path) -> bool:
    """An unknown name gives a status, no exports, and a shell that lives."""
    out = run(shell, root, 'source speedrun/setup.sh tinny; echo "$? ${CHECKPOINT-nothing}"')
    return out == "1 nothing\n"


def works_in_a_strict_shell(shell: str, root: Path) -> bool:
    """With -e, -u and pipefail set by the user."""
    script = "set -eu -o pipefail; source speedrun/setup.sh tiny; echo on"
    failing = "set -eu; source speedrun/setup.sh tinny || echo failed; echo on"
    return run(shell, root, script) == "on\n" and run(shell, root, failing) == "failed\non\n"


def leaves_nothing(shell: str, root: Path) -> bool:
    """Options, traps, functions, aliases and names of variables are those of before."""
    show = f"{{ {STATE[shell]}; }}"
    before = f"export CHECKPOINT=; {show} >before; source speedrun/setup.sh tiny"
    run(shell, root, f"{before}; {show} >after")
    was, now = (set((root / name).read_text().splitlines()) for name in ("before", "after"))
    return was == now


def prints_when_executed(shell: str, root: Path) -> bool:
    """Its standard output is shell code that sets the same."""
    out = run(shell, root, f'eval "$({shell} speedrun/setup.sh tiny)"; echo "$CHECKPOINT"')
    return out == f"{root}/checkpoints/tiny\n"


def run(shell: str, root: Path, script: str) -> str:
    """Standard output of a script in a shell that has no home and no variables yet."""
    path = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"
    done = subprocess.run(
        [*SHELLS[shell], "-c", script],
        cwd=root,
        env={"HOME": str(root), "PATH": path},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    return done.stdout


CASES = {
    case.__name__.replace("_", " "): case
    for case in (
        fetches,
        finds_it_again,
        goes_on_after_a_failure,
        works_in_a_strict_shell,
        leaves_nothing,
        prints_when_executed,
    )
}


if __name__ == "__main__":
    main()
