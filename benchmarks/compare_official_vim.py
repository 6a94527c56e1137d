"""Puts random weights of the official Vision Mamba class into ours and compares their outputs, on a CPU.

    python benchmarks/compare_official_vim.py PATH    # a checkout of hustvl/Vim; needs einops, which that code imports

The official class needs CUDA extensions, and its path without them drops the backward direction. So the extensions are
replaced here: the scan by the reference that the official code publishes, for both directions; what its fused kernel
does around the scan, and the norm, by a few lines of torch. Model, mixer and scan are read from the checkout. Weights
go through a file and `timm.create_model(..., pretrained=True)`, strictly.

Prints, for each model and image size, the largest difference of the class scores over the largest score, and for
comparison the same for another image; exits with 1 if a difference is above 1e-4.
"""

import argparse
import sys
import tempfile
import types
from pathlib import Path

import timm
import timm.layers
import timm.models.vision_transformer
import torch
import torch.nn.functional as F
from common import describe, table
from torch import Tensor, nn

import vision_longhorn  # noqa: F401  (registers the models)
from vision_longhorn.command_line.parser import Parser, run_cli
from vision_longhorn.errors import UserError

BAR = 1e-4
WIDTHS = {"tiny": 192, "small": 384, "base": 768}
CASES = (("vim_tiny", 224), ("vim_tiny", 160), ("vim_small", 224), ("vim_small", 160), ("vim_tiny_stride8", 160))


class RMSNorm(nn.Module):
    """The part of its fused norm that the official model needs."""

    def __init__(self, size: int, eps: float = 1e-5, device=None, dtype=None):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))
        self.register_parameter("bias", None)

    def forward(self, x: Tensor) -> Tensor:
        return x / torch.sqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


def _stub(name: str, **values: object) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__dict__.update(values)
    sys.modules[name] = module
    return module


def _run_file(name: str, path: Path) -> types.ModuleType:
    module = _stub(name)
    exec(compile(path.read_text(), str(path), "exec"), module.__dict__)
    return module


def official_models(checkout: Path) -> types.ModuleType:
    """Import the checkout's vim/models_mamba.py with its extensions replaced."""
    packages = checkout / "mamba-1p1p1" / "mamba_ssm"
    for name in ("mamba_ssm", "mamba_ssm.modules", "mamba_ssm.ops", "mamba_ssm.ops.triton", "mamba_ssm.utils"):
        _stub(name).__path__ = []
    _stub("causal_conv1d", causal_conv1d_fn=None, causal_conv1d_update=None)
    _stub("causal_conv1d_cuda")
    _stub("selective_scan_cuda")
    scan = _run_file("mamba_ssm.ops.selective_scan_interface", packages / "ops" / "selective_scan_interface.py")

    def inner(
        xz,
        conv_weight,
        conv_bias,
        x_proj,
        dt_proj,
        A,
        B=None,
        C=None,
        D=None,
        delta_bias=None,
        delta_softplus=True,
        **_,
    ):
        L, R, N = xz.shape[-1], dt_proj.shape[1], A.shape[1]
        x, z = xz.chunk(2, 1)  # (B, D, L) each
        past = conv_weight.shape[-1] - 1
        x = F.silu(F.conv1d(x, conv_weight, conv_bias, padding=past, groups=len(conv_bias))[..., :L])
        low = x_proj @ x  # (B, R + 2 N, L)
        return scan.selective_scan_ref(
            x,
            dt_proj @ low[:, :R],
            A,
            low[:, R : R + N],
            low[:, R + N :],
            D,
            z=z,
            delta_bias=delta_bias,
            delta_softplus=delta_softplus,
        )

    scan.mamba_inner_fn_no_out_proj = inner
    _stub("mamba_ssm.ops.triton.layer_norm", RMSNorm=RMSNorm, layer_norm_fn=None, rms_norm_fn=None)
    _stub("mamba_ssm.ops.triton.selective_state_update", selective_state_update=None)
    _stub("mamba_ssm.utils.generation", GenerationMixin=object)
    _stub("mamba_ssm.utils.hf", load_config_hf=None, load_state_dict_hf=None)
    _stub("rope", VisionRotaryEmbeddingFast=None)
    _run_file("mamba_ssm.modules.mamba_simple", packages / "modules" / "mamba_simple.py")
    # Names that timm had when that code was written.
    _stub("timm.models.registry", register_model=lambda function: function)
    _stub(
        "timm.models.layers",
        **{name: getattr(timm.layers, name) for name in ("DropPath", "lecun_normal_", "to_2tuple", "trunc_normal_")},
    )
    for name in ("_cfg", "_load_weights"):
        if not hasattr(timm.models.vision_transformer, name):
            setattr(timm.models.vision_transformer, name, lambda **_: {})
    return _run_file("models_mamba", checkout / "vim" / "models_mamba.py")


def compare(official: types.ModuleType, name: str, size: int, depth: int) -> dict:
    torch.manual_seed(0)
    theirs = official.VisionMamba(
        img_size=size,
        patch_size=16,
        stride=8 if "stride8" in name else 16,
        embed_dim=WIDTHS[name.split("_")[1]],
        depth=depth,
        rms_norm=True,
        residual_in_fp32=True,
        fused_add_norm=False,
        final_pool_type="mean",
        if_abs_pos_embed=True,
        bimamba_type="v2",
        if_cls_token=True,
        if_divide_out=True,
        use_middle_cls_token=True,
    ).eval()
    with torch.no_grad():
        for key, value in theirs.named_parameters():  # off their initial values, so that no two could be mixed up
            value.add_(torch.randn_like(value), alpha=0.02 if key.startswith("layers") else 0.2)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "weights.pth"
        torch.save({"model": theirs.state_dict(), "args": argparse.Namespace(lr=1)}, path)
        ours = timm.create_model(
            name, img_size=size, depth=depth, pretrained=True, pretrained_cfg_overlay=dict(file=str(path))
        ).eval()
    image = torch.randn(1, 3, size, size)
    with torch.no_grad():
        right, other = theirs(image), theirs(image.flip(-1))
        found = ours(image)
    scale = right.abs().max()
    return dict(
        model=name,
        size=size,
        depth=depth,
        parameters=sum(value.numel() for value in ours.parameters()),
        difference=((found - right).abs().max() / scale).item(),
        other=((other - right).abs().max() / scale).item(),
    )


def main() -> int:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="a checkout of hustvl/Vim")
    parser.add_argument("--depth", type=int, default=24, help="blocks (24)")
    args = parser.parse_args()
    try:
        official = official_models(args.checkout)
    except (ImportError, OSError) as error:
        raise UserError(f"the official code cannot be read from {args.checkout}: {describe(error)}") from error
    rows = [compare(official, name, size, args.depth) for name, size in CASES]
    table(
        "official Vision Mamba and ours, same weights",
        rows,
        model=("model", ""),
        size=("px", "d"),
        depth=("blocks", "d"),
        parameters=("parameters", ",d"),
        difference=("difference", ".1e"),
        other=("another image", ".2f"),
    )
    return int(max(row["difference"] for row in rows) > BAR)


if __name__ == "__main__":
    run_cli(lambda: sys.exit(main()))
