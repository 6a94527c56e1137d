"""Compares variants: trains what a study is missing, side by side, and ends in a JSON, a table and a plot.

The same command goes on after an interruption: finished runs are not repeated, others resume. OUT/runs holds the runs
(`tensorboard --logdir OUT/runs` shows them side by side), OUT/STUDY.json all results, OUT/STUDY.md and OUT/STUDY.png
the table and the plot. A signal stops what still runs, and results are written afterwards. Exit codes: 0 if all is
done, 1 if a run failed, 128 plus the signal's number after a signal.
"""

import argparse
from collections.abc import Sequence

from lab.plan import STUDIES, read_studies
from vision_longhorn.command_line.parser import Parser, run_cli
from vision_longhorn.errors import UserError, nearest
from vision_longhorn.settings import COUNT

EXAMPLE = """a whole file of studies, for --file:
  studies:
    mine:
      config: own_data            # a name in configs/, or a YAML file
      data: photos                # `--data DIR` says where they are
      seeds: 3
      overrides: {epochs: 30}     # values that differ from the config
      variants:
        - {name: longhorn, model: vlonghorn_tiny, model_kwargs: {depth: 6}}
        - {name: vim, model: vim_tiny_best, model_kwargs: {depth: 6}}
      pair: [longhorn, vim]
"""


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line. Brackets in the help show the default of an option."""
    lines = str(__doc__).split("\n\n")
    form = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog="python -m lab", description=lines[0], epilog=f"{lines[1]}\n{EXAMPLE}", formatter_class=form)
    option = parser.add_argument
    option("names", nargs="*", metavar="NAME", help="studies, see --list")
    option("--file", default=STUDIES, help="YAML file of studies [lab/studies.yaml, which explains it]")
    option("--out", default="studies", help="folder of runs and results [studies]")
    option("--data", nargs="+", default=[], metavar="NAME=DIR",
           help="folder of each kind of data; DIR alone if one kind is needed; digits are built in")  # fmt: skip
    option("--merge", nargs="+", default=[], metavar="JSON", help="earlier results, such as another machine's: "
           "finished runs of the same settings, data and seed count as done")  # fmt: skip
    option("--device", choices=("auto", "cuda", "cpu"), default="auto", help="[cuda if there is one]")
    option("--per-gpu", type=COUNT, default=1, help="runs side by side on each GPU, or on the CPU [1]")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--list", action="store_true", help="show each study's name, question and number of runs done")
    what.add_argument("--dry-run", action="store_true", help="show every run with its state; start nothing")
    what.add_argument("--report", action="store_true", help="train nothing: write and print results of the runs or the "
                      "JSON in OUT; with --data, evaluate what is missing")  # fmt: skip
    what.add_argument("--speed", action="store_true", help="measure images/s of a training step of each variant alone, "
                      "into OUT/speed.json, which tables use")  # fmt: skip
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Does what the command line `argv` says (default: the process's own)."""
    args = parse(argv)
    everything = read_studies(args.file)
    for name in args.names:
        if name not in everything:
            raise UserError(f"unknown study {name!r}: give {' '.join(nearest(name, everything)) or 'one of --list'}")
    if not args.names and not args.list:
        raise UserError(f"say which study, before the options: give names of {', '.join(everything)}, or --list")
    studies = [everything[name] for name in dict.fromkeys(args.names)] or list(everything.values())
    from lab.session import Session  # it imports torch; mistakes are reported before that

    Session(studies, [f"{name}.json" for name in everything], args).run()


if __name__ == "__main__":
    run_cli(main, stopped="stopped; the same command goes on from here")
