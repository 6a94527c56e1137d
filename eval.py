"""Evaluates a checkpoint, or any timm model, on image shards: top-1, top-5, loss and count, printed and saved as JSON.

    accelerate launch eval.py --checkpoint runs/NAME/best.pt
    accelerate launch eval.py --model resnet50 --pretrained --data DIR --split val

Any number of processes gives the same counts. A checkpoint of a training run brings its model, classes, data, input
size, normalisation and crop.
"""

import json
from pathlib import Path

from timm.data import create_transform

from vision_longhorn.checkpoint import create_model, load_checkpoint, load_weights, write_text
from vision_longhorn.config import parse_pairs
from vision_longhorn.data import eval_loader, open_shards
from vision_longhorn.errors import Parser, UserError, run_cli
from vision_longhorn.evaluate import describe, evaluate, input_settings, locate_data, make_accelerator


def main(argv=None):
    """Evaluates as the command line `argv` says (default: the process's own) and returns the result, a dict."""
    args = parse(argv)
    accelerator = make_accelerator(args.device, args.precision)

    # What the checkpoint says of itself stands in for what the command line leaves open.
    checkpoint = {}
    if args.checkpoint:
        path = Path(args.checkpoint, "best.pt") if Path(args.checkpoint).is_dir() else Path(args.checkpoint)
        checkpoint = load_checkpoint(path)
    values = checkpoint.get("config", {})
    name = args.model or checkpoint.get("arch")
    if name is None:
        raise UserError(f"{path} does not say which model it holds: give --model NAME")
    split = args.split or values.get("val_split", "val")
    data, samples = args.data, args.samples
    if data is None:
        data = values.get("data")
        if split == values.get("val_split"):
            data, samples = values.get("val_data") or data, samples or values.get("val_samples")
        elif split == values.get("train_split"):
            samples = samples or values.get("train_samples")
    if data is None:
        raise UserError("no data: give --data DIR, a folder of shards, or --data digits")
    values = {**values, "model_kwargs": {**values.get("model_kwargs", {}), **parse_pairs(args.model_kwargs)}}

    # Model and weights
    num_classes = args.num_classes or checkpoint.get("num_classes")
    model = create_model(name, pretrained=args.pretrained, num_classes=num_classes, **values["model_kwargs"])
    weights = "pretrained" if args.pretrained else "random"
    if checkpoint:
        ema = "state_dict_ema" in checkpoint if args.ema is None else args.ema
        load_weights(model, checkpoint, path, ema)
        weights = "EMA" if ema else "raw"
    model.to(accelerator.device)

    # Data
    data = locate_data(data, accelerator)
    shards = open_shards(data, split, samples, allow_pipe=args.allow_pipe)
    if not checkpoint and shards.num_classes not in (None, model.num_classes):
        raise UserError(f"{name} has {model.num_classes} classes, the shards in {data} have {shards.num_classes}: "
                        "give a model of these classes")
    settings = input_settings(model, values)
    batches = eval_loader(
        shards, create_transform(**settings), batch_size=args.batch_size, num_workers=args.workers,
        rank=accelerator.process_index, world_size=accelerator.num_processes, num_classes=model.num_classes,
        pin_memory=accelerator.device.type == "cuda",
    )

    # Result
    result = evaluate({"model": model}, batches, accelerator, shards.num_samples, args.batch_size)["model"]
    result.update(model=name, weights=weights, checkpoint=args.checkpoint, data=data, split=split,
                  input_size=list(settings["input_size"]), precision=accelerator.mixed_precision,
                  processes=accelerator.num_processes)
    out = Path(args.out or (path.parent if checkpoint else Path()) / f"eval-{split}.json")
    if accelerator.is_main_process:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_text(out, json.dumps(result, indent=2) + "\n")
    accelerator.print(f"{name}, {weights} weights, {split} split of {data}")
    accelerator.print(f"{describe(result)} of {shards.num_samples}")
    accelerator.print(f"saved as {out}")
    if accelerator.device.type == "cuda":
        accelerator.end_training()  # NCCL wants it; with gloo, torch 2.7 can wait in it for itself, for ever
    return result


def parse(argv):
    """Command line; in brackets what an option stands at where it is not given."""
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", help="a run's folder (then best.pt) or file, or a state dict with --model")
    weights = parser.add_mutually_exclusive_group()
    weights.add_argument("--ema", action="store_true", default=None, help="averaged weights [where there are]")
    weights.add_argument("--raw", dest="ema", action="store_false", default=None, help="weights as trained")
    parser.add_argument("--model", help="timm name [the checkpoint's]")
    parser.add_argument("--model-kwargs", nargs="+", default=[], metavar="KEY=VALUE", help="[the checkpoint's]")
    parser.add_argument("--pretrained", action="store_true", help="timm's pretrained weights of --model")
    parser.add_argument("--data", help="folder of shards, pattern or URL, or 'digits' [the checkpoint's]")
    parser.add_argument("--split", help="[the checkpoint's, or val]")
    parser.add_argument("--samples", type=int, help="size of the split, for shards without an index")
    parser.add_argument("--allow-pipe", action="store_true", help="run the command of --data pipe:COMMAND, or of the "
                        "checkpoint's data, which prints shards")
    parser.add_argument("--num-classes", type=int, help="[the checkpoint's, or the model's own]")
    parser.add_argument("--batch-size", type=int, default=256, help="per process [256]")
    parser.add_argument("--workers", type=int, default=4, help="loader processes per process [4]")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="[cuda if there is one]")
    parser.add_argument("--precision", choices=("auto", "bf16", "fp32"), default="auto", help="[bf16 on a GPU]")
    parser.add_argument("--out", help="JSON file [eval-SPLIT.json beside the checkpoint, or here]")
    args = parser.parse_args(argv)
    if not (args.checkpoint or args.model) or args.checkpoint and args.pretrained:
        raise UserError("say what to evaluate: --checkpoint FILE, or --model NAME --pretrained")
    return args


if __name__ == "__main__":
    run_cli(main)
