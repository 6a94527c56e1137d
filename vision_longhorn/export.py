"""Models for other runtimes: exported programs, packages of AOTInductor, and ONNX.

    python -m vision_longhorn.export runs/NAME/best.pt model.onnx
    python -m vision_longhorn.export vim_tiny model.pt2 --pretrained --device cuda

docs/export.md says what each of them needs where it is loaded.
"""

import copy
import os
from pathlib import Path

import torch
from torch import Tensor, nn

from vision_longhorn.checkpoint import create_model
from vision_longhorn.config import parse_pairs
from vision_longhorn.errors import Parser, UserError, run_cli
from vision_longhorn.hub import load_run
from vision_longhorn.mixer import BidirectionalMixer
from vision_longhorn.vlonghorn import VisionLonghorn

MAX_BATCH = 1 << 16  # torch 2.7 wants a bound where tensors are sliced


def _backbone(model: nn.Module) -> VisionLonghorn:
    found = next((module for module in model.modules() if isinstance(module, VisionLonghorn)), None)
    if found is None:
        raise UserError(f"{type(model).__name__} holds no VisionLonghorn: give a vlonghorn_* or vim_* model, or a "
                        "module around one")
    return found


def example_images(model: nn.Module, batch: int = 2, rows: int = 2, columns: int = 3) -> Tensor:
    """Noise that `model` takes as images: (batch, in_chans, H, W) on its device and in its dtype.

    H and W are those that the model is built for, or, for a model of any image size, one patch and `rows` and `columns`
    strides more.
    """
    backbone = _backbone(model)
    patches = backbone.patch_embed
    size = patches.img_size
    if backbone.dynamic_img_size:
        size = [side + more * step
                for side, step, more in zip(patches.patch_size, patches.patch_stride, (rows, columns))]
    weight = patches.proj.weight
    return torch.randn(batch, backbone.in_chans, *size, device=weight.device, dtype=weight.dtype)


def export_program(model: nn.Module) -> torch.export.ExportedProgram:
    """`torch.export` of a model for any number of images and, with `dynamic_img_size=True`, of any size.

    Args:
        model: a `VisionLonghorn` in evaluation mode, or a module around one whose one input are its images, such as
            what `features_only=True` gives.

    Returns:
        The program. It keeps the operators of `vision_longhorn`: where it runs, the package must be imported.

    Raises:
        UserError: the model is in training mode, or holds no `VisionLonghorn`.
    """
    dynamic = {0: torch.export.Dim("batch", max=MAX_BATCH)}
    if _backbone(model).dynamic_img_size:
        dynamic |= {2: torch.export.Dim.AUTO, 3: torch.export.Dim.AUTO}
    if model.training:
        raise UserError("the model is in training mode: call model.eval() before exporting it")
    with torch.no_grad():
        return torch.export.export(model, (example_images(model),), dynamic_shapes=(dynamic,))


def to_package(model: nn.Module, path: str | os.PathLike) -> None:
    """Compile a model ahead of time with AOTInductor, for the device that it is on.

    `torch._inductor.aoti_load_package(path)` gives the function from images to outputs. The process that loads it must
    have imported `vision_longhorn`: the scan is an operator of this package, and of its code only the call is compiled.

    Args:
        model: as `export_program` takes it.
        path: the .pt2 file to write.

    Raises:
        UserError: as `export_program`, or another ending.
    """
    if Path(path).suffix != ".pt2":
        raise UserError(f"{path} is no name of a package: let it end in .pt2")
    aside = f"{path}.tmp.pt2"
    try:
        with torch.no_grad():
            torch._inductor.aoti_compile_and_package(export_program(model), package_path=aside)
        os.replace(aside, path)
    finally:
        Path(aside).unlink(missing_ok=True)


def to_onnx(model: nn.Module, path: str | os.PathLike) -> None:
    """Write a model as an ONNX file of standard operators, computing in float32; its scans are `Scan` nodes.

    The input is "images" (batch, in_chans, H, W); the output is "output", or "output_0" and so on. Batch, and with
    `dynamic_img_size=True` height and width, are left open. Nothing is written that ONNX's checker does not pass.

    Args:
        model: as `export_program` takes it, on any device and in any dtype; it is not changed.
        path: the file to write.

    Raises:
        UserError: as `export_program`, or onnx or onnxscript is not installed.
    """
    try:
        import onnx

        from vision_longhorn.onnx_ops import OPSET, TRANSLATIONS
    except ModuleNotFoundError as error:
        raise _missing(error) from error
    model = copy.deepcopy(model).float().cpu()
    for module in model.modules():
        if isinstance(module, BidirectionalMixer):
            module.scan_backend = "auto"  # a Triton kernel that is asked for would refuse the CPU
    program = export_program(model)
    names = {0: "batch", 2: "height", 3: "width"} if _backbone(model).dynamic_img_size else {0: "batch"}
    count = len(program.graph_signature.user_outputs)
    written = torch.onnx.export(
        program, dynamo=True, custom_translation_table=TRANSLATIONS, opset_version=OPSET, verbose=False,
        input_names=["images"], output_names=["output"] if count == 1 else [f"output_{i}" for i in range(count)],
        dynamic_shapes=(names,))
    for node in written.model.graph.all_nodes():
        node.metadata_props.clear()  # where in whose files each node came from
    aside = f"{path}.tmp"
    try:
        written.save(aside, external_data=False)
        onnx.checker.check_model(aside, full_check=True)
        os.replace(aside, path)
    finally:
        Path(aside).unlink(missing_ok=True)


def _missing(error: ModuleNotFoundError) -> UserError:
    return UserError(f"ONNX needs the Python package {error.name}, which is not installed: "
                     "pip install 'vision-longhorn[onnx]'")


def load_onnx(path: str | os.PathLike):
    """A function from images (a tensor) to the outputs (a list of tensors) of an ONNX file, run by onnxruntime on the
    CPU.

    Raises:
        UserError: onnxruntime is not installed.
    """
    try:
        from onnxruntime import InferenceSession
    except ModuleNotFoundError as error:
        raise _missing(error) from error
    session = InferenceSession(os.fspath(path), providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return lambda images: [torch.from_numpy(value) for value in session.run(None, {name: images.numpy()})]


@torch.no_grad()
def largest_error(model: nn.Module, run, batches=(1, 3)) -> float:
    """How far the outputs of `run` lie from those of `model` on noise: the largest difference over the largest value.

    Tried are `batches` of images, of another size each where the model takes any size.
    """
    errors = []
    for i, batch in enumerate(batches):
        images = example_images(model, batch, rows=3 + i, columns=2)
        wanted, found = model(images), run(images)
        wanted, found = ([value] if isinstance(value, Tensor) else value for value in (wanted, found))
        errors += [(a - b).abs().max() / a.abs().max() for a, b in zip(wanted, found, strict=True)]
    return max(map(float, errors))


def main(argv=None):
    """Command line of this module."""
    parser = Parser(description="Exports a model, loads what was written, and compares it with the model.")
    parser.add_argument("model", help="a run's folder or checkpoint, or a name of timm")
    parser.add_argument("file", help="to write: .onnx, or .pt2 for AOTInductor")
    parser.add_argument("--pretrained", action="store_true", help="with a name: timm's pretrained weights")
    parser.add_argument("--model-kwargs", nargs="+", default=[], metavar="KEY=VALUE", help="with a name")
    parser.add_argument("--device", default="cpu", help="that a .pt2 is for [cpu]")
    args = parser.parse_args(argv)
    suffix = Path(args.file).suffix
    if suffix not in (".onnx", ".pt2"):
        raise UserError(f"{args.file} says no format: let it end in .onnx or .pt2")
    if suffix == ".onnx" and args.device != "cpu":
        raise UserError(f"--device {args.device} with {args.file}: an ONNX file is for no device, leave it out")
    if Path(args.model).exists():
        model, _ = load_run(args.model)
    else:
        model = create_model(args.model, pretrained=args.pretrained, **parse_pairs(args.model_kwargs))
    model.eval().to(args.device)
    if suffix == ".onnx":
        to_onnx(model, args.file)
        run = load_onnx(args.file)
    else:
        to_package(model, args.file)
        run = torch._inductor.aoti_load_package(args.file)
    error = largest_error(model, run)
    print(f"wrote {args.file}, {Path(args.file).stat().st_size / 1e6:.1f} MB; its outputs differ from the model's by "
          f"{error:.1e} of the largest value")


if __name__ == "__main__":
    run_cli(main)
