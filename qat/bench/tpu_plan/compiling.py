"""One student's step, compiled for one TPU at any batch size."""

from qat.bench.config import BenchConfig
from qat.bench.tpu_plan.topologies import Compiled, Topology, check_installed
from qat.errors import ConfigError


class Planner:
    """Traces the student once; `compile` takes it from there."""

    def __init__(
        self, config: BenchConfig, source: str, topology: Topology, memory_gib: float
    ) -> None:
        self.dtype = "bf16" if config.dtype == "auto" else config.dtype
        self._topology = topology
        self._memory_gib = memory_gib
        _check(config)
        check_installed()
        from qat.bench.tpu_plan.pieces import Traceable

        on_cpu = {"device": "cpu", "dtype": self.dtype, "compile": "off"}
        self._student = Traceable(config.model_copy(update=on_cpu), source)

    def compile(self, batch_size: int) -> Compiled:
        """The whole step at `batch_size`, in no more than the memory that it was given."""
        from qat.bench.tpu_plan.step import arguments, build
        from qat.bench.tpu_plan.xla import compile_for, shape_of

        step = build(self._student, batch_size)
        parts = vars(arguments(self._student, batch_size)).values()
        shapes = tuple([shape_of(tensor) for tensor in part] for part in parts)
        return compile_for(
            self._topology, step, shapes, donated=(0, 1), memory_gib=self._memory_gib
        )


def _check(config: BenchConfig) -> None:
    """Refuse what is not compiled here.

    Raises:
        ConfigError: see its message.
    """
    if config.dtype in ("fp16", "tf32"):
        raise ConfigError(
            f"dtype={config.dtype}, but a TPU computes in bf16 or fp32; use --dtype bf16 or fp32"
        )
    fixed = {
        "optimizer": ("adamw", config.optimizer),
        "latent_dtype": ("fp32", config.latent_dtype),
        "grad_accum_steps": (1, config.grad_accum_steps),
        "checkpoint_every": (1, config.checkpoint_every),
    }
    for name, (expected, found) in fixed.items():
        if found != expected:
            raise ConfigError(
                f"{name}={found}, but steps are planned for a TPU with {name}={expected} alone; "
                f"leave out --{name.replace('_', '-')}"
            )
