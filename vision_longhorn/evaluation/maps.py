"""What each token makes a model's states forget and how strongly it writes to them, as maps over the image.

Every block and direction has a state S of N numbers for each channel d. A token changes it by

    Longhorn, diagonal   S[d] <- (1 - eps[d] k k) S[d] + eps[d] x[d] k        k k element by element
    Longhorn, exact      S[d] <- (I - eps[d] k k^T) S[d] + eps[d] x[d] k      eps = beta / (1 + beta |k|^2)
    Mamba                S[d] <- exp(dt[d] A[d]) S[d] + dt[d] x[d] B          Mamba-2: dt and A of d's head

**Forgetting** is 1 less the factor before the old state, averaged over the N numbers and all channels; for the exact
rule, whose factor is a matrix, over its eigenvalues. **Write strength** multiplies x and the key (Mamba's B), averaged
over the channels. Longhorn's N numbers forget less than 1 together, so its mean stays below 1 / N; Mamba's need not.

docs/maps_digits.png shows 0000000_digit_0705 of data/digits/val-000000.tar. Its model is that of

    vision-longhorn train --model-kwargs img_size=32 patch_size=4 d_state=8
"""

import contextlib
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vision_longhorn.errors import UserError
from vision_longhorn.models.mixers import describe_mixer
from vision_longhorn.models.tokens import class_index, turn_patches
from vision_longhorn.models.vlonghorn import VisionLonghorn
from vision_longhorn.plots import new_figure, save_png


class TokenMaps(NamedTuple):
    """Forgetting and write strength of every token. The axis of 2 holds the scan from the first token to the last, and
    the scan back. Both are the same in the "shared" wiring, and where a block has one scan."""

    # fmt: off
    forgetting: Tensor                   # (depth, B, 2, H, W), H x W patches
    write: Tensor                        # (depth, B, 2, H, W)
    class_forgetting: Tensor | None      # (depth, B, 2), of the class token; None in a model without one
    class_write: Tensor | None
    arrows: tuple[str, ...]              # the ways in which the two scans of each block go over the image, such as "→←"
    # fmt: on


def token_maps(model: VisionLonghorn, images: Tensor) -> TokenMaps:
    """Measures forgetting and write strength in a forward pass of `model` as it stands.

    Args:
        model: A model of this package; in training mode its dropout and drop path take part, so call eval() first.
        images: (B, in_chans, H, W), normalised for the model, on its device.

    Returns:
        The maps in float32 (float64 for a model in float64).

    Raises:
        UserError: `model` is not of this package, or its mixer keeps no state.
    """
    if not isinstance(model, VisionLonghorn):
        raise UserError(
            f"token_maps takes a VisionLonghorn, not a {type(model).__name__}: give one of timm.list_models"
            "(module='vlonghorn'), not compiled and not wrapped in another module"
        )
    mixers: list[Any] = [block.mixer for block in model.blocks]
    for mixer in mixers:
        if not hasattr(mixer, "forgetting_and_write"):
            raise UserError(
                f"the mixer ({describe_mixer(mixer)}) keeps no state that could forget: give one with a scan"
            )
    found: list[Tensor] = []  # of each block (forgetting and write, B, 2, L), tokens in the order of its scan

    def keep(mixer: Any, inputs: tuple[Any, ...], _: Any) -> None:
        found.append(mixer.forgetting_and_write(*inputs))

    with torch.no_grad(), contextlib.ExitStack() as hooks:
        for mixer in mixers:
            hooks.enter_context(mixer.register_forward_hook(keep))
        model.forward_features(images)
    rows, columns = model.patch_embed.dynamic_feat_size(images.shape[-2:])
    for i, block in enumerate(model.blocks):
        if block.reads_columns:  # back to the order of the image
            turned = turn_patches(found[i].flatten(0, 2)[..., None], columns, model.class_token)
            found[i] = turned.view(found[i].shape)
    both = torch.stack(found, 1)  # (2 kinds, depth, B, 2, L)
    of_class: Any = None, None
    if model.cls_token is not None:
        i = class_index(model.class_token, rows * columns)
        of_class = both[..., i]
        both = torch.cat([both[..., :i], both[..., i + 1 :]], -1)
    return TokenMaps._make((*both.unflatten(-1, (rows, columns)), *of_class, tuple(map(_arrows, model.blocks))))


def _arrows(block: Any) -> str:
    ways = "\N{DOWNWARDS ARROW}\N{UPWARDS ARROW}" if block.reads_columns else "\N{RIGHTWARDS ARROW}\N{LEFTWARDS ARROW}"
    if getattr(block.mixer, "wiring", None) in ("forward", "alternate"):
        return ways[block.mixer.reversed] * 2  # its only scan
    return ways


def shown(image: Tensor, settings: dict[str, Any]) -> Any:
    """Undoes the normalisation by `settings`, from an image (3, H, W) to an array (H, W, 3) in [0, 1]."""
    mean, std = (torch.tensor(settings[key])[:, None, None] for key in ("mean", "std"))
    return (image * std + mean).clamp(0, 1).permute(1, 2, 0).numpy()


def plot_maps(maps: TokenMaps, image: Any, out: str | Path, layers: list[int] | None = None, sample: int = 0) -> None:
    """Plots the maps of one image into a PNG: a row for each block, and an arrow above each map that tells in which way
    the scan goes over the image.

    Args:
        maps: Maps of `token_maps`.
        image: (H, W) or (H, W, 3) array in [0, 1], or a PIL image, to show beside the maps.
        out: Path of the PNG, as in `vision_longhorn.plots.save_png`.
        layers: Indices of the blocks to show; all if None.
        sample: Index of the image in the batch of `maps`.

    Raises:
        UserError: There is no such block.
        OSError: The PNG cannot be written.
    """
    depth = len(maps.write)
    layers = list(range(depth)) if layers is None else layers
    if not layers or not all(-depth <= i < depth for i in layers):
        raise UserError(f"layers={layers}: choose from blocks 0 to {depth - 1}")
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
