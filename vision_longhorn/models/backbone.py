"""The backbone of Vision Longhorn and Vision Mamba, with the interface of timm's vision transformers.

Papers:
- Longhorn: State Space Models are Amortized Online Learners, https://arxiv.org/abs/2407.14207
- Vision Mamba: Efficient Visual Representation Learning with Bidirectional State Space Model,
  https://arxiv.org/abs/2401.09417
"""

import inspect
from functools import partial
from typing import Any, Final, Optional, cast

import torch
from timm.layers import DropPath, calculate_drop_path_rates, get_device_dtype, lecun_normal_, trunc_normal_
from timm.layers.trace_utils import _assert
from timm.models import checkpoint_seq
from timm.models._features import feature_take_indices
from timm.models._input import update_model_input_size
from torch import Tensor, nn

from vision_longhorn.kernels.contract import check_option
from vision_longhorn.models.conv_mlp import ConvMlp
from vision_longhorn.models.grid_conv import GridConv
from vision_longhorn.models.mixers import Mixer, check_options, create_mixer, reset_mixer
from vision_longhorn.models.mlp import GeluMlp
from vision_longhorn.models.norm import norm_beside
from vision_longhorn.models.patch_embed import StridedPatchEmbed
from vision_longhorn.models.pos_embed import resample_pos_embed
from vision_longhorn.models.tokens import join_class, split_class, turn_patches
from vision_longhorn.models.vim_weights import rename_official

__all__ = ["Block", "VisionLonghorn"]

CLASS_TOKENS = ("middle", "first", "last", "none")
POOLS = ("token", "avg", "max", "")
SCAN_ORDERS = ("rows", "rows_columns")


class Block(nn.Module):
    """x + drop_path(mixer(norm(x))), and with `mlp_ratio` another such step with an MLP in the place of the mixer. x is
    kept in its own dtype whatever these compute in.

    Args:
        dim: width of the tokens.
        drop_path: probability of leaving the mixer out for a sample, and likewise the MLP.
        eps: added to the mean square in the norm.
        mixer: name of the mixer, or what makes it, see `vision_longhorn.models.mixers`.
        reads_columns: give the mixer the patches column by column; they come in row by row.
        class_token: its place among the tokens, "middle", "first", "last" or "none".
        grid_conv: side of a convolution over the grid of patches before the mixer (`GridConv`), 0 for none.
        mlp_ratio: inner width of the MLP over `dim`; 0 for no MLP.
        mlp_conv: side of the convolution over the grid of patches inside the MLP (`ConvMlp`), 0 for none.
        mixer_args: options of the mixer, and those that a model gives it: `index` and `residual_layers`.

    Raises:
        ValueError: mixer or MLP use the grid of patches, and there is a class token; or the MLP has no width.
    """

    needs_grid: Final[bool]
    mlp_needs_grid: Final[bool]

    def __init__(
        self,
        dim: int,
        drop_path: float = 0.0,
        eps: float = 1e-5,
        mixer: Mixer = "longhorn",
        reads_columns: bool = False,
        class_token: str = "middle",
        grid_conv: int = 0,
        mlp_ratio: float = 0.0,
        mlp_conv: int = 0,
        device: Any = None,
        dtype: Any = None,
        **mixer_args: Any,
    ):
        super().__init__()
        self.reads_columns, self.class_token = reads_columns, class_token
        self.norm = nn.RMSNorm(dim, eps=eps, device=device, dtype=dtype)
        self.grid_conv = GridConv(dim, grid_conv, class_token, device=device, dtype=dtype) if grid_conv else None
        self.mixer = create_mixer(mixer, dim, eps=eps, device=device, dtype=dtype, **mixer_args)
        self.needs_grid = bool(getattr(self.mixer, "needs_grid", False))
        self.mlp_needs_grid = mlp_conv != 0
        if (self.needs_grid or self.mlp_needs_grid) and class_token != "none":
            raise ValueError(
                f"class_token={class_token!r} with a block over the grid of patches, where a class token has no place: "
                "use class_token='none', or a block without the grid (conv='causal', rope=False, mlp_conv=0)"
            )
        self.drop_path = DropPath(drop_path) if drop_path > 0 else nn.Identity()
        hidden = int(mlp_ratio * dim)
        if mlp_ratio and hidden < 1:
            raise ValueError(f"mlp_ratio={mlp_ratio}: give the MLP's inner width over embed_dim, or 0 for no MLP")
        if mlp_conv and not hidden:
            raise ValueError(f"mlp_conv={mlp_conv} without an MLP: give its inner width over embed_dim as mlp_ratio")
        self.mlp_norm = nn.RMSNorm(dim, eps=eps, device=device, dtype=dtype) if hidden else None
        self.mlp: Optional[nn.Module] = None
        if hidden:
            make = partial(ConvMlp, size=mlp_conv) if mlp_conv else GeluMlp
            self.mlp = make(dim, hidden, device=device, dtype=dtype)

    def forward(self, x: Tensor, rows: int = 0) -> Tensor:
        """Map tokens (B, L, dim) to (B, L, dim). A block that uses the grid of patches needs its number of `rows`."""
        if self.reads_columns or self.needs_grid or self.mlp_needs_grid or self.grid_conv is not None:
            _assert(rows > 0, "this block needs the grid of patches: give rows=N, the number of its rows")
        turned = False
        if torch.jit.is_scripting():
            h = self.norm(x.to(self.norm.weight.dtype))
        else:
            turned = self.reads_columns and self.class_token == "none" and self.grid_conv is None
            reader = self.mixer if self.grid_conv is None else self.grid_conv
            x, h = norm_beside(self.norm, x, reader, rows if turned else None)
        if self.grid_conv is not None:
            h = self.grid_conv(h, rows)
        rows_read = rows
        if self.reads_columns:
            if not turned:
                h = turn_patches(h, rows, self.class_token)
            rows_read = (h.shape[1] - (0 if self.class_token == "none" else 1)) // rows  # the columns of the image
        if self.needs_grid:
            h = self.mixer(h, rows_read)
        else:
            h = self.mixer(h)
        if self.reads_columns:
            h = turn_patches(h, rows_read, self.class_token)
        x = x + self.drop_path(h)
        if self.mlp is not None and self.mlp_norm is not None:
            if torch.jit.is_scripting():
                h = self.mlp_norm(x.to(self.mlp_norm.weight.dtype))
            else:
                x, h = norm_beside(self.mlp_norm, x, self.mlp)
            if self.mlp_needs_grid:
                h = self.mlp(h, rows)
            else:
                h = self.mlp(h)
            x = x + self.drop_path(h)
        return x


class VisionLonghorn(nn.Module):
    """Patches, a class token among them, a stack of bidirectional state-space blocks, norm, head.

    With the default arguments this is `vlonghorn_tiny_paper`; `mixer="mamba"` makes it Vision Mamba (ViM).

    Args:
        img_size: height and width of the images, or one number for both.
        patch_size: side of a patch in pixels; a border that does not fill a patch is left out.
        patch_stride: pixels from one patch to the next; `patch_size` if None. With less, patches overlap.
        in_chans: channels of the images.
        num_classes: outputs of the head; 0 leaves it out.
        global_pool: "token" (the class token's output), "avg" or "max" over the patches, or "" for all tokens.
        embed_dim: width of the tokens.
        depth: number of blocks.
        mixer: mixes the tokens of a block; a name, or a class of your own, see `vision_longhorn.models.mixers`.
        class_token: its place in the sequence, "middle", "first", "last", or "none".
        scan_order: "rows", or "rows_columns": the blocks read the patches row by row and column by column in turn (with
            wiring="alternate" two and two, so that four blocks have read them in all four directions).
        grid_conv: side, such as 3, of a depthwise convolution over the grid of patches before each mixer; 0 for none.
        mlp_ratio: give each block an MLP after the mixer, `mlp_ratio` times as wide inside; 0 for none.
        mlp_conv: side, such as 3, of a depthwise convolution over the grid of patches inside the MLPs; 0 for none.
        stem: "patch", a projection of each patch, or "conv", three convolutions in its place: see `ConvStem`.
        drop_rate: dropout before the head.
        pos_drop_rate: dropout after the position embedding.
        drop_path_rate: stochastic depth of the last block; it grows linearly from 0 at the first.
        norm_eps: added to the mean square in all RMS norms, and to the variance in the stem's norms.
        residual_in_fp32: keep the residual stream, the running sum of the blocks' outputs, in float32 even if the model
            or autocast is in lower precision. If False, it has the stem's dtype, or float32 if that is float16.
        dynamic_img_size: take images of any size in whole patches, and resample the position embedding for each size.
        dynamic_img_pad: pad images to whole patches.
        mixer_args: options of the mixer; those of the state-space ones are in `BidirectionalMixer`: d_state, conv,
            d_conv, expand, dt_rank, rule, wiring, beta, beta_min, beta_max, gate, qk_norm, rope, save_states,
            A_per_token.

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
        mlp_ratio: float = 0.0,
        mlp_conv: int = 0,
        stem: str = "patch",
        device: Any = None,
        dtype: Any = None,
        **mixer_args: Any,
    ):
        super().__init__()
        dd: dict[str, Any] = {"device": device, "dtype": dtype}
        check_option("class_token", class_token, CLASS_TOKENS)
        check_option("scan_order", scan_order, SCAN_ORDERS)
        check_options(mixer, mixer_args, models_own=inspect.signature(VisionLonghorn).parameters)
        self.num_features = self.head_hidden_size = self.embed_dim = embed_dim
        self.in_chans, self.class_token, self.dynamic_img_size = in_chans, class_token, dynamic_img_size
        self.num_prefix_tokens = 0 if class_token == "none" else 1
        self.residual_in_fp32, self.grad_checkpointing = residual_in_fp32, False
        self._set_pool(global_pool)

        pads = dict(strict_img_size=not dynamic_img_size, dynamic_img_pad=dynamic_img_pad)
        sizes = dict(in_chans=in_chans, embed_dim=embed_dim, norm_eps=norm_eps)
        self.patch_embed = StridedPatchEmbed(img_size, patch_size, patch_stride, stem, **sizes, **pads, **dd)
        num_tokens = self.patch_embed.num_patches + self.num_prefix_tokens
        self.cls_token = nn.Parameter(torch.empty(1, 1, embed_dim, **dd)) if self.num_prefix_tokens else None
        self.pos_embed = nn.Parameter(torch.empty(1, num_tokens, embed_dim, **dd))
        self.pos_drop = nn.Dropout(pos_drop_rate)

        period = 2 if mixer_args.get("wiring") == "alternate" else 1  # blocks with one order of the patches in a row
        turned = [scan_order == "rows_columns" and i // period % 2 == 1 for i in range(depth)]
        rates = cast("list[float]", calculate_drop_path_rates(drop_path_rate, depth))
        options = dict(eps=norm_eps, mixer=mixer, class_token=class_token, grid_conv=grid_conv, **mixer_args, **dd)
        options |= dict(mlp_ratio=mlp_ratio, mlp_conv=mlp_conv)
        options |= dict(residual_layers=2 * depth if mlp_ratio else depth)
        blocks = [Block(embed_dim, rates[i], reads_columns=turned[i], index=i, **options) for i in range(depth)]
        self.blocks = nn.Sequential(*blocks)
        reduction = self.patch_embed.feat_ratio()
        self.feature_info = [dict(module=f"blocks.{i}", num_chs=embed_dim, reduction=reduction) for i in range(depth)]
        self.norm: nn.Module = nn.RMSNorm(embed_dim, eps=norm_eps, **dd)
        self.head_drop = nn.Dropout(drop_rate)
        self._make_head(num_classes)
        self.init_weights(needs_reset=False)
        self.register_load_state_dict_pre_hook(rename_official)

    def _set_pool(self, global_pool: str) -> None:
        check_option("global_pool", global_pool, POOLS)
        if global_pool == "token" and self.class_token == "none":
            raise ValueError("global_pool='token' needs a class token; with class_token='none' use global_pool='avg'")
        self.global_pool = global_pool

    def _make_head(self, num_classes: int) -> None:
        self.num_classes = num_classes
        place = get_device_dtype(self)
        self.head = nn.Linear(self.embed_dim, num_classes, **place) if num_classes > 0 else nn.Identity()

    @torch.no_grad()
    def init_weights(self, needs_reset: bool = True) -> None:
        """Initialise as ViM does, and a stem of convolutions as torch does. With `needs_reset` also blocks, norm and
        such a stem, which are initialised when built."""
        if needs_reset:
            for part in (*self.blocks, self.norm):
                reset_mixer(part)
        stem = self.patch_embed.proj
        if isinstance(stem, nn.Conv2d):
            lecun_normal_(stem.weight)
            nn.init.zeros_(cast(Tensor, stem.bias))
        elif needs_reset:
            reset_mixer(stem)
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
        """Name, with wildcards, what timm's optimisers must not decay (they spare 1-D parameters by themselves)."""
        # Ask all modules, because a mixer may have been wrapped in another one.
        modules = self.blocks.named_modules()
        names = {f"*.{path}.{name}" for path, module in modules for name in getattr(module, "NO_WEIGHT_DECAY", ())}
        return {"pos_embed", "cls_token", *names}

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Return patterns that group parameters by depth, for layer-wise learning-rate decay."""
        start = r"^(?:model\.)?"  # timm's wrapper with features_only=True has these parameters in its "model"
        blocks = [(start + r"blocks\.(\d+)", None), (start + "norm", (99999,))]
        return dict(stem=start + "(?:cls_token|pos_embed|patch_embed)", blocks=blocks)

    @torch.jit.ignore
    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute each block in the backward pass instead of keeping its activations."""
        self.grad_checkpointing = enable

    @torch.jit.ignore
    def get_classifier(self) -> nn.Module:
        """Return the head, an Identity if there are no classes."""
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: Optional[str] = None) -> None:
        """Make a new head for `num_classes` (0 for none), and change the pooling if one is given.

        Raises:
            ValueError: no pooling is called `global_pool`, or it needs a class token and there is none.
        """
        if global_pool is not None:
            self._set_pool(global_pool)
        self._make_head(num_classes)
        self._init_head()

    def set_input_size(
        self,
        img_size: Optional[int | tuple[int, int]] = None,
        patch_size: Optional[int | tuple[int, int]] = None,
        patch_stride: Optional[int | tuple[int, int]] = None,
    ) -> None:
        """Take images (patches) of another size from now on. Position embedding and patch projection are resampled.

        If no `patch_stride` is given, overlapping patches keep theirs, and other patches still do not overlap. Raises
        ValueError as `StridedPatchEmbed.set_input_size` does, and with stem="conv" for any other patches.
        """
        patches, old_grid = self.patch_embed, self.patch_embed.grid_size
        patches.set_input_size(img_size=img_size, patch_size=patch_size, patch_stride=patch_stride)
        if patches.grid_size != old_grid:
            pos_embed = resample_pos_embed(self.pos_embed.detach(), self.class_token, old_grid, patches.grid_size)
            self.pos_embed = nn.Parameter(pos_embed, requires_grad=self.pos_embed.requires_grad)
        update_model_input_size(
            self, patches.img_size, patch_size=patches.patch_size, patch_stride=patches.patch_stride
        )

    def _check_images(self, x: Tensor) -> None:
        _assert(x.ndim == 4, f"images have {x.ndim} axes: give (batch, channels, height, width)")
        _assert(
            x.shape[1] == self.in_chans,
            f"images have {x.shape[1]} channels and the model takes {self.in_chans}: give in_chans to create_model",
        )
        if not self.dynamic_img_size:
            height, width = self.patch_embed.img_size
            message = (
                f"images are {x.shape[-2]} x {x.shape[-1]} and the model is built for {height} x {width}: give "
                "img_size to create_model, call model.set_input_size(), or build it with dynamic_img_size=True"
            )
            _assert(x.shape[-2] == height, message)
            _assert(x.shape[-1] == width, message)

    def _embed(self, x: Tensor) -> tuple[Tensor, int]:
        """Turn images (B, C, H, W) into tokens (B, L, embed_dim) with positions, and the number of rows of patches."""
        self._check_images(x)
        x = self.patch_embed(x)
        B, H, W, C = x.shape
        pos_embed: Tensor = self.pos_embed
        if self.dynamic_img_size:
            pos_embed = resample_pos_embed(pos_embed, self.class_token, self.patch_embed.grid_size, (H, W))
        x = x.reshape(B, H * W, C)
        if self.cls_token is not None:
            x = join_class(self.cls_token.to(x.dtype).expand(B, -1, -1), x, self.class_token)
        # The sum may leave the range of float16.
        x = x.float() if self.residual_in_fp32 or x.dtype == torch.float16 else x
        return self.pos_drop(x + pos_embed.to(x.dtype)), H

    def _norm(self, x: Tensor) -> Tensor:
        return self.norm(x.to(self.pos_embed.dtype))

    def forward_features(self, x: Tensor) -> Tensor:
        """Map images (B, C, H, W) to normalised tokens (B, L, embed_dim), the class token in its place among them."""
        x, rows = self._embed(x)
        if self.grad_checkpointing and not torch.jit.is_scripting():
            return self._norm(checkpoint_seq([partial(block, rows=rows) for block in self.blocks], x))
        for block in self.blocks:
            x = block(x, rows)
        return self._norm(x)

    def pool(self, x: Tensor) -> Tensor:
        """Pool tokens (B, L, C) to (B, C); with global_pool="" return them all."""
        if self.global_pool == "":
            return x
        token, patches = split_class(x, self.class_token)
        if token is not None and self.global_pool == "token":
            return token.squeeze(1)
        return patches.mean(1) if self.global_pool == "avg" else patches.amax(1)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Map tokens of `forward_features` to class scores (B, num_classes), or to the head's input (`pre_logits`)."""
        x = self.head_drop(self.pool(x))
        return x if pre_logits else self.head(x)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (B, C, H, W) to class scores (B, num_classes)."""
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
        """Return the outputs of chosen blocks, as timm's vision transformers give them.

        Args:
            x: (B, C, H, W) images.
            indices: a number n for the last n blocks, a list for the blocks of these indices, None for all.
            return_prefix_tokens: also return the class token of each, as pairs (patches, class token).
            norm: apply the final norm to them.
            stop_early: leave out the blocks after the last one asked for.
            output_fmt: "NCHW" maps (B, embed_dim, H, W) or "NLC" tokens (B, H W, embed_dim), without the class token.
            intermediates_only: leave out the final features.

        Returns:
            The list of intermediates, or (final features, intermediates).

        Raises:
            ValueError: `output_fmt` is not known.
            AssertionError: no block has such an index (timm's error).
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
                    patches = patches.transpose(1, 2).reshape(x.shape[0], self.embed_dim, H, W).contiguous()
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
        """Do as `forward_intermediates`, by DINO's name: return outputs of the last `n` blocks, or of those with the
        indices `n`, as tokens (B, H W, embed_dim), or with `reshape` as maps (B, embed_dim, H, W)."""
        form = "NCHW" if reshape else "NLC"
        found: list[Any] = self.forward_intermediates(
            x, n, return_prefix_tokens, norm, output_fmt=form, intermediates_only=True
        )
        return found

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Drop the blocks after the last of `indices`, and on request norm and head. Return the indices, from 0."""
        take, last = feature_take_indices(len(self.blocks), indices)
        self.blocks = self.blocks[: last + 1]
        if prune_norm:
            self.norm = nn.Identity()
        if prune_head:
            self.reset_classifier(0, "")
        return take
