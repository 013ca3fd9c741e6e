"""Read and check chats that call tools."""

from qat.extensions.tools.rendering import check_complete
from qat.extensions.tools.rows import turn_of, with_beside

__all__ = ["check_complete", "turn_of", "with_beside"]
