"""The benchmark of whole models in a small setting on the CPU, and what it and the profile make of their figures."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import timm
import torch

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import bench_model  # noqa: E402
import profile_model  # noqa: E402

CPU = ["--modes", "eager", "--steps", "1", "--seconds", "0", "--arg", "depth=1"]


def test_every_model_is_measured_and_a_failure_recorded(tmp_path):
    models = ["vlonghorn_test", "no_such_model", "vim_test", "vlonghorn_test,class_token=nowhere",
              "deit_tiny_patch16_224,depth=1"]
    run = subprocess.run(
        [sys.executable, str(BENCHMARKS / "bench_model.py"), "--models", *models, "--sizes", "2x32", *CPU,
         "--official", str(tmp_path), "--out", str(tmp_path)],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    found = json.loads((tmp_path / "model.json").read_text())
    assert found["environment"]["torch"] == torch.__version__ and found["missing"] == []
    assert [(row["model"], row["pass"]) for row in found["models"]] == [
        (model, name) for model in models for name in ("train", "infer")]
    for row in found["models"]:
        assert (row["batch"], row["resolution"], row["mode"]) == (2, 32, "eager")
        if row["model"] == "no_such_model":
            assert "no_such_model" in row["error"] and "ms" not in row
        elif "nowhere" in row["model"]:
            assert "class_token" in row["error"]
        else:
            assert "error" not in row
            assert row["images_per_s"] > 0 and row["ms"] > 0 and row["first_step_s"] > 0 and row["steps"] >= 1
            assert row["GiB"] is None or row["GiB"] > 0
    assert [row["model"] for row in found["best"]] == [models[0], models[2], models[4]]
    assert not found["official"]["imported"] and "models_mamba" in found["official"]["error"]
    assert "no_such_model" in run.stdout and "models_mamba" in run.stdout


def test_sweep_leaves_a_plot(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    bench_model.main(["--sweep", "--models", "vlonghorn_test", "--sizes", "2x32", "1x64", *CPU, "--out", str(tmp_path)])
    found = json.loads((tmp_path / "model_sweep.json").read_text())
    assert [row["resolution"] for row in found["best"]] == [32, 64]
    assert (tmp_path / "model_over_resolution.png").stat().st_size > 1000


def test_out_of_time_says_what_is_missing(tmp_path, capsys):
    bench_model.main(["--budget", "-1", "--models", "vim_test", "--sizes", "1x32", "--out", str(tmp_path)])
    found = json.loads((tmp_path / "model.json").read_text())
    assert found["models"] == [] and len(found["missing"]) == 4
    said = capsys.readouterr().out
    assert "not measured" in said and all(f"vim_test, {mode}, 1 x 32 px, {name}" in said
                                          for mode in ("eager", "compiled") for name in ("train", "infer"))


@pytest.mark.parametrize("word", ["256", "0x224", "8x1248x3"])
def test_size_that_is_none(word, capsys):
    with pytest.raises(SystemExit):
        bench_model.main(["--sizes", word])
    assert "BATCHxRESOLUTION" in capsys.readouterr().err


def test_sweep_keeps_the_number_of_patches():
    sizes = bench_model.sweep_sizes()
    assert sizes[0] == (256, 224) and (8, 1248) in sizes and sizes[-1] == (2, 2496)
    assert all(abs(batch * (px // 16) ** 2 / (256 * 196) - 1) < 0.05 for batch, px in sizes)


def rows_of(model, mode, resolution, **speeds):
    return [dict(model=model, mode=mode, batch=1, resolution=resolution, images_per_s=speed, GiB=None) | {"pass": name}
            for name, speed in speeds.items()]


def test_best_of_modes_and_crossing():
    rows = [*rows_of("vlonghorn_tiny", "eager", 200, train=3.0, infer=9.0),
            *rows_of("vlonghorn_tiny", "compiled", 200, train=4.0, infer=1.0),
            *rows_of("deit_tiny_patch16_224", "eager", 200, train=8.0, infer=6.0),
            *rows_of("deit_small_patch16_224", "eager", 200, train=1.0, infer=1.0),
            *rows_of("vlonghorn_tiny", "eager", 800, train=3.0, infer=5.0),
            *rows_of("deit_tiny_patch16_224", "eager", 800, train=2.0, infer=1.0)]
    best = bench_model.best_of_modes([*rows, {"error": "out of memory"}])
    first = best[0]
    assert (first["train mode"], first["train ratio"]) == ("compiled", 0.5)
    assert (first["infer mode"], first["infer ratio"]) == ("eager", 1.5)
    # From a ratio of 0.5 at 200 px to 1.5 at 800 px: 1 is half of the way, and 400 px half of it in the logarithm.
    assert bench_model.crossings(best) == [dict(model="vlonghorn_tiny", over="deit_tiny_patch16_224",
                                                train="from 400 px", infer="from 200 px or less")]
    assert bench_model.overtakes({224: 2.0, 448: 0.5, 896: 0.9}) == "not up to 896 px"


@pytest.mark.parametrize("name, size", [("vim_tiny (official)", "tiny"), ("vlonghorn_small_exact", "small"),
                                        ("deit3_base_patch16_224,depth=1", "base"), ("resnet50", None)])
def test_size_in_a_name(name, size):
    assert bench_model.size_of(name) == size


@pytest.mark.parametrize("kernel, part", [
    ("_forward_kernel", "scan forward"),
    ("_backward_kernel", "scan backward"),
    ("_norm_kernel", "scan, other"),
    ("_adjoint_kernel", "scan, other"),
    ("_add_kernel", "scan, other"),
    ("_conv_backward_kernel", "short convolution"),
    ("void at::native::(anonymous namespace)::conv_depthwise2d_forward_kernel<4, int>", "short convolution"),
    ("_gated_norm_kernel", "gated norm"),
    ("triton_red_fused__scaled_dot_product_flash_attention_backward_add_3", profile_model.FUSED),
    ("triton_tem_fused_mm_12", "matrix products"),
    ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits>", "attention"),
    ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT", "matrix products"),
    ("void cublasLt::splitKreduce_kernel<32, 16>", "matrix products"),
    ("void at::native::multi_tensor_apply_kernel<at::native::FusedAdamMathFunctor>", "optimizer"),
    ("void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<c10::BFloat16>", "norms"),
    ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>", "reductions"),
    ("Memcpy DtoD (Device -> Device)", "elementwise, copies and casts"),
    ("void at::native::(anonymous namespace)::max_pool_forward_nchw", "other"),
])
def test_part_of_a_kernel(kernel, part):
    assert profile_model.part_of(kernel) == part


def test_sums_of_parts():
    kernels = [profile_model.Kernel("nvjet_a", 4, 6.0), profile_model.Kernel("nvjet_b", 2, 1.0),
               profile_model.Kernel("_forward_kernel", 2, 1.0)]
    assert profile_model.sum_parts(kernels, 2, {"optimizer": 0.5}) == [
        dict(part="scan forward", launches=1, ms=0.5, share=12.5, budget_ms=None),
        dict(part="matrix products", launches=3, ms=3.5, share=87.5, budget_ms=None),
        dict(part="optimizer", launches=0, ms=0, share=0, budget_ms=0.5)]


@pytest.mark.parametrize("wiring, sets", [("vim", 2), ("shared", 1)])
def test_budget_from_the_dimensions(wiring, sets):
    with torch.device("meta"):
        model = timm.create_model("vlonghorn_tiny", wiring=wiring, depth=3)
    # Projections of 192 to 2 x 384, 384 to 12 + 2 x 16 and 12 to 384 for each set, and 384 to 192.
    products = 192 * 768 + sets * 384 * (12 + 32) + sets * 12 * 384 + 384 * 192
    found = profile_model.products_ms(model.blocks, 100, 1e9, 1e30, training=True)
    assert found == pytest.approx(3 * 3 * 2 * 100 * products / 1e9 * 1e3)
    moved = 192 + 768 + sets * (384 + 44) + sets * (12 + 384) + 384 + 192
    found = profile_model.products_ms(model.blocks, 100, 1e30, 1e9, training=False)
    assert found == pytest.approx(3 * 2 * 100 * moved / 1e9 * 1e3)
    found = profile_model.passes_ms(model, 100, 1e9, training=True)
    assert found["short convolution"] == pytest.approx(3 * 100 * 2 * 384 * (3 + 2 * sets) / 1e9 * 1e3)
    assert ("gated norm" in found) == (wiring == "shared")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_profile_says_that_it_needs_a_gpu(capsys):
    with pytest.raises(SystemExit):
        profile_model.main(["--model", "vlonghorn_test"])
    assert "needs a GPU" in capsys.readouterr().err
