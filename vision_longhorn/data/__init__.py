"""Image data in tar shards: where it comes from, finding it, reading it. `vision_longhorn.shards` makes shards."""

from .augment import device_batches, split_transform
from .images import DataError, decode_image
from .index import ShardSet, open_shards
from .loader import eval_loader, train_loader

__all__ = ["DataError", "ShardSet", "decode_image", "device_batches", "eval_loader", "open_shards", "split_transform",
           "train_loader"]
