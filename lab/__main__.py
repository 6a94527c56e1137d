"""Compares variants: trains what a study is missing, side by side, and ends in a JSON, a table and a plot.

The same command goes on after whatever stopped it: finished runs are not repeated, others resume. OUT/runs holds the
runs (`tensorboard --logdir OUT/runs` shows them side by side), OUT/STUDY.json all that came of them, OUT/STUDY.md and
OUT/STUDY.png what that says. A signal stops what still runs; results are written after it. Exit codes: 0 all is done,
1 a run failed, 128 and the signal's number where one came.
"""

import argparse
from collections.abc import Sequence

from lab.plan import STUDIES, read_studies
from vision_longhorn.command_line.parser import Parser, run_cli
from vision_longhorn.errors import UserError, nearest
from vision_longhorn.settings import Range

EXAMPLE = """a whole file of studies, for --file:
  studies:
    mine:
      config: own_data            # a name in configs/, or a YAML file
      data: photos                # whose place `--data DIR` gives
      seeds: 3
      overrides: {epochs: 30}     # what is not as in the config
      variants:
        - {name: longhorn, model: vlonghorn_tiny, model_kwargs: {depth: 6}}
        - {name: vim, model: vim_tiny, model_kwargs: {depth: 6}}
      pair: [longhorn, vim]
"""


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Command line; in brackets what an option stands at where it is not given."""
    lines = str(__doc__).split("\n\n")
    form = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog="python -m lab", description=lines[0], epilog=f"{lines[1]}\n{EXAMPLE}", formatter_class=form)
    option = parser.add_argument
    option("names", nargs="*", metavar="NAME", help="studies, see --list")
    option("--file", default=STUDIES, help="YAML file of studies [lab/studies.yaml, which explains it]")
    option("--out", default="studies", help="folder of runs and results [studies]")
    option("--data", nargs="+", default=[], metavar="NAME=DIR",
           help="where data lie; DIR alone where one kind is needed; the digits are built in")  # fmt: skip
    option("--merge", nargs="+", default=[], metavar="JSON", help="earlier results, such as another machine's: "
           "finished runs of the same settings, data and seed count as done")  # fmt: skip
    option("--device", choices=("auto", "cuda", "cpu"), default="auto", help="[cuda if there is one]")
    option("--per-gpu", type=Range(1, kind=int), default=1, help="runs side by side on each GPU, or on the CPU [1]")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--list", action="store_true", help="names, what each asks, and how many runs are done")
    what.add_argument("--dry-run", action="store_true", help="every run with its state; start nothing")
    what.add_argument("--report", action="store_true", help="train nothing: write and print what runs or the JSON of "
                      "OUT say; with --data, evaluate what is missing")  # fmt: skip
    what.add_argument("--speed", action="store_true", help="measure images/s of a training step of each variant alone, "
                      "into OUT/speed.json, which tables use")  # fmt: skip
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Does as the command line `argv` says (default: the process's own)."""
    args = parse(argv)
    everything = read_studies(args.file)
    for name in args.names:
        if name not in everything:
            raise UserError(f"unknown study {name!r}: give {' '.join(nearest(name, everything)) or 'one of --list'}")
    if not args.names and not args.list:
        raise UserError(f"say which study, before the options: give names of {', '.join(everything)}, or --list")
    studies = [everything[name] for name in dict.fromkeys(args.names)] or list(everything.values())
    from lab.session import Session  # which imports torch: mistakes are told before

    Session(studies, [f"{name}.json" for name in everything], args).run()


if __name__ == "__main__":
    run_cli(main, stopped="stopped; the same command goes on from here")
