"""Compares variants: runs what a study is missing, side by side, and ends in a JSON, a table and a plot.

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

from lab.costs import Costs, hardware
from lab.jobs import Jobs, unseen
from lab.plan import STUDIES, Run, Study, read_studies, unique_runs
from lab.results import SPEEDS, Known, build, collect, count_parameters, set_aside, write_results
from lab.runner import START, Outcome, Runner, find_places
from lab.runs import complete_history, folder_of, history_of, read_json
from vision_longhorn.command_line.parser import Parser
from vision_longhorn.demo import DIGITS
from vision_longhorn.errors import UserError, nearest, spelled
from vision_longhorn.files import write_text
from vision_longhorn.lock import FolderLock
from vision_longhorn.outputs import check_output
from vision_longhorn.settings import Range
from vision_longhorn.signals import StopSignals
from vision_longhorn.training.config import Config

LEFT = 3  # exit code where work is left


def main(argv: Sequence[str] | None = None) -> None:
    """Does as the command line `argv` says (default: the process's own)."""
    args = parse(argv)
    all_studies, out = read_studies(args.file), Path(args.out)
    for option in "data", "merge":
        for word in getattr(args, option):
            if word in all_studies and word != DIGITS and not Path(word).exists():
                raise UserError(f"--{option} {word}: a study's name goes before the options")
    studies = [_pick(name, all_studies) for name in dict.fromkeys(args.names)]
    own = [out / f"{name}.json" for name in all_studies]  # of all: they may share runs
    known = Known([*map(Path, args.merge), *(file for file in (*own, out / SPEEDS) if file.exists())])
    known.check(arm for study in studies for arm in study.arms)
    if args.list:
        return list_studies(studies or list(all_studies.values()), out, known)
    if not studies:
        raise UserError(f"say which study: give names of {', '.join(all_studies)}, or --list")
    if not args.speed:  # a word that is none, or data without a place, show before there is a folder
        waiting = () if args.report or args.dry_run else unique_runs(studies)
        find_data(args.data, studies, {run.arm.data for run in waiting if not known.is_done(out, run)})
    if args.dry_run:
        return dry_run(studies, out, known, args)
    if args.report and not args.merge and not out.is_dir():
        raise UserError(f"there is no folder {out} to report on: give --out, or --merge with earlier results")
    for study in studies:
        # A study's own JSON is known by what it says (`Known`), its table and plot by standing beside that or its runs.
        begun = (out / f"{study.name}.json").is_file() or any(folder_of(out, run).is_dir() for run in study.runs())
        for path in () if begun else (out / f"{study.name}.md", out / f"{study.name}.png"):
            check_output("--out", path, (path.suffix,))
    out.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as held:
        if not args.report:  # which may look on
            held.callback(FolderLock(out).release)  # one at a time: two would start the same runs
        if args.speed:
            return measure_speeds(studies, out, known, args.device)
        sys.exit(run_studies(studies, out, known, args))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Command line; in brackets what an option stands at where it is not given."""
    count = Range(1, kind=int)
    lines = str(__doc__).split("\n\n")
    parser = Parser(prog="python -m lab", description=lines[0], epilog=lines[1])
    parser.add_argument("names", nargs="*", metavar="NAME", help="studies, see --list")
    parser.add_argument("--file", default=STUDIES, help="YAML file of studies [lab/studies.yaml, which explains it]")
    parser.add_argument("--out", default="studies", help="folder of runs and results [studies]")
    parser.add_argument("--data", nargs="+", default=[], metavar="NAME=DIR", help="where data lie; DIR alone where one "
                        "kind is needed; the digits are built in")  # fmt: skip
    parser.add_argument("--merge", nargs="+", default=[], metavar="JSON", help="earlier results, such as another "
                        "machine's: finished runs of the same settings, data and seed count as done")  # fmt: skip
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="[cuda if there is one]")
    parser.add_argument("--per-gpu", type=count, default=1, help="runs side by side on each GPU [1]")
    parser.add_argument("--jobs", type=count, default=1, help="runs side by side where there is no GPU [1]")
    parser.add_argument("--budget", type=Range(above=0), metavar="SECONDS", help="start nothing that by estimate would "
                        "not end in this time, then stop what still runs; results are written after it")  # fmt: skip
    parser.add_argument("--list", action="store_true", help="names, what each asks, and how many runs are done")
    parser.add_argument("--dry-run", action="store_true", help="every run with its estimated cost; start nothing")
    parser.add_argument("--report", action="store_true", help="train nothing: write and print what runs or the JSON "
                        "of OUT say; with --data, evaluate what is missing")  # fmt: skip
    parser.add_argument("--speed", action="store_true", help="measure images/s of a training step of each variant "
                        "alone, into OUT/speed.json, which tables and estimates use; those of unknown speed come "
                        "first")  # fmt: skip
    args = parser.parse_args(argv)
    chosen = [option for option in ("list", "dry_run", "report", "speed") if getattr(args, option)]
    if len(chosen) > 1:
        raise UserError(f"give one of {', '.join('--' + option.replace('_', '-') for option in chosen)}")
    return args


def _pick(name: str, studies: dict[str, Study]) -> Study:
    if name not in studies:
        near = nearest(name, studies)
        hint = f"the nearest known one is {near[0]!r}, " if near else ""
        raise UserError(f"unknown study {name!r}; {hint}--list shows all")
    return studies[name]


def find_data(words: list[str], studies: list[Study], needed: set[str]) -> dict[str, str]:
    """Place of each kind of data by name.

    Args:
        words: NAME=DIR, or DIR alone.
        studies: The studies that are asked for.
        needed: Names of data that a place is needed of.

    Raises:
        UserError: Where one has no place, or a word is none of these.
    """
    names = {arm.data for study in studies for arm in study.arms if arm.data}
    places = {DIGITS: DIGITS}
    for word in words:
        name, equals, place = word.partition("=")
        if equals and name in names:
            places[name] = place
        elif len(names - {DIGITS}) == 1 and not equals:
            places[(names - {DIGITS}).pop()] = word
        elif not names - {DIGITS}:
            raise UserError(f"--data {word}: no data are needed{', the digits are built in' if names else ''}")
        else:
            needs = " ".join(f"{known}=DIR" for known in sorted(names - {DIGITS}))
            raise UserError(f"--data {word}: these studies need --data {needs}")
    for name in sorted(needed - {"", *places}):
        raise UserError(f"no place of the data {name}: give --data {name}=DIR, a folder of shards or images")
    return places


def check_data(runs: list[Run], places: dict[str, str]) -> None:
    """Raises UserError where data whose place is known are not what the studies say: before the first run starts, not
    in each of them."""
    from vision_longhorn.data import DataError, open_shards, sources

    for name, cfg in {run.arm.data: run.arm.config for run in runs}.items():
        if name not in places or not isinstance(cfg, Config):
            continue
        if places[name] == DIGITS:
            splits, classes = sources.digits()
            facts = {
                "train_samples": len(splits["train"]),
                "val_samples": len(splits["val"]),
                "num_classes": len(classes),
            }
            if wrong := [f"{key}={getattr(cfg, key)}" for key, value in facts.items() if getattr(cfg, key) != value]:
                right = ", ".join(f"{key}: {value}" for key, value in facts.items())
                raise UserError(f"data {name}: {', '.join(wrong)}, but those that are built in have {right}")
            continue
        try:
            with spelled(num_samples="train_samples"):
                train = open_shards(places[name], cfg.train_split, cfg.train_samples)
            with spelled(num_samples="val_samples"):
                open_shards(places[name], cfg.val_split, cfg.val_samples, train=train)
            found = len(train.class_names or []) or train.num_classes or cfg.num_classes
            if found != cfg.num_classes:
                raise DataError(f"num_classes={cfg.num_classes}, but {places[name]} has {found} classes")
        except DataError as error:
            raise UserError(
                f"{error} (--data gives {places[name]} for {name}, of which the file of studies says: "
                f"{cfg.train_samples} images to train on, {cfg.val_samples} to evaluate on, {cfg.num_classes} classes)"
            ) from None


def check_models(studies: list[Study], todo: list[Run], known: Known) -> None:
    """Builds the model of each variant that is to run, so that a wrong name, argument or resolution shows before the
    first run. Raises UserError."""
    wanted = {run.arm.key for run in todo}
    for study in studies:
        for arm in study.arms:
            if arm.key not in wanted:
                continue
            model = build(arm)
            known.parameters[arm.key] = count_parameters(model)
            patch = getattr(getattr(model, "patch_embed", None), "patch_size", (1, 1))
            for size in study.sizes(arm) if arm.of_images else ():
                if size < max(patch):
                    raise UserError(
                        f"study {study.name}, {arm.label}: resolutions has {size}, which holds no patch of "
                        f"{patch[0]} x {patch[1]}: give larger ones"
                    )


# ------------------------------------------------------------------------------------------------- what starts nothing


def list_studies(studies: list[Study], out: Path, known: Known) -> None:
    """Prints the names, what each asks, and how many of its runs are done."""
    width = max(len(study.name) for study in studies)
    for study in studies:
        runs = study.runs()
        done = sum(known.is_done(out, run) for run in runs)
        print(f"{study.name:{width}} {done:3} of {len(runs):3} runs done  {study.asks}")


def dry_run(studies: list[Study], out: Path, known: Known, args: argparse.Namespace) -> None:
    """Prints every run with its state and the seconds that it takes by estimate."""
    runs = list(unique_runs(studies))
    todo = [run for run in runs if not known.is_done(out, run)]
    check_models(studies, todo, known)
    check_data(todo, find_data(args.data, studies, set()))
    costs = Costs(runs, out, known, hardware(args.device))
    total, longest, unknown, left = 0.0, 0.0, 0, 0
    for run in runs:
        epochs = len(history_of(folder_of(out, run)))
        state = "done" if known.is_done(out, run) else f"{epochs} of {run.arm.config.epochs} epochs"
        rest = costs.seconds(run)
        seconds = None if rest is None else START + rest
        cost = "unknown" if seconds is None else f"{seconds:,.0f} s"
        if state != "done":
            total, unknown, left = total + (seconds or 0), unknown + (seconds is None), left + 1
            longest = max(longest, seconds or 0)
        print(f"{run.name:50} {state:18} {'' if state == 'done' else cost}")
    print(f"{left} of {len(runs)} runs to do", end="" if left > unknown else "\n")
    if left > unknown:
        print(f", each alone: {total:,.0f} s on one device", end="")
        print("".join(f", {max(longest, total / count):,.0f} s on {count}" for count in (2, 4, 8)))
    if any(run.arm.of_images for run in runs):
        print(f"by speeds of {costs.hardware}" if costs.hardware else "no speed is known: --speed measures them")
    if unknown:
        print(f"{'not in these sums: ' if left > unknown else ''}{unknown} runs of unknown cost")


# ------------------------------------------------------------------------------------------------------- what computes


def measure_speeds(studies: list[Study], out: Path, known: Known, device: str) -> None:
    """Measures every variant's training step alone, into OUT/speed.json: first those of which no speed is known."""
    from lab.speed import measure

    if other := [study.name for study in studies if study.task != "images"]:
        raise UserError(f"--speed measures training on images: leave {', '.join(other)} out, its finished runs tell")
    name, speeds = hardware(device), (read_json(out / SPEEDS) or {}).get("speeds", {})
    arms = {arm.speed_key: arm for study in studies for arm in study.arms}
    print(f"training steps on {name}")
    for key, arm in sorted(arms.items(), key=lambda pair: name in known.speeds.get(pair[0], {})):
        print(f"{arm.label:30} ", end="", flush=True)  # a CPU takes minutes for some
        found = measure(arm, device)
        speeds.setdefault(key, {})[name] = found
        write_results(out / SPEEDS, {"speeds": speeds})
        memory = f", {found['peak_gib']} GiB" if "peak_gib" in found else ""
        rate = f"{found['images_per_s']:,.0f} images/s" if "images_per_s" in found else found["error"]
        print(f"{rate}{memory}")


def run_studies(studies: list[Study], out: Path, known: Known, args: argparse.Namespace) -> int:
    """Runs what is missing, looks at the final weights, and writes the results; the exit code."""
    deadline = None if args.budget is None else time.monotonic() + args.budget
    runs = list(unique_runs(studies))
    for run in runs:
        complete_history(folder_of(out, run), run)
    todo = [] if args.report else [run for run in runs if not known.is_done(out, run)]
    check_models(studies, todo, known)
    data = find_data(args.data, studies, {run.arm.data for run in todo})
    check_data(todo, data)
    environment, outcome, came = None, Outcome(), 0
    if todo or unseen(studies, out):
        from vision_longhorn.environment import describe_environment  # which imports torch

        places = find_places(args.device, args.per_gpu, args.jobs)
        costs = Costs(runs, out, known, hardware(args.device))
        say = partial(print, file=sys.stderr if args.report else sys.stdout)
        jobs = Jobs(studies, out, data, args.device, places, costs, say)
        with StopSignals(out) as signals:
            runner = Runner(places, signals, deadline, say)
            if todo:
                say(f"{len(todo)} of {len(runs)} runs to do, {len(places)} at a time")
                outcome = runner.run(jobs.trainings(todo))
                environment = {key: value for key, value in describe_environment().items() if key != "command"}
            if not signals.received:
                outcome += runner.run(jobs.looks())
            came = signals.received
    for study in studies:
        report(study, out, known, environment)
    if came or outcome.left:
        print("work is left: the same command goes on from here", file=sys.stderr)
    return 128 + came if came else 1 if outcome.failed else LEFT if outcome.left else 0


def report(study: Study, out: Path, known: Known, environment: dict[str, Any] | None) -> None:
    """Writes a study's JSON, table and plot, and prints the table between the marks that a document has around it."""
    from lab.tables import markdown, plot

    path = out / f"{study.name}.json"
    content = collect(study, out, known, environment)
    if aside := set_aside(path, content):
        print(f"{path} has runs of other settings or seeds: it is {aside} now, for --merge", file=sys.stderr)
    write_results(path, content)
    write_text(path.with_suffix(".md"), markdown(content))
    plot(content, path.with_suffix(".png"))
    print(f"<!-- study: {study.name} -->\n{markdown(content)}<!-- end -->")
    print(f"wrote {path}, {path.with_suffix('.md')}, {path.with_suffix('.png')}", file=sys.stderr)
