"""The documents say what is: their links resolve, what they name exists, their tables are whole."""

import re
from functools import cache
from pathlib import Path

import pytest
import torch

import vision_longhorn

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [
    path
    for pattern in (
        "README.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
        "docs/*.md",
        "docs/studies/*.md",
        "benchmarks/README.md",
    )
    for path in sorted(ROOT.glob(pattern))
]

# Where identifiers and options are looked for. The tests are not among them: a name that only they know is stale.
SOURCES = [
    "vision_longhorn/**/*.py",
    "kernels/**/*.py",
    "lab/*.py",
    "lab/*.yaml",
    "benchmarks/*.py",
    "examples/*.py",
    "configs/*.yaml",
    "*.py",
    "pyproject.toml",
    "tests/run_timm_suite.py",
    "tests/conftest.py",
]

# Names in backticks that begin with one of these belong to somebody else.
FOREIGN_ROOTS = {"timm", "torch", "onnx", "argparse"}
# fmt: off
FOREIGN_NAMES = {
    "deit_tiny_patch16_224",                # timm's, beside ours in a table
    "AutoModelForImageClassification", "from_pretrained",  # transformers'
    "target_parameters", "GradCAM", "reshape_transform", "to_map",  # peft's, pytorch-grad-cam's, the reader's
    "MyMixer",                              # the reader's
    "to_empty",                             # torch's
    "parse_device_str",                     # torch's, in C++
    "output_1",                             # `output_` and a number
    "dd0358a",                              # a commit
}
# fmt: on
ENDINGS = {
    "csv",
    "gz",
    "json",
    "lock",
    "md",
    "onnx",
    "pt",
    "pt2",
    "pth",
    "py",
    "safetensors",
    "so",
    "tar",
    "toml",
    "txt",
    "yaml",
}  # fmt: skip
# fmt: off
FOREIGN_FILES = {
    "validate.py", "benchmark.py",          # scripts of timm's
    "ab.png", "mine.yaml",                  # the reader's
    "eval-last-val.json",  # put together from what was evaluated
}
# fmt: on
FOREIGN_OPTIONS = {
    "argparse": {"--help"},
    "accelerate": {
        "--cpu",
        "--machine_rank",
        "--main_process_ip",
        "--main_process_port",
        "--multi_gpu",
        "--num_machines",
        "--num_processes",
        "--quiet",
        "--use_deepspeed",
        "--use_fsdp",
    },
    "torchrun": {
        "--master_addr",
        "--master_port",
        "--max-restarts",
        "--nnodes",
        "--node_rank",
        "--nproc_per_node",
        "--standalone",
    },
    "slurm": {
        "--cpus-per-task",
        "--gpus-per-node",
        "--kill-on-bad-exit",
        "--nodes",
        "--ntasks-per-node",
        "--open-mode",
        "--requeue",
        "--signal",
        "--time",
    },
    "timm": {
        "--data-dir",
        "--device-modules",
        "--gp",
        "--img-size",
        "--kd-model-name",
        "--opt",
        "--mean",
        "--std",
        "--use-ema",
    },
    "ncu": {"--clock-control", "--section"},
    "others": {"--check", "--index-url", "--junitxml", "--logdir"},  # ruff, pip, pytest, tensorboard
}  # fmt: skip


def without_code(text: str) -> str:
    """The text without fenced blocks and comments, line by line as it was."""

    def blank(match: re.Match[str]) -> str:
        return "\n" * match[0].count("\n")

    text = re.sub(r"^( *)```.*?^ *```$", blank, text, flags=re.M | re.S)
    return re.sub(r"<!--.*?-->", blank, text, flags=re.S)


def blocks_of(text: str, *languages: str) -> list[str]:
    """The fenced blocks in one of the languages."""
    found = re.findall(r"^ *```(\w*)\n(.*?)^ *```$", text, flags=re.M | re.S)
    return [block for language, block in found if language in languages]


def spans_of(text: str) -> list[str]:
    """What stands in single backticks, on one line or over a line's end, outside of fenced blocks."""
    return [
        " ".join(span.split())
        for paragraph in without_code(text).split("\n\n")
        for span in re.findall(r"`([^`]+)`", paragraph)
    ]


def anchors_of(text: str) -> set[str]:
    """The anchors that GitHub gives to the headings."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ +(.*)$", without_code(text), flags=re.M):
        heading = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
        number = 0
        while (anchor := f"{slug}-{number}" if number else slug) in found:
            number += 1
        found.add(anchor)
    return found


@cache
def sources() -> dict[Path, str]:
    return {path: path.read_text(encoding="utf-8") for pattern in SOURCES for path in sorted(ROOT.glob(pattern))}


@cache
def words() -> set[str]:
    """Every identifier in the sources, and every name of a folder or file of the repository without its ending."""
    return {word for text in sources().values() for word in re.findall(r"[A-Za-z_]\w*", text)} | {
        Path(name).stem for name in files()
    }


@cache
def files() -> set[str]:
    """Names of all files of the repository, without folders."""
    roots = [path for path in ROOT.iterdir() if path.name[0] != "." and path.name not in ("runs", "data", "build")]
    return {path.name for root in roots for path in (root.rglob("*") if root.is_dir() else [root]) if path.is_file()}


@cache
def options() -> set[str]:
    """Every option of a command: those in quotes in the sources, and the trainer's, which are fields of its config."""
    found = {option for text in sources().values() for option in re.findall(r"[\"'](--\w[\w-]*)[\"']", text)}
    config = (ROOT / "vision_longhorn/training/config.py").read_text(encoding="utf-8")
    for field in re.findall(r"^    (\w+): .* = option\(", config, flags=re.M):
        found |= {f"--{field}", f"--{field.replace('_', '-')}"}
    return found.union(*FOREIGN_OPTIONS.values())


def module_of(name: str) -> tuple[Path | None, list[str]]:
    """File or folder of the longest part of a dotted name that is a module, and the names that follow it."""
    parts = name.split(".")
    folder = ROOT / "kernels" if parts[1:2] == ["kernels"] else ROOT / parts[0]
    used = 2 if parts[1:2] == ["kernels"] else 1
    found = folder
    while used < len(parts):
        here = folder / parts[used]
        if here.is_dir():
            folder = found = here
        elif here.with_suffix(".py").is_file():
            return here.with_suffix(".py"), parts[used + 1 :]
        else:
            break
        used += 1
    return (found if found.is_dir() else None), parts[used:]


def defines(name: str) -> bool:
    """Whether a dotted name that begins with `vision_longhorn` is a module, or a module's text has what follows."""
    module, rest = module_of(name)
    if module is None:
        return False
    if not rest:
        return True
    file = module if module.is_file() else module / "__init__.py"
    return file.is_file() and re.search(rf"\b{re.escape(rest[0])}\b", file.read_text(encoding="utf-8")) is not None


def faults_of_links(text: str, path: Path) -> list[str]:
    faults = []
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "``", without_code(text))):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        there = (path.parent / file).resolve() if file else path
        if not there.exists() or not there.is_relative_to(ROOT):
            faults.append(f"({target}): there is no such file")
        elif anchor and anchor not in anchors_of(text if there == path else there.read_text(encoding="utf-8")):
            faults.append(f"({target}): there is no such heading")
    return faults


def faults_of_tables(text: str) -> list[str]:
    faults: list[str] = []
    lines = without_code(text).split("\n")
    width = 0
    for number, line in enumerate(lines, 1):
        if not line.startswith("|"):
            width = 0
            continue
        cells = len(re.findall(r"(?<!\\)\|", line)) - 1
        if not width:
            width = cells
            below = lines[number] if number < len(lines) else ""
            if not re.fullmatch(r"\|(\s*:?-+:?\s*\|)+", below):
                faults.append(f"line {number}: a table that begins without a head: {line[:60]}")
        elif cells != width:
            faults.append(f"line {number}: {cells} cells where the head has {width}: {line[:60]}")
        if not line.rstrip().endswith("|"):
            faults.append(f"line {number}: a row without its end: {line[:60]}")
    return faults


def faults_of_paths(text: str) -> list[str]:
    """Paths in backticks that begin with a folder of the repository, and bare names of files.

    A bare name is a file of the repository, or one that the sources write or read.
    """
    faults = []
    tops = {path.name for path in ROOT.iterdir() if path.is_dir()} - {"data", "runs"}
    everything = "\n".join(sources().values())
    for span in spans_of(text):
        for word in span.split() if span.startswith(("python ", "accelerate ", "torchrun ")) else [span]:
            if re.fullmatch(r"[\w.-]+(/[\w.*-]+)*/?", word) and "/" in word and word.split("/")[0] in tops:
                if not any(ROOT.glob(word.rstrip("/"))):
                    faults.append(f"`{word}`: there is no such file or folder")
            elif re.fullmatch(r"\w[\w-]*\.(py|yaml|json|md|toml|csv|png|pt|lock|txt)", word):
                if word not in files() | FOREIGN_FILES and word not in everything:
                    faults.append(f"`{word}`: no file of the repository, and the sources do not know it")
    return faults


def faults_of_names(text: str) -> list[str]:
    """Names in backticks, and imports in the examples, that the sources lack."""
    faults = []
    for span in spans_of(text):
        for operator in re.findall(r"(?:torch\.ops\.vision_longhorn\.|vision_longhorn::)(\w+)", span):
            if not hasattr(torch.ops.vision_longhorn, operator):
                faults.append(f"`{span}`: there is no such operator")
        for name in re.findall(r"(?<![\w.:/-])vision_longhorn(?:\.\w+)+", span):
            if not defines(name):
                faults.append(f"`{span}`: {name} is not defined")
        # A name alone, called or given a value: `scan_plan`, `scan_plan(...)`, `set_input_size(...)`, `rule="exact"`.
        match = re.match(r"([A-Za-z_][\w.]*\w)(?:$|[(=\[])", span)
        if match and "/" not in match[1] and not match[1].startswith("vision_longhorn"):
            parts = match[1].split(".")
            if parts[0] in FOREIGN_ROOTS or parts[-1] in ENDINGS:
                continue
            faults += [
                f"`{span}`: no source has {part!r}"
                for part in parts
                if part not in words() | FOREIGN_NAMES and not part.isupper() and not part.isdigit()
            ]
    for block in blocks_of(text, "python"):
        for module, names in re.findall(r"^from (vision_longhorn[\w.]*) import ([\w, ]+)", block, flags=re.M):
            faults += [
                f"from {module} import {name}: there is none"
                for name in re.findall(r"\w+", names)
                if not defines(f"{module}.{name}")
            ]
    for block in [*spans_of(text), *blocks_of(text, "bash", "")]:
        faults += [
            f"python -m {name}: there is no such module"
            for name in re.findall(r"python3? -m (vision_longhorn[\w.]*)", block)
            if not defines(name)
        ]
    return faults


def faults_of_options(text: str) -> list[str]:
    found = [
        option
        for block in [*spans_of(text), *blocks_of(text, "bash")]
        for option in re.findall(r"(?<![\w-])--[a-z][\w-]*", re.sub(r"#(?!SBATCH).*", "", block))
    ]
    return [f"{option}: no command has it" for option in found if option not in options()]


# Python blocks that are not run, by a part of each: why not.
NOT_RUN = {
    "open_shards(": "data, DIR, and a GPU",
    "loader.set_epoch(3": "data, DIR",
    "load_model(": "a run, or the network",
    "model.cuda()": "a GPU",
    "custom_translation_table=": "a module of the reader's",
    'create_model("vim_small", pretrained=True)': "the network",
    "push_to_hf_hub(": "the network",
    "plot_maps(": "the network",
    "get_peft_model(": "peft, which is no dependency",
}


PAGES = [path for path in DOCUMENTS if blocks_of(path.read_text(encoding="utf-8"), "python")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a page one after the other, as who reads it would paste them."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "__main__"}
    for block in blocks_of(page.read_text(encoding="utf-8"), "python"):
        code = compile(block, f"{page.name}: {block[:60]!r}", "exec")
        if not any(part in block for part in NOT_RUN):
            exec(code, names)


def test_each_reason_is_that_of_one_block() -> None:
    blocks = [block for page in PAGES for block in blocks_of(page.read_text(encoding="utf-8"), "python")]
    assert {part: sum(part in block for block in blocks) for part in NOT_RUN} == dict.fromkeys(NOT_RUN, 1)


@pytest.mark.parametrize("module, name", [("hub", "load_run"), ("maps", "token_maps"), ("data", "open_shards")])
def test_modules_are_there_after_a_plain_import(module: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(vision_longhorn, module, raising=False)  # as before anything has imported it
    assert getattr(getattr(vision_longhorn, module), name)
    assert not hasattr(vision_longhorn, "gone")


CHECKS = {
    "links": faults_of_links,
    "tables": faults_of_tables,
    "paths": faults_of_paths,
    "names": faults_of_names,
    "options": faults_of_options,
}


def faults_of(text: str, check: str, path: Path = ROOT / "docs" / "scan.md") -> list[str]:
    return faults_of_links(text, path) if check == "links" else CHECKS[check](text)


@pytest.mark.parametrize("check", CHECKS)
def test_documents(check: str) -> None:
    assert DOCUMENTS
    faults = {
        str(path.relative_to(ROOT)): found
        for path in DOCUMENTS
        if (found := faults_of(path.read_text(encoding="utf-8"), check, path))
    }
    assert not faults, "\n".join(
        ["what belongs to others goes into the lists of tests/test_docs.py, with a reason"]
        + [f"{path}: {fault}" for path, found in faults.items() for fault in found]
    )


@pytest.mark.parametrize(
    "check, text",
    [
        ("links", "[gone](gone.md)"),
        ("links", "[gone](training.md#gone)"),
        ("links", "# Here\n\n[gone](#gone)"),
        ("tables", "| a | b |\n|---|---|\n| 1 | 2 |\n\n| 3 | 4 |\n"),
        ("tables", "| a | b |\n|---|---|\n| 1 | 2 | 3 |\n"),
        ("tables", "| a | b |\n| 1 | 2 |\n"),
        ("paths", "see `kernels/gone.py`"),
        ("paths", "see `gone.py`"),
        ("paths", "run `python benchmarks/gone.py --quick`"),
        ("names", "computed by `_chunk_backward`"),
        ("names", "`vision_longhorn.hub.gone(RUN)`"),
        ("names", "`vision_longhorn.gone`"),
        ("names", "calls of `torch.ops.vision_longhorn.gone`"),
        ("names", "```python\nfrom vision_longhorn.hub import gone\n```"),
        ("names", "```bash\npython -m vision_longhorn.gone DIR\n```"),
        ("options", "with `--gone 3`"),
        ("options", "```bash\npython train_imagenet.py --gone\n```"),
    ],
)
def test_a_fault_is_found(check: str, text: str) -> None:
    assert len(faults_of(text, check)) == 1


def test_what_is_right_passes() -> None:
    text = """# One, and `two`: three's

[one](#one-and-two-threes), [configs](training.md#configs), [page](https://example.org/gone.md)

| `a` \\| b | c |
|---|---:|
| 1 | 2 |

`scan_plan(Scan(...))`, `vision_longhorn.hub.load_run`, `kernels/backends/`, `configs/*.yaml`, `metrics.json`,
`torch.load(path)`, `runs/NAME/best.pt`, `--batch-size` and `--batch_size`, `accelerate launch --quiet`,
`torch.ops.vision_longhorn.scan`

```
| a figure | [gone](gone.md) `_gone`
```
"""
    assert [faults_of(text, check) for check in CHECKS] == [[]] * len(CHECKS)
