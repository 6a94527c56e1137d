"""Models for other runtimes: exported programs, packages of AOTInductor, ONNX, and folders for timm and the hub.

    vision-longhorn export runs/NAME/best.pt model.onnx
    vision-longhorn export runs/NAME/best.pt FOLDER
    vision-longhorn export vim_tiny model.pt2 --pretrained --device cuda

docs/export.md says what each of them needs where it is loaded.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vision_longhorn.command_line.parser import Parser
from vision_longhorn.errors import UserError, bad_input
from vision_longhorn.files import check_whole, is_as_hashed, written_aside
from vision_longhorn.hub import save_run_for_hub
from vision_longhorn.loading import load_model
from vision_longhorn.model_arguments import check_names
from vision_longhorn.outputs import check_output
from vision_longhorn.settings import COUNT, Range, parse_pairs

# Slow imports stand where they are used, so that the command line is read first.
if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

MAX_BATCH = 1 << 16  # torch 2.7 needs a bound where tensors are sliced
MAX_ERROR = 1e-2  # the most that a float32 export may differ; all that were measured lie below 1e-5


def _backbone(model: nn.Module) -> Any:
    from vision_longhorn.models.vlonghorn import VisionLonghorn

    for module in model.modules():
        if isinstance(module, VisionLonghorn):
            return module
    raise UserError(
        f"{type(model).__name__} holds no VisionLonghorn: give a vlonghorn_* or vim_* model, or a module around one"
    )


def example_images(model: nn.Module, batch: int = 2, rows: int = 2) -> Tensor:
    """Make noise that `model` takes as images. If it takes any size, they are `rows` patches high and one more wide."""
    import torch

    backbone = _backbone(model)
    patches = backbone.patch_embed
    size = patches.img_size
    if backbone.dynamic_img_size:
        size = [patches.patch_size[i] + (rows + i) * patches.patch_stride[i] for i in range(2)]
    like = backbone.pos_embed
    return torch.randn(batch, backbone.in_chans, *size, device=like.device, dtype=like.dtype)


def export_program(model: nn.Module, batch: int | None = None) -> torch.export.ExportedProgram:
    """Export a model by `torch.export`. Import `vision_longhorn`, whose operators it calls, before it is run.

    Args:
        model: a `VisionLonghorn` in evaluation mode, or a module around one whose only input is images, such as
            the one that `features_only=True` gives. If it takes any image size, so does the program.
        batch: the number of images of each call, or None for any number.
    """
    import torch

    dynamic = {} if batch else {0: torch.export.Dim("batch", max=MAX_BATCH)}
    if _backbone(model).dynamic_img_size:
        dynamic |= {2: torch.export.Dim.AUTO, 3: torch.export.Dim.AUTO}
    if model.training:
        raise UserError("the model is in training mode: call model.eval() before exporting it")
    # A strict export looks like a compilation, for which MLPs on a GPU have an operator of ours.
    with torch.no_grad():
        return torch.export.export(model, (example_images(model, batch or 2),), dynamic_shapes=(dynamic,), strict=False)


def to_package(model: nn.Module, path: str | os.PathLike, batch: int | None = None) -> float:
    """Compile a model ahead of time with AOTInductor, for the device that it is on, into a .pt2 file and its hash.

    `torch._inductor.aoti_load_package(path)` gives the function from images to outputs; import `vision_longhorn` first.

    Returns:
        The `largest_error` of what was written. If it is above `MAX_ERROR`, nothing is written: UserError.
    """
    import torch

    if Path(path).suffix != ".pt2":
        raise UserError(f"{path} is no name of a package: let it end in .pt2")
    with written_aside(path, ending=".pt2", hashed=True) as aside:
        try:
            with torch.no_grad():
                torch._inductor.aoti_compile_and_package(export_program(model, batch), package_path=str(aside))
        except RuntimeError as error:  # torch wraps the compiler's error in one of its own
            if not re.search("InvalidCxxCompiler|CppCompileError", f"{type(error)} {error}"):
                raise
            raise UserError(
                f"a .pt2 is compiled with {os.environ.get('CXX', 'g++')}, which does not work here: install a C++ "
                "compiler and Python's headers, or name a compiler by the environment variable CXX"
            ) from error
        return _compared(model, torch._inductor.aoti_load_package(str(aside)), path, batch)


def to_onnx(model: nn.Module, path: str | os.PathLike, batch: int | None = None) -> float:
    """Write a model as an ONNX file of standard operators, in float32, and the file's hash beside it.

    The input is "images" (batch, in_chans, H, W); the output is "output", or "output_0" and so on. The model may be on
    any device and in any dtype, and is not changed. A file is only written if ONNX's checker passes it.

    Returns:
        The same as `to_package`.
    """
    _require("onnx", "onnxscript")
    import onnx
    import torch

    from vision_longhorn.models.mixers import BidirectionalMixer
    from vision_longhorn.onnx_ops import OPSET, TRANSLATIONS

    model = copy.deepcopy(model).float().cpu()
    for module in model.modules():
        if isinstance(module, BidirectionalMixer):
            module.scan_backend = "auto"  # "triton" would refuse the CPU
    program = export_program(model, batch)
    names = {} if batch else {0: "batch"}
    if _backbone(model).dynamic_img_size:
        names |= {2: "height", 3: "width"}
    count = len(program.graph_signature.user_outputs)
    written: Any = torch.onnx.export(
        program,
        dynamo=True,
        custom_translation_table=dict[Any, Any](TRANSLATIONS),
        opset_version=OPSET,
        verbose=False,
        input_names=["images"],
        output_names=["output"] if count == 1 else [f"output_{i}" for i in range(count)],
        dynamic_shapes=(names,),
    )
    for node in written.model.graph.all_nodes():
        node.metadata_props.clear()  # they name the places in source files that a node came from
    with written_aside(path, hashed=True) as aside:
        written.save(aside, external_data=False)
        onnx.checker.check_model(str(aside), full_check=True)
        return _compared(model, load_onnx(aside), path, batch)


def _compared(model: nn.Module, run: Callable[[Tensor], Any], path: str | os.PathLike, batch: int | None) -> float:
    import torch

    difference = largest_error(model, run, batches=[batch] if batch else (1, 3))
    epsilon = torch.finfo(_backbone(model).pos_embed.dtype).eps
    if not difference < max(MAX_ERROR, 16 * epsilon):
        raise UserError(
            f"{path} was not written: the outputs of the exported model differ from the model's by {difference:.1e} of "
            "the largest value; please report that, with the command"
        )
    return difference


def _require(*packages: str) -> None:
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise UserError(
                f"ONNX needs the Python package {package}, which is not installed: pip install 'vision-longhorn[onnx]'"
            )


def load_onnx(path: str | os.PathLike) -> Callable[[Tensor], list[Tensor]]:
    """Load an ONNX file into onnxruntime on the CPU, and return a function from images to the list of outputs."""
    check_whole(path)
    _require("onnxruntime")
    import torch
    from onnxruntime import InferenceSession

    session = InferenceSession(os.fspath(path), providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return lambda images: [
        torch.from_numpy(value) for value in session.run(None, {name: torch.as_tensor(images).numpy()})
    ]


def largest_error(model: nn.Module, run: Callable[[Tensor], Any], batches: Sequence[int] = (1, 3)) -> float:
    """Compare `run` with `model` on `batches` of noise: the largest difference of outputs over the largest value."""
    import torch

    errors = []
    for i, batch in enumerate(batches):
        images = example_images(model, batch, rows=3 + i)
        with torch.no_grad():
            wanted, found = model(images), run(images)
        wanted, found = ([value] if isinstance(value, torch.Tensor) else value for value in (wanted, found))
        errors += [(a - b).abs().max() / a.abs().max() for a, b in zip(wanted, found, strict=True)]
    return torch.stack(errors).max().item()  # NaN if one of them is NaN


def main(argv: Sequence[str] | None = None) -> None:
    """Exports as the command line `argv` says, by default the process's own."""
    args = _parse(argv)
    if args.kind == "folder":
        save_run_for_hub(args.model, args.target, args.license)
        print(f"wrote {args.target}")
        return
    model, trained = _load(args)
    with bad_input(f"--device {args.device}"):
        model.to(args.device or "cpu")
    write = to_onnx if args.kind == ".onnx" else to_package
    difference = write(model.eval(), args.target, args.batch)
    size = Path(args.target).stat().st_size / 1e6
    print(
        f"wrote {args.target}, {size:.1f} MB{'' if trained else ', random weights'}; its outputs differ from the "
        f"model's by {difference:.1e} of the largest value"
    )


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line. Add `kind`, what to write, and `is_run`, which is true unless the model is a timm name."""
    parser = Parser(description="Exports a model, loads what was written, and compares it with the model.")
    parser.add_argument("model", help="a run's folder or checkpoint, a folder in the hub's layout, or a name of timm")
    parser.add_argument("target", help="FILE.onnx, FILE.pt2 for AOTInductor, or, of a run, a folder to make for timm")
    about = "height and width in pixels, one number for both, or any for all sizes in whole patches [the model's]"
    parser.add_argument("--img-size", nargs="+", type=_side, metavar="N", help=about)
    parser.add_argument("--batch", type=Range(1, MAX_BATCH, kind=int), metavar="N", help="images at each call [any]")
    parser.add_argument("--device", help="the device that a .pt2 is for [cpu]")
    parser.add_argument("--pretrained", action="store_true", help="with a name: timm's pretrained weights")
    parser.add_argument("--model-kwargs", nargs="+", metavar="KEY=VALUE", help="arguments of the model")
    parser.add_argument("--license", metavar="ID", help="with a folder: as `vision-longhorn hub` takes it")
    args = parser.parse_args(argv)
    given, target = Path(args.model), Path(args.target)
    args.kind = "folder" if args.target.endswith(("/", os.sep)) or not target.suffix else target.suffix
    if args.kind not in ("folder", ".onnx", ".pt2"):
        raise UserError(f"{args.target} names no format: let it end in .onnx or .pt2, or in / for a folder")
    args.is_run = given.exists() or given.suffix in (".pt", ".pth") or bool(re.match("[^:]*/", args.model))
    if args.pretrained and args.is_run:
        raise UserError("--pretrained is for a name of timm: a run has its own weights, leave it out")
    if args.device and args.kind != ".pt2":
        raise UserError(f"--device is for a .pt2, and {target} is none: leave it out")
    size = args.img_size or []
    if len(size) > 2 or len(size) == 2 and "any" in size:
        raise UserError(f"--img-size is {size}: give height and width in pixels, one number, or any")
    if args.kind != "folder":
        check_output("target", target, (args.kind,), is_as_hashed, [given])
        if args.license:
            raise UserError("--license is for a folder: leave it out")
    elif size or args.batch or args.model_kwargs:
        raise UserError(f"{target} is to hold the run as it is: leave out --img-size, --batch and --model-kwargs")
    return args


def _side(word: str) -> Any:
    return word if word == "any" else COUNT(word)


def _load(args: argparse.Namespace) -> tuple[nn.Module, bool]:
    """Make the model of the command line, and tell whether its weights are trained."""
    from vision_longhorn.models.create import create_model

    size, kwargs = args.img_size, parse_pairs(args.model_kwargs or [])
    where = "a name of timm as MODEL" if args.is_run else ""
    check_names(kwargs, {"pretrained": "--pretrained", "num_classes": where, "features_only": where, "source": "MODEL"})
    if size == ["any"]:
        kwargs["dynamic_img_size"] = True
    trained = args.is_run or args.pretrained or ":" in args.model  # "hf-hub:" and "local-dir:" bring weights
    if args.is_run:
        model = load_model(args.model, **kwargs).model
    else:
        model = create_model(args.model, pretrained=trained, **kwargs)
    if size and size != ["any"]:
        backbone = _backbone(model)
        with bad_input(f"--img-size {' '.join(map(str, size))}"):  # smaller than a patch, for one
            backbone.set_input_size(img_size=(size[0], size[-1]))
        backbone.dynamic_img_size = False
    return model, trained


if __name__ == "__main__":
    from vision_longhorn.command_line.commands import run

    run("export")
