"""``hpctrain ckpt ls|verify|inspect|diff|export``."""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
import time
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hpctrain.checkpoint.export import (
    Selection,
    export_folder,
    export_safetensors,
    export_state_dict,
    model_weights,
)
from hpctrain.checkpoint.format.layout import DamagedCheckpoint, UnreadableCheckpoint
from hpctrain.checkpoint.format.strict_json import JsonReader
from hpctrain.checkpoint.inspect import all_arrays, summary_tree, tensor_differences, tensor_summaries
from hpctrain.checkpoint.mirror import locate_checkpoint
from hpctrain.checkpoint.reading import Loaded
from hpctrain.checkpoint.store import CheckpointStore
from hpctrain.checkpoint.verify import verify_checkpoint
from hpctrain.errors import ExitCode, UserError
from hpctrain.run.resolve_run import step
from hpctrain.system import foreign_text
from hpctrain.system.quantities import size

if TYPE_CHECKING:
    from hpctrain.data.dataset import Dataset
    from hpctrain.data.samples import Recipe
    from hpctrain.data.stream import Stream
    from hpctrain.tasks.definition import Task

ACTIONS = {
    "ls": "list the checkpoints of a run",
    "verify": "read and check every byte; exit code 70 unless all are intact",
    "inspect": "show what is in a checkpoint: names, types, shapes, min, mean, max, NaN",
    "diff": "show which tensors differ between two checkpoints; exit code 1 if any does",
    "export": "write a checkpoint's weights for other programs",
}
PATH_HELP = "run folder, its checkpoints folder, or one checkpoint's folder; or the URL of checkpoints in a store"
GRAPHS = (".pt2", ".onnx")
"""Suffixes of files that hold the model's forward pass too."""
SUFFIXES = (".safetensors", ".pt", ".weights.h5", ".keras", *GRAPHS)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the subcommands."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ls|verify|inspect|diff|export")
    ls, verify, inspect, diff, export = (
        actions.add_parser(name, help=text, description=text) for name, text in ACTIONS.items()
    )
    for action in (ls, verify, inspect, export):
        action.add_argument("path", help=PATH_HELP)
    for action, default in ((verify, "all"), (inspect, "the newest"), (export, "the newest")):
        action.add_argument("--step", type=step, help=f"a step or best; by default {default}")
    inspect.add_argument("--name", default="", help="only tensors below this name, such as model")
    diff.add_argument("first", help=PATH_HELP)
    diff.add_argument("second", help="the second checkpoint, in the same form")
    add = export.add_argument
    add("-o", "--output", required=True, metavar="FILE", help=f"output file: {', '.join(SUFFIXES)}")
    add("--trainable-only", action="store_true", help="only trained weights, such as an adapter without its base")
    add(
        "--merge-lora",
        type=float,
        metavar="ALPHA",
        help="add LoRA adapters to their weights, times ALPHA / r",
    )
    add("--rename", action="append", default=[], metavar="OLD=NEW", help="replace a prefix of names: --rename model.=")
    add("--like", metavar="FOLDER", help="write a folder for from_pretrained: a copy of FOLDER with these weights")
    help = "export the moving average of the weights, as evaluations use it; by default if there is one"
    add("--ema", action=argparse.BooleanOptionalAction, help=help)
    for action in (ls, verify, inspect, diff, export):
        action.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Runs the command; an exit code."""
    return {"ls": ls, "verify": verify, "inspect": inspect, "diff": diff, "export": export}[args.action](args)


def ls(args: argparse.Namespace) -> int:
    """Lists checkpoints by their manifests."""

    store, only = locate_checkpoint(args.path)
    rows = [describe(store, step) for step in store.steps() if only in (None, step)]
    for beaten in [row for row in rows if row.get("best")][:-1]:
        beaten["best"] = False
    foreign_text.answer(args.json, rows, (row_text(row) for row in rows))
    return ExitCode.DONE


def describe(store: CheckpointStore, step: int) -> dict[str, Any]:
    """Returns one row of ``ls``."""

    row: dict[str, Any] = {"step": step, "path": store.where(step)}
    try:
        manifest = store.manifest(step)
    except (DamagedCheckpoint, UnreadableCheckpoint, UserError) as error:
        return row | {"problem": error.what, "readable": isinstance(error, DamagedCheckpoint)}
    meta = manifest.meta
    numbers = {"bytes": manifest.num_bytes, "ranks": manifest.ranks, "tensors": len(manifest.tensors())}
    return (
        row | numbers | {"time": meta.get("time"), "framework": meta.get("framework"), "best": bool(meta.get("best"))}
    )


def row_text(row: dict[str, Any]) -> str:
    """Formats a row of ``ls`` for people."""
    if "problem" in row:
        return f"step {row['step']:>9}  {'DAMAGED' if row['readable'] else 'UNREADABLE'}: {row['problem']}"
    when = local_time(row["time"])
    best = "  best" if row["best"] else ""
    ranks = "rank " if row["ranks"] == 1 else "ranks"
    return f"step {row['step']:>9}  {when:19}  {size(row['bytes']):>10}  {row['ranks']:>4} {ranks}  {row['path']}{best}"


def local_time(seconds: Any) -> str:
    """Formats a time as local time; empty if the value is not a time."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds)) if seconds else ""
    except (TypeError, ValueError, OverflowError, OSError):
        return ""


def verify(args: argparse.Namespace) -> int:
    """Reads all data and compares checksums."""

    store, only = locate_checkpoint(args.path, args.step)
    verdicts = [verify_checkpoint(store, step) for step in store.steps() if only in (None, step)]
    rows = [{**dataclasses.asdict(one), "sound": not one.problems} for one in verdicts]
    foreign_text.answer(args.json, rows, (f"{one.path}: {'; '.join(one.problems) or 'intact'}" for one in verdicts))
    return ExitCode.FAILURE if any(one.problems for one in verdicts) else ExitCode.DONE


def inspect(args: argparse.Namespace) -> int:
    """Shows the tensors of a checkpoint as a tree."""

    with opened(args.path, args.step) as loaded:
        found = tensor_summaries(loaded, args.name)
        if not found:
            fix = "inspect it without --name to see all names"
            raise UserError(f"{loaded.path} has no tensor below {args.name}", fix)
    rows = {"step": loaded.step, "meta": loaded.meta, "tensors": [dataclasses.asdict(one) for one in found]}
    title = f"{loaded.path} ({loaded.ranks} ranks)"
    if loaded.source:
        title += f"; {len(loaded.source)} frozen weights are in {loaded.source.record.path}"
    foreign_text.answer(args.json, rows, [title, *summary_tree(found)])
    return ExitCode.DONE


def diff(args: argparse.Namespace) -> int:
    """Compares two checkpoints."""

    with opened(args.first) as first, opened(args.second) as second:
        found = tensor_differences(first, second)
        in_both = all_arrays(first).keys() & all_arrays(second).keys()
        same = len(in_both) - sum(not one.kind.startswith("only") for one in found)
    amounts = [f" ({one.changed} differ, by at most {one.largest})" if one.changed else "" for one in found]
    lines = [f"{one.name}: {one.kind}{amount}" for one, amount in zip(found, amounts, strict=True)]
    different = [dataclasses.asdict(one) for one in found]
    rows = {"first": str(first.path), "second": str(second.path), "equal": same, "different": different}
    foreign_text.answer(args.json, rows, [*lines, f"{same} tensors are equal, {len(found)} differ"])
    return 1 if found else ExitCode.DONE


def export(args: argparse.Namespace) -> int:
    """Writes weights in another format."""

    output, selection = Path(args.output), selection_of(args)
    if not args.like and not args.output.endswith(SUFFIXES):
        raise UserError(f"--output is {args.output}: its suffix names no format", f"end it in {', '.join(SUFFIXES)}")
    with opened(args.path, args.step) as loaded:
        if args.like:
            output = export_folder(loaded, output, Path(args.like), selection)
        elif args.output.endswith(".safetensors"):
            export_safetensors(loaded, output, selection)
        elif args.output.endswith(GRAPHS):
            export_graph_of(loaded, output, selection)
        elif args.output.endswith(".pt"):
            export_state_dict(loaded, output, selection)
        else:
            export_keras_file(loaded, output, selection)
        is_apart = "sync/outer" in loaded.arrays
    num_bytes = output.stat().st_size
    row = {"step": loaded.step, "output": str(output), "bytes": num_bytes}
    lines = [f"weights of step {loaded.step} in {output}, {size(num_bytes)}"]
    if is_apart:
        lines.append("the mean over the ranks of local SGD; within a round, evaluations judge the outer weights")
    foreign_text.answer(args.json, row, lines)
    return ExitCode.DONE


def selection_of(args: argparse.Namespace) -> Selection:
    """Combines the options of ``export``. Raises UserError."""

    pairs = [pair.partition("=") for pair in args.rename]
    if any(not equals for _, equals, _ in pairs):
        fix = "write --rename OLD=NEW; --rename model.= removes model."
        raise UserError(f"--rename {args.rename[0]} has no =", fix)
    if args.trainable_only and args.merge_lora is not None:
        fix = "give one of the two"
        raise UserError("--merge-lora needs the frozen weights, which --trainable-only leaves out", fix)
    rename = {old: new for old, _, new in pairs}
    return Selection(args.ema, args.trainable_only, args.merge_lora, rename)


def export_keras_file(loaded: Loaded, output: Path, selection: Selection) -> None:
    """Exports through the model of the run's task: Keras files number layers in the model's order."""
    from hpctrain.rank.problem import with_weights
    from hpctrain.system.files import replace_whole
    from hpctrain.tasks.definition import KerasTask, TorchTask
    from hpctrain.train.saved_arrays import DerivedArrays

    if dataclasses.replace(selection, averaged=None) != Selection():
        fix = "leave out --trainable-only, --rename and --merge-lora: Keras itself merges adapters into such files"
        raise UserError("a file of Keras holds all weights of a model, by their places in it", fix)
    task, data, recipe, precision = saved_task(loaded)
    if not isinstance(task, KerasTask):
        raise UserError("the task is not a Keras task", "export it to a .pt or .safetensors file")
    task = with_weights(task, precision, data, recipe)
    weights, _ = model_weights(loaded, selection)
    arrays = DerivedArrays({f"model/{name}": (weights, name) for name in weights})
    if isinstance(task, TorchTask):
        from hpctrain.backends.torch.keras.keras_adapter import export_keras
    else:
        from hpctrain.backends.tensorflow.state.weights import export_keras
    replace_whole(output, lambda path: export_keras(task.model, arrays, path))


def export_graph_of(loaded: Loaded, output: Path, selection: Selection) -> None:
    """Exports the forward pass of a torch task with the weights in it."""
    from hpctrain.data.order import first_draw
    from hpctrain.data.samples import make_batch
    from hpctrain.rank.problem import examples_of
    from hpctrain.tasks.definition import TorchTask

    if dataclasses.replace(selection, averaged=None) != Selection():
        fix = "export to a .safetensors file, or without --trainable-only, --merge-lora and --rename"
        raise UserError("a graph holds the whole model as the task makes it", fix)
    task, data, recipe, _ = saved_task(loaded)
    if not isinstance(task, TorchTask):
        raise UserError(
            "the task is not a PyTorch task", "export it to a .weights.h5 file, and the model by model.export"
        )
    from hpctrain.backends.torch.graph_export import export_graph

    batch = make_batch(examples_of(data, 2), recipe, first_draw(np.arange(2)))
    with tempfile.TemporaryDirectory() as folder:
        export_state_dict(loaded, Path(folder) / "weights.pt", selection)
        export_graph(task, Path(folder) / "weights.pt", batch, output)


def saved_task(loaded: Loaded) -> tuple[Task, Dataset | Stream, Recipe, str]:
    """Makes the task of the run that saved a checkpoint; returns it with its training data, how they are batched, and
    its precision.

    Raises UserError if the checkpoint does not name it, or the task cannot be made.
    """
    from hpctrain.comm.world import alone
    from hpctrain.rank.problem import open_training_data, seed_task, with_input
    from hpctrain.tasks.load_task import load_task
    from hpctrain.tasks.tf_environment import without_chatter

    if "identity" not in loaded.meta:
        raise UserError(f"{loaded.path} was not saved by a training run", "export it to a .safetensors file")
    identity = JsonReader(loaded.meta["identity"], f"{loaded.path}, identity of the run")
    config = JsonReader(identity.get("config", dict, "an object"), identity.where)
    train = JsonReader(config.get("train", dict, "an object"), identity.where)
    name = config.get("task", str, "a string")
    arguments = config.get("task_args", dict, "an object")
    seed = config.integer("seed", 0, 2**64 - 1)
    precision = train.get("precision", str, "a string")
    with without_chatter():
        task = load_task(name, arguments, alone(), partial(seed_task, seed, precision, 0))
    data = open_training_data(task)
    task, recipe = with_input(task, data, seed)
    return task, data, recipe, precision


def opened(path: str, step: int | str | None = None) -> AbstractContextManager[Loaded]:
    """Opens the checkpoint that the user names; if the newest is damaged, no older one takes its place."""

    store, found = locate_checkpoint(path, step)
    return store.opened(store.steps()[-1] if found is None else found)
