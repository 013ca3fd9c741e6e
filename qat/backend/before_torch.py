"""Environment variables that must be set before torch loads; this module does not import torch.

They set the number of threads, keep bytecode, and keep libtpu from querying the metadata server:
libtpu loads with torch wherever torch_xla or torch_tpu is installed, even without a TPU.
"""

import os
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

from qat.backend.tpu import tpu_name
from qat.process import cores

BYTECODE = "~/.cache/qat/bytecode"
ROOM_BYTES = 2**30
"""Free bytes to keep bytecode, which takes a tenth. On a full disk Python before 3.12.8 leaves half
of a file (cpython issue 126606), and no later command can import it."""


def skip_tpu_metadata() -> None:
    """Keep libtpu off the metadata server, unless this machine has or declares a TPU."""
    if os.environ.get("PJRT_DEVICE") != "TPU" and tpu_name() is None:
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")


def before_torch() -> None:
    """Keep libtpu off the metadata server without a TPU, and keep torch_tpu from loading.

    torch_tpu is another package for TPUs, which nothing here uses.
    """
    has_eager, has_lazy = (find_spec(name) is not None for name in ("torch_tpu", "torch_xla"))
    if has_eager or has_lazy:  # both load libtpu with torch
        skip_tpu_metadata()
    if has_eager:  # it exits the process without libtpu, and fails with many versions of torch
        os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"


def keep_to_own_cores() -> None:
    """Limit torch to one thread per core that this process may use, with passive waiting.

    Call it before torch is loaded. PyTorch starts one thread per core of the machine; in a
    container limited to a few cores they would wait for one another. By default a waiting thread
    spins, on a core that another process may need. `OMP_NUM_THREADS` and `OMP_WAIT_POLICY` are kept
    if already set.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    if cores() < (os.cpu_count() or 1):
        os.environ.setdefault("OMP_NUM_THREADS", str(cores()))


def keep_bytecode() -> None:
    """Store Python's bytecode in `BYTECODE` if nothing else would store it.

    That is the case if the installer compiled none, and Python either is told to write none, as in
    containers, or may not write beside the sources. Each command then compiles some 3,400 modules,
    which takes 10 seconds.
    Processes that this one starts, such as those that compile kernels, keep it too.
    """
    found, place = map(find_spec, ("torch", "transformers")), os.path.expanduser(BYTECODE)
    kept = [Path(package.cached) for package in found if package and package.cached]
    missing = [path for path in kept if not path.exists()]
    if not missing or sys.pycache_prefix:
        return
    is_kept = not sys.dont_write_bytecode and os.access(missing[0].parents[1], os.W_OK)
    if not is_kept and os.path.isabs(place) and _is_fit(place):  # some users have no home
        sys.pycache_prefix = os.environ["PYTHONPYCACHEPREFIX"] = place
        sys.dont_write_bytecode = False
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def _is_fit(place: str) -> bool:
    """Return whether `place` has room and is this user's, because what it holds is run."""
    try:
        os.makedirs(place, mode=0o700, exist_ok=True)
    except OSError:
        return False
    user = os.geteuid() if hasattr(os, "geteuid") else 0
    is_own = os.access(place, os.W_OK) and os.stat(place).st_uid == user
    return is_own and shutil.disk_usage(place).free > ROOM_BYTES
