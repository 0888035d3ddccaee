"""Keys of how ranks work together: partitions of the model, sums of gradients, when they are exchanged."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from hpctrain.config.features import Feature, stated_by, used, values_of
from hpctrain.config.section import AboveZero, Decisive, Natural, Positive, Range, Section, WrongValue

SHARDS = values_of("parallel.shard")
if TYPE_CHECKING:
    Shard: TypeAlias = str
else:
    Shard = Literal["none", *SHARDS]


class ParallelConfig(Section, key="parallel"):
    """How a model is partitioned over ranks."""

    tensor: Positive = 1
    """PyTorch: size of the groups of ranks, on one node, that split the layers in the task's tensor=. Each group trains
    on its own samples."""
    tensor_exact: Decisive[bool] = True
    """Whether ranks of a tensor group add 16-bit activations and gradients of split layers in fp32. With false, process
    groups (NCCL, or reduce.kind: nccl) add them as they are, which is half of the bytes."""
    sequence: bool = False
    """Whether each rank of a tensor group has only some rows of the activations between split layers, so that norms and
    dropouts compute on those (sequence parallelism)."""
    pipeline: Positive = 1
    """PyTorch: number of pipeline stages into which the layers of the model are divided: those of the task's layers=,
    or of an nn.Sequential. The batch passes through them in the micro-batches of train.accumulate."""
    pipeline_chunks: Positive = 1
    """Pipeline stages of each rank. With several smaller ones, ranks wait less for each other, hold more activations,
    and send them more often (interleaved 1F1B)."""
    shard: Shard = "none"
    """What is sharded over the ranks (PyTorch); results and checkpoints are the same."""
    shard_within: Literal["all", "node"] = "all"
    """Ranks over which shard: parameters or gradients divides rows: all, or those of each node (HSDP). Each node then
    holds a copy of the model and gathers layers without the network, which carries sums of rows only."""
    layers: tuple[str, ...] = ()
    """Classes of the layers that shard: parameters or gradients gathers, such as LlamaDecoderLayer; by default the
    members of lists and sequences, and blocks of one class."""
    offload: bool = False
    """Whether shard: parameters or gradients keeps rows, their gradients and optimizer state in host memory, and
    updates them there (FSDP2's CPUOffloadPolicy): GPUs hold only what is gathered, and activations."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pipeline_chunks > 1 and self.pipeline == 1:
            what = f"parallel.pipeline_chunks is {self.pipeline_chunks}, and parallel.pipeline is 1"
            raise WrongValue("parallel.pipeline_chunks", what, "leave it out, or set parallel.pipeline to 2 or more")
        given = {
            "shard_within": "node" if self.shard_within == "node" else "",
            "layers": ", ".join(self.layers),
            "offload": "true" if self.offload else "",
        }
        for name in (name for name, value in given.items() if value and not self.gathers):
            what = f"parallel.{name} is {given[name]}, and parallel.shard is {self.shard}"
            raise WrongValue(f"parallel.{name}", what, "leave it out, or set parallel.shard: parameters")

    @property
    def gathers(self) -> bool:
        """Whether each rank has rows of all parameters, and gathers layers to compute."""
        return self.shard in ("parameters", "gradients")


class ReduceConfig(Section, key="reduce"):
    """How gradients are averaged over the ranks."""

    kind: Literal["auto", "horovod", "mpi", "nccl", "none"] = "auto"
    """The reducer. nccl: PyTorch's process groups (RCCL on AMD GPUs, XCCL on Intel's, gloo on CPUs); auto: nccl if each
    rank has a GPU, otherwise the fastest candidate, measured before the first update."""
    compression: Decisive[Literal["none", "fp16", "bf16", "auto"]] = "none"
    """Type in which gradients are sent instead of fp32; auto measures none and fp16."""
    overlap: Literal["auto", "on", "off"] = "auto"
    """Send a bucket as soon as its gradients are ready (on), or everything after backward (off)."""
    bucket_bytes: Annotated[int, Range(least=1024)] | None = None
    """Size of a bucket if buckets are sent during backward; by default 8 MiB on CPUs, and 25 MiB on GPUs, where the
    first and the last one have 1 MiB: the first is sent early, and nothing hides the last."""
    exact: Decisive[bool] = True
    """On GPUs: add in an order that is the same in each run. false lets NCCL add in switches (NVLS, CollNet), which is
    faster; the last bits may then differ."""
    sparse: Literal["auto", "densify", "refuse"] = "auto"
    """Sparse gradients of embeddings: auto sends only rows if that does not change the result, densify makes them
    dense, refuse names them and ends the run."""
    verify_every_steps: Positive | None = None
    """Compare a hash of the weights over all ranks every N steps, and fail on a difference; by default once, after the
    first step."""

    def features(self) -> dict[Feature, Any]:
        """What of this section does not work with everything."""
        return used(stated_by({"reduce": self}))


class SyncConfig(Section, key="sync"):
    """When ranks exchange what they have learned."""

    kind: Literal["every_step", "local"] = "every_step"
    """every_step: exchange gradients in each update; local: local SGD, with an outer step every N updates."""
    every_steps: Positive = 32
    """Updates per round, after which an outer step is made."""
    after_steps: Natural = 0
    """Updates at the beginning of a run in which gradients are still exchanged."""
    outer_lr: AboveZero = 1.0
    """Learning rate of outer steps; 1 without momentum averages the weights. DiLoCo: 0.7, and a momentum of 0.9."""
    outer_momentum: Annotated[float, Range(least=0, most=0.999)] = 0.7
    """Nesterov momentum of outer steps."""
    within: Literal["none", "node"] = "none"
    """node: the ranks of a node exchange gradients in each update, and nodes train independently."""
    overlap: bool = False
    """Overlap the exchange with updates: a sixteenth of the weights at a time (Streaming DiLoCo)."""
