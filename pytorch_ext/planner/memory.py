"""What a rank holds at the peak of a step, in bytes (Korthikanti et al. 2022 for the activations)."""

from dataclasses import dataclass, fields
from functools import lru_cache, partial

from weft.planner.job import GRADIENT_BYTES, Job, Layout, Shard


@dataclass(frozen=True)
class Memory:
    """Bytes on the fullest rank.

    weights, gradients, optimizer: by parameter. activations: what forward keeps for backward, of the micro-batches in
    flight. logits: and their softmax and gradient in fp32. buffers: communication. workspace: what a layer's backward
    needs while it runs, recomputed activations included, beyond the logits' room. lost: fragmentation, and what a
    device holds before the first tensor.
    """

    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    buffers: float
    workspace: float
    lost: float

    @property
    def total(self) -> float:
        states = self.weights + self.gradients + self.optimizer
        return states + self.activations + self.logits + self.buffers + self.workspace + self.lost

    def split(self) -> dict[str, float]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


class Scale:
    """Weighs layouts of one job."""

    def __init__(self, job: Job):
        self.job = job
        self._activations = lru_cache(maxsize=None)(partial(layer_activations, job))
        self._shard = lru_cache(maxsize=None)(partial(Shard.of, job))

    def memory(self, layout: Layout) -> Memory:
        """Of the fullest rank: one of the first stage (most micro-batches in flight) or of the last (the logits)."""
        stages = {0, layout.pp - 1}
        return max((self.stage(layout, stage) for stage in stages), key=lambda memory: memory.total)

    def stage(self, layout: Layout, stage: int) -> Memory:
        job, hardware = self.job, self.job.hardware
        shard = self._shard(layout.cp, layout.tp, layout.micro_batch)
        layers = split_layers(job.model.layers, layout.pp, stage)
        parameters = layers * shard.layer_parameters(job.model) + self._ends(layout, stage, shard)
        shared = layout.data_ranks
        weights = job.element_bytes * parameters / (shared if layout.zero >= 3 else 1)
        gradients = GRADIENT_BYTES * parameters / (shared if layout.zero >= 2 else 1)
        optimizer = job.optimizer_bytes * parameters / (shared if layout.zero >= 1 else 1)
        full = self._activations(layout.cp, layout.tp, layout.micro_batch, "none")
        kept = self._activations(layout.cp, layout.tp, layout.micro_batch, layout.recompute)
        activations = layers * kept * in_flight(layout, stage, layout.micro_batches(job))
        last = stage == layout.pp - 1
        # Logits as the layer gives them, fp32 softmax, its gradient.
        logits = shard.tokens * shard.vocab * (job.element_bytes + 8) if last else 0.0
        if last:  # the inputs of the last norm and of the output layer
            activations += 2 * self._region(layout, shard) * job.model.hidden * job.element_bytes
        buffers = self._buffers(layout, shard, gradients, parameters / max(1, layers))
        # A layer that runs backward: what has just been computed again, and the gradients that pass through it, one as
        # wide as the MLP and two as wide as the model. The logits are gone then.
        passing = shard.tokens * (2 * job.model.hidden + shard.intermediate) * job.element_bytes
        workspace = max(0.0, full - kept + passing - logits)
        moving = activations + logits + buffers + workspace
        lost = hardware.reserved_bytes + hardware.fragmentation * moving
        return Memory(weights, gradients, optimizer, activations, logits, buffers, workspace, lost)

    def _region(self, layout: Layout, shard: Shard) -> int:
        return -(-shard.tokens // layout.tp) if self.job.sequence_parallel else shard.tokens

    def _ends(self, layout: Layout, stage: int, shard: Shard) -> int:
        """Parameters of the embeddings and of the output layer on this stage; tied ones stand on both ends."""
        model = self.job.model
        first, last = stage == 0, stage == layout.pp - 1
        matrices = 1 if first and last and model.tied_embeddings else first + last
        return matrices * shard.vocab * model.hidden + first * model.positions * model.hidden + last * model.final_norm

    def _buffers(self, layout: Layout, shard: Shard, gradients: float, layer_parameters: float) -> float:
        """What collectives write to: a gathered input, neighbours' keys and values, a stage's input, buckets."""
        job = self.job
        whole = shard.tokens * job.model.hidden * job.element_bytes
        buffers = 0.0
        if layout.tp > 1 and job.sequence_parallel:
            buffers += whole
        if layout.cp > 1:
            buffers += 4 * shard.tokens * shard.kv_heads * job.model.head_dim * job.element_bytes
        if layout.pp > 1:
            buffers += 2 * whole / layout.tp
        if layout.data_ranks > 1:
            buffers += min(2 * job.bucket_bytes, gradients)
        if layout.zero == 3:  # the layer that computes and the next
            buffers += 2 * job.element_bytes * layer_parameters
        return buffers


def split_layers(layers: int, pp: int, stage: int) -> int:
    """Layers of a stage: balanced, the first stages one more, so that the last has room for the output layer."""
    return layers // pp + (1 if stage < layers % pp else 0)


def in_flight(layout: Layout, stage: int, micro_batches: int) -> float:
    """Micro-batches whose activations a stage holds at once; with chunks, in shares of the stage's layers.

    GPipe keeps all; 1F1B (and zero-bubble H1) as many as there are stages from here to the end; interleaved 1F1B
    warms up for longer (Narayanan et al. 2021, section 2.2; on stage 0 it is Korthikanti et al. 2022's
    p (1 + (p - 1) / (p v))).
    """
    behind = layout.pp - stage
    if layout.schedule == "gpipe":
        return micro_batches
    if layout.schedule == "interleaved":
        pieces = 2 * (behind - 1) + (layout.chunks - 1) * layout.pp + 1
        return min(micro_batches, pieces / layout.chunks)
    return min(micro_batches, behind)


def layer_activations(job: Job, cp: int, tp: int, micro_batch: int, recompute: str) -> float:
    """Bytes that one layer keeps of one micro-batch on a rank.

    What PyTorch saves: the inputs of both norms (of RMSNorm, the scaled input too) and of the four linear layers,
    query, key, value and attention's log-sum-exp, what goes into and comes out of the MLP's activation, and the dropout
    masks. For a GPT with as many key-value heads as heads and unfused attention this is sbh (34 + 5 a s / h)
    (Korthikanti et al. 2022, equation 1), of which tensor parallelism divides sbh (24 + 5 a s / h), and with sequence
    parallelism everything (equations 2 to 4).
    """
    model, shard = job.model, Shard.of(job, cp, tp, micro_batch)
    bytes_ = job.element_bytes
    region = -(-shard.tokens // tp) if job.sequence_parallel else shard.tokens
    if recompute == "full":
        return region * model.hidden * bytes_
    outer = region * model.hidden * ((4 if model.bias else 6) * bytes_ + (2 if model.dropout else 0))
    attention = shard.tokens * (2 * shard.heads + 2 * shard.kv_heads) * model.head_dim * bytes_
    # With a gate: its input, its activation, the other half, their product.
    inner = shard.tokens * shard.intermediate * bytes_ * (4 if model.gated_mlp else 2)
    if job.fused_attention:
        core = 4 * shard.tokens * shard.heads
        if recompute == "selective":
            core, inner = 0, inner // 2
    else:  # the softmax's output, the dropout's mask and its output
        scores = shard.tokens * job.sequence_length * shard.heads
        core = 0 if recompute == "selective" else scores * (bytes_ * 2 + 1 if model.dropout else bytes_)
    return outer + attention + inner + core
