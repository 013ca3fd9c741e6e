"""Settings of what follows a run."""

from pathlib import Path

from pydantic import Field

from qat.config import Settings, Trackers


class TrackConfig(Settings):
    """Trackers and uploads that follow a run during training; not part of the recipe."""

    wandb: Trackers[bool] = False
    """Follow the run with Weights & Biases; offline without a login."""
    wandb_project: Trackers[str] = "qat"
    """Project in Weights & Biases."""
    wandb_name: Trackers[str | None] = None
    """Name of the run in Weights & Biases; by default that of the run directory."""
    tensorboard: Trackers[bool] = False
    """Write TensorBoard event files to OUT/tracking/tensorboard."""
    trackio: Trackers[bool] = False
    """Write the run to trackio's local database, as project qat."""
    mlflow: Trackers[bool] = False
    """Log the run to MLflow's server or database, as experiment qat."""
    gdrive_dir: Trackers[Path | None] = None
    """Folder (of a mounted Drive, say) that gets the best checkpoint, the logs and the --resume
    state while the run trains, in a folder with the name of the run directory."""
    gdrive_state_gib: Trackers[float] = Field(16.0, ge=0)
    """Largest state for --resume that is uploaded there, in GiB; 0 uploads none."""
