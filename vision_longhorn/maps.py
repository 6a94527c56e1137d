"""What each token makes a model's states forget and how strongly it writes to them, as maps over the image.

    python -m vision_longhorn.maps runs/NAME/best.pt IMAGE --out maps.png

Every block and direction has a state S of N numbers for each channel d. A token changes it by

    Longhorn, diagonal   S[d] <- (1 - eps[d] k k) S[d] + eps[d] x[d] k        k k element by element
    Longhorn, exact      S[d] <- (I - eps[d] k k^T) S[d] + eps[d] x[d] k      eps = beta / (1 + beta |k|^2)
    Mamba                S[d] <- exp(dt[d] A[d]) S[d] + dt[d] x[d] B

**Forgetting** is 1 less the factor before the old state, averaged over the N numbers and all channels: 0 keeps
everything, 1 erases it. For the exact rule the factor is a matrix and the average that of its eigenvalues, which comes
to the number of the diagonal rule. What Longhorn's N numbers forget adds up to less than 1: its average is below 1 / N.

**Write strength** is what multiplies x and the key (Mamba's B), averaged over the channels: eps, between 0 and 1, for
Longhorn, and dt, any positive number, for Mamba.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Optional

from vision_longhorn.command_line.parser import Parser
from vision_longhorn.errors import UserError
from vision_longhorn.plots import check_png, new_figure, save_png
from vision_longhorn.settings import Range

# What takes long to import is imported where it is used: the command line is read before.
if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from vision_longhorn.models.vlonghorn import VisionLonghorn


class TokenMaps(NamedTuple):
    """Forgetting and write strength of every token. The axis of 2 holds the directions: the scan from the first token
    to the last, the scan back. In the "shared" wiring both are the same: both scans read one key and one step size. So
    they are where a block has one scan, whatever its direction."""

    # fmt: off
    forgetting: Tensor                   # (depth, B, 2, H, W), H x W patches
    write: Tensor                        # (depth, B, 2, H, W)
    class_forgetting: Optional[Tensor]   # (depth, B, 2), of the class token; None in a model without one
    class_write: Optional[Tensor]
    arrows: tuple[str, ...]              # the ways in which the two scans of each block go over the image, such as "→←"
    # fmt: on


def token_maps(model: VisionLonghorn, images: Tensor) -> TokenMaps:
    """Forgetting and write strength, as this module's text defines them, of a forward pass of `model` as it stands.

    Args:
        model: any model of this package; in training mode its dropout and drop path take part, so call eval() first.
        images: (B, in_chans, H, W), normalised as the model wants them, on its device.

    Returns:
        The maps in float32 (float64 for a model in float64).

    Raises:
        UserError: `model` is not one of this package, or its mixer keeps no state.
    """
    import torch

    from vision_longhorn.models.mixers import describe_mixer
    from vision_longhorn.models.tokens import class_index, turn_patches
    from vision_longhorn.models.vlonghorn import VisionLonghorn

    if not isinstance(model, VisionLonghorn):
        raise UserError(
            f"token_maps takes a VisionLonghorn, not a {type(model).__name__}: give one of timm.list_models"
            "(module='vlonghorn'), itself and not wrapped in another module or compiled"
        )
    mixers: list[Any] = [block.mixer for block in model.blocks]
    stateless = next((mixer for mixer in mixers if not hasattr(mixer, "forgetting_and_write")), None)
    if stateless is not None:
        raise UserError(
            f"the mixer of this model ({describe_mixer(stateless)}) keeps no state that could forget: give a "
            "model with a scan"
        )
    found: list[Tensor] = []

    def keep(mixer: Any, inputs: tuple[Any, ...], _: Any) -> None:
        found.append(mixer.forgetting_and_write(*inputs))

    hooks = [mixer.register_forward_hook(keep) for mixer in mixers]
    try:
        with torch.no_grad():
            model.forward_features(images)
    finally:
        for hook in hooks:
            hook.remove()
    rows, columns = model.patch_embed.dynamic_feat_size(images.shape[-2:])
    for i, block in enumerate(model.blocks):
        if block.reads_columns:  # back to the order of the image
            kinds, B, directions, L = found[i].shape
            turned = turn_patches(found[i].reshape(-1, L, 1), columns, model.class_token)
            found[i] = turned.view(kinds, B, directions, L)
    both = torch.stack(found, 1)  # (2 kinds, depth, B, 2, L)
    of_class: Any = None, None
    if model.cls_token is not None:
        i = class_index(model.class_token, rows * columns)
        of_class = both[..., i]
        both = torch.cat([both[..., :i], both[..., i + 1 :]], -1)
    return TokenMaps._make((*both.unflatten(-1, (rows, columns)), *of_class, tuple(map(_arrows, model.blocks))))


def _arrows(block: Any) -> str:
    """The ways of both directions of a block; those of its one scan, where it has only one."""
    ways = "\N{DOWNWARDS ARROW}\N{UPWARDS ARROW}" if block.reads_columns else "\N{RIGHTWARDS ARROW}\N{LEFTWARDS ARROW}"
    if getattr(block.mixer, "wiring", None) in ("forward", "alternate"):
        return ways[block.mixer.reversed] * 2
    return ways


def plot_maps(
    maps: TokenMaps, image: Any, out: str | Path, layers: Optional[list[int]] = None, sample: int = 0
) -> None:
    """Plots the maps of one image into a PNG: a row for each block, the two directions of a quantity in one scale, each
    under an arrow, the way in which it goes over the image.

    Args:
        maps: of `token_maps`.
        image: (H, W) or (H, W, 3) array in [0, 1], or a PIL image: what is shown beside the maps.
        out: path of the PNG, as `vision_longhorn.plots.save_png` takes it.
        layers: indices of the blocks to show; all if None.
        sample: index of the image in the batch of `maps`.

    Raises:
        UserError: there is no such block, or the PNG cannot be written.
    """
    depth = len(maps.write)
    layers = list(range(depth)) if layers is None else layers
    wrong = [i for i in layers if not -depth <= i < depth]
    if wrong or not layers:
        raise UserError(f"layers={layers}: the model has blocks 0 to {depth - 1}")
    rows, columns = maps.write.shape[-2:]
    figure = new_figure(9, 0.4 + 1.6 * len(layers) * min(max(rows / columns, 0.5), 2))
    grid = figure.subplots(len(layers), 5, squeeze=False)
    above = ""
    for axes, layer in zip(grid, layers):
        arrows = maps.arrows[layer]
        if arrows != above:
            titles = ["image", *(f"{quantity} {arrow}" for quantity in ("forgetting", "write") for arrow in arrows)]
            for axis, title in zip(axes, titles):
                axis.set_title(title, fontsize=9)
            above = arrows
        axes[0].imshow(image, cmap="gray", vmin=0, vmax=1)
        axes[0].set_ylabel(f"block {layer % depth}")
        for pair, quantity in ((axes[1:3], maps.forgetting[layer, sample]), (axes[3:], maps.write[layer, sample])):
            values = quantity.cpu().numpy()
            for axis, value in zip(pair, values):
                drawn = axis.imshow(value, vmin=values.min(), vmax=values.max())
            figure.colorbar(drawn, ax=pair[1], fraction=0.08).ax.tick_params(labelsize=6)
    for axis in grid.flat:
        axis.set(xticks=[], yticks=[])
    save_png(figure, out, dpi=90, tool="maps")


def main(argv: Optional[Sequence[str]] = None) -> None:
    """Command line of this module."""
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", help="a run's folder or file, or a folder in the hub's layout")
    parser.add_argument("image", help="image file: JPEG, PNG, WebP or PPM")
    parser.add_argument("--out", default="maps.png", help="the PNG to write [maps.png]")
    parser.add_argument(
        "--layers",
        nargs="+",
        type=Range(kind=int),
        metavar="N",
        help="indices of the blocks to show, from 0, or from the last at -1 [all]",
    )
    args = parser.parse_args(argv)
    check_png(args.out, "maps", [args.checkpoint, args.image])
    if not Path(args.image).is_file():
        raise UserError(f"no image at {args.image}: give an image file")

    import torch
    from timm.data import create_transform, resolve_data_config

    from vision_longhorn.data.images import DataError, decode_image, too_dark
    from vision_longhorn.runs import load_model

    try:
        data = Path(args.image).read_bytes()
        image = decode_image(data)
    except DataError as error:
        raise UserError(f"{args.image} is {error}") from error
    if dark := too_dark(data, image):
        print(f"note: {args.image} is {dark}", file=sys.stderr)
    model = load_model(args.checkpoint)[0].eval()
    settings = resolve_data_config(model=model)
    tensor = create_transform(**settings)(image)  # (3, H, W)
    mean, std = (torch.tensor(settings[key])[:, None, None] for key in ("mean", "std"))
    shown = (tensor * std + mean).clamp(0, 1).permute(1, 2, 0).numpy()
    plot_maps(token_maps(model, tensor[None]), shown, args.out, args.layers)
    print(f"wrote {args.out}")


if __name__ == "__main__":
    from vision_longhorn.command_line.commands import run

    run("maps")
