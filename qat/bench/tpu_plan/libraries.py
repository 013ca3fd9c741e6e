"""The one place where jax and torchax are imported; whoever imports this has the extra.

jax computes on the CPU; libtpu compiles for a TPU that is only described, and asks no network.
"""

import warnings

from qat.backend.before_torch import keep_libtpu_offline
from qat.bench.tpu_plan.topologies import check_installed

check_installed()
keep_libtpu_offline()

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torchax's own
    import jax
    import torchax
    from jax import lax
    from jax import numpy as jnp
    from jax.experimental import topologies
    from jax.sharding import SingleDeviceSharding
    from torchax import interop
    from torchax.ops import jaten  # noqa: F401  its operators first, or they replace ours
    from torchax.ops.ops_registry import register_torch_dispatch_op

jax.config.update("jax_platforms", "cpu")
# an eighth of the time, for a little more memory (docs/tpu.md, "How far to trust it")
jax.config.update("jax_optimization_level", "O0")

__all__ = [
    "SingleDeviceSharding",
    "interop",
    "jax",
    "jnp",
    "lax",
    "register_torch_dispatch_op",
    "topologies",
    "torchax",
]
