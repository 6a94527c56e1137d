"""Runs a command on some studies: looks at what is done, trains what is missing, and writes the results."""

import argparse
import contextlib
import sys
from functools import partial
from pathlib import Path
from typing import Any

from lab.plan import Arm, Study, Trial, unique_trials
from lab.queue import Job, Queue, find_places
from lab.results import SPEEDS, Known, build, collect, machine, write_results
from lab.runs import TrialFolder
from lab.speed import measure
from lab.tables import markdown, plot
from vision_longhorn.cores import cores
from vision_longhorn.data import open_shards
from vision_longhorn.data.sharding import make_digits
from vision_longhorn.errors import UserError, spelled
from vision_longhorn.files import lock_folder, read_json, write_text
from vision_longhorn.outputs import check_output
from vision_longhorn.settings import DIGITS
from vision_longhorn.signals import StopSignals


class Session:
    """Some studies, and the known results, also from the files `own` in OUT. `args` is the command line."""

    def __init__(self, studies: list[Study], own: list[str], args: argparse.Namespace) -> None:
        self.studies, self.args, self.out = studies, args, Path(args.out)
        files = [self.out / name for name in (*own, SPEEDS)]
        self.known = Known(self.out, [*map(Path, args.merge), *(file for file in files if file.exists())])
        self.known.check(arm for study in studies for arm in study.arms)
        self.trials = unique_trials(studies)
        trains = not (args.report or args.speed)
        self.todo = [trial for trial in self.trials if trains and not self.known.is_done(trial)]
        self.sizes: dict[tuple[str, int], set[int]] = {}  # sides of images at which to evaluate a trial's final weights
        for study in studies:
            for trial in study.trials():
                self.sizes.setdefault(trial.identity, set()).update(study.sizes(trial.arm) if trial.arm.data else ())

    def run(self) -> None:
        """Does what the command line says."""
        args = self.args
        if args.list:
            return self.show()
        self.data = self.find_data()
        if args.dry_run:
            self.check()
            return self.dry_run()
        if args.report and not args.merge and not self.out.is_dir():
            raise UserError(f"there is no folder {self.out} to report on: give --out, or --merge with earlier results")
        for study in self.studies:  # `Known` refuses a JSON that no study has written
            begun = (TrialFolder(self.out, trial).path.is_dir() for trial in study.trials())
            if not (self.out / f"{study.name}.json").is_file() and not any(begun):
                for ending in ".md", ".png":
                    check_output("--out", self.out / f"{study.name}{ending}", (ending,))
        self.out.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as held:
            if not args.report:  # a report may be made while runs go on
                held.enter_context(lock_folder(self.out))  # one at a time, because two would start the same runs
            if args.speed:
                return self.measure_speeds()
            self.check()
            sys.exit(self.train())

    def find_data(self) -> dict[str, str]:
        """Finds the place of each kind of data, by name. Raises UserError if data to train on have none."""
        names = {arm.data for study in self.studies for arm in study.arms} - {"", DIGITS}
        places, needs = {DIGITS: DIGITS}, " ".join(f"{name}=DIR" for name in sorted(names))
        for word in self.args.data:
            name, equals, place = word.partition("=")
            if equals and name in names:
                places[name] = place
            elif len(names) == 1 and not equals:
                places[next(iter(names))] = word
            else:
                needed = f"need --data {needs}" if needs else "need no data, the digits are built in"
                raise UserError(f"--data {word}: these studies {needed}")
        for name in set() if self.args.dry_run else {trial.arm.data for trial in self.todo} - {"", *places}:
            raise UserError(f"no place of the data {name}: give --data {needs}, folders of shards or images")
        return places

    def check(self) -> None:
        """Raises UserError, before the first run, if models or data are not what the studies say."""
        for trial in {trial.arm.key: trial for trial in self.todo}.values():
            patch = max(getattr(getattr(build(trial.arm), "patch_embed", None), "patch_size", (1, 1)))
            if (least := min(self.sizes[trial.identity], default=patch)) < patch:
                raise UserError(
                    f"study {trial.arm.study}, {trial.arm.label}: resolutions has {least}, which holds no patch of "
                    f"{patch} pixels: give larger ones"
                )
        for arm in {trial.arm.data: trial.arm for trial in self.todo if trial.arm.data in self.data}.values():
            check_data(arm, self.data[arm.data])

    def show(self) -> None:
        for study in self.studies:
            trials = study.trials()
            done = sum(map(self.known.is_done, trials))
            print(f"{study.name:14} {done:3} of {len(trials):3} runs done  {study.asks}")

    def dry_run(self) -> None:
        for trial in self.trials:
            epochs = f"{len(TrialFolder(self.out, trial).history())} of {trial.arm.config.epochs} epochs"
            print(f"{trial.name:50} {epochs if trial in self.todo else 'done'}")
        print(f"{len(self.todo)} of {len(self.trials)} runs to do")

    def measure_speeds(self) -> None:
        """Measures every variant's training step alone, into OUT/speed.json, beginning with those not yet in there."""
        if other := [study.name for study in self.studies if study.task != "images"]:
            raise UserError(f"--speed measures training on images: leave {', '.join(other)} out")
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
        """Trains what is missing, evaluates the final weights, writes the results, and returns the exit code."""
        say = partial(print, file=sys.stderr if self.args.report else sys.stdout)
        self.places = find_places(self.args.device, self.args.per_gpu)
        self.workers = max(1, min(8, cores() // len(self.places)))  # loader processes of each
        with StopSignals() as signals:
            queue = Queue(self.places, signals, say)
            if self.todo:
                say(f"{len(self.todo)} of {len(self.trials)} runs to do, {len(self.places)} at a time")
                queue.run([self.training(trial) for trial in self.todo])
            for trial in self.trials:
                if trial.arm.data not in self.data and TrialFolder(self.out, trial).unseen(
                    [*self.sizes[trial.identity]]
                ):
                    say(f"{trial.name}: to evaluate its images one by one, give --data {trial.arm.data}=DIR")
            if not signals.received:
                queue.run([job for trial in self.trials for job in self.look(trial)])
            came = signals.received
        for study in self.studies:
            self.report(study)
        if came:
            print("work is left: the same command goes on from here", file=sys.stderr)
        return 128 + came if came else int(queue.failed > 0)

    def training(self, trial: Trial) -> Job:
        """Makes the job that begins a trial or goes on with it."""
        folder = TrialFolder(self.out, trial)

        def start() -> tuple[list[str], Path]:
            config = folder.prepare(self.places.count(self.places[0]), self.workers)
            words = ["--config", str(config), "--run-dir", str(folder.path), "--device", self.args.device]
            if trial.arm.data:
                more = ["--resume", "--data", self.data[trial.arm.data]]
                return ["vision_longhorn", "train", *words, *more], folder.output_file
            return ["lab.recall", *words], folder.output_file

        def done(code: int) -> tuple[bool, str, list[Job]]:
            if folder.is_finished():
                last = folder.history()[-1]
                top1 = (last.get("val_ema") or last["val"])["top1"]
                # Evaluate at once: if time is short, the machine may soon be gone, and the weights with it.
                return True, f"top-1 {top1:.2f} %", self.look(trial)
            return False, f"exit code {code}\n    {folder.output_file} ends with{folder.note_failure(code)}", []

        return Job(folder.path.name, start, done)

    def look(self, trial: Trial) -> list[Job]:
        """Makes the job that evaluates the final weights of a trial image by image, if that is left to do."""
        folder = TrialFolder(self.out, trial)
        sizes = ",".join(map(str, folder.unseen(sorted(self.sizes[trial.identity]))))
        if not sizes or trial.arm.data not in self.data:
            return []
        log, words = folder.path / "images.log", ["lab.hits", f"{folder.path}:{sizes}"]
        words += ["--data", self.data[trial.arm.data], "--device", self.args.device, "--workers", str(self.workers)]

        def done(code: int) -> tuple[bool, str, list[Job]]:
            return code == 0, "" if code == 0 else f"exit code {code}, {log} says why", []

        return [Job(f"images-{folder.path.name}", lambda: (words, log), done)]

    def report(self, study: Study) -> None:
        """Writes a study's JSON, table and plot, and prints the table."""
        path = self.out / f"{study.name}.json"
        content = collect(study, self.known)
        text = markdown(content)
        write_results(path, content)
        write_text(path.with_suffix(".md"), text)
        plot(content, path.with_suffix(".png"))
        print(f"{study.name}\n\n{text}")
        print(f"wrote {path}, {path.with_suffix('.md')}, {path.with_suffix('.png')}", file=sys.stderr)


def check_data(arm: Arm, place: str) -> None:
    """Raises UserError if the data of an arm are not what the file of studies says."""
    cfg: Any = arm.config
    if place == DIGITS:
        make_digits(place := str(Path("data", DIGITS)))
    try:
        with spelled(num_samples="train_samples"):
            train = open_shards(place, cfg.train_split, cfg.train_samples)
        with spelled(num_samples="val_samples"):
            open_shards(place, cfg.val_split, cfg.val_samples, train=train)
        if None not in (cfg.num_classes, train.num_classes) and cfg.num_classes != train.num_classes:
            raise UserError(f"num_classes={cfg.num_classes}, but {place} has {train.num_classes} classes")
    except UserError as error:
        raise UserError(f"{error} (the data {arm.data}, as the file of studies has them)") from None
