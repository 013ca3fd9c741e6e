"""Read rows with packages of the extra `datasets`: data sets of a hub, and Parquet files."""

from pathlib import Path

from qat.data.documents import Place
from qat.data.sources import Rows
from qat.errors import DataError, how_to_install, is_installed
from qat.online import is_online


def hub_rows(data: str, setting: str) -> Rows:
    """Return the rows of a `datasets` id, written `owner/name[:config][@split]`.

    Raises:
        DataError, HubError: see `hub_name`; or the package cannot load the data set.
    """
    name, config, split = hub_name(data, setting)
    import datasets

    try:
        rows = datasets.load_dataset(name, config or None, split=split or "train", streaming=True)
    except (datasets.exceptions.DatasetsError, OSError, ValueError) as error:
        raise DataError(
            f"{setting}={data} is no file, and datasets cannot load it: {error}; check the name"
        ) from None
    return ((Place(data, number), row) for number, row in enumerate(rows, start=1))


def hub_name(data: str, setting: str) -> tuple[str, str, str]:
    """Split a `datasets` id into name, configuration and split; check that a hub has it.

    Raises:
        DataError: the package is not installed.
        HubError: no hub has it, or none responds.
    """
    if not is_installed("datasets"):
        raise DataError(
            f"{setting}={data} is no file or directory, and a datasets id needs the 'datasets' "
            f"package; check the path or run: {how_to_install('datasets')}"
        )
    name, _, split = data.partition("@")
    name, _, config = name.partition(":")
    is_online(name, "dataset")
    return name, config, split


def parquet_rows(path: Path) -> Rows:
    """Yield the rows of a Parquet file.

    Raises:
        DataError: it is none, or the package that reads it is not installed.
    """
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise DataError(
            f"{path} is Parquet, which needs the 'pyarrow' package; "
            f"convert it to .jsonl or run: {how_to_install('datasets')}"
        ) from None
    try:
        with parquet.ParquetFile(path) as file:
            rows = (row for batch in file.iter_batches(1024) for row in batch.to_pylist())
            for number, row in enumerate(rows, start=1):
                yield Place(str(path), number), row
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise DataError(f"{path} is not Parquet ({error}); expected such; fetch it again") from None
