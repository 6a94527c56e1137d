"""Vision Longhorn and Vision Mamba, two settings of one backbone, registered with timm.

Papers:
- Longhorn: State Space Models are Amortized Online Learners, https://arxiv.org/abs/2407.14207
- Vision Mamba: Efficient Visual Representation Learning with Bidirectional State Space Model,
  https://arxiv.org/abs/2401.09417
"""

import inspect
import math
from collections.abc import Sequence
from functools import partial
from numbers import Integral
from typing import Any, Final, Optional, cast

import torch
import torch.nn.functional as F
from timm.layers import (
    DropPath,
    calculate_drop_path_rates,
    lecun_normal_,
    register_notrace_function,
    resample_patch_embed,
    to_2tuple,
    trunc_normal_,
)
from timm.layers.trace_utils import _assert
from timm.models import build_model_with_cfg, checkpoint_seq, generate_default_cfgs, register_model
from timm.models._features import feature_take_indices
from torch import Tensor, nn

from vision_longhorn.kernels.contract import check_option
from vision_longhorn.models.grid_conv import GridConv
from vision_longhorn.models.mixers import Mixer, check_options, create_mixer, reset_mixer
from vision_longhorn.models.patch_embed import StridedPatchEmbed
from vision_longhorn.models.tokens import join_class, split_class, turn_patches
from vision_longhorn.models.vim_weights import fit_features, rename_official, unwrap

try:
    from timm.models._input import update_model_input_size
except ImportError:  # timm before it recorded how a model was built, for save_for_hf
    update_model_input_size = None  # type: ignore[assignment]

__all__ = ["Block", "VisionLonghorn"]

CLASS_TOKENS = ("middle", "first", "last", "none")
POOLS = ("token", "avg", "max", "")
SCAN_ORDERS = ("rows", "rows_columns")


class Block(nn.Module):
    """x + drop_path(mixer(norm(x))), with x kept in its own dtype whatever the mixer computes in.

    Args:
        dim: width of the tokens.
        drop_path: probability of leaving the block out for a sample.
        eps: of the norm.
        mixer: name of the mixer, or what makes it, see `vision_longhorn.models.mixers`.
        reads_columns: take the patches column by column, where the tokens are the rows one after the other.
        grid_conv: side of a convolution over the grid of patches before the mixer (`GridConv`), 0 for none.
        class_token: its place among the tokens, for both of these.
        mixer_args: its options, and `index`, of this block in the model.
    """

    def __init__(
        self,
        dim: int,
        drop_path: float = 0.0,
        eps: float = 1e-5,
        mixer: Mixer = "longhorn",
        reads_columns: bool = False,
        class_token: str = "middle",
        grid_conv: int = 0,
        device: Any = None,
        dtype: Any = None,
        **mixer_args: Any,
    ):
        super().__init__()
        self.reads_columns, self.class_token = reads_columns, class_token
        self.norm = nn.RMSNorm(dim, eps=eps, device=device, dtype=dtype)
        self.grid_conv = GridConv(dim, grid_conv, class_token, device=device, dtype=dtype) if grid_conv else None
        self.mixer = create_mixer(mixer, dim, eps=eps, device=device, dtype=dtype, **mixer_args)
        self.drop_path = DropPath(drop_path) if drop_path > 0 else nn.Identity()

    def forward(self, x: Tensor, rows: int = 0) -> Tensor:
        """(B, L, dim) tokens to (B, L, dim); a block with a grid needs to know the number of its rows."""
        h = self.norm(x.to(self.norm.weight.dtype))
        if self.reads_columns or self.grid_conv is not None:
            _assert(rows > 0, "this block needs to know the grid of patches: call it with rows=..., their number")
        if self.grid_conv is not None:
            h = self.grid_conv(h, rows)
        if self.reads_columns:
            columns = (h.shape[1] - (0 if self.class_token == "none" else 1)) // rows
            h = turn_patches(self.mixer(turn_patches(h, rows, self.class_token)), columns, self.class_token)
        else:
            h = self.mixer(h)
        return x + self.drop_path(h)


def _resize(grid: Tensor, size: int) -> Tensor:
    """(old, n, C) to (n, size, C), float32: its first axis resampled, antialiased bicubic, and made the second."""
    old, n, _ = grid.shape
    # Not as `old` channels of width 1: there torch (2.7 and 2.15) gives each row the values of the first.
    identity = torch.eye(old, device=grid.device)[None, None]
    weight = F.interpolate(identity, size=(size, old), mode="bicubic", antialias=True)[0, 0]
    # In place, as autocast lowers the precision of products that are not.
    return grid.new_zeros(size, n * grid.shape[2]).addmm_(weight, grid.flatten(1)).view(size, n, -1).transpose(0, 1)


@torch.fx.wrap
@register_notrace_function
def _resample_grid(patches: Tensor, old_grid: tuple[int, int], new_grid: tuple[int, int]) -> Tensor:
    """(1, patches, C) of `old_grid` to `new_grid`, as timm's `resample_abs_pos_embed` does.

    By matrices, since the gradient of torch's own resampling takes no symbolic sizes, which a model compiled for every
    image size has, and on a GPU differs from run to run.
    """
    if not torch.compiler.is_compiling() and old_grid[0] == new_grid[0] and old_grid[1] == new_grid[1]:
        return patches
    grid = patches.float().reshape(old_grid[0], old_grid[1], -1)
    return _resize(_resize(grid, new_grid[0]), new_grid[1]).flatten(0, 1).unsqueeze(0).to(patches.dtype)


def resample_pos_embed(
    pos_embed: Tensor, class_token: str, old_grid: tuple[int, int], new_grid: tuple[int, int]
) -> Tensor:
    """Position embedding for another grid of patches; the class token's own entry is kept and put where it belongs.

    Args:
        pos_embed: (1, tokens, C) of `old_grid`, in the order of the tokens.
        class_token: its position, "middle", "first", "last", or "none".
        old_grid, new_grid: patches along (height, width).

    Returns:
        (1, tokens, C) of `new_grid`.
    """
    token, patches = split_class(pos_embed, class_token)
    return join_class(token, _resample_grid(patches, old_grid, new_grid), class_token)


class VisionLonghorn(nn.Module):
    """Patches, a class token among them, a stack of bidirectional state-space blocks, norm, head.

    With the default arguments this is Vision Longhorn tiny; `mixer="mamba"` makes it Vision Mamba (ViM).

    Args:
        img_size: height and width of the images, or one number for both.
        patch_size: side of a patch in pixels; what does not fill a patch at the border is left out.
        patch_stride: pixels from one patch to the next; `patch_size` if None, and patches that overlap if less.
        in_chans: channels of the images.
        num_classes: outputs of the head; 0 leaves it out.
        global_pool: "token" (the class token's output), "avg" or "max" over the patches, or "" for all tokens.
        embed_dim: width of the tokens.
        depth: number of blocks.
        mixer: what mixes the tokens of a block, by name, or a class of your own, see `vision_longhorn.models.mixers`.
        class_token: its place in the sequence, "middle", "first", "last", or "none".
        scan_order: "rows", or "rows_columns": the blocks read the patches row by row and column by column in turn (with
            wiring="alternate" two and two, so that four blocks have read them in all four directions).
        grid_conv: side, such as 3, of a depthwise convolution over the grid of patches before each mixer; 0: none.
        drop_rate: dropout before the head.
        pos_drop_rate: dropout after the position embedding.
        drop_path_rate: stochastic depth of the last block; it grows linearly from 0 at the first.
        norm_eps: of all RMS norms.
        residual_in_fp32: keep the sum of the blocks in float32 in a model of lower precision.
        dynamic_img_size: take images of any size in whole patches, resampling the position embedding for each.
        dynamic_img_pad: pad images to whole patches.
        mixer_args: options of the mixer; those of the state-space ones are in `BidirectionalMixer`: d_state, d_conv,
            expand, dt_rank, rule, wiring, beta, save_states.

    Raises:
        TypeError: the mixer has no such option.
        ValueError: an option is not known, options contradict each other, or an image is smaller than a patch.
    """

    dynamic_img_size: Final[bool]

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        patch_size: int | tuple[int, int] = 16,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "token",
        embed_dim: int = 192,
        depth: int = 24,
        mixer: Mixer = "longhorn",
        class_token: str = "middle",
        drop_rate: float = 0.0,
        pos_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        norm_eps: float = 1e-5,
        residual_in_fp32: bool = True,
        dynamic_img_size: bool = False,
        dynamic_img_pad: bool = False,
        patch_stride: Optional[int | tuple[int, int]] = None,
        scan_order: str = "rows",
        grid_conv: int = 0,
        device: Any = None,
        dtype: Any = None,
        **mixer_args: Any,
    ):
        super().__init__()
        dd = {"device": device, "dtype": dtype}
        check_option("class_token", class_token, CLASS_TOKENS)
        check_option("scan_order", scan_order, SCAN_ORDERS)
        _check_whole(embed_dim=embed_dim, depth=depth)
        check_options(mixer, mixer_args, models_own=inspect.signature(VisionLonghorn).parameters)
        self.num_classes = num_classes
        self.in_chans = in_chans
        self.num_features = self.head_hidden_size = self.embed_dim = embed_dim
        self.class_token = class_token
        self.num_prefix_tokens = 0 if class_token == "none" else 1
        self.residual_in_fp32 = residual_in_fp32
        self.dynamic_img_size = dynamic_img_size
        self.grad_checkpointing = False
        self._set_pool(global_pool)

        self.patch_embed = StridedPatchEmbed(
            img_size=img_size,
            patch_size=patch_size,
            patch_stride=patch_stride,
            in_chans=in_chans,
            embed_dim=embed_dim,
            strict_img_size=not dynamic_img_size,
            dynamic_img_pad=dynamic_img_pad,
            **dd,
        )
        if not self.patch_embed.num_patches:
            raise ValueError(
                f"img_size={img_size} holds no patch of patch_size={patch_size}; "
                "make the images at least one patch high and wide"
            )
        num_patches = self.patch_embed.num_patches
        self.cls_token = nn.Parameter(torch.empty(1, 1, embed_dim, **dd)) if self.num_prefix_tokens else None
        self.pos_embed = nn.Parameter(torch.empty(1, num_patches + self.num_prefix_tokens, embed_dim, **dd))
        self.pos_drop = nn.Dropout(pos_drop_rate)
        period = 2 if mixer_args.get("wiring") == "alternate" else 1
        self.blocks = nn.Sequential(
            *[
                Block(
                    embed_dim,
                    drop_path=rate,
                    eps=norm_eps,
                    mixer=mixer,
                    reads_columns=scan_order == "rows_columns" and i // period % 2 == 1,
                    class_token=class_token,
                    grid_conv=grid_conv,
                    index=i,
                    residual_layers=depth,
                    **dd,
                    **mixer_args,
                )
                for i, rate in enumerate(cast("list[float]", calculate_drop_path_rates(drop_path_rate, depth)))
            ]
        )
        reduction = self.patch_embed.feat_ratio()
        self.feature_info = [dict(module=f"blocks.{i}", num_chs=embed_dim, reduction=reduction) for i in range(depth)]
        self.norm: nn.Module = nn.RMSNorm(embed_dim, eps=norm_eps, **dd)
        self.head_drop = nn.Dropout(drop_rate)
        self.head = nn.Linear(embed_dim, num_classes, **dd) if num_classes > 0 else nn.Identity()
        self.init_weights(needs_reset=False)
        self.register_load_state_dict_pre_hook(rename_official)

    def _set_pool(self, global_pool: str) -> None:
        check_option("global_pool", global_pool, POOLS)
        if global_pool == "token" and self.class_token == "none":
            raise ValueError("global_pool='token' needs a class token; with class_token='none' use global_pool='avg'")
        self.global_pool = global_pool

    @torch.no_grad()
    def init_weights(self, needs_reset: bool = True) -> None:
        """Initialise as ViM does; the blocks' own modules only if `needs_reset` (they do so when built)."""
        if needs_reset:
            mixers = {block.mixer for block in self.blocks}
            for module in self.modules():
                if module in mixers or isinstance(module, (nn.RMSNorm, GridConv)):
                    reset_mixer(module)
        lecun_normal_(self.patch_embed.proj.weight)
        nn.init.zeros_(cast(Tensor, self.patch_embed.proj.bias))
        trunc_normal_(self.pos_embed, std=0.02)
        if self.cls_token is not None:
            trunc_normal_(self.cls_token, std=0.02)
        self._init_head()

    def _init_head(self) -> None:
        if isinstance(self.head, nn.Linear):
            trunc_normal_(self.head.weight, std=0.02)
            nn.init.zeros_(self.head.bias)

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        """Names, with wildcards, that timm's optimiser factory must not decay (it spares 1-D parameters by itself)."""
        # Of all modules, as a mixer may have been wrapped in another since.
        names = {name for module in self.blocks.modules() for name in getattr(module, "NO_WEIGHT_DECAY", ())}
        return {"pos_embed", "cls_token", *(f"*.mixer.{name}" for name in names)}

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Patterns that group parameters by depth, for layer-wise learning-rate decay."""
        return dict(stem=r"^cls_token|pos_embed|patch_embed", blocks=[(r"^blocks\.(\d+)", None), (r"^norm", (99999,))])

    @torch.jit.ignore
    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute each block in the backward pass instead of keeping its activations."""
        self.grad_checkpointing = enable

    @torch.jit.ignore
    def get_classifier(self) -> nn.Module:
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: Optional[str] = None) -> None:
        """A new head for `num_classes` (0: none), with another pooling if given."""
        if global_pool is not None:
            self._set_pool(global_pool)
        self.num_classes = num_classes
        weight = self.pos_embed
        self.head = (
            nn.Linear(self.embed_dim, num_classes, device=weight.device, dtype=weight.dtype)
            if num_classes > 0
            else nn.Identity()
        )
        self._init_head()

    def set_input_size(
        self,
        img_size: Optional[int | tuple[int, int]] = None,
        patch_size: Optional[int | tuple[int, int]] = None,
        patch_stride: Optional[int | tuple[int, int]] = None,
    ) -> None:
        """Take images (patches) of another size from now on; position embedding and patch projection are resampled.

        Without `patch_stride` patches that do not overlap go on not to, and overlapping ones keep their stride.
        """
        old_grid = self.patch_embed.grid_size
        self.patch_embed.set_input_size(img_size=img_size, patch_size=patch_size, patch_stride=patch_stride)
        if self.patch_embed.grid_size != old_grid:
            pos_embed = resample_pos_embed(
                self.pos_embed.detach(), self.class_token, old_grid, self.patch_embed.grid_size
            )
            self.pos_embed = nn.Parameter(pos_embed, requires_grad=self.pos_embed.requires_grad)
        if update_model_input_size is not None:
            update_model_input_size(
                self,
                self.patch_embed.img_size,
                patch_size=self.patch_embed.patch_size,
                patch_stride=self.patch_embed.patch_stride,
            )

    def _embed(self, x: Tensor) -> tuple[Tensor, int]:
        """(B, C, H, W) images to (B, L, embed_dim) tokens, positions added, and the number of rows of patches."""
        _assert(x.ndim == 4, f"images have {x.ndim} axes: give (batch, channels, height, width)")
        _assert(
            x.shape[1] == self.in_chans,
            f"images have {x.shape[1]} channels and the model takes {self.in_chans}: give create_model in_chans",
        )
        if not self.dynamic_img_size:
            height, width = self.patch_embed.img_size
            message = (
                f"images are {x.shape[-2]} x {x.shape[-1]} and the model is built for {height} x {width}: give "
                "img_size to create_model, call model.set_input_size(), or build it with dynamic_img_size=True"
            )
            _assert(x.shape[-2] == height, message)
            _assert(x.shape[-1] == width, message)
        x = self.patch_embed(x)  # (B, H, W, C)
        B, H, W, C = x.shape
        pos_embed: Tensor = self.pos_embed
        if self.dynamic_img_size:
            pos_embed = resample_pos_embed(pos_embed, self.class_token, self.patch_embed.grid_size, (H, W))
        x = x.reshape(B, H * W, C)
        if self.cls_token is not None:
            x = join_class(self.cls_token.to(x.dtype).expand(B, -1, -1), x, self.class_token)
        x = self.pos_drop(x + pos_embed)
        return x.float() if self.residual_in_fp32 else x, H

    def _norm(self, x: Tensor) -> Tensor:
        return self.norm(x.to(self.pos_embed.dtype))

    def forward_features(self, x: Tensor) -> Tensor:
        """(B, C, H, W) images to (B, L, embed_dim) normalised tokens, the class token in its place among them."""
        x, rows = self._embed(x)
        if self.grad_checkpointing and not torch.jit.is_scripting():
            x = checkpoint_seq([partial(block, rows=rows) for block in self.blocks], x)
        else:
            for block in self.blocks:
                x = block(x, rows)
        return self._norm(x)

    def pool(self, x: Tensor) -> Tensor:
        """(B, L, C) tokens to (B, C), or all of them with global_pool=""."""
        if self.global_pool == "":
            return x
        token, patches = split_class(x, self.class_token)
        if token is not None and self.global_pool == "token":
            return token.squeeze(1)
        return patches.mean(1) if self.global_pool == "avg" else patches.amax(1)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Tokens of `forward_features` to class scores (B, num_classes), or to what the head sees."""
        x = self.head_drop(self.pool(x))
        return x if pre_logits else self.head(x)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) images to (B, num_classes) class scores."""
        return self.forward_head(self.forward_features(x))

    def forward_intermediates(
        self,
        x: Tensor,
        indices: Optional[int | list[int]] = None,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> Any:
        """Outputs of chosen blocks, as timm's vision transformers give them.

        Args:
            x: (B, C, H, W) images.
            indices: the last n blocks if a number, those of these indices if a list, all if None.
            return_prefix_tokens: also return the class token of each, as pairs (patches, class token).
            norm: apply the final norm to them.
            stop_early: leave out the blocks after the last one asked for.
            output_fmt: "NCHW" maps (B, embed_dim, H, W) or "NLC" tokens (B, H W, embed_dim), without the class token.
            intermediates_only: leave out the final features.

        Returns:
            The list of intermediates, or (final features, intermediates).
        """
        check_option("output_fmt", output_fmt, ("NCHW", "NLC"))
        take, last = feature_take_indices(len(self.blocks), indices)
        H, W = self.patch_embed.dynamic_feat_size(x.shape[-2:])
        x, _ = self._embed(x)
        intermediates = []
        for i, block in enumerate(self.blocks[: last + 1] if stop_early else self.blocks):
            if self.grad_checkpointing and not torch.jit.is_scripting():
                x = checkpoint_seq([partial(block, rows=H)], x)
            else:
                x = block(x, H)
            if i in take:
                token, patches = split_class(self._norm(x) if norm else x, self.class_token)
                if output_fmt == "NCHW":
                    patches = patches.transpose(1, 2).reshape(x.shape[0], -1, H, W).contiguous()
                intermediates.append((patches, token) if return_prefix_tokens and token is not None else patches)
        return intermediates if intermediates_only else (self._norm(x), intermediates)

    def get_intermediate_layers(
        self,
        x: Tensor,
        n: int | list[int] = 1,
        reshape: bool = False,
        return_prefix_tokens: bool = False,
        norm: bool = False,
    ) -> list[Any]:
        """DINO's name for `forward_intermediates`: what the last n blocks give, or those of the indices n, as tokens
        (B, H W, embed_dim), with `reshape` as maps (B, embed_dim, H, W)."""
        form = "NCHW" if reshape else "NLC"
        found: list[Any] = self.forward_intermediates(
            x, n, return_prefix_tokens, norm, output_fmt=form, intermediates_only=True
        )
        return found

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Drop the blocks after the last one that `indices` asks for, and on request the norm and the head."""
        take, last = feature_take_indices(len(self.blocks), indices)
        self.blocks = self.blocks[: last + 1]
        if prune_norm:
            self.norm = nn.Identity()
        if prune_head:
            self.reset_classifier(0, "")
        return take


def _fit_pos_embed(pos_embed: Tensor, kernel: Sequence[int], model: VisionLonghorn) -> Tensor:
    """Position embedding of pretrained weights with patches of size `kernel`, resampled for `model` where needed."""
    num_patches = pos_embed.shape[1] - model.num_prefix_tokens
    # The image size that timm knows the weights to be of. A configuration that did not come with them is no use where
    # the numbers agree: 7 x 28 patches are as many as 14 x 14.
    saved, cfg = getattr(model, "pretrained_model_args", {}), getattr(model, "pretrained_cfg", {})
    size = saved.get("img_size")
    if size is None and (cfg.get("source") or num_patches != model.patch_embed.num_patches):
        size = cfg.get("input_size", (3, 0, 0))[-2:]
    strides = (saved.get("patch_stride"), kernel, model.patch_embed.patch_stride)
    grids = [
        tuple((side - patch) // step + 1 for side, patch, step in zip(to_2tuple(size), kernel, to_2tuple(stride)))
        for stride in strides
        if size is not None and stride is not None
    ]
    side = math.isqrt(num_patches)
    grid = next(
        (grid for grid in [*grids, model.patch_embed.grid_size, (side, side)] if grid[0] * grid[1] == num_patches), None
    )
    if grid is None:
        raise RuntimeError(
            f"pos_embed of these weights has {num_patches} patches, which is no square, and the model has "
            f"{model.patch_embed.num_patches}: say what image size they are of, by "
            "input_size=(channels, height, width) in the pretrained_cfg of these weights"
        )
    if grid == model.patch_embed.grid_size:
        return pos_embed
    return resample_pos_embed(pos_embed, model.class_token, grid, model.patch_embed.grid_size)


def checkpoint_filter_fn(state_dict: dict[str, Tensor], model: VisionLonghorn) -> dict[str, Tensor]:
    """Weights of the same model at another image or patch size made to fit `model`.

    Takes bare weights or a whole checkpoint (the averaged weights first, as timm does). Their patches are those of the
    image size that timm knows them to be of, from their folder or their `pretrained_cfg`, if the number agrees;
    otherwise the model's own if they are as many, and else a square.

    Raises:
        RuntimeError: the number of patches is none of these, or only one of both has a class token.
    """
    state_dict = unwrap(state_dict)
    has, wants = "cls_token" in state_dict, model.cls_token is not None
    if "pos_embed" in state_dict and has != wants:
        raise RuntimeError(
            f"these weights have {'a' if has else 'no'} cls_token, and this model has {'one' if wants else 'none'}: "
            f"give create_model class_token={'none' if wants else 'middle'!r}, or other weights"
        )
    out = {}
    for name, value in state_dict.items():
        if name == "patch_embed.proj.weight" and value.shape[-2:] != model.patch_embed.proj.weight.shape[-2:]:
            value = resample_patch_embed(value, model.patch_embed.patch_size)
        elif name == "pos_embed":
            patches = state_dict.get("patch_embed.proj.weight", model.patch_embed.proj.weight)
            value = _fit_pos_embed(value, tuple(patches.shape[-2:]), model)
        out[name] = value
    return out


def _cfg(url: str = "", **kwargs: Any) -> dict[str, Any]:
    return {
        "url": url,
        "num_classes": 1000,
        "input_size": (3, 224, 224),
        "pool_size": None,
        "crop_pct": 0.875,
        "interpolation": "bicubic",
        "fixed_input_size": True,
        "mean": (0.485, 0.456, 0.406),
        "std": (0.229, 0.224, 0.225),
        "first_conv": "patch_embed.proj",
        "classifier": "head",
        **kwargs,
    }


def _vim_cfg(size: str, file: str) -> dict[str, Any]:
    """Weights that the authors of Vision Mamba published on the Hugging Face hub."""
    return _cfg(
        hf_hub_id=f"hustvl/Vim-{size}-midclstok",
        hf_hub_filename=file,
        license="apache-2.0",
        paper_ids="arXiv:2401.09417",
        origin_url="https://github.com/hustvl/Vim",
    )


_TEST_SIZE: dict[str, Any] = dict(input_size=(3, 96, 96))
default_cfgs = generate_default_cfgs(
    {
        "vlonghorn_test.untrained": _cfg(**_TEST_SIZE),
        "vlonghorn_tiny.untrained": _cfg(),
        "vlonghorn_tiny_cross.untrained": _cfg(),
        "vlonghorn_tiny_exact.untrained": _cfg(),
        "vlonghorn_tiny_shared.untrained": _cfg(),
        "vlonghorn_small.untrained": _cfg(),
        "vlonghorn_small_cross.untrained": _cfg(),
        "vlonghorn_small_exact.untrained": _cfg(),
        "vlonghorn_small_shared.untrained": _cfg(),
        "vlonghorn_base.untrained": _cfg(),
        "vlonghorn_base_cross.untrained": _cfg(),
        "vlonghorn_base_exact.untrained": _cfg(),
        "vlonghorn_base_shared.untrained": _cfg(),
        "vim_test.untrained": _cfg(**_TEST_SIZE),
        "vim_tiny.in1k": _vim_cfg("tiny", "vim_t_midclstok_76p1acc.pth"),
        "vim_tiny_cross.untrained": _cfg(),
        "vim_tiny_stride8.in1k": _vim_cfg("tiny", "vim_t_midclstok_ft_78p3acc.pth"),
        "vim_small.in1k": _vim_cfg("small", "vim_s_midclstok_80p5acc.pth"),
        "vim_small_cross.untrained": _cfg(),
        "vim_small_stride8.in1k": _vim_cfg("small", "vim_s_midclstok_ft_81p6acc.pth"),
        "vim_base.in1k": _vim_cfg("base", "vim_b_midclstok_81p9acc.pth"),
        "vim_base_cross.untrained": _cfg(),
    }
)

_SIZES = {
    "test": dict(img_size=96, embed_dim=64, depth=4),
    "tiny": dict(embed_dim=192, depth=24),
    "small": dict(embed_dim=384, depth=24),
    "base": dict(embed_dim=768, depth=24),
}
# The trunk that docs/study.md found better for every mixer tried in it
_TRUNK: dict[str, Any] = dict(scan_order="rows_columns", class_token="none", global_pool="avg")
_CROSS: dict[str, Any] = dict(rule="exact", **_TRUNK)
_VIM_CROSS: dict[str, Any] = dict(mixer="mamba", **_TRUNK)


def _check_whole(**sizes: Any) -> None:
    for name, size in sizes.items():
        if not isinstance(size, Integral):
            raise ValueError(f"{name}={size!r}: give a whole number")


def _create(variant: str, pretrained: bool, **kwargs: Any) -> VisionLonghorn:
    kwargs = {**_SIZES[variant.split("_")[1]], **kwargs}
    _check_whole(depth=kwargs["depth"])
    out_indices = kwargs.pop("out_indices", min(3, kwargs["depth"]))
    model = build_model_with_cfg(
        VisionLonghorn,
        variant,
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg=dict(out_indices=out_indices, feature_cls="getter"),
        **kwargs,
    )
    if not isinstance(model, VisionLonghorn):
        model.register_load_state_dict_pre_hook(partial(fit_features, depth=kwargs["depth"]))
    return model


@register_model
def vlonghorn_test(pretrained: bool = False, **kwargs: Any) -> VisionLonghorn:
    """Vision Longhorn for tests and demos: 4 blocks of width 64, 36 patches."""
    return _create("vlonghorn_test", pretrained, **kwargs)


@register_model
def vlonghorn_tiny(pretrained: bool = False, **kwargs: Any) -> VisionLonghorn:
    """Vision Longhorn, 24 blocks of width 192, diagonal rule."""
    return _create("vlonghorn_tiny", pretrained, **kwargs)


@register_model
def vlonghorn_tiny_cross(pretrained: bool = False, **kwargs: Any) -> VisionLonghorn:
    """`vlonghorn_tiny` with the exact rule, rows and columns read in turn, and the mean of the patches."""
    return _create("vlonghorn_tiny_cross", pretrained, **{**_CROSS, **kwargs})


@register_model
def vlonghorn_tiny_exact(pretrained: bool = False, **kwargs: Any) -> VisionLonghorn:
    """`vlonghorn_tiny` with the exact rule."""
    return _create("vlonghorn_tiny_exact", pretrained, **{"rule": "exact", **kwargs})


@register_model
def vlonghorn_tiny_shared(pretrained: bool = False, **kwargs: Any) -> VisionLonghorn:
    """`vlonghorn_tiny` whose directions share their convolution and projections."""
    return _create("vlonghorn_tiny_shared", pretrained, **{"wiring": "shared", **kwargs})


@register_model
def vlonghorn_small(pretrained: bool = False, **kwargs: Any) -> VisionLonghorn:
    """Vision Longhorn, 24 blocks of width 384, diagonal rule."""
    return _create("vlonghorn_small", pretrained, **kwargs)


@register_model
def vlonghorn_small_cross(pretrained: bool = False, **kwargs: Any) -> VisionLonghorn:
    """`vlonghorn_small` with the exact rule, rows and columns read in turn, and the mean of the patches."""
    return _create("vlonghorn_small_cross", pretrained, **{**_CROSS, **kwargs})


@register_model
def vlonghorn_small_exact(pretrained: bool = False, **kwargs: Any) -> VisionLonghorn:
    """`vlonghorn_small` with the exact rule."""
    return _create("vlonghorn_small_exact", pretrained, **{"rule": "exact", **kwargs})


@register_model
def vlonghorn_small_shared(pretrained: bool = False, **kwargs: Any) -> VisionLonghorn:
    """`vlonghorn_small` whose directions share their convolution and projections."""
    return _create("vlonghorn_small_shared", pretrained, **{"wiring": "shared", **kwargs})


@register_model
def vlonghorn_base(pretrained: bool = False, **kwargs: Any) -> VisionLonghorn:
    """Vision Longhorn, 24 blocks of width 768, diagonal rule."""
    return _create("vlonghorn_base", pretrained, **kwargs)


@register_model
def vlonghorn_base_cross(pretrained: bool = False, **kwargs: Any) -> VisionLonghorn:
    """`vlonghorn_base` with the exact rule, rows and columns read in turn, and the mean of the patches."""
    return _create("vlonghorn_base_cross", pretrained, **{**_CROSS, **kwargs})


@register_model
def vlonghorn_base_exact(pretrained: bool = False, **kwargs: Any) -> VisionLonghorn:
    """`vlonghorn_base` with the exact rule."""
    return _create("vlonghorn_base_exact", pretrained, **{"rule": "exact", **kwargs})


@register_model
def vlonghorn_base_shared(pretrained: bool = False, **kwargs: Any) -> VisionLonghorn:
    """`vlonghorn_base` whose directions share their convolution and projections."""
    return _create("vlonghorn_base_shared", pretrained, **{"wiring": "shared", **kwargs})


@register_model
def vim_test(pretrained: bool = False, **kwargs: Any) -> VisionLonghorn:
    """Vision Mamba for tests and demos: 4 blocks of width 64, 36 patches."""
    return _create("vim_test", pretrained, **{"mixer": "mamba", **kwargs})


@register_model
def vim_tiny(pretrained: bool = False, **kwargs: Any) -> VisionLonghorn:
    """Vision Mamba (ViM), 24 blocks of width 192."""
    return _create("vim_tiny", pretrained, **{"mixer": "mamba", **kwargs})


@register_model
def vim_tiny_cross(pretrained: bool = False, **kwargs: Any) -> VisionLonghorn:
    """`vim_tiny` with rows and columns read in turn, and the mean of the patches."""
    return _create("vim_tiny_cross", pretrained, **{**_VIM_CROSS, **kwargs})


@register_model
def vim_tiny_stride8(pretrained: bool = False, **kwargs: Any) -> VisionLonghorn:
    """`vim_tiny` with a patch of 16 pixels every 8: 729 patches at 224 px."""
    return _create("vim_tiny_stride8", pretrained, **{"mixer": "mamba", "patch_stride": 8, **kwargs})


@register_model
def vim_small(pretrained: bool = False, **kwargs: Any) -> VisionLonghorn:
    """Vision Mamba (ViM), 24 blocks of width 384."""
    return _create("vim_small", pretrained, **{"mixer": "mamba", **kwargs})


@register_model
def vim_small_cross(pretrained: bool = False, **kwargs: Any) -> VisionLonghorn:
    """`vim_small` with rows and columns read in turn, and the mean of the patches."""
    return _create("vim_small_cross", pretrained, **{**_VIM_CROSS, **kwargs})


@register_model
def vim_small_stride8(pretrained: bool = False, **kwargs: Any) -> VisionLonghorn:
    """`vim_small` with a patch of 16 pixels every 8: 729 patches at 224 px."""
    return _create("vim_small_stride8", pretrained, **{"mixer": "mamba", "patch_stride": 8, **kwargs})


@register_model
def vim_base(pretrained: bool = False, **kwargs: Any) -> VisionLonghorn:
    """Vision Mamba (ViM), 24 blocks of width 768."""
    return _create("vim_base", pretrained, **{"mixer": "mamba", **kwargs})


@register_model
def vim_base_cross(pretrained: bool = False, **kwargs: Any) -> VisionLonghorn:
    """`vim_base` with rows and columns read in turn, and the mean of the patches."""
    return _create("vim_base_cross", pretrained, **{**_VIM_CROSS, **kwargs})
