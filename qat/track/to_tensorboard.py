"""A run as TensorBoard's event files."""

from collections.abc import Mapping

from qat.track.tracker import Sample, Start


class TensorBoard:
    """Writes scalars and texts into `tracking/tensorboard`."""

    id = "tensorboard"

    def __init__(self, start: Start) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(start.directory / "tensorboard")
        if start.id is None:
            rows = "".join(f"| {key} | {value} |\n" for key, value in start.config.items())
            self._writer.add_text("config", f"| key | value |\n|---|---|\n{rows}")

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """One point of each curve."""
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    def samples(self, rows: list[Sample]) -> None:
        """The newest sample, as a text of its step."""
        step, prompt, text = rows[-1]
        self._writer.add_text("eval/sample", f"**{prompt}**{text}", step)

    def flush(self) -> None:
        """Write the events out."""
        self._writer.flush()

    def close(self, *, failed: bool) -> None:  # noqa: ARG002
        """Close the file."""
        self._writer.close()
