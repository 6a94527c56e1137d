"""Models for other runtimes: exported programs, packages of AOTInductor, ONNX, and folders for timm and the hub.

    python -m vision_longhorn.export runs/NAME/best.pt model.onnx
    python -m vision_longhorn.export runs/NAME/best.pt FOLDER
    python -m vision_longhorn.export vim_tiny model.pt2 --pretrained --device cuda

docs/export.md says what each of them needs where it is loaded.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import os
import re
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vision_longhorn.command_line.parser import Parser
from vision_longhorn.errors import UserError, one_line
from vision_longhorn.files import check_whole, is_as_hashed, written_aside
from vision_longhorn.model_arguments import check_names
from vision_longhorn.outputs import check_output
from vision_longhorn.runs import timm_source
from vision_longhorn.settings import Range, parse_pairs

# What takes long to import is imported where it is used: the command line is read before.
if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from vision_longhorn.models.vlonghorn import VisionLonghorn

MAX_BATCH = 1 << 16  # torch 2.7 wants a bound where tensors are sliced
MAX_ERROR = 1e-2  # of an export that counts as right; all that were measured lie below 1e-5


def _backbone(model: nn.Module) -> VisionLonghorn:
    from vision_longhorn.models.vlonghorn import VisionLonghorn

    found = next((module for module in model.modules() if isinstance(module, VisionLonghorn)), None)
    if found is None:
        raise UserError(
            f"{type(model).__name__} holds no VisionLonghorn: give a vlonghorn_* or vim_* model, or a module around one"
        )
    return found


def example_images(model: nn.Module, batch: int = 2, rows: int = 2, columns: int = 3) -> Tensor:
    """Noise that `model` takes as images: (batch, in_chans, H, W) on its device and in its dtype.

    H and W are those that the model is built for, or, for a model of any image size, one patch and `rows` and `columns`
    strides more.
    """
    import torch

    backbone = _backbone(model)
    patches = backbone.patch_embed
    size = patches.img_size
    if backbone.dynamic_img_size:
        size = [
            side + more * step
            for side, step, more in zip(patches.patch_size, patches.patch_stride, (rows, columns), strict=True)
        ]
    weight = patches.proj.weight
    return torch.randn(batch, backbone.in_chans, *size, device=weight.device, dtype=weight.dtype)


def export_program(model: nn.Module, batch: int | None = None) -> torch.export.ExportedProgram:
    """`torch.export` of a model for any number of images, or just `batch`, and, with `dynamic_img_size=True`, of any
    size.

    Args:
        model: a `VisionLonghorn` in evaluation mode, or a module around one whose one input are its images, such as
            what `features_only=True` gives.
        batch: the number of images at each call; any if None.

    Returns:
        The program. It keeps the operators of `vision_longhorn`: where it runs, the package must be imported.

    Raises:
        UserError: the model is in training mode, or holds no `VisionLonghorn`.
    """
    import torch

    dynamic = {} if batch else {0: torch.export.Dim("batch", max=MAX_BATCH)}
    if _backbone(model).dynamic_img_size:
        dynamic |= {2: torch.export.Dim.AUTO, 3: torch.export.Dim.AUTO}
    if model.training:
        raise UserError("the model is in training mode: call model.eval() before exporting it")
    with torch.no_grad():
        return torch.export.export(model, (example_images(model, batch or 2),), dynamic_shapes=(dynamic,))


def to_package(model: nn.Module, path: str | os.PathLike, batch: int | None = None) -> None:
    """Compile a model ahead of time with AOTInductor, for the device that it is on.

    `torch._inductor.aoti_load_package(path)` gives the function from images to outputs. The process that loads it must
    have imported `vision_longhorn`: the scan is an operator of this package, and of its code only the call is compiled.

    Args:
        model, batch: as `export_program` takes them.
        path: the .pt2 file to write.

    Raises:
        UserError: as `export_program`, another ending, or there is no C++ compiler.
    """
    import torch

    if Path(path).suffix != ".pt2":
        raise UserError(f"{path} is no name of a package: let it end in .pt2")
    try:
        with torch.no_grad(), written_aside(path, ending=".pt2") as aside:
            torch._inductor.aoti_compile_and_package(export_program(model, batch), package_path=str(aside))
    except RuntimeError as error:  # torch wraps its own in one of its own
        if not re.search("InvalidCxxCompiler|CppCompileError", f"{type(error)} {error}"):
            raise
        raise UserError(
            f"a .pt2 is compiled with {os.environ.get('CXX', 'g++')}, which does not work here: "
            "install a C++ compiler and Python's headers, or name a compiler by the environment variable "
            "CXX"
        ) from error


def to_onnx(model: nn.Module, path: str | os.PathLike, batch: int | None = None) -> None:
    """Write a model as an ONNX file of standard operators, computing in float32; its scans are `Scan` nodes. The file's
    hash stands beside it.

    The input is "images" (batch, in_chans, H, W); the output is "output", or "output_0" and so on. Batch, and with
    `dynamic_img_size=True` height and width, are left open. Nothing is written that ONNX's checker does not pass.

    Args:
        model, batch: as `export_program` takes them; the model on any device and in any dtype. It is not changed.
        path: the file to write.

    Raises:
        UserError: as `export_program`, or onnx or onnxscript is not installed.
    """
    with written_aside(path, hashed=True) as aside:
        _write_onnx(model, aside, batch)


def _write_onnx(model: nn.Module, path: Path, batch: int | None) -> None:
    try:
        import onnx

        from vision_longhorn.onnx_ops import OPSET, TRANSLATIONS
    except ModuleNotFoundError as error:
        raise _missing(error.name) from error
    import torch

    from vision_longhorn.models.mixers import BidirectionalMixer

    translations: dict[Any, Any] = {**TRANSLATIONS}
    model = copy.deepcopy(model).float().cpu()
    for module in model.modules():
        if isinstance(module, BidirectionalMixer):
            module.scan_backend = "auto"  # a Triton kernel that is asked for would refuse the CPU
    program = export_program(model, batch)
    names = {} if batch else {0: "batch"}
    if _backbone(model).dynamic_img_size:
        names |= {2: "height", 3: "width"}
    count = len(program.graph_signature.user_outputs)
    written: Any = torch.onnx.export(
        program,
        dynamo=True,
        custom_translation_table=translations,
        opset_version=OPSET,
        verbose=False,
        input_names=["images"],
        output_names=["output"] if count == 1 else [f"output_{i}" for i in range(count)],
        dynamic_shapes=(names,),
    )
    for node in written.model.graph.all_nodes():
        node.metadata_props.clear()  # where in whose files each node came from
    written.save(path, external_data=False)
    onnx.checker.check_model(str(path), full_check=True)


def _missing(package: str | None) -> UserError:
    return UserError(
        f"ONNX needs the Python package {package}, which is not installed: pip install 'vision-longhorn[onnx]'"
    )


def load_onnx(path: str | os.PathLike) -> Callable[[Tensor], list[Tensor]]:
    """A function from images (a tensor) to the outputs (a list of tensors) of an ONNX file, run by onnxruntime on the
    CPU.

    Raises:
        UserError: onnxruntime is not installed, or the file is not the one whose hash stands beside it.
    """
    check_whole(path)
    try:
        from onnxruntime import InferenceSession
    except ModuleNotFoundError as error:
        raise _missing(error.name) from error
    import torch

    session = InferenceSession(os.fspath(path), providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return lambda images: [torch.from_numpy(value) for value in session.run(None, {name: images.numpy()})]


def largest_error(model: nn.Module, run: Callable[[Tensor], Any], batches: Sequence[int] = (1, 3)) -> float:
    """How far the outputs of `run` lie from those of `model` on noise: the largest difference over the largest value.

    Tried are `batches` of images, of another size each where the model takes any size.
    """
    import torch

    errors = []
    for i, batch in enumerate(batches):
        images = example_images(model, batch, rows=3 + i, columns=2)
        with torch.no_grad():
            wanted, found = model(images), run(images)
        wanted, found = ([value] if isinstance(value, torch.Tensor) else value for value in (wanted, found))
        errors += [(a - b).abs().max() / a.abs().max() for a, b in zip(wanted, found, strict=True)]
    return torch.stack(errors).max().item()  # not a number where one of them is none


def main(argv: Sequence[str] | None = None) -> None:
    """Command line of this module."""
    parser = Parser(description="Exports a model, loads what was written, and compares it with the model.")
    parser.add_argument("model", help="a run's folder or checkpoint, a folder in the hub's layout, or a name of timm")
    parser.add_argument(
        "target",
        help="FILE.onnx, FILE.pt2 for AOTInductor, or, of a run, a folder to make for timm's local-dir: and the hub",
    )
    parser.add_argument(
        "--img-size",
        nargs="+",
        metavar="N",
        help="height and width in pixels, one number for both, "
        "or any: the file takes all sizes in whole patches [what the model is built for]",
    )
    parser.add_argument("--batch", type=Range(1, MAX_BATCH, kind=int), metavar="N", help="images at each call [any]")
    parser.add_argument("--device", help="that a .pt2 is for [cpu]")
    parser.add_argument("--pretrained", action="store_true", help="with a name: timm's pretrained weights")
    parser.add_argument("--model-kwargs", nargs="+", metavar="KEY=VALUE", help="with a name: arguments of the model")
    parser.add_argument("--license", metavar="ID", help="with a folder: as `python -m vision_longhorn.hub` takes it")
    args = parser.parse_args(argv)
    kind = _kind(args.target)
    given = Path(args.model)
    is_run = given.exists() or given.suffix in (".pt", ".pth") or bool(re.match("[^:]*/", args.model))
    _check_options(args, kind, is_run)
    size = _img_size(args.img_size)
    if kind == "folder":
        from vision_longhorn.hub import main as hub

        hub([args.model, args.target] + (["--license", args.license] if args.license is not None else []))
        return
    if kind == ".onnx":
        for package in ("onnx", "onnxscript", "onnxruntime"):
            if importlib.util.find_spec(package) is None:
                raise _missing(package)
    check_output("target", args.target, (kind,), _is_own, [args.model])
    folder = Path(args.target).parent
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise UserError(f"{args.target} cannot be written: {folder} is no folder that you may write to")

    import torch

    model, trained = _load(args, is_run, dict(dynamic_img_size=True) if size == "any" else {})
    if size not in (None, "any"):
        backbone: Any = _backbone(model)
        smallest = backbone.patch_embed.patch_size
        if size[0] < smallest[0] or size[1] < smallest[1]:
            raise UserError(
                f"--img-size is {size[0]} x {size[1]}, and a patch of {args.model} {smallest[0]} x "
                f"{smallest[1]}: give at least that"
            )
        backbone.set_input_size(img_size=size)
        backbone.dynamic_img_size = False
    try:
        model.eval().to(args.device or "cpu")
    except (AssertionError, NotImplementedError, RuntimeError) as error:
        raise UserError(f"--device {args.device} cannot be used here: {str(error).splitlines()[0]}") from error
    try:
        with written_aside(args.target, ending=kind, hashed=kind == ".onnx") as aside:  # until it has been compared
            if kind == ".onnx":
                _write_onnx(model, aside, args.batch)
                run = load_onnx(aside)
            else:
                to_package(model, aside, args.batch)
                run = torch._inductor.aoti_load_package(str(aside))
            difference = largest_error(model, run, batches=[args.batch] if args.batch else (1, 3))
            if not difference < MAX_ERROR:
                raise UserError(
                    f"{args.target} was not written: the outputs of the exported model differ from the "
                    f"model's by {difference:.1e} of the largest value; please report that, with the "
                    "command"
                )
    except OSError as error:
        raise UserError(f"{args.target} cannot be written ({error.strerror or one_line(error)})") from error
    size = Path(args.target).stat().st_size / 1e6
    print(
        f"wrote {args.target}, {size:.1f} MB{'' if trained else ', random weights'}; its outputs differ from the "
        f"model's by {difference:.1e} of the largest value"
    )


def _kind(target: str) -> str:
    """ ".onnx", ".pt2" or "folder", by the name of what is to be written."""
    suffix = Path(target).suffix
    if target.endswith(("/", os.sep)) or not suffix:
        return "folder"
    if suffix not in (".onnx", ".pt2"):
        raise UserError(f"{target} says no format: let it end in .onnx or .pt2, or in / for a folder")
    return suffix


def _is_own(path: Path) -> bool:
    """Whether a file is an earlier export: an ONNX file by its hash, a package by the operators that it calls."""
    if path.suffix == ".onnx":
        return is_as_hashed(path)
    try:
        with zipfile.ZipFile(path) as archive:
            notes = [name for name in archive.namelist() if name.endswith(".json")]
            return any(b"vision_longhorn" in archive.read(name) for name in notes)
    except (OSError, zipfile.BadZipFile):
        return False


def _check_options(args: argparse.Namespace, kind: str, is_run: bool) -> None:
    """Raises UserError for an option that would change nothing."""
    shape = ("img_size", "batch", "device", "pretrained", "model_kwargs")
    idle = {
        "a folder holds the run's model as it is": shape if kind == "folder" else (),
        "an ONNX file is for no device": ("device",) if kind == ".onnx" else (),
        "only a folder has a card to name it on": ("license",) if kind != "folder" else (),
        f"the model and its weights are those of {args.model}": ("pretrained", "model_kwargs") if is_run else (),
    }
    for reason, names in idle.items():
        for name in names:
            if getattr(args, name) not in (None, False):
                raise UserError(
                    f"--{name.replace('_', '-')} with {args.model} and {args.target}: {reason}, leave it out"
                )
    if kind == "folder" and (not is_run or timm_source(args.model)):
        raise UserError(
            f"{args.target} would be a folder, which is made of a run, and {args.model} is none: give a "
            "run's folder or checkpoint, or a file name that ends in .onnx or .pt2"
        )


def _img_size(words: list[str] | None) -> Any:
    """What follows --img-size: (height, width), "any" or None."""
    if words is None or words == ["any"]:
        return words and "any"
    if len(words) > 2 or not all(re.fullmatch("0*[1-9][0-9]{0,5}", word) for word in words):
        raise UserError(f"--img-size is {' '.join(words)}: give height and width in pixels, one number, or any")
    return int(words[0]), int(words[-1])


def _load(args: argparse.Namespace, is_run: bool, extra: dict[str, Any]) -> tuple[nn.Module, bool]:
    """The model of the command line, and whether its weights are trained."""
    from vision_longhorn.loading import load_model
    from vision_longhorn.models.create import create_model

    if is_run:
        return load_model(args.model, **extra).model, True
    pretrained = args.pretrained or ":" in args.model  # the sources of timm are weights
    kwargs = parse_pairs(args.model_kwargs or [])
    check_names(kwargs, {"pretrained": "--pretrained", "num_classes": "", "features_only": ""})
    kwargs |= extra
    return create_model(args.model, pretrained=pretrained, **kwargs), pretrained


if __name__ == "__main__":
    from vision_longhorn.command_line.commands import run

    run("export")
