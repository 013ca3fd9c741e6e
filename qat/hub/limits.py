"""How much an archive may ask for before it is refused."""

from dataclasses import dataclass

MIB = 2**20


@dataclass(frozen=True)
class Limits:
    """Bounds that no honest archive of a cache, a checkpoint or a run comes near."""

    members: int = 100_000
    """Files and directories, also those that only names of others imply."""
    depth: int = 16
    """Directories in a name."""
    name_bytes: int = 1024
    """Of a whole name in UTF-8; each part of it may have 255."""
    ratio: int = 100
    """Unpacked bytes per packed byte: tensors reach 10, a bomb in gzip 1,000."""
    floor_bytes: int = 64 * MIB
    """What any archive may unpack to, however small it is."""
    entry_bytes: int = 2**14
    """What each file and directory counts as: empty ones take time and room on a disk, too."""

    def unpacked_bytes(self, packed: int, free: int) -> int:
        """Most bytes that an archive of `packed` bytes may unpack to on a disk with `free` left."""
        return min(max(self.ratio * packed, self.floor_bytes), free)

    def entries(self, unpacked_bytes: int) -> int:
        """Most files and directories of an archive that may unpack to so many bytes."""
        return min(self.members, unpacked_bytes // self.entry_bytes)


USUAL = Limits()
"""What holds unless a caller knows better."""
