"""Finds, reads and augments images in tar shards or in folders. `vision_longhorn.shards` makes shards."""

from .augment import device_batches, split_transform
from .images import DataError, decode_image
from .loader import default_workers, eval_loader, train_loader
from .memory import keep_in_memory
from .places import ShardSet, open_shards

__all__ = [
    "DataError",
    "ShardSet",
    "decode_image",
    "default_workers",
    "device_batches",
    "eval_loader",
    "keep_in_memory",
    "open_shards",
    "split_transform",
    "train_loader",
]
