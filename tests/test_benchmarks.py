"""The benchmarks of models, loaders, several processes and long runs in a small setting on the CPU, and what they and
the profile make of their figures."""

import json
import os
import subprocess
import sys
from pathlib import Path

import PIL
import pytest
import timm
import torch
from accelerate.state import AcceleratorState, GradientState
from matplotlib.axes import Axes
from PIL import Image

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import bench_loader  # noqa: E402
import bench_model  # noqa: E402
import bench_scaling  # noqa: E402
import bench_trainer  # noqa: E402
import profile_model  # noqa: E402
import soak  # noqa: E402

from vision_longhorn.data import open_shards  # noqa: E402
from vision_longhorn.errors import UserError  # noqa: E402

CPU = ["--modes", "eager", "--steps", "1", "--seconds", "0", "--arg", "depth=1"]


def test_every_model_is_measured_and_a_failure_recorded(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "path", [*sys.path])  # to which it adds that of the official models
    models = [
        "vlonghorn_test",
        "no_such_model",
        "vim_test",
        "vlonghorn_test,class_token=nowhere",
        "deit_tiny_patch16_224,depth=1",
    ]
    bench_model.main(
        ["--models", *models, "--sizes", "2x32", *CPU, "--official", str(tmp_path), "--out", str(tmp_path)]
    )
    found = json.loads((tmp_path / "model.json").read_text())
    assert found["environment"]["torch"] == torch.__version__ and found["missing"] == []
    assert [(row["model"], row["pass"]) for row in found["models"]] == [
        (model, name) for model in models for name in ("train", "infer")
    ]
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
    said = capsys.readouterr().out
    assert "no_such_model" in said and "models_mamba" in said


def test_the_plot_shows_each_model_beside_the_deit_of_its_size(tmp_path, monkeypatch):
    """A label shows a model's arguments only where two lines share a name, and a single size makes no line."""
    rates = {
        "vlonghorn_small,save_states=True": 60.0,
        "vim_small": 20.0,
        "vim_small,wiring=alternate": 30.0,
        "deit_small_patch16_224": 100.0,
    }
    rates |= {"vlonghorn_tiny": 90.0, "vim_small_best": 50.0}  # beside no DeiT, and at 224 px alone
    rows = [
        dict(model=name, batch=1, resolution=resolution, mode="graphs", images_per_s=rate, GiB=1.0) | {"pass": "train"}
        for name, rate in rates.items()
        for resolution in (224, 448)
        if (name, resolution) != ("vim_small_best", 448)
    ]
    drawn = []
    monkeypatch.setattr(Axes, "annotate", lambda self, text, *place, **how: drawn.append((text.strip(), *place)))
    bench_model.plot(bench_model.best_of_modes(rows), tmp_path / "plot.png", "a GPU")
    lines = [("vlonghorn_small", 0.6), ("vim_small", 0.2), ("vim_small,wiring=alternate", 0.3)]
    assert drawn[1:] == [(label, (448, rate)) for label, rate in lines] and drawn[0][0] == "DeiT"
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_earlier_rows_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    bench_model.main(["--models", "vlonghorn_test", "--sizes", "2x32", "1x64", *CPU, "--out", str(tmp_path)])
    found = json.loads((tmp_path / "model.json").read_text())
    assert [row["resolution"] for row in found["best"]] == [32, 64]

    # Earlier rows stay, those measured again are replaced, and the file says what each part ran on.
    first = tmp_path / "first.json"
    (tmp_path / "model.json").rename(first)
    options = ["--merge", str(first), "--out", str(tmp_path)]
    bench_model.main([*options, "--models", "vlonghorn_test", "--sizes", "1x64", "--passes", "infer", *CPU])
    again = json.loads((tmp_path / "model.json").read_text())
    assert [(row["resolution"], row["pass"]) for row in again["models"]] == [
        (32, "train"), (32, "infer"), (64, "train"), (64, "infer")]  # fmt: skip
    dated = [{"date": found["environment"]["date"], **row} for row in found["models"]]
    assert again["models"][:3] == dated[:3] and again["models"][3]["ms"] != dated[3]["ms"]
    assert again["earlier"] == [found["environment"]] and again["missing"] == []
    bench_model.main([*options, "--budget", "0"])
    alone = json.loads((tmp_path / "model_documented.json").read_text())
    assert (alone["environment"], alone["models"]) == (found["environment"], dated)
    late = ["--models", "vlonghorn_test", "--sizes", "1x64", "--budget", "-1", *CPU]
    bench_model.main([*options, *late])  # no time for what was to be measured again: what there was stays
    again = json.loads((tmp_path / "model.json").read_text())
    assert again["models"] == dated and [row["pass"] for row in again["missing"]] == ["train", "infer"]
    found["environment"]["gpu"] = "another"
    first.write_text(json.dumps(found))
    with pytest.raises(UserError, match="of another, and others are of a CPU"):
        bench_model.main([*options, "--models", "vlonghorn_test", "--sizes", "1x64", *CPU])


def test_without_models_it_measures_what_the_documents_show_and_is_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    measured = []

    def attempt(row, model, *_):
        assert timm.is_model(model.name)
        measured.append((row["batch"], row["resolution"], row["model"]))
        return row | dict(images_per_s=1.0, ms=1.0, GiB=1.0)

    monkeypatch.setattr(bench_model, "attempt", attempt)
    bench_model.main(["--sizes", "64x448", "8x1248", "--passes", "train", "--out", str(tmp_path)])
    assert (tmp_path / "model_over_resolution.png").exists()
    found = json.loads((tmp_path / "model_documented.json").read_text())["models"]
    assert {row["mode"] for row in found} == {"graphs"}
    (one,) = [row["args"] for row in found if row["model"] == "vlonghorn_small_fast" and row["batch"] == 8]
    assert (one["save_states"], one["residual_in_fp32"], one["wiring"]) == (True, False, "alternate")
    (one,) = [row["args"] for row in found if row["model"].startswith("vim_small,") and row["batch"] == 8]
    assert one["residual_in_fp32"] is True
    first = measured.copy()
    (tmp_path / "model_documented.json").rename(tmp_path / "first.json")
    bench_model.main(["--merge", str(tmp_path / "first.json"), "--passes", "train", "--out", str(tmp_path)])
    later = measured[len(first) :]
    assert not {*first} & {*later} and (256, 224, "vlonghorn_tiny_fast") in later
    assert sorted(measured) == sorted((*size, word) for size, _, words in bench_model.DOCUMENTED for word in words)


def test_a_size_that_the_documents_do_not_show_needs_models(tmp_path):
    with pytest.raises(UserError, match="none of these --sizes: give --models, or some of 128x224, 256x224"):
        bench_model.main(["--sizes", "64x224", "--out", str(tmp_path)])
    assert not list(tmp_path.iterdir())


def test_out_of_time_says_what_is_missing(tmp_path, capsys):
    bench_model.main(["--budget", "-1", "--models", "vim_test", "--sizes", "1x32", "--out", str(tmp_path)])
    found = json.loads((tmp_path / "model.json").read_text())
    assert found["models"] == [] and len(found["missing"]) == 4
    said = capsys.readouterr().out
    assert "not measured" in said and all(
        f"vim_test, {mode}, 1 x 32 px, {name}" in said for mode in ("eager", "compiled") for name in ("train", "infer")
    )


@pytest.mark.parametrize("word", ["256", "0x224", "8x1248x3"])
def test_size_that_is_none(word):
    with pytest.raises(UserError, match="BATCHxRESOLUTION"):
        bench_model.main(["--sizes", word])


def test_earlier_rows_have_the_names_of_now(tmp_path):
    rows = [{**row, "args": {}} for name in ("vlonghorn_tiny,depth=1", "vlonghorn_tiny_exact", "deit_tiny_patch16_224")
            for row in rows_of(name, "eager", 200, train=3.0)]  # fmt: skip
    rows += [{**row, "args": {"all_arguments": True}} for row in rows_of("vlonghorn_tiny", "eager", 200, train=3.0)]
    (tmp_path / "model.json").write_text(json.dumps({"environment": {"date": "today"}, "models": rows}))
    _, found = bench_model.earlier_runs([tmp_path / "model.json"], [])
    assert [row["model"] for row in found] == [
        "vlonghorn_tiny_paper,depth=1", "vlonghorn_tiny_exact", "deit_tiny_patch16_224", "vlonghorn_tiny"]  # fmt: skip


def rows_of(model, mode, resolution, **speeds):
    return [
        dict(model=model, mode=mode, batch=1, resolution=resolution, images_per_s=speed, GiB=None) | {"pass": name}
        for name, speed in speeds.items()
    ]


def test_best_of_modes():
    rows = [
        *rows_of("vlonghorn_tiny", "eager", 200, train=3.0, infer=9.0),
        *rows_of("vlonghorn_tiny", "compiled", 200, train=4.0, infer=1.0),
        *rows_of("deit_tiny_patch16_224", "eager", 200, train=8.0, infer=6.0),
        *rows_of("deit_small_patch16_224", "eager", 200, train=1.0, infer=1.0),
    ]
    best = bench_model.best_of_modes([*rows, {"error": "out of memory"}])
    first = best[0]
    assert (first["train mode"], first["train ratio"]) == ("compiled", 0.5)
    assert (first["infer mode"], first["infer ratio"]) == ("eager", 1.5)


@pytest.mark.parametrize(
    "name, size",
    [
        ("vim_tiny (official)", "tiny"),
        ("vlonghorn_small_exact", "small"),
        ("deit3_base_patch16_224,depth=1", "base"),
        ("resnet50", None),
    ],
)
def test_size_in_a_name(name, size):
    assert bench_model.size_of(name) == size


@pytest.mark.parametrize(
    "kernel, part",
    [
        ("_forward_kernel", "scan forward"),
        ("_backward_kernel", "scan backward"),
        ("_norm_kernel", "scan, other"),
        ("_adjoint_kernel", "scan, other"),
        ("_add_kernel", "scan, other"),
        ("_finish_rows_kernel", "scan, other"),
        ("_conv_backward_kernel", "short convolution"),
        ("_grid_conv_backward_kernel", "short convolution"),
        ("_finish_taps_kernel", "short convolution"),
        ("_pad_kernel", "elementwise, copies and casts"),
        ("void at::native::(anonymous namespace)::conv_depthwise2d_forward_kernel<4, int>", "short convolution"),
        ("_gated_norm_kernel", "gated norm"),
        ("_skip_backward_kernel", "gated skip"),
        ("triton_red_fused__scaled_dot_product_flash_attention_backward_add_3", profile_model.FUSED),
        ("_x_proj_forward_kernel", "matrix products"),
        ("triton_tem_fused_mm_12", "matrix products"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits>", "attention"),
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT", "matrix products"),
        ("void cublasLt::splitKreduce_kernel<32, 16>", "matrix products"),
        ("void at::native::multi_tensor_apply_kernel<at::native::FusedAdamMathFunctor>", "optimizer"),
        ("void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<c10::BFloat16>", "norms"),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>", "reductions"),
        ("Memcpy DtoD (Device -> Device)", "elementwise, copies and casts"),
        ("void at::native::(anonymous namespace)::max_pool_forward_nchw", "other"),
    ],
)
def test_part_of_a_kernel(kernel, part):
    assert profile_model.part_of(kernel) == part


def test_sums_of_parts():
    kernels = [
        profile_model.Kernel("nvjet_a", 4, 6.0),
        profile_model.Kernel("nvjet_b", 2, 1.0),
        profile_model.Kernel("_forward_kernel", 2, 1.0),
    ]
    assert profile_model.sum_parts(kernels, 2, {"optimizer": 0.5}) == [
        dict(part="scan forward", launches=1, ms=0.5, share=12.5, budget_ms=None),
        dict(part="matrix products", launches=3, ms=3.5, share=87.5, budget_ms=None),
        dict(part="optimizer", launches=0, ms=0, share=0, budget_ms=0.5),
    ]


@pytest.mark.parametrize("wiring, sets", [("vim", 2), ("shared", 1), ("alternate", 1)])
def test_budget_from_the_dimensions(wiring, sets):
    with torch.device("meta"):
        model = timm.create_model("vlonghorn_tiny_paper", wiring=wiring, depth=3)
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
def test_profile_says_that_it_needs_a_gpu():
    with pytest.raises(UserError, match="needs a GPU"):
        profile_model.main(["--model", "vlonghorn_test"])


@pytest.fixture
def command_line(monkeypatch):
    """Runs the main() of a script that reads its arguments from the process, as one that has no GPU."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("VISION_LONGHORN_COMMIT", "0123abc")

    def run(script, *words):
        monkeypatch.setattr(sys, "argv", [script.__file__, *map(str, words)])
        script.main()

    return run


def test_two_processes_train_and_are_timed(tmp_path, command_line):
    command_line(bench_scaling, "--processes", 2, "--model", "vlonghorn_test", "--resolution", 32, "--batch", 3,
                 "--steps", 1, "--warm-up", 1, "--no-compile", "--out", tmp_path)  # fmt: skip
    found = json.loads((tmp_path / "scaling.json").read_text())
    assert (found["environment"]["torch"], found["environment"]["timm"]) == (torch.__version__, timm.__version__)
    assert found["environment"]["commit"] == "0123abc" and "--batch 3" in found["environment"]["command"]
    assert (found["options"]["model"], found["options"]["batch"], found["options"]["compile"]) == (
        "vlonghorn_test",
        3,
        False,
    )
    (row,) = found["scaling"]
    assert (row["processes"], row["efficiency"], row["GiB"]) == (2, 1, None)
    assert row["ms"] > 0 and row["images_per_s"] == pytest.approx(2 * 3 / row["ms"] * 1e3)


def test_efficiency_is_against_each_process_of_the_first_row(tmp_path, command_line, monkeypatch):
    speeds, commands = iter([100.0, 150.0, 400.0]), []

    def launcher(command, **_):
        commands.append(command)
        count = int(next(word for word in command if "nproc" in word).partition("=")[2])
        if count == 3:
            return subprocess.CompletedProcess(command, 1, stdout="")
        row = dict(processes=count, ms=1.0, images_per_s=next(speeds), GiB=None)
        return subprocess.CompletedProcess(command, 0, stdout=f"a word of a library\n{json.dumps(row)}\n")

    monkeypatch.setattr(bench_scaling.subprocess, "run", launcher)
    monkeypatch.setattr(bench_scaling, "environment", dict)
    words = ["--model", "vim_test", "--compress-gradients", "--out", tmp_path]
    command_line(bench_scaling, "--processes", 1, 2, 4, *words)
    rows = json.loads((tmp_path / "scaling.json").read_text())["scaling"]
    assert [(row["processes"], row["efficiency"]) for row in rows] == [(1, 1), (2, 0.75), (4, 1)]
    assert all("vim_test" in command and "--compress-gradients" in command for command in commands)
    with pytest.raises(UserError, match="with 3 processes it ended with 1"):
        command_line(bench_scaling, "--processes", 3, *words)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(sys, "argv", ["bench_scaling.py", "--processes", "3"])
    with pytest.raises(UserError, match="--processes 3: there are 2 GPUs here"):
        bench_scaling.main()


def test_a_short_soak(tmp_path, command_line, monkeypatch):
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    monkeypatch.chdir(tmp_path)
    command_line(soak, "--updates", 6, "--batch-size", 256, "--workers", 1, "--out", "out",
                 "--model-kwargs", "depth=1", "embed_dim=32", "img_size=8")  # fmt: skip
    found = json.loads((tmp_path / "out" / "soak.json").read_text())
    assert found["environment"]["torch"] == torch.__version__ and found["environment"]["commit"] == "0123abc"
    # Two epochs of five updates hold six; each ends with an entry. A GPU's memory is no curve of a CPU.
    assert {name: [update for update, _ in points] for name, points in found["curves"].items()} == dict.fromkeys(
        ("images_per_s", "host_gib", "data_wait"), [5, 10]
    )
    rows = {row["what"]: row for row in found["rows"]}
    assert rows.keys() == {"images/s", "host, GiB", "data wait"}
    assert rows["images/s"]["first"] == found["curves"]["images_per_s"][0][1] > 0
    assert rows["host, GiB"]["change"] == pytest.approx(rows["host, GiB"]["last"] / rows["host, GiB"]["first"] - 1)
    assert 0.1 < rows["host, GiB"]["last"] < 50 and 0 <= rows["data wait"]["last"] <= 1
    assert (tmp_path / "out" / "soak.png").stat().st_size > 1000


def test_a_soak_compares_quarters_and_leaves_the_start_out():
    points = [(update, 9e9 if update <= 100 else float(update)) for update in range(20, 1001, 20)]
    found = soak.compare(points, 1000)  # 45 are left, 120 to 1,000; a quarter are 11 of them
    assert found == dict(first=220, last=900, change=900 / 220 - 1)
    assert soak.compare([(500, 0.0), (1000, 0.0)], 1000) == dict(first=0, last=0, change=None)


def test_loaders_are_timed_side_by_side(tmp_path, monkeypatch):
    (tmp_path / "images" / "cat").mkdir(parents=True)
    for number, side in enumerate((260, 320, 1100, 90)):  # the last one is too small
        Image.effect_noise((side, side - 20), 60).convert("RGB").save(tmp_path / "images" / "cat" / f"{number}.jpg")
    monkeypatch.setenv("VISION_LONGHORN_COMMIT", "0123abc")
    for name, value in ("DEVICE", torch.device("cpu")), ("PER_SHARD", 20), ("ROUNDS", 2):
        monkeypatch.setattr(bench_loader, name, value)
    threads = torch.get_num_threads()
    cores = os.sched_getaffinity(0)
    try:
        bench_loader.main([str(tmp_path / "images"), "--batch-size", "2", "--seconds", "0.2", "--out", str(tmp_path)])
    finally:
        torch.set_num_threads(threads)
    assert os.sched_getaffinity(0) == cores
    found = json.loads((tmp_path / "loader_cpu.json").read_text())
    versions = {name: found["environment"][name] for name in ("torch", "timm", "pillow", "commit")}
    assert versions == dict(torch=torch.__version__, timm=timm.__version__, pillow=PIL.__version__, commit="0123abc")
    assert found["images"]["files"] == 3
    assert found["images"]["mean_pixels"] == (260 * 240 + 320 * 300 + 1100 * 1080) / 3
    rows = {row["loader"]: row for row in found["loaders"]}
    assert (
        rows.keys()
        == {
            "timm",
            "timm, prefetcher",
            "ours, all in workers",
            "ours, split",
            "ours, split, workers crop, 3 views",
            "ours, split, 3 views",
            "ours, split, in memory",
            "ours, split, --max-side 500",
            "ours, split, --max-side 400",
        }
        and len(found["loaders"]) == 9
    )
    for row in rows.values():
        assert "error" not in row
        assert row["per_core"] == row["images_per_s"] > 0 and row["per_cpu_second"] > 0 and row["times_timm"] > 0
    assert rows["timm"]["times_timm"] == 1
    assert len(found["stages"]) == 9 and all(row["ms"] > 0 for row in found["stages"])
    assert found["crop"]["crops"] == 9 and 0 <= found["crop"]["mean"] < 1 and found["crop"]["above_1"] < 0.05


def test_the_trainer_is_timed_beside_its_update(tmp_path, monkeypatch):
    for number in range(3):
        Image.new("RGB", (220, 100), (80 * number, 0, 0)).save(tmp_path / f"{number}.jpg")

    def rate(cfg, folder):
        shards = open_shards(cfg.data, cfg.train_split, cfg.train_samples)
        assert shards.num_classes is None and cfg.num_classes == 1000  # without either the trainer refuses the shards
        assert len(shards.urls) > cfg.workers and cfg.epochs == 2 and cfg.auto_augment.startswith("rand-m9")
        return 100.0 * cfg.repeats

    monkeypatch.setattr(bench_trainer, "train", rate)
    monkeypatch.setattr(bench_trainer, "time_update", lambda cfg, accelerator: 200.0 * cfg.model_kwargs["depth"])
    words = ["--config", "vlonghorn_tiny", "--workers", "2", "5", "--repeats", "3", "--max-side", "200"]
    bench_trainer.main([str(tmp_path), *words, "--model-kwargs", "depth=2", "--out", str(tmp_path)])
    found = json.loads((tmp_path / "trainer.json").read_text())
    assert [(row["workers"], row["images_per_s"], row["ratio"]) for row in found["trainer"]] == [
        (2, 300.0, 0.75),
        (5, 300.0, 0.75),
    ]
    assert found["images"]["files"] == 3 and found["config"]["model_kwargs"]["save_states"]
    with pytest.raises(UserError, match="no JPEG files of 200 pixels or more"):
        bench_trainer.main([str(tmp_path / "empty")])


@pytest.mark.parametrize(
    "folder, words, message",
    [
        ("empty", [], "empty holds no JPEG file with a side of at least 200 pixels"),
        ("nowhere", [], "nowhere holds no JPEG file"),
        ("small", [], "small holds no JPEG file with a side of at least 200 pixels"),
        ("small", ["--min-side", "9", "--workers", "99999"], "--workers 99999: give 1 to"),
    ],
)
def test_loaders_need_pictures_and_cores(tmp_path, folder, words, message):
    (tmp_path / "empty").mkdir()
    (tmp_path / "small").mkdir()
    Image.new("RGB", (90, 90)).save(tmp_path / "small" / "0.jpg")
    with pytest.raises(UserError) as caught:
        bench_loader.main([str(tmp_path / folder), *words, "--out", str(tmp_path / "out")])
    assert message in str(caught.value)
    assert not (tmp_path / "out").exists()
