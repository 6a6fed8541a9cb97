"""A training job, and one way to lay it out over devices."""

from dataclasses import dataclass
from math import ceil

from weft.tools.planner.hardware import Hardware, check_count
from weft.tools.planner.model import Model

# Bytes of an element of weights and activations, and whether there is an additional fp32 copy of the weights.
PRECISIONS = {"fp32": (4, False), "bf16": (2, True), "fp16": (2, True)}
# fp32 numbers that the optimizer keeps per parameter, without that copy.
OPTIMIZERS = {"adamw": 2, "adam": 2, "lamb": 2, "lars": 1, "momentum": 1, "sgd": 0}
SCHEDULES = ("1f1b", "interleaved", "gpipe", "zero-bubble")
RECOMPUTE = ("none", "selective", "full")
OVERLAP = ("none", "some", "all")
GRADIENT_BYTES = 4  # gradients are accumulated and summed in fp32


@dataclass(frozen=True, eq=False)
class Job:
    """A model, its batch and the machine.

    Args:
        sequence_length: tokens of a sequence.
        global_batch: sequences of an optimizer step, over all ranks and micro-batches.
        precision: of weights and activations: "fp32", "bf16" or "fp16". Gradients and optimizer states are fp32.
        optimizer: one of OPTIMIZERS.
        fused_attention: attention keeps no matrix of scores in memory, and skips the half that a causal mask hides.
        sequence_parallel: norms and dropout are split over the tensor-parallel ranks too.
        overlap: communication that runs at the same time as arithmetic. "none". "some": gradients during the last
            backward, and tensor parallelism's collectives in backward during the weights' gradients. "all": also those
            in forward, in pieces, and the pipeline's.
        by_weft: buffers as in weft. weft.Pipeline has a buffer for each micro-batch of a step that a stage receives, as
            torch.distributed.pipelining does; weft.DataParallel's sharded optimizer has a copy of its part of the
            gradients. If False, a pipeline has buffers for the micro-batches in flight, and there is no such copy.
        imbalance: tokens of the rank whose experts are chosen most, over the mean of the ranks that hold experts
            together. The default is an assumption, for a router with a load-balancing loss; weft.explain shows a
            model's own.
    """

    model: Model
    hardware: Hardware
    sequence_length: int
    global_batch: int
    precision: str = "bf16"
    optimizer: str = "adamw"
    fused_attention: bool = True
    sequence_parallel: bool = True
    overlap: str = "some"
    by_weft: bool = True
    imbalance: float = 1.1

    def __post_init__(self):
        choices = {"precision": tuple(PRECISIONS), "optimizer": tuple(OPTIMIZERS), "overlap": OVERLAP}
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r} is not one of {', '.join(known)}")
        for name in ("sequence_length", "global_batch"):
            check_count(name, getattr(self, name))
        if not 1 <= self.imbalance < float("inf"):
            raise ValueError(f"imbalance={self.imbalance} must be at least 1: the most loaded rank over the mean")
        if self.precision not in self.hardware.peak_flops:
            raise ValueError(
                f"{self.hardware.name} has no rate for {self.precision}; it has {', '.join(self.hardware.peak_flops)}"
            )

    @property
    def element_bytes(self) -> int:
        return PRECISIONS[self.precision][0]

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of a parameter's optimizer states, including the fp32 copy of a 16-bit weight."""
        return 4 * (OPTIMIZERS[self.optimizer] + PRECISIONS[self.precision][1])

    @property
    def eager(self) -> bool:
        """Whether operations run one by one, as on a CPU."""
        return self.hardware.processors == 0

    @property
    def peak_flops(self) -> float:
        return self.hardware.peak_flops[self.precision]


@dataclass(frozen=True)
class Layout:
    """One way to use pp x dp x cp x tp devices; tp changes fastest, as in weft.init_mesh.

    Args:
        pp, dp, cp, tp: ranks along each dimension of the mesh.
        micro_batch: sequences that pass through the model together on a data-parallel rank.
        schedule: schedule of the pipeline.
        chunks: pieces of the model on each rank of an interleaved pipeline.
        recompute: the part that is computed again in backward: "none", "selective" or "full" (layers). "selective" is
            as in weft.parallelize: attention and MLP without the norms. Without fused attention it is the core of
            attention, as in Korthikanti et al. 2022.
        zero: the state that data-parallel ranks shard: 0 nothing, 1 optimizer states, 2 gradients too, 3 weights too.
        ep: ranks among which experts are split, folded out of dp; tokens travel between them.
    """

    pp: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1
    micro_batch: int = 1
    schedule: str = "1f1b"
    chunks: int = 1
    recompute: str = "none"
    zero: int = 0
    ep: int = 1

    @property
    def ranks(self) -> int:
        return self.pp * self.dp * self.cp * self.tp

    @property
    def data_ranks(self) -> int:
        """Number of ranks that hold the same parameters and sum their gradients."""
        return self.dp * self.cp

    def micro_batches(self, job: Job) -> int:
        return -(-job.global_batch // (self.dp * self.micro_batch))


@dataclass(frozen=True)
class LayerShare:
    """The largest share that a rank has of a layer, its products and its tokens.

    Attributes:
        experts: experts of the rank.
        rows: tokens of these experts; a token counts for each of its experts.
    """

    tokens: int
    sequences: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab: int
    experts: int
    rows: int

    @staticmethod
    def of(job: Job, cp: int, tp: int, micro_batch: int, ep: int = 1) -> "LayerShare":
        """Return the share of a layer.

        Sizes that do not divide are split as in weft.split_sizes. A key-value head is replicated, never cut.
        """
        model = job.model
        tokens = micro_batch * -(-job.sequence_length // cp)
        even = tokens * model.experts_per_token / tp  # the ranks of ep bring as many tokens as they take
        return LayerShare(
            tokens=tokens,
            sequences=micro_batch,
            heads=-(-model.heads // tp),
            kv_heads=-(-model.kv_heads // tp),
            intermediate=-(-model.mlp_width // tp),
            vocab=-(-model.vocab // tp),
            experts=-(-model.experts // (ep * tp)),
            rows=ceil(even * (job.imbalance if ep * tp > 1 else 1)),
        )

    def layer_parameters(self, model: Model) -> int:
        """Return the number of parameters of a rank's part of one layer, without experts.

        Norms are whole, and so are routers and the biases of outputs that are summed over ranks.
        """
        qkv = (self.heads + 2 * self.kv_heads) * model.head_dim
        products = model.hidden * (qkv + self.heads * model.head_dim + model.experts)
        products += (3 if model.gated_mlp else 2) * model.hidden * self.intermediate
        return products + model.vectors_per_layer(qkv, self.intermediate)
