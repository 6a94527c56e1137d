"""Memory that a loader's worker shares with the process it works for, and uses again."""

import torch
from torch import Tensor
from torch.utils.data import get_worker_info

PREFETCH = 2  # batches for which torch asks a worker before it has taken the first
_SPARE = 1.25  # bytes of new memory for each byte of the batch that needs it, since batches differ in size


class SharedMemory:
    """Gives memory for batches. To use new memory for the first time takes longer than to fill it, so a worker whose
    batches are pinned keeps two pieces and gives them in turn.

    When torch asks a worker for its batch n, it has copied the worker's batch n - 2 to pinned memory. A batch that is
    not pinned may still be in use then, so it gets new memory. So does every batch of an evaluation: once a worker has
    ended, torch asks the others earlier. In training, all batches have been asked for when a worker ends.

    Args:
        is_pinned: whether torch copies each batch to pinned memory, and no worker ends before another.
    """

    def __init__(self, is_pinned: bool) -> None:
        self.is_pinned = is_pinned
        self.pieces = [torch.empty(0, dtype=torch.uint8)] * PREFETCH

    def __call__(self, size: int) -> Tensor:
        """Return memory for `size` bytes, uint8 (size,), with any content."""
        if get_worker_info() is None:
            return torch.empty(size, dtype=torch.uint8)
        if not self.is_pinned:
            return _shared(size)
        piece, *others = self.pieces
        if len(piece) < size:
            piece = _shared(int(size * _SPARE))
        self.pieces = [*others, piece]
        return piece[:size]


def _shared(size: int) -> Tensor:
    # As torch's own collation does. What lies elsewhere would be copied to such memory.
    return torch.empty(0, dtype=torch.uint8).set_(torch.UntypedStorage._new_shared(size))
