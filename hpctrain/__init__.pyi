"""The public names, once: hpctrain/__init__.py finds each here when it is first used, and type checkers read it."""

from hpctrain.backends.tensorflow.keras_reducer import KerasReducer as _KerasReducer
from hpctrain.backends.tensorflow.keras_reducer import Pieces as _KerasGradients
from hpctrain.backends.tensorflow.keras_reducer import broadcast as _keras_broadcast
from hpctrain.backends.tensorflow.keras_reducer import measured_reducer as _keras_reducer
from hpctrain.backends.torch.process_groups import broadcast as _torch_broadcast
from hpctrain.backends.torch.reduce.reducer import Reducer as _TorchReducer
from hpctrain.backends.torch.reduce.torch_reducers import measured_reducer as _torch_reducer
from hpctrain.backends.torch.steps.step_context import StepContext as StepContext
from hpctrain.backends.torch.strategies.tp_group import cross_entropy as cross_entropy
from hpctrain.backends.torch.task.carried import CarriedState as CarriedState
from hpctrain.checkpoint.policy import Retention as Retention
from hpctrain.checkpoint.reading import Loaded as Loaded
from hpctrain.checkpoint.saver import Saver as Saver
from hpctrain.checkpoint.saver import array_tensors as array_tensors
from hpctrain.checkpoint.store import CheckpointStore as CheckpointStore
from hpctrain.checkpoint.store import open_saver as open_saver
from hpctrain.comm.group import Group as Group
from hpctrain.comm.world import World as World
from hpctrain.comm.world import connect as connect
from hpctrain.config.loading import load as _load_config
from hpctrain.config.sections import Config as Config
from hpctrain.config.sections import MonitorConfig as MonitorConfig
from hpctrain.config.sections import ReduceConfig as ReduceConfig
from hpctrain.data.dataset import Dataset as Dataset
from hpctrain.data.dataset import Field as Field
from hpctrain.data.formats.sources import open_dataset as open_dataset
from hpctrain.data.order import Epoch as Epoch
from hpctrain.data.packing.pack_source import from_dataset as from_dataset
from hpctrain.data.packing.pack_source import packed_notes as packed_notes
from hpctrain.data.packing.write import write_hdf5 as write_hdf5
from hpctrain.data.padding import pad as pad
from hpctrain.data.samplers import LaneSampler as LaneSampler
from hpctrain.data.samplers import LengthGroupedSampler as LengthGroupedSampler
from hpctrain.data.samplers import WeightedSampler as WeightedSampler
from hpctrain.data.stream import open_stream as open_stream
from hpctrain.errors import ExitCode as ExitCode
from hpctrain.errors import HpctrainError as HpctrainError
from hpctrain.errors import NoRequeue as NoRequeue
from hpctrain.errors import RunFailed as RunFailed
from hpctrain.errors import UserError as UserError
from hpctrain.monitor.rank_monitor import MonitorSession as MonitorSession
from hpctrain.monitor.rank_monitor import start as _start_monitor
from hpctrain.monitor.ring_clock import RingClock as _MonitorClock
from hpctrain.programs.heartbeat import heartbeat as heartbeat
from hpctrain.programs.own_loop import checkpoint_saved as checkpoint_saved
from hpctrain.programs.own_loop import stop_requested as stop_requested
from hpctrain.rank.fit import fit as fit
from hpctrain.run.events import Event as Event
from hpctrain.run.figures import Curve as Curve
from hpctrain.run.figures import Matrix as Matrix
from hpctrain.run.run_view import RunView as RunView
from hpctrain.tasks.definition import ColwiseParallel as ColwiseParallel
from hpctrain.tasks.definition import KerasTask as KerasTask
from hpctrain.tasks.definition import PerBatch as PerBatch
from hpctrain.tasks.definition import RowwiseParallel as RowwiseParallel
from hpctrain.tasks.definition import TorchScheduler as TorchScheduler
from hpctrain.tasks.definition import TorchTask as TorchTask
from hpctrain.tasks.definition import columns as columns
from hpctrain.tasks.definition import rows as rows
from hpctrain.tasks.definition import vocabulary as vocabulary
from hpctrain.tasks.meters import Selected as Selected
from hpctrain.track.sink import Sink as Sink
from hpctrain.train.framework import StepResult as StepResult
from hpctrain.train.hooks import BaseHook as BaseHook
from hpctrain.train.hooks import Hook as Hook
from hpctrain.train.hooks import RateHook as RateHook
from hpctrain.train.hooks import StopReason as StopReason
from hpctrain.train.hooks import Training as Training
from hpctrain.train.loop import RunSummary as RunSummary
from hpctrain.train.loop import Trainer as Trainer
from hpctrain.train.metrics import Metric as Metric
from hpctrain.train.saved_arrays import SavedArrays as SavedArrays
from hpctrain.train.state import Cut as Cut
from hpctrain.train.state import TrainState as TrainState
from hpctrain.train.stateful import PerRank as PerRank

__version__: str

# type checkers see what is imported `as` itself, or assigned
KerasGradients = _KerasGradients
KerasReducer = _KerasReducer
MonitorClock = _MonitorClock
TorchReducer = _TorchReducer
keras_broadcast = _keras_broadcast
keras_reducer = _keras_reducer
load_config = _load_config
start_monitor = _start_monitor
torch_broadcast = _torch_broadcast
torch_reducer = _torch_reducer
