"""Splits training data, so that variants are chosen by other images than those that later test them. In each class of
the training split in DATA, every tenth image goes to the evaluation split of OUT, the others to its training split.

python -m lab.holdout DATA OUT --tenth 2
"""

import collections
import os
from collections.abc import Sequence

from webdataset import ShardWriter

from vision_longhorn.command_line.parser import Parser, run_cli
from vision_longhorn.data.index import read_index
from vision_longhorn.data.places import find_shards
from vision_longhorn.data.samples import label_of
from vision_longhorn.data.sharding import index_shards
from vision_longhorn.data.tars import read_shard
from vision_longhorn.errors import UserError
from vision_longhorn.settings import Range


def hold_out(data: str, out: str, tenth: int = 0) -> None:
    """Writes the shards of `out` and their index. `tenth` (0 to 9) says which tenth of each class is held out.

    Raises:
        UserError: `data` has no shards to train on, or `out` exists already.
    """
    urls = find_shards(data).get("train")
    if not urls:
        raise UserError(f"{data} has no shards of a split train: give a folder of shards")
    if os.path.exists(out):
        raise UserError(f"{out} is there already: name a new folder")
    os.makedirs(out)
    seen: collections.Counter[int] = collections.Counter()
    with (
        ShardWriter(os.path.join(out, "train-%06d.tar"), maxcount=2000, verbose=0, encoder=False) as train,
        ShardWriter(os.path.join(out, "val-%06d.tar"), maxcount=2000, verbose=0, encoder=False) as val,
    ):
        for url in urls:
            for sample in read_shard(url):
                label = label_of(sample)
                writer = val if seen[label] % 10 == tenth else train
                seen[label] += 1
                writer.write({key: value for key, value in sample.items() if key != "__url__"})
    index = read_index(data)
    index_shards(out, index.get("class_names") if index else None)


def main(argv: Sequence[str] | None = None) -> None:
    """Does what the command line `argv` says (default: the process's own)."""
    parser = Parser(prog="python -m lab.holdout", description=str(__doc__).partition("\n\n")[0])
    parser.add_argument("data", metavar="DATA", help="a folder of shards")
    parser.add_argument("out", metavar="OUT", help="a new folder")
    parser.add_argument("--tenth", type=Range(0, below=10, kind=int), default=0, help="which tenth, 0 to 9 [0]")
    args = parser.parse_args(argv)
    hold_out(args.data, args.out, args.tenth)
    print(f"wrote {args.out}")


if __name__ == "__main__":
    run_cli(main)
