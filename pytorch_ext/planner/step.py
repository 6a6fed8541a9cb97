"""How long a training step takes under a layout: arithmetic, exposed communication, pipeline bubble."""

from dataclasses import dataclass
from functools import lru_cache
from math import log, sqrt

from weft.planner.job import GRADIENT_BYTES, Job, Layout, Shard
from weft.planner.rates import gather_s, matmul_s, memory_s, send_s

CAUSAL_BACKWARD = 2.5  # attention's backward has five products where forward has two (Dao et al. 2022)
KERNELS_FORWARD, KERNELS_BACKWARD = 12, 22  # launches of a layer
# Communication that runs beside arithmetic still takes multiprocessors and memory bandwidth from it: it costs this
# share of its own time. From the layer times of Korthikanti et al. 2022, table 4: (11.8 ms - 11.2 ms) / 1.5 ms.
BESIDE_COST = 0.4
# A step waits for the slowest node. Of n whose speeds are normally distributed it is expected sqrt(2 ln n) standard
# deviations behind; 2% is what clusters of equal GPUs show (Sinha et al. 2022 measured 8% between the extremes).
NODE_SPREAD = 0.02
LOSS_BYTES = 24  # moved per logit, forward and backward: 16-bit logits read and written, fp32 copy, softmax, gradient


@dataclass(frozen=True)
class Block:
    """Seconds of one layer, or of the output layer, for one micro-batch on one rank.

    forward, backward: arithmetic and memory traffic; recomputed: forward again, before backward; weight: the part of
    backward that only computes the weights' gradients. *_exposed: communication that the rank waits for.
    """

    forward: float = 0.0
    backward: float = 0.0
    recomputed: float = 0.0
    weight: float = 0.0
    forward_exposed: float = 0.0
    backward_exposed: float = 0.0

    @property
    def forward_all(self) -> float:
        return self.forward + self.forward_exposed

    @property
    def backward_all(self) -> float:
        return self.backward + self.recomputed + self.backward_exposed


@dataclass(frozen=True)
class Step:
    """A training step.

    seconds: in all. bubble: share of it in which a rank waits for the pipeline to fill and drain. uneven: share in
    which it waits for the slowest stage. exposed_s: seconds of communication that nothing hides. flops_per_s: model
    FLOPs per second and device (6 N and attention, causal where the kernel is fused; recomputation not counted). mfu:
    that over the datasheet's peak.
    """

    seconds: float
    bubble: float
    uneven: float
    exposed_s: float
    flops_per_s: float
    mfu: float


def beside(communication: float, arithmetic: float) -> float:
    """Seconds that communication adds to arithmetic that runs at the same time."""
    hidden = min(communication, arithmetic)
    return communication - hidden + BESIDE_COST * hidden


class Clock:
    """Times layouts of one job. What layouts have in common is computed once."""

    def __init__(self, job: Job):
        self.job = job
        self.block = lru_cache(maxsize=None)(self._block)
        self.head = lru_cache(maxsize=None)(self._head)
        self.synchronisation = lru_cache(maxsize=None)(self._synchronisation)
        self.flops = job.model.flops_per_token(job.sequence_length, causal=job.fused_attention)

    def step(self, layout: Layout) -> Step:
        """The step's time.

        The slowest stage sets the pace of m micro-batches; filling and draining costs (pp - 1) / chunks more of them
        (Narayanan et al. 2021, section 2.2), and with the zero-bubble schedule H1 the weights' gradients fill part of
        that (Qi et al. 2023, table 1).
        """
        job, m = self.job, layout.micro_batches(self.job)
        block = self.block(layout.cp, layout.tp, layout.micro_batch, layout.recompute)
        head = self.head(layout.cp, layout.tp, layout.micro_batch)
        most, least = -(-job.model.layers // layout.pp), job.model.layers // layout.pp
        gathered = self._weights_gathered(layout, block) if layout.zero == 3 else 0.0
        one = block.forward_all + block.backward_all + gathered
        last = head.forward_all + head.backward_all
        slowest = max(most * one, (least if layout.pp > 1 else most) * one + last)
        mean = (job.model.layers * one + last) / layout.pp
        transfers = self._transfers(layout) if layout.pp > 1 else 0.0
        idle = (layout.pp - 1) / layout.chunks * (mean + transfers)
        if layout.schedule == "zero-bubble":
            idle -= (layout.pp - 1) * 2 * job.model.layers / layout.pp * block.weight
        gradients, update = self.synchronisation(layout.pp, layout.dp, layout.cp, layout.tp, layout.zero)
        if layout.zero >= 2:
            gradients *= m if layout.zero == 2 else 0  # stage 3 scatters them with the layers, see _weights_gathered
        if job.overlap != "none":
            backward = most * (block.backward + block.recomputed) * (m if layout.zero == 2 else 1)
            gradients = beside(gradients * (1 - 1 / most), backward) + gradients / most  # the last bucket is alone
        nodes = -(-layout.ranks // job.hardware.devices_per_node)
        late = 1 + NODE_SPREAD * sqrt(2 * log(nodes))
        seconds = (m * (slowest + transfers) + idle + gradients + update) * late
        waited = most * (block.forward_exposed + block.backward_exposed + gathered) + transfers
        exposed = m * waited + gradients
        seconds = max(seconds, self._shared(layout, (seconds - idle)))
        rate = self.flops * job.sequence_length * job.global_batch / seconds / layout.ranks
        return Step(seconds, idle / seconds, m * (slowest - mean) / seconds, exposed, rate, rate / job.peak_flops)

    def _shared(self, layout: Layout, busy: float) -> float:
        """Where ranks share cores, the time in which the cores can do all ranks' work; bubbles cost nothing then."""
        together = self.job.hardware.full_speed_ranks
        return busy * min(layout.ranks, self.job.hardware.devices_per_node) / together if together else 0.0

    def _matmul(self, m: int, n: int, k: int) -> float:
        return matmul_s(self.job.hardware, self.job.peak_flops, self.job.element_bytes, m, n, k)

    def _block(self, cp: int, tp: int, micro_batch: int, recompute: str) -> Block:
        job, model, hardware = self.job, self.job.model, self.job.hardware
        shard = Shard.of(job, cp, tp, micro_batch)
        tokens, bytes_ = shard.tokens, job.element_bytes
        qkv = (shard.heads + 2 * shard.kv_heads) * model.head_dim
        up = shard.intermediate * (2 if model.gated_mlp else 1)
        shapes = [
            (qkv, model.hidden),
            (model.hidden, shard.heads * model.head_dim),
            (up, model.hidden),
            (model.hidden, shard.intermediate),
        ]
        forward = sum(self._matmul(tokens, n, k) for n, k in shapes)
        data = sum(self._matmul(tokens, k, n) for n, k in shapes)
        weight = sum(self._matmul(n, k, tokens) for n, k in shapes)
        attention_forward, attention_backward = self._attention(shard)

        region = -(-tokens // tp) if job.sequence_parallel else tokens
        masks = 0.5 if model.dropout else 0
        # Two norms (read, write; backward reads x and dy, writes dx) and two residual sums (read two, write one).
        outer_forward = memory_s(hardware, region * model.hidden * bytes_ * 2 * (2 + 3 + masks))
        outer_backward = memory_s(hardware, region * model.hidden * bytes_ * 2 * (3 + 2 + 3 * masks))
        passes = (3, 5) if model.gated_mlp else (2, 3)
        inner_forward, inner_backward = (memory_s(hardware, tokens * shard.intermediate * bytes_ * n) for n in passes)
        rotated = 0 if model.positions else 2 * (shard.heads + shard.kv_heads) * model.head_dim * tokens * bytes_
        outer_forward += memory_s(hardware, rotated)
        outer_backward += memory_s(hardware, rotated)

        forward_s = self._launched(forward + attention_forward + outer_forward + inner_forward, KERNELS_FORWARD)
        backward_s = self._launched(
            data + weight + attention_backward + outer_backward + inner_backward, KERNELS_BACKWARD
        )
        once = gather_s(hardware, tokens * model.hidden * bytes_, tp, 1)
        forward_exposed, backward_exposed = self._tensor_exposed(once, tp, forward, data, weight)
        forward_exposed += self._context_exposed(shard, cp, tp, attention_forward)
        backward_exposed += 2 * self._context_exposed(shard, cp, tp, attention_backward / 2)
        recomputed = 0.0
        if recompute == "full":
            recomputed, backward_exposed = forward_s, backward_exposed + forward_exposed
        elif recompute == "selective":
            recomputed = attention_forward + (inner_forward if job.fused_attention else 0)
        return Block(forward_s, backward_s, recomputed, weight, forward_exposed, backward_exposed)

    def _launched(self, seconds: float, kernels: int) -> float:
        """Beside a GPU the host launches ahead, and is in the way only where kernels are shorter than their launch."""
        launches = kernels * self.job.hardware.launch_s
        return max(seconds, launches) if self.job.hardware.processors else seconds + launches

    def _attention(self, shard: Shard) -> tuple[float, float]:
        """Seconds of attention's core, forward and backward."""
        job, model, hardware = self.job, self.job.model, self.job.hardware
        scores = shard.tokens * job.sequence_length * shard.heads
        flops = 4 * scores * model.head_dim
        rate = job.peak_flops * hardware.matmul_fraction
        if job.fused_attention:
            forward = flops / 2 / (rate * hardware.attention_fraction)
            return forward, CAUSAL_BACKWARD * forward
        # Each of the batched products reads or writes the scores once; softmax and dropout pass over them.
        batches = shard.sequences * shard.heads
        product = batches * self._matmul(shard.tokens // shard.sequences, job.sequence_length, model.head_dim)
        bytes_, mask = job.element_bytes, 1 if model.dropout else 0
        passes_forward = 2 * bytes_ + mask * (2 * bytes_ + 1)
        passes_backward = 3 * bytes_ + mask * (2 * bytes_ + 1)
        return (
            2 * product + memory_s(hardware, scores * passes_forward),
            4 * product + memory_s(hardware, scores * passes_backward),
        )

    def _tensor_exposed(self, once: float, tp: int, forward: float, data: float, weight: float) -> tuple[float, float]:
        """Seconds that tensor parallelism waits, forward and backward; once is one all-gather of the activations.

        Forward: gather and scatter around attention and around the MLP. Backward: the same for the gradients, and the
        inputs are gathered again beside the gradients of the data (Korthikanti et al. 2022, section 4.2).
        """
        if tp == 1:
            return 0.0, 0.0
        gathered_again = 2 * once if self.job.sequence_parallel else 0.0
        if self.job.overlap == "none":
            return 4 * once, 4 * once + gathered_again
        if self.job.overlap == "some":
            return 4 * once, 2 * once + beside(gathered_again, data) + beside(2 * once, weight)
        return beside(4 * once, forward), beside(4 * once + gathered_again, data + weight)

    def _context_exposed(self, shard: Shard, cp: int, tp: int, attention: float) -> float:
        """Seconds that a ring waits for keys and values beyond the attention that hides them."""
        if cp == 1:
            return 0.0
        size = 2 * shard.tokens * shard.kv_heads * self.job.model.head_dim * self.job.element_bytes
        ring = gather_s(self.job.hardware, size * cp, cp, tp)
        return beside(ring, attention * (cp - 1) / cp)

    def _head(self, cp: int, tp: int, micro_batch: int) -> Block:
        """The output layer and the loss; the embedding is a lookup and takes no time worth counting."""
        job, model = self.job, self.job.model
        shard = Shard.of(job, cp, tp, micro_batch)
        forward = self._matmul(shard.tokens, shard.vocab, model.hidden)
        data = self._matmul(shard.tokens, model.hidden, shard.vocab)
        weight = self._matmul(shard.vocab, model.hidden, shard.tokens)
        loss = memory_s(job.hardware, LOSS_BYTES * shard.tokens * shard.vocab)
        once = gather_s(job.hardware, shard.tokens * model.hidden * job.element_bytes, tp, 1)
        return Block(forward + loss / 3, data + weight + loss * 2 / 3, 0.0, weight, once, once)

    def _transfers(self, layout: Layout) -> float:
        """Seconds a micro-batch waits for activations from, and gradients for, the neighbouring stages."""
        job = self.job
        shard = Shard.of(job, layout.cp, layout.tp, layout.micro_batch)
        whole = shard.tokens * job.model.hidden * job.element_bytes
        stride = layout.dp * layout.cp * layout.tp
        # Each tensor-parallel rank sends its part; without sequence parallelism it is gathered on arrival
        # (Narayanan et al. 2021, section 4.1).
        one = send_s(job.hardware, whole / layout.tp, stride)
        if not job.sequence_parallel:
            one += gather_s(job.hardware, whole, layout.tp, 1)
        return 2 * layout.chunks * one * (BESIDE_COST if job.overlap == "all" else 1)

    def _stage_parameters(self, pp: int, tp: int) -> int:
        """Of a rank's part of the largest stage."""
        model, shard = self.job.model, Shard.of(self.job, 1, tp, 1)
        embedding = shard.vocab * model.hidden
        ends = embedding * (1 if model.tied_embeddings or pp > 1 else 2)
        return -(-model.layers // pp) * shard.layer_parameters(model) + ends

    def _synchronisation(self, pp: int, dp: int, cp: int, tp: int, zero: int) -> tuple[float, float]:
        """Seconds of summing the gradients over the data-parallel ranks, and of the optimizer's update."""
        job, hardware = self.job, self.job.hardware
        parameters = self._stage_parameters(pp, tp)
        ranks = dp * cp
        scattered = gather_s(hardware, GRADIENT_BYTES * parameters, ranks, tp)
        if zero == 0:
            gathered = scattered
        else:
            gathered = gather_s(hardware, job.element_bytes * parameters, ranks, tp) if zero < 3 else 0.0
        # Clipping reads the gradients; the update reads them and the states and writes states and weights.
        moved = 2 * GRADIENT_BYTES + 2 * job.optimizer_bytes + job.element_bytes
        update = memory_s(hardware, moved * parameters / (ranks if zero else 1))
        if zero == 2:  # scattered for each micro-batch, gathered once
            return scattered, update + gathered
        return scattered + gathered, update

    def _weights_gathered(self, layout: Layout, block: Block) -> float:
        """Seconds a layer waits under ZeRO stage 3: its weights gathered twice and its gradients scattered."""
        job, hardware = self.job, self.job.hardware
        parameters = Shard.of(job, 1, layout.tp, 1).layer_parameters(job.model)
        weights = gather_s(hardware, job.element_bytes * parameters, layout.data_ranks, layout.tp)
        gradients = gather_s(hardware, GRADIENT_BYTES * parameters, layout.data_ranks, layout.tp)
        forward, backward = block.forward, block.backward + block.recomputed
        if job.overlap == "none":
            forward = backward = 0.0
        return beside(weights, forward) + beside(weights + gradients, backward)
