"""Batch training of neural networks on HPC clusters: Horovod and MPI, HDF5, Slurm.

The names below are all that the docs and examples use; docs/stability.md says what they promise. Each is imported when
it is first used, so that ``import hpctrain`` loads no framework and no MPI. None has the name of a subpackage, which
would take its place when it is imported.
"""

import sys

if (
    sys.argv[:1] == ["-m"]
    and sys.orig_argv[-len(sys.argv)].removeprefix("-m").partition(".")[0] == __name__
    and not sys.flags.safe_path
):
    # `python -m hpctrain` has put the current folder before the standard library, of which nothing has been imported
    # yet. While the package is looked for, argv holds -m and what follows the package's name.
    del sys.path[0]

import importlib

__version__ = "0.2.0"

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from hpctrain.checkpoint import CheckpointStore, Loaded, Retention, Saver, array_tensors, open_saver
    from hpctrain.comm.group import Group
    from hpctrain.comm.world import World, connect
    from hpctrain.config.loading import load as load_config
    from hpctrain.config.sections import Config, MonitorConfig, ReduceConfig
    from hpctrain.data.dataset import Dataset, Field
    from hpctrain.data.formats.sources import open_dataset
    from hpctrain.data.order import Epoch
    from hpctrain.data.packing.notes import packed_notes
    from hpctrain.data.packing.source import from_dataset
    from hpctrain.data.packing.write import write_hdf5
    from hpctrain.data.padding import pad
    from hpctrain.data.samplers import CurriculumSampler, LaneSampler, LengthGroupedSampler, WeightedSampler
    from hpctrain.data.stream import open_stream
    from hpctrain.errors import ExitCode, HpctrainError, NoRequeue, RunFailed, UserError
    from hpctrain.frameworks.torch.carried import CarriedState
    from hpctrain.frameworks.torch.step_context import StepContext
    from hpctrain.monitor.rank.clock import RingClock as MonitorClock
    from hpctrain.monitor.rank.session import Session as MonitorSession
    from hpctrain.monitor.rank.session import start as start_monitor
    from hpctrain.parallel.tensor_words import columns, rows, vocabulary
    from hpctrain.parallel.torch_classes import cross_entropy
    from hpctrain.rank.fit import fit
    from hpctrain.rank.heartbeat import heartbeat
    from hpctrain.reduce.tensorflow_pieces import Pieces as KerasGradients
    from hpctrain.reduce.tensorflow_reducer import Reducer as KerasReducer
    from hpctrain.reduce.tensorflow_reducer import broadcast as keras_broadcast
    from hpctrain.reduce.tensorflow_reducer import measured_reducer as keras_reducer
    from hpctrain.reduce.torch_reducer import Reducer as TorchReducer
    from hpctrain.reduce.torch_reducer import broadcast as torch_broadcast
    from hpctrain.reduce.torch_reducer import measured_reducer as torch_reducer
    from hpctrain.run.events import Event
    from hpctrain.run.figures import Curve, Matrix
    from hpctrain.run.view import RunView
    from hpctrain.tasks.definition import KerasTask, TorchScheduler, TorchTask
    from hpctrain.tasks.meters import Selected
    from hpctrain.track.sink import Sink
    from hpctrain.train.confusion import F1, ConfusionMatrix
    from hpctrain.train.framework import StepResult
    from hpctrain.train.hooks import BaseHook, Hook, RateHook, StopReason
    from hpctrain.train.loop import RunSummary, Trainer
    from hpctrain.train.metrics import Metric
    from hpctrain.train.ranking import AUC, PrecisionRecallCurve, RocCurve
    from hpctrain.train.saved_arrays import SavedArrays
    from hpctrain.train.state import Cut, TrainState
    from hpctrain.train.stateful import PerRank
    from hpctrain.train.training import Training

_HOMES = {
    "AUC": "hpctrain.train.ranking:AUC",
    "BaseHook": "hpctrain.train.hooks:BaseHook",
    "CarriedState": "hpctrain.frameworks.torch.carried:CarriedState",
    "CheckpointStore": "hpctrain.checkpoint:CheckpointStore",
    "Config": "hpctrain.config.sections:Config",
    "ConfusionMatrix": "hpctrain.train.confusion:ConfusionMatrix",
    "CurriculumSampler": "hpctrain.data.samplers:CurriculumSampler",
    "Curve": "hpctrain.run.figures:Curve",
    "Cut": "hpctrain.train.state:Cut",
    "Dataset": "hpctrain.data.dataset:Dataset",
    "Epoch": "hpctrain.data.order:Epoch",
    "Event": "hpctrain.run.events:Event",
    "ExitCode": "hpctrain.errors:ExitCode",
    "F1": "hpctrain.train.confusion:F1",
    "Field": "hpctrain.data.dataset:Field",
    "Group": "hpctrain.comm.group:Group",
    "Hook": "hpctrain.train.hooks:Hook",
    "HpctrainError": "hpctrain.errors:HpctrainError",
    "KerasGradients": "hpctrain.reduce.tensorflow_pieces:Pieces",
    "KerasReducer": "hpctrain.reduce.tensorflow_reducer:Reducer",
    "KerasTask": "hpctrain.tasks.definition:KerasTask",
    "LaneSampler": "hpctrain.data.samplers:LaneSampler",
    "LengthGroupedSampler": "hpctrain.data.samplers:LengthGroupedSampler",
    "Loaded": "hpctrain.checkpoint:Loaded",
    "Matrix": "hpctrain.run.figures:Matrix",
    "Metric": "hpctrain.train.metrics:Metric",
    "MonitorClock": "hpctrain.monitor.rank.clock:RingClock",
    "MonitorConfig": "hpctrain.config.sections:MonitorConfig",
    "MonitorSession": "hpctrain.monitor.rank.session:Session",
    "NoRequeue": "hpctrain.errors:NoRequeue",
    "PerRank": "hpctrain.train.stateful:PerRank",
    "PrecisionRecallCurve": "hpctrain.train.ranking:PrecisionRecallCurve",
    "RateHook": "hpctrain.train.hooks:RateHook",
    "ReduceConfig": "hpctrain.config.sections:ReduceConfig",
    "Retention": "hpctrain.checkpoint:Retention",
    "RocCurve": "hpctrain.train.ranking:RocCurve",
    "RunFailed": "hpctrain.errors:RunFailed",
    "RunSummary": "hpctrain.train.loop:RunSummary",
    "RunView": "hpctrain.run.view:RunView",
    "SavedArrays": "hpctrain.train.saved_arrays:SavedArrays",
    "Saver": "hpctrain.checkpoint:Saver",
    "Selected": "hpctrain.tasks.meters:Selected",
    "Sink": "hpctrain.track.sink:Sink",
    "StepContext": "hpctrain.frameworks.torch.step_context:StepContext",
    "StepResult": "hpctrain.train.framework:StepResult",
    "StopReason": "hpctrain.train.hooks:StopReason",
    "TorchReducer": "hpctrain.reduce.torch_reducer:Reducer",
    "TorchScheduler": "hpctrain.tasks.definition:TorchScheduler",
    "TorchTask": "hpctrain.tasks.definition:TorchTask",
    "TrainState": "hpctrain.train.state:TrainState",
    "Trainer": "hpctrain.train.loop:Trainer",
    "Training": "hpctrain.train.training:Training",
    "UserError": "hpctrain.errors:UserError",
    "WeightedSampler": "hpctrain.data.samplers:WeightedSampler",
    "World": "hpctrain.comm.world:World",
    "array_tensors": "hpctrain.checkpoint:array_tensors",
    "columns": "hpctrain.parallel.tensor_words:columns",
    "connect": "hpctrain.comm.world:connect",
    "cross_entropy": "hpctrain.parallel.torch_classes:cross_entropy",
    "fit": "hpctrain.rank.fit:fit",
    "from_dataset": "hpctrain.data.packing.source:from_dataset",
    "heartbeat": "hpctrain.rank.heartbeat:heartbeat",
    "keras_broadcast": "hpctrain.reduce.tensorflow_reducer:broadcast",
    "keras_reducer": "hpctrain.reduce.tensorflow_reducer:measured_reducer",
    "load_config": "hpctrain.config.loading:load",
    "open_dataset": "hpctrain.data.formats.sources:open_dataset",
    "open_saver": "hpctrain.checkpoint:open_saver",
    "open_stream": "hpctrain.data.stream:open_stream",
    "packed_notes": "hpctrain.data.packing.notes:packed_notes",
    "pad": "hpctrain.data.padding:pad",
    "rows": "hpctrain.parallel.tensor_words:rows",
    "start_monitor": "hpctrain.monitor.rank.session:start",
    "torch_broadcast": "hpctrain.reduce.torch_reducer:broadcast",
    "torch_reducer": "hpctrain.reduce.torch_reducer:measured_reducer",
    "vocabulary": "hpctrain.parallel.tensor_words:vocabulary",
    "write_hdf5": "hpctrain.data.packing.write:write_hdf5",
}
"""Where each name is defined: module:attribute."""

__all__ = [
    "AUC",
    "F1",
    "BaseHook",
    "CarriedState",
    "CheckpointStore",
    "Config",
    "ConfusionMatrix",
    "CurriculumSampler",
    "Curve",
    "Cut",
    "Dataset",
    "Epoch",
    "Event",
    "ExitCode",
    "Field",
    "Group",
    "Hook",
    "HpctrainError",
    "KerasGradients",
    "KerasReducer",
    "KerasTask",
    "LaneSampler",
    "LengthGroupedSampler",
    "Loaded",
    "Matrix",
    "Metric",
    "MonitorClock",
    "MonitorConfig",
    "MonitorSession",
    "NoRequeue",
    "PerRank",
    "PrecisionRecallCurve",
    "RateHook",
    "ReduceConfig",
    "Retention",
    "RocCurve",
    "RunFailed",
    "RunSummary",
    "RunView",
    "SavedArrays",
    "Saver",
    "Selected",
    "Sink",
    "StepContext",
    "StepResult",
    "StopReason",
    "TorchReducer",
    "TorchScheduler",
    "TorchTask",
    "TrainState",
    "Trainer",
    "Training",
    "UserError",
    "WeightedSampler",
    "World",
    "__version__",
    "array_tensors",
    "columns",
    "connect",
    "cross_entropy",
    "fit",
    "from_dataset",
    "heartbeat",
    "keras_broadcast",
    "keras_reducer",
    "load_config",
    "open_dataset",
    "open_saver",
    "open_stream",
    "packed_notes",
    "pad",
    "rows",
    "start_monitor",
    "torch_broadcast",
    "torch_reducer",
    "vocabulary",
    "write_hdf5",
]


def __getattr__(name: str) -> "Any":
    if name not in _HOMES:
        raise AttributeError(f"module 'hpctrain' has no attribute {name!r}")
    module, _, attribute = _HOMES[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


def __dir__() -> list[str]:
    return list(__all__)
