"""Turns images into patches, which are adjacent or overlap, and projects each, or takes three convolutions instead."""

from collections.abc import Sequence
from functools import partial
from typing import Any, Optional, cast

import torch
import torch.nn.functional as F
from timm.layers import PatchEmbed, get_device_dtype, register_notrace_function, resample_patch_embed, to_2tuple
from torch import Tensor, nn

from vision_longhorn.kernels.contract import check_option
from vision_longhorn.models.conv_stem import ConvStem

__all__ = ["PatchProjection", "StridedPatchEmbed", "check_stem", "patch_grid"]

STEMS = ("patch", "conv")


class PatchProjection(nn.Conv2d):
    """A convolution that is computed as a matrix product where the patches do not overlap.

    With three input channels in bfloat16, cuDNN's own convolution takes as long as several blocks.
    """

    def forward(self, x: Tensor) -> Tensor:  # (B, in_chans, H, W) -> (B, embed_dim, rows, columns)
        if self.stride != self.kernel_size:
            return self._conv_forward(x, self.weight, self.bias)
        height, width = self.kernel_size
        B, C, H, W = x.shape
        rows, columns = H // height, W // width
        x = x[:, :, : rows * height, : columns * width].reshape(B, C, rows, height, columns, width)
        x = x.permute(0, 2, 4, 1, 3, 5).reshape(B, rows, columns, C * height * width)
        return F.linear(x, self.weight.flatten(1), self.bias).permute(0, 3, 1, 2)


def check_stem(patches: Any, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Raise RuntimeError for weights of another stem than the model's: a hook before `load_state_dict`."""
    first = state_dict.get(f"{prefix}proj.0.weight")
    if first is None and f"{prefix}proj.weight" not in state_dict:
        return
    theirs = "stem='patch'" if first is None else f"stem='conv', patch_size={2 * (first.shape[-1] - 1)}"
    own = patches.proj
    ours = f"stem='conv', patch_size={own.side}" if isinstance(own, ConvStem) else "stem='patch'"
    if theirs != ours:
        raise RuntimeError(
            f"these weights are of a model with {theirs}, and this one has {ours}: give create_model {theirs}, or "
            "other weights"
        )


def patch_grid(img_size: Any, patch_size: Any, patch_stride: Any) -> tuple[int, int]:
    """Count patches along (height, width) of an image. Each argument is one number or (height, width), in pixels."""
    rows, columns = (
        (size - side) // step + 1
        for size, side, step in zip(to_2tuple(img_size), to_2tuple(patch_size), to_2tuple(patch_stride))
    )
    return rows, columns


@torch.fx.wrap
@register_notrace_function
def _check_covered(H: int, W: int, patch_size: tuple[int, int], patch_stride: tuple[int, int]) -> None:
    """Raise AssertionError unless patches cover images of H x W exactly.

    This branches, because `torch._assert` makes its message even when nothing is wrong: the sizes in the message would
    bind a compiled model to those sizes.
    """
    (height, width), (down, right) = patch_size, patch_stride
    if H < height or W < width or (H - height) % down != 0 or (W - width) % right != 0:
        raise AssertionError(
            f"images are {H} x {W}, which patches of {height} x {width} every {down} x {right} pixels do not fill: "
            "give images of whole patches, or build the model with dynamic_img_pad=True"
        )


class StridedPatchEmbed(PatchEmbed):
    """timm's patch embedding with a stride of its own: a patch starts every `patch_stride` pixels.

    An image of side S has (S - patch_size) // patch_stride + 1 patches along it. If the stride equals the patch size,
    they do not overlap, and everything is as in timm.

    Args:
        img_size: height and width of the images, or one number for both.
        patch_size: height and width of a patch, or one number for both.
        patch_stride: from one patch to the next along (height, width), or one number for both; `patch_size` if None.
        stem: "patch", which projects each patch, or "conv" for a `ConvStem`, whose patches do not overlap.
        norm_eps: added to the variance in the norms of a `ConvStem`.
        kwargs: other arguments of timm's: in_chans, embed_dim, strict_img_size, dynamic_img_pad, device, dtype.

    Raises:
        ValueError: an image is smaller than a patch, the stride is not between 1 and the patch size, or the stem is
            not known or not for these patches.
    """

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        patch_size: int | tuple[int, int] = 16,
        patch_stride: Optional[int | tuple[int, int]] = None,
        stem: str = "patch",
        norm_eps: float = 1e-5,
        **kwargs: Any,
    ):
        check_option("stem", stem, STEMS)
        super().__init__(None, cast(Any, patch_size), output_fmt="NHWC", **kwargs)
        old = self.proj
        make: Any = partial(ConvStem, eps=norm_eps) if stem == "conv" else PatchProjection
        self.proj = make(old.in_channels, old.out_channels, self.patch_size, **get_device_dtype(old))
        self.register_load_state_dict_pre_hook(check_stem)
        self.patch_stride = self.patch_size
        self.set_input_size(img_size, patch_size, patch_stride)

    def set_input_size(
        self,
        img_size: Optional[int | tuple[int, int]] = None,
        patch_size: Optional[int | tuple[int, int]] = None,
        patch_stride: Optional[int | tuple[int, int]] = None,
    ) -> None:
        """Take other images, patches or strides from now on. For other patches the projection is resampled.

        If no `patch_stride` is given, overlapping patches keep theirs in pixels, and others still do not overlap.

        Raises:
            ValueError: an image is smaller than a patch, or would be padded though its size is fixed; the stride is not
                between 1 and the patch size; or a `ConvStem` would get other patches. Nothing has changed then.
        """
        size = to_2tuple(self.img_size if img_size is None else img_size)
        patch = to_2tuple(self.patch_size if patch_size is None else patch_size)
        kept = patch if self.patch_stride == self.patch_size else self.patch_stride
        stride = to_2tuple(kept if patch_stride is None else patch_stride)
        if not all(1 <= step <= side for step, side in zip(stride, patch)):
            raise ValueError(f"patch_stride={stride} is below 1 or leaves pixels out; choose 1 to patch_size={patch}")
        if any(length < side for length, side in zip(size, patch)):
            raise ValueError(
                f"img_size={size} holds no patch of patch_size={patch}; "
                "make the images at least one patch high and wide"
            )
        left = [(length - side) % step for length, side, step in zip(size, patch, stride)]
        if self.dynamic_img_pad and self.strict_img_size and any(left):
            raise ValueError(
                f"img_size={size} is not filled by patches of {patch}, and with dynamic_img_pad=True images become "
                "larger: give dynamic_img_size=True, too, or a size that patches fill"
            )
        if isinstance(self.proj, ConvStem):
            if not self.patch_size == patch == stride:
                raise ValueError(
                    f"patch_size={patch} and patch_stride={stride} with stem='conv', whose patches are "
                    f"{self.patch_size} side by side: give {self.patch_size} for both, or stem='patch'"
                )
        else:
            if patch != self.patch_size:
                old = self.proj.weight
                self.proj.weight = nn.Parameter(resample_patch_embed(old.detach(), list(patch)), old.requires_grad)
            self.proj.kernel_size, self.proj.stride = patch, stride
        self.img_size, self.patch_size, self.patch_stride = size, patch, stride
        self.grid_size = patch_grid(size, patch, stride)
        self.num_patches = self.grid_size[0] * self.grid_size[1]

    def feat_ratio(self, as_scalar: bool = True) -> int | tuple[int, int]:
        """Return the pixels from one patch to the next: the larger of both sides, or (height, width)."""
        return max(self.patch_stride) if as_scalar else self.patch_stride

    def _padding(self, H: int, W: int) -> tuple[int, int]:
        """Count the pixels to add at the bottom and the right so that patches cover H x W images, if the model pads."""
        if not self.dynamic_img_pad:
            return 0, 0
        down, right = (
            side - size if size < side else (side - size) % step
            for size, side, step in zip((H, W), self.patch_size, self.patch_stride)
        )
        return down, right

    def dynamic_feat_size(self, img_size: Sequence[int]) -> tuple[int, int]:
        """Count patches along (height, width) of images of `img_size`, padded if the model pads."""
        H, W = img_size
        down, right = self._padding(H, W)
        return patch_grid((H + down, W + right), self.patch_size, self.patch_stride)

    def forward(self, x: Tensor) -> Tensor:  # (B, in_chans, H, W) -> (B, rows, columns, embed_dim)
        H, W = x.shape[-2], x.shape[-1]
        if self.dynamic_img_pad:
            down, right = self._padding(H, W)
            x = F.pad(x, (0, right, 0, down))
        elif not self.strict_img_size:
            _check_covered(H, W, self.patch_size, self.patch_stride)
        return self.norm(self.proj(x).permute(0, 2, 3, 1))
