"""`qat bench` with the verbs of extensions, which themselves import `qat.extensions.bench.verb`."""

from qat.cli import VERBS
from qat.extensions.bench.verb import bench_app
from qat.hooks import hooks, load

__all__ = ["bench_app"]
for _name, _extension in hooks("qat.verbs").items():
    if _name not in VERBS:
        load(_extension)(bench_app)
