"""Bytes that a rank holds at the peak of a step (Korthikanti et al. 2022 for the activations)."""

from dataclasses import dataclass, fields
from functools import lru_cache, partial

from weft.tools.planner.job import GRADIENT_BYTES, Job, LayerShare, Layout


@dataclass(frozen=True)
class Memory:
    """Bytes on the fullest rank.

    Attributes:
        weights, gradients, optimizer: proportional to the parameters.
        activations: tensors that forward keeps for backward, of the micro-batches in flight.
        logits: logits, and their softmax and gradient in fp32.
        buffers: buffers of communication.
        workspace: tensors that a layer's backward needs while it runs, including recomputed activations, beyond the
            logits' room.
        lost: fragmentation, and memory that a device holds before the first tensor.
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


class MemoryModel:
    """Memory of the layouts of one job."""

    def __init__(self, job: Job):
        self.job = job
        self._layer = lru_cache(maxsize=None)(partial(layer_of, job))
        self._shard = lru_cache(maxsize=None)(partial(LayerShare.of, job))

    def memory(self, layout: Layout) -> Memory:
        """Return the memory of the fullest rank.

        It is in the first stage (most micro-batches in flight), in the second (it receives from both sides) or in the
        last (the logits).
        """
        stages = {0, min(1, layout.pp - 1), layout.pp - 1}
        return max((self.stage(layout, stage) for stage in stages), key=lambda memory: memory.total)

    def stage(self, layout: Layout, stage: int) -> Memory:
        job, hardware, model = self.job, self.job.hardware, self.job.model
        shard = self._shard(layout.cp, layout.tp, layout.micro_batch, layout.ep)
        layers = split_layers(model.layers, layout.pp, stage)
        common = layers * shard.layer_parameters(model) + self._ends(layout, stage, shard)
        experts = layers * shard.experts * model.expert_parameters
        # What each rank has if the ranks with the same parameters shard them.
        parameters, part = common + experts, (common + experts * layout.ep) / layout.data_ranks
        weights = job.element_bytes * (part if layout.zero >= 3 else parameters)
        gradients = GRADIENT_BYTES * (part if layout.zero >= 2 else parameters)
        optimizer = job.optimizer_bytes * (part if layout.zero >= 1 else parameters)
        layer = self._layer(layout.cp, layout.tp, layout.micro_batch, layout.ep)
        carried = in_flight(layout, stage, layout.micro_batches(job))
        activations = layers * layer.kept(layout.recompute) * carried
        last = stage == layout.pp - 1
        # Logits in the layer's dtype, fp32 softmax, its gradient.
        logits = shard.tokens * shard.vocab * (job.element_bytes + 8) if last else 0.0
        # The inputs of the last norm (of RMSNorm, the scaled input too) and of the output layer.
        ends = (2 if model.bias else 3) * layer.boundary if last else 0.0
        buffers = self._buffers(layout, stage, GRADIENT_BYTES * part, carried, layer.boundary)
        # A layer in backward holds its recomputed tensors and gradients: of the output and the input of the MLP's
        # second product, and of the layer's input or the matrix. Logits and ends are freed by then.
        passing = shard.tokens * (model.hidden + shard.intermediate)
        passing += model.hidden * max(shard.tokens, shard.intermediate)
        if model.experts:  # one gradient for the first matrices of all experts
            matrices = shard.experts * model.intermediate * (2 if model.gated_mlp else 1)
            if job.eager:  # a loop over the experts adds up this gradient and that of the second matrices
                matrices = 2 * matrices + shard.experts * model.intermediate
            passing = shard.rows * (model.hidden + model.intermediate) + model.hidden * max(shard.rows, matrices)
        workspace = max(0.0, layer.again(layout.recompute) + passing * job.element_bytes - logits - ends)
        activations += ends
        moving = activations + logits + buffers + workspace
        lost = hardware.reserved_bytes + hardware.fragmentation * moving
        return Memory(weights, gradients, optimizer, activations, logits, buffers, workspace, lost)

    def _ends(self, layout: Layout, stage: int, shard: LayerShare) -> int:
        """Return the number of parameters of the embeddings and of the output layer on this stage.

        Tied embeddings are on both ends.
        """
        model = self.job.model
        first, last = stage == 0, stage == layout.pp - 1
        matrices = 1 if first and last and model.tied_embeddings else first + last
        return matrices * shard.vocab * model.hidden + first * model.positions * model.hidden + last * model.final_norm

    def _buffers(self, layout: Layout, stage: int, part: float, carried: float, boundary: float) -> float:
        """Return the bytes of the buffers that collectives write to.

        They are a gathered input, neighbours' keys and values, and values between stages.
        The buckets that are sent hold the gradients themselves.

        Args:
            part: bytes of the gradients that a rank has if they are sharded.
        """
        job, shard = self.job, self._shard(layout.cp, layout.tp, layout.micro_batch)
        buffers = 0.0
        if layout.tp > 1 and job.sequence_parallel:
            buffers += shard.tokens * job.model.hidden * job.element_bytes
        if layout.cp > 1:
            buffers += 4 * shard.tokens * shard.kv_heads * job.model.head_dim * job.element_bytes
        if layout.pp > 1:
            buffers += self._passed_on(layout, stage, carried) * boundary
        if layout.zero == 1 and layout.dp > 1 and layout.pp == layout.cp == 1 and job.by_weft:
            buffers += part
        if layout.zero == 3:  # the running layer and the next
            whole = shard.layer_parameters(job.model) + shard.experts * job.model.expert_parameters
            buffers += 2 * job.element_bytes * whole
        return buffers

    def _passed_on(self, layout: Layout, stage: int, carried: float) -> float:
        """Return the number of boundaries between stages in a stage's memory.

        Inputs that layers keep anyway are not counted.
        """
        if not self.job.by_weft:
            return 2
        micro_batches = layout.micro_batches(self.job)
        receiving, sending = layout.chunks - (stage == 0), layout.chunks - (stage == layout.pp - 1)
        inputs = receiving * (micro_batches - carried)
        return inputs + sending * (micro_batches + carried)  # gradients come back for what goes out


@dataclass(frozen=True)
class LayerMemory:
    """Bytes of one micro-batch in one layer on a rank.

    Attributes:
        boundary: the layer's input.
        outer: tensors that norms and dropout keep, including the residual stream.
        attention: query, key, value and attention's result.
        core: other tensors that attention keeps.
        inner: tensors of the MLP and of the experts.
        selective: the parts of these that selective recomputation computes again, one after another.
    """

    boundary: float
    outer: float
    attention: float
    core: float
    inner: float
    selective: tuple[float, ...]

    @property
    def whole(self) -> float:
        return self.outer + self.attention + self.core + self.inner

    def kept(self, recompute: str) -> float:
        """Return the bytes that the layer keeps from forward to backward."""
        if recompute == "full":
            return self.boundary
        return self.whole - (sum(self.selective) if recompute == "selective" else 0)

    def again(self, recompute: str) -> float:
        """Return the most bytes that are computed again for backward and held at one time."""
        if recompute == "full":
            return self.whole - self.boundary
        return max(self.selective) if recompute == "selective" else 0.0


def split_layers(layers: int, pp: int, stage: int) -> int:
    """Return the number of layers of a stage.

    The split is balanced. The first stages take one more, so that the last has room for the output layer.
    """
    return layers // pp + (1 if stage < layers % pp else 0)


def in_flight(layout: Layout, stage: int, micro_batches: int) -> float:
    """Return the number of micro-batches whose activations a stage holds at once.

    With chunks it counts in shares of the stage's layers. GPipe keeps all. 1F1B (and zero-bubble H1) keeps as many as
    there are stages from here to the end. Interleaved 1F1B warms up for longer (Narayanan et al. 2021, section 2.2); on
    stage 0 it is p (1 + (p - 1) / (p v)) of Korthikanti et al. 2022.
    """
    behind = layout.pp - stage
    if layout.schedule == "gpipe":
        return micro_batches
    if layout.schedule == "interleaved":
        pieces = 2 * (behind - 1) + (layout.chunks - 1) * layout.pp + 1
        return min(micro_batches, pieces / layout.chunks)
    return min(micro_batches, behind)


def layer_of(job: Job, cp: int, tp: int, micro_batch: int, ep: int = 1) -> LayerMemory:
    """Return the bytes that one layer keeps of one micro-batch on a rank.

    PyTorch saves: the inputs of both norms (of RMSNorm, the scaled input too) and of the four linear layers; query,
    key, value and attention's log-sum-exp; input and output of the MLP's activation; the dropout masks.

    For a GPT with as many key-value heads as heads and unfused attention this is sbh (34 + 5 a s / h) (Korthikanti et
    al. 2022, equation 1). Tensor parallelism divides sbh (24 + 5 a s / h) of it, and with sequence parallelism
    everything (equations 2 to 4).

    Context parallelism returns its result head by head, so the output layer has its own copy.

    Experts keep as much for each of their tokens as an MLP of their width, and further the token itself and the output
    before its routing weight.
    """
    model, shard = job.model, LayerShare.of(job, cp, tp, micro_batch, ep)
    bytes_ = job.element_bytes
    region = -(-shard.tokens // tp) if job.sequence_parallel else shard.tokens
    outer = region * model.hidden * ((4 if model.bias else 6) * bytes_ + (2 if model.dropout else 0))
    results = 1 if cp == 1 else 2
    attention = shard.tokens * ((1 + results) * shard.heads + 2 * shard.kv_heads) * model.head_dim * bytes_
    # With a gate: its input, its activation, the other half, their product.
    wide = 4 if model.gated_mlp else 2
    inner = shard.tokens * shard.intermediate * bytes_ * wide
    inner += shard.rows * (wide * model.intermediate + 2 * model.hidden) * bytes_
    if job.fused_attention:
        core = 4 * shard.tokens * shard.heads
        selective = (attention + core, inner) if model.mlp_module else (attention + core,)
    else:  # the softmax's output, the dropout's mask and its output
        scores = shard.tokens * job.sequence_length * shard.heads
        core = scores * (bytes_ * 2 + 1 if model.dropout else bytes_)
        selective = (core,)
    return LayerMemory(region * model.hidden * bytes_, outer, attention, core, inner, selective)
