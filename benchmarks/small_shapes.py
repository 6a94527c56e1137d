"""Every kernel once at small, awkward sizes, for a memory checker:

    compute-sanitizer --tool memcheck python benchmarks/small_shapes.py
    compute-sanitizer --tool racecheck python benchmarks/small_shapes.py
"""

import torch

from vision_longhorn.kernels import longhorn_scan, selective_scan
from vision_longhorn.models.mixers import BidirectionalMixer


def scans() -> None:
    for rule in ("diagonal", "exact", "mamba"):
        for B, L, D, N in ((2, 37, 70, 16), (1, 101, 64, 5), (1, 70, 33, 33)):
            for regime in ("sequential",) if rule == "exact" else ("sequential", "parallel"):
                x, step, k, q = (torch.randn(2, B, L, n, device="cuda", dtype=torch.bfloat16, requires_grad=True)
                                 for n in (D, D, N, N))
                z = torch.randn(B, L, D, device="cuda", dtype=torch.bfloat16, requires_grad=True)
                skip = torch.randn(2, D, device="cuda", requires_grad=True)
                options = dict(direction="both", combine="mean", regime=regime, backend="triton")
                if rule == "mamba":
                    y = selective_scan(x, step, -torch.rand(D, N, device="cuda"), k, q, z, skip, skip, **options)
                else:
                    y = longhorn_scan(x, step, k, q, z, skip, skip, rule=rule, **options)
                y.float().square().mean().backward()
                torch.cuda.synchronize()
                assert all(value.grad.isfinite().all() for value in (x, step, k, q, z, skip))
                print(rule, (B, L, D, N), regime, "ran")


def mixers() -> None:
    """Short convolution, gated norm and the sum of two directions, around the scans."""
    for B, L, dim in ((2, 37, 40), (1, 5, 24)):
        for arguments in (dict(), dict(wiring="shared"), dict(rule="mamba")):
            mixer = BidirectionalMixer(dim, d_state=8, **arguments).cuda()
            x = torch.randn(B, L, dim, device="cuda", requires_grad=True)
            with torch.autocast("cuda", torch.bfloat16):
                y = mixer(x)
            y.float().square().mean().backward()
            torch.cuda.synchronize()
            assert all(value.grad.isfinite().all() for value in (x, *mixer.parameters()))
            print("mixer", (B, L, dim), arguments, "ran")


if __name__ == "__main__":
    torch.manual_seed(0)
    scans()
    mixers()
