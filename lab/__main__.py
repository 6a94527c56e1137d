"""Compares variants: trains what a study is missing, side by side, and ends in a JSON, a table and a plot.

The same command goes on after whatever stopped it: finished runs are not repeated, others resume. OUT/runs holds the
runs (`tensorboard --logdir OUT/runs` shows them side by side), OUT/STUDY.json all that came of them, OUT/STUDY.md and
OUT/STUDY.png what that says. Exit codes: 0 all is done, 1 a run failed, 3 work is left as time was over, 128 and the
signal's number where one came.
"""

import argparse
import contextlib
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lab.plan import STUDIES, Arm, Study, read_studies, unique_trials
from vision_longhorn.command_line.parser import Parser, run_cli
from vision_longhorn.demo import DIGITS
from vision_longhorn.errors import UserError, nearest
from vision_longhorn.files import write_text
from vision_longhorn.outputs import check_output
from vision_longhorn.settings import Range

LEFT = 3  # exit code where work is left
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
    option("--budget", type=Range(above=0), default=float("inf"), metavar="SECONDS", help="then stop what still runs, "
           "which the same command goes on with; results are written after it")  # fmt: skip
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
    for word in (*args.data, *args.merge):
        if word in everything and word != DIGITS and not Path(word).exists():
            raise UserError(f"{word} follows --data or --merge: a study's name goes before the options")
    for name in args.names:
        if name not in everything:
            near = nearest(name, everything)
            hint = f"the nearest known one is {near[0]!r}, " if near else ""
            raise UserError(f"unknown study {name!r}; {hint}--list shows all")
    if not args.names and not args.list:
        raise UserError(f"say which study: give names of {', '.join(everything)}, or --list")
    studies = [everything[name] for name in dict.fromkeys(args.names)] or list(everything.values())
    Lab(studies, [f"{name}.json" for name in everything], args).run()


class Lab:
    """What a command does with some studies.

    Args:
        studies: The studies.
        own: Names of files in OUT that may hold results which they share.
        args: The command line.
    """

    def __init__(self, studies: list[Study], own: list[str], args: argparse.Namespace) -> None:
        from lab.results import SPEEDS, Known  # which imports torch: mistakes are told before

        self.studies, self.args, self.out = studies, args, Path(args.out)
        files = [self.out / name for name in (*own, SPEEDS)]
        self.known = Known(self.out, [*map(Path, args.merge), *(file for file in files if file.exists())])
        self.known.check(arm for study in studies for arm in study.arms)
        self.trials = unique_trials(studies)
        trains_nothing = args.report or args.speed
        self.todo = [] if trains_nothing else [trial for trial in self.trials if not self.known.is_done(trial)]
        self.classes: dict[str, int | None] = {}  # how many each kind of data has, as far as they were looked at

    def run(self) -> None:
        """Does it."""
        args = self.args
        if args.list:
            return self.list()
        self.data = self.find_data()
        if args.dry_run:
            self.check()
            return self.dry_run()
        if args.report and not args.merge and not self.out.is_dir():
            raise UserError(f"there is no folder {self.out} to report on: give --out, or --merge with earlier results")
        self.refuse_others_files()
        self.out.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as held:
            if not args.report:  # which may look on
                from vision_longhorn.lock import FolderLock

                held.callback(FolderLock(self.out).release)  # one at a time: two would start the same runs
            if args.speed:
                return self.measure_speeds()
            self.check()
            sys.exit(self.train())

    def refuse_others_files(self) -> None:
        """Raises UserError where a table or plot of OUT is none of ours; `Known` does where a JSON is."""
        from lab.runs import TrialFolder

        for study in self.studies:
            begun = (TrialFolder(self.out, trial).path.is_dir() for trial in study.trials())
            if not (self.out / f"{study.name}.json").is_file() and not any(begun):
                for ending in ".md", ".png":
                    check_output("--out", self.out / f"{study.name}{ending}", (ending,))

    def find_data(self) -> dict[str, str]:
        """The place of each kind of data by name. Raises UserError where what is to be trained on has none."""
        names = {arm.data for study in self.studies for arm in study.arms} - {"", DIGITS}
        places = {DIGITS: DIGITS}
        for word in self.args.data:
            name, equals, place = word.partition("=")
            if equals and name in {*names, DIGITS}:
                places[name] = place
            elif len(names) == 1 and not equals:
                places[names.copy().pop()] = word
            else:
                needs = " ".join(f"{name}=DIR" for name in sorted(names))
                raise UserError(f"--data {word}: " + (f"these studies need --data {needs}" if needs else "no data are "
                                "needed, the digits are built in"))  # fmt: skip
        needed = set() if self.args.dry_run else {trial.arm.data for trial in self.todo} - {""}
        for name in sorted(needed - places.keys()):
            raise UserError(f"no place of the data {name}: give --data {name}=DIR, a folder of shards or images")
        return places

    def check(self) -> None:
        """Raises UserError where data or models of what is to be trained are not what the studies say: before the first
        run starts, not in each of them. Notes the numbers of classes."""
        for arm in {trial.arm.data: trial.arm for trial in self.todo if trial.arm.data in self.data}.values():
            self.classes[arm.data] = count_classes(arm, self.data[arm.data])
        wanted = {trial.arm.key for trial in self.todo}
        for study in self.studies:
            for arm in study.arms:
                if arm.key in wanted:
                    self.check_model(study, arm)

    def check_model(self, study: Study, arm: Arm) -> None:
        from lab.results import build

        classes = self.classes.get(arm.data)
        model = build(arm, classes or getattr(arm.config, "num_classes", None))
        self.known.count_parameters(arm, classes)
        patch = getattr(getattr(model, "patch_embed", None), "patch_size", (1, 1))
        for size in study.sizes(arm) if arm.data else ():
            if size < max(patch):
                raise UserError(
                    f"study {study.name}, {arm.label}: resolutions has {size}, which holds no patch of "
                    f"{patch[0]} x {patch[1]}: give larger ones"
                )

    def list(self) -> None:
        """Prints the names, what each asks, and how many of its runs are done."""
        for study in self.studies:
            trials = study.trials()
            done = sum(map(self.known.is_done, trials))
            print(f"{study.name:14} {done:3} of {len(trials):3} runs done  {study.asks}")

    def dry_run(self) -> None:
        """Prints every run with its state."""
        from lab.runs import TrialFolder

        for trial in self.trials:
            epochs = f"{len(TrialFolder(self.out, trial).history())} of {trial.arm.config.epochs} epochs"
            print(f"{trial.name:50} {epochs if trial in self.todo else 'done'}")
        print(f"{len(self.todo)} of {len(self.trials)} runs to do")

    def measure_speeds(self) -> None:
        """Measures every variant's training step alone, into OUT/speed.json: first those of which no speed is known."""
        from lab.results import SPEEDS, machine, write_results
        from lab.runs import read_json
        from lab.speed import measure

        if other := [study.name for study in self.studies if study.task != "images"]:
            raise UserError(
                f"--speed measures training on images: leave {', '.join(other)} out, its finished runs tell"
            )
        name, speeds = machine(self.args.device), (read_json(self.out / SPEEDS) or {}).get("speeds", {})
        arms = {arm.speed_key: arm for study in self.studies for arm in study.arms}
        print(f"training steps on {name}")
        for key, arm in sorted(arms.items(), key=lambda pair: name in self.known.speeds.get(pair[0], {})):
            found = measure(arm, self.args.device)
            speeds.setdefault(key, {})[name] = found
            write_results(self.out / SPEEDS, {"speeds": speeds})
            memory = f", {found['peak_gib']} GiB" if "peak_gib" in found else ""
            rate = f"{found['images_per_s']:,.0f} images/s" if "images_per_s" in found else found["error"]
            print(f"{arm.label:30} {rate}{memory}")

    def train(self) -> int:
        """Trains what is missing, looks at the final weights, and writes the results; the exit code."""
        from lab.jobs import Jobs
        from lab.queue import Queue, find_places
        from vision_longhorn.signals import StopSignals

        deadline = time.monotonic() + self.args.budget
        say = partial(print, file=sys.stderr if self.args.report else sys.stdout)
        places = find_places(self.args.device, self.args.per_gpu)
        with StopSignals(self.out) as signals:
            queue = Queue(places, signals, deadline, say)
            jobs = Jobs(self.studies, self.trials, self.known, self.data, self.args.device, places)
            if self.todo:
                say(f"{len(self.todo)} of {len(self.trials)} runs to do, {len(places)} at a time")
                queue.run([jobs.training(trial) for trial in self.todo])
            if not signals.received:
                queue.run(jobs.looks(say))
            came = signals.received
        for study in self.studies:
            self.report(study)
        if came or queue.left:
            print("work is left: the same command goes on from here", file=sys.stderr)
        return 128 + came if came else 1 if queue.failed else LEFT if queue.left else 0

    def report(self, study: Study) -> None:
        """Writes a study's JSON, table and plot, and prints the table between the marks that a document has around
        it."""
        from lab.results import collect, write_results
        from lab.tables import markdown, plot

        path = self.out / f"{study.name}.json"
        content = collect(study, self.known)
        write_results(path, content)
        write_text(path.with_suffix(".md"), markdown(content))
        plot(content, path.with_suffix(".png"))
        print(f"<!-- study: {study.name} -->\n{markdown(content)}<!-- end -->")
        print(f"wrote {path}, {path.with_suffix('.md')}, {path.with_suffix('.png')}", file=sys.stderr)


def count_classes(arm: Arm, place: str) -> int | None:
    """How many classes the data of an arm have. Raises UserError where they are not what the file of studies says."""
    from vision_longhorn.data import DataError, open_shards
    from vision_longhorn.data.sharding import make_digits

    cfg: Any = arm.config
    if place == DIGITS:
        make_digits(place := str(Path("data", DIGITS)))
    try:
        train = open_shards(place, cfg.train_split, cfg.train_samples)
        open_shards(place, cfg.val_split, cfg.val_samples, train=train)
        found = len(train.class_names or []) or train.num_classes or cfg.num_classes
        if cfg.num_classes not in (None, found):
            raise DataError(f"num_classes={cfg.num_classes}, but {place} has {found} classes")
        return found
    except DataError as error:
        facts = {key: getattr(cfg, key) for key in ("train_samples", "val_samples", "num_classes")}
        said = ", ".join(f"{key}={value}" for key, value in facts.items() if value is not None)
        raise UserError(f"{error} (the data {arm.data}, of which the studies say {said or 'nothing'})") from None


if __name__ == "__main__":
    run_cli(main, stopped="stopped; the same command goes on from here")
