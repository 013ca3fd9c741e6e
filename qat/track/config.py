"""Settings of what follows a run: trackers and uploads. They are no part of its recipe."""

from pathlib import Path

from pydantic import Field

from qat.config import Settings, Trackers


class TrackConfig(Settings):
    """Who reads the run directory while a student trains."""

    wandb: Trackers[bool] = False
    """Follow the run with Weights & Biases; offline where nobody is logged in."""
    wandb_project: Trackers[str] = "qat"
    """Project there."""
    wandb_name: Trackers[str | None] = None
    """Name of the run there; by default that of the run directory."""
    tensorboard: Trackers[bool] = False
    """Write TensorBoard's event files into OUT/tracking/tensorboard."""
    trackio: Trackers[bool] = False
    """Write the run into trackio's local database, as project qat."""
    gdrive_dir: Trackers[Path | None] = None
    """Folder (of a mounted Drive, say) that gets the best checkpoint, the logs and what --resume
    goes on from while the run goes on, under the name of the run directory."""
    gdrive_state_gib: Trackers[float] = Field(16.0, ge=0)
    """Most that may take there what --resume goes on from; 0 sends none."""
