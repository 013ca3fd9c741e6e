"""Writes empty stand-ins for the CUDA libraries that PyTorch's wheel links to, beside it.

With them the wheel loads on a machine without a GPU, without gigabytes of libraries that nobody
calls. Usage: xla_stubs.py TORCH_LIB_DIRECTORY
"""

import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

CUDA = re.compile(r"lib(cu|nccl|nv)")
SYMBOL = re.compile(r"cu(fft|rand|sparse|dnn|File|solver|blas|[A-Z])|nccl|nvsh|nvrtc|nvml|__cuda")


def readelf(option: str, library: Path) -> list[str]:
    """The lines that `readelf` prints."""
    told = subprocess.run(
        ["readelf", option, "-W", library], capture_output=True, text=True, check=True
    )
    return told.stdout.splitlines()


class Wanted:
    """The CUDA libraries that the libraries of a directory need, with their symbols."""

    def __init__(self, directory: Path) -> None:
        libraries = sorted(directory.glob("*.so*"))
        beside = (directory.parents[1] / "nvidia").glob("*/lib/*.so*")
        self._there = {path.name for path in (*libraries, *beside)}
        self.names: set[str] = set()
        self.files: dict[str, set[str]] = defaultdict(set)
        """Libraries that must define a version of symbols, by version."""
        self.symbols: dict[str, set[str]] = defaultdict(set)
        """Required symbols by version; the key is empty for those without one."""
        self._defined: set[str] = set()
        for library in libraries:
            self._read(library)
        self.symbols[""] = {s for s in self.symbols[""] - self._defined if SYMBOL.match(s)}

    def _read(self, library: Path) -> None:
        needed = re.findall(r"NEEDED.*\[(.*?)\]", "\n".join(readelf("-d", library)))
        self.names |= {name for name in needed if CUDA.match(name) and name not in self._there}
        file = None
        for line in readelf("-V", library):
            if found := re.search(r"File: (\S+)", line):
                file = found[1]
            elif file and (found := re.search(r"Name: (\S+)", line)):
                self.files[found[1]].add(file)
            elif "section" in line and "Version needs" not in line:
                file = None
        for line in readelf("--dyn-syms", library):
            columns = line.split()
            if len(columns) < 8 or not columns[0].rstrip(":").isdigit():
                continue
            name, _, version = columns[7].partition("@")
            if columns[6] == "UND":
                self.symbols[version].add(name)
            else:
                self._defined.add(name)

    def of(self, name: str) -> dict[str, set[str]]:
        """The symbols of one library by their version."""
        found = {v: self.symbols[v] for v, files in self.files.items() if name in files}
        return found | ({"": self.symbols[""]} if name.startswith("libnccl") else {})


def write_stub(directory: Path, name: str, symbols: dict[str, set[str]]) -> None:
    """Compile a library of functions that say an error."""
    every = sorted(set().union(*symbols.values())) or [re.sub(r"\W", "_", name)]
    source, versions = directory / f"{name}.c", directory / f"{name}.map"
    source.write_text("\n".join(f"int {symbol}(void) {{ return 100; }}" for symbol in every))
    blocks = [
        f"{version} {{ global: {' '.join(f'{s};' for s in sorted(group))} }};"
        for version, group in symbols.items()
        if version
    ]
    versions.write_text("\n".join(blocks))
    flags = ["-shared", "-fPIC", "-w", "-fno-builtin", f"-Wl,-soname,{name}"]
    if blocks:
        flags.append(f"-Wl,--version-script,{versions}")
    subprocess.run(["gcc", *flags, "-o", directory / name, source], check=True)
    source.unlink()
    versions.unlink()


def main() -> None:
    """Write one for every library that is missing."""
    directory = Path(sys.argv[1])
    wanted = Wanted(directory)
    for name in sorted(wanted.names):
        write_stub(directory, name, wanted.of(name))


if __name__ == "__main__":
    main()
