"""Time of a training step under a layout: arithmetic, exposed communication, pipeline bubble."""

from dataclasses import dataclass
from functools import lru_cache
from math import log, log2, sqrt

from weft.tools.planner.job import GRADIENT_BYTES, Job, LayerShare, Layout
from weft.tools.planner.passes import passes_of, update_bytes
from weft.tools.planner.rates import attention_s, elementwise_s, exchange_s, gather_s, matmul_s, memory_s, send_s

CAUSAL_BACKWARD = 2.5  # attention's backward has five products, forward has two (Dao et al. 2022)
KERNELS_FORWARD, KERNELS_BACKWARD = 12, 22  # launches in a layer
KERNELS_OF_EXPERTS = 10  # further launches for a layer's routing, in either direction: scores, sort, counts, rows, sums
TENSOR_MEETINGS = 4  # collectives of tp in a layer: sums after attention and after the MLP, and both in backward
CONTEXT_MEETINGS = 6  # collectives of cp: keys and values, both again in backward, and their gradients
EXPERT_MEETINGS = 4  # all-to-alls of ep in a layer: tokens and results, and the gradients of both
# Passes over the tokens of experts, in either direction: a row for each token's expert (read, write), the sum of the
# results (read, read and write the sum). With ep the rows are sorted once more after each all-to-all.
ROW_PASSES, ROW_PASSES_EP = 5, 9
# Communication at the same time as arithmetic takes multiprocessors and memory bandwidth from it: it costs this share
# of its own time. From the layer times of Korthikanti et al. 2022, table 4: (11.8 ms - 11.2 ms) / 1.5 ms.
BESIDE_COST = 0.4
# Standard deviation of the nodes' speeds. A step waits for the slowest of n nodes: if speeds are normally distributed,
# it is sqrt(2 ln n) deviations behind. Clusters of equal GPUs show 2% (Sinha et al. 2022: 8% between the extremes).
NODE_SPREAD = 0.02
LOSS_BYTES = 24  # moved per logit, forward and backward: 16-bit logits read and written, fp32 copy, softmax, gradient


@dataclass(frozen=True)
class Block:
    """Seconds of one layer, or of the output layer, for one micro-batch on one rank.

    Attributes:
        forward, backward: arithmetic and memory traffic.
        recomputed: forward again, before backward.
        weight: the part of backward that only computes the weights' gradients.
        forward_exposed, backward_exposed: communication that the rank waits for.
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

    Attributes:
        seconds: its time.
        bubble: share of the time in which a rank waits for the pipeline to fill and drain.
        uneven: share of the time in which a rank waits for the slowest stage.
        exposed_s: seconds of communication that nothing hides.
        flops_per_s: model FLOPs per second and device (6 N and attention, causal if the kernel is fused; recomputation
            is not counted).
        mfu: flops_per_s over the datasheet's peak.
    """

    seconds: float
    bubble: float
    uneven: float
    exposed_s: float
    flops_per_s: float
    mfu: float


def beside(communication: float, arithmetic: float) -> float:
    """Return the seconds that communication adds to arithmetic that runs at the same time."""
    hidden = min(communication, arithmetic)
    return communication - hidden + BESIDE_COST * hidden


class Clock:
    """Times of the layouts of one job. Parts that layouts have in common are computed once."""

    def __init__(self, job: Job):
        self.job = job
        self.block = lru_cache(maxsize=None)(self._block)
        self.head = lru_cache(maxsize=None)(self._head)
        self.synchronisation = lru_cache(maxsize=None)(self._synchronisation)
        self.flops = job.model.flops_per_token(job.sequence_length, causal=job.fused_attention)

    def step(self, layout: Layout) -> Step:
        """Return the step's time.

        The slowest stage sets the pace of m micro-batches. Filling and draining costs (pp - 1) / chunks more of them
        (Narayanan et al. 2021, section 2.2). With the zero-bubble schedule H1 the weights' gradients fill part of that
        (Qi et al. 2023, table 1).
        """
        job, m = self.job, layout.micro_batches(self.job)
        block = self.block(layout.cp, layout.tp, layout.micro_batch, layout.recompute, layout.ep)
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
            # Backward continues in the stage before without the weights' gradients: pp - 1 stages do not wait for them.
            # The weights' gradients of micro-batches before the last, up to pp - 1, fill the remaining idle time.
            filling = layout.pp - 1 + min(m - 1, layout.pp - 1)
            idle = max(0.0, idle - filling * job.model.layers / layout.pp * block.weight)
        gradients, update = self.synchronisation(layout.pp, layout.dp, layout.cp, layout.tp, layout.zero, layout.ep)
        if layout.zero >= 2:
            gradients *= m if layout.zero == 2 else 0  # stage 3: see _weights_gathered
        if job.overlap != "none":
            backward = most * (block.backward + block.recomputed) * (m if layout.zero == 2 else 1)
            gradients = beside(gradients * (1 - 1 / most), backward) + gradients / most  # last: not hidden
        nodes = -(-layout.ranks // job.hardware.devices_per_node)
        late = 1 + NODE_SPREAD * sqrt(2 * log(nodes))
        seconds = (m * (slowest + transfers) + idle + gradients + update) * late
        waited = most * (block.forward_exposed + block.backward_exposed + gathered) + transfers
        exposed = m * waited + gradients
        seconds = max(seconds, self._shared(layout, seconds - idle, slowest))
        rate = self.flops * job.sequence_length * job.global_batch / seconds / layout.ranks
        return Step(seconds, idle / seconds, m * (slowest - mean) / seconds, exposed, rate, rate / job.peak_flops)

    def _shared(self, layout: Layout, busy: float, one: float) -> float:
        """Return the least time of a step on cores that ranks share.

        In this time the cores do the work of all ranks. Bubbles cost nothing then. While a pipeline fills and drains,
        with one micro-batch a stage and fewer busy ranks than cores, cores are idle; that time is added.
        """
        cores = self.job.hardware.full_speed_ranks
        if not cores:
            return 0.0
        if layout.ranks > cores:
            busy += self._turns(layout) * cores / min(layout.ranks, self.job.hardware.devices_per_node)
        a_stage = layout.ranks / layout.pp
        working = (stages * a_stage for stages in range(1, layout.pp))
        filling = sum(max(0.0, 1 - ranks / cores) for ranks in working) * one / layout.chunks
        return busy * min(layout.ranks, self.job.hardware.devices_per_node) / cores + filling

    def _turns(self, layout: Layout) -> float:
        """Return the seconds that a step's collectives inside of layers wait for cores.

        A group of n waits as log2 n pairs do.
        """
        layers = -(-self.job.model.layers // layout.pp) * layout.micro_batches(self.job)
        meetings = TENSOR_MEETINGS * log2(layout.tp) + CONTEXT_MEETINGS * log2(layout.cp)
        meetings += EXPERT_MEETINGS * log2(layout.ep)
        return layers * meetings * self.job.hardware.turn_s

    def _matmul(self, m: float, n: int, k: float, groups: int = 1) -> float:
        return matmul_s(self.job.hardware, self.job.peak_flops, self.job.element_bytes, m, n, k, groups)

    def _experts(self, shard: LayerShare) -> tuple[float, float, float]:
        """Return the seconds of the products of routers and experts: forward, gradients of tokens, of weights."""
        model = self.job.model
        if not model.experts:
            return 0.0, 0.0, 0.0
        up, rows = model.intermediate * (2 if model.gated_mlp else 1), shard.rows / shard.experts
        shapes: list[tuple[float, int, int, int]] = [(shard.tokens, model.experts, model.hidden, 1)]
        shapes += [(rows, up, model.hidden, shard.experts), (rows, model.hidden, model.intermediate, shard.experts)]
        return (
            sum(self._matmul(m, n, k, groups) for m, n, k, groups in shapes),
            sum(self._matmul(m, k, n, groups) for m, n, k, groups in shapes),
            sum(self._matmul(n, k, m, groups) for m, n, k, groups in shapes),
        )

    def _block(self, cp: int, tp: int, micro_batch: int, recompute: str, ep: int = 1) -> Block:
        job, model, hardware = self.job, self.job.model, self.job.hardware
        shard = LayerShare.of(job, cp, tp, micro_batch, ep)
        tokens, bytes_ = shard.tokens, job.element_bytes
        qkv = (shard.heads + 2 * shard.kv_heads) * model.head_dim
        up = shard.intermediate * (2 if model.gated_mlp else 1)
        shapes = [
            (qkv, model.hidden),
            (model.hidden, shard.heads * model.head_dim),
        ]
        if shard.intermediate:
            shapes += [(up, model.hidden), (model.hidden, shard.intermediate)]
        experts = self._experts(shard)
        forward = sum(self._matmul(tokens, n, k) for n, k in shapes) + experts[0]
        data = sum(self._matmul(tokens, k, n) for n, k in shapes) + experts[1]
        weight = sum(self._matmul(n, k, tokens) for n, k in shapes) + experts[2]
        attention_forward, attention_backward = self._attention(shard)

        between = self._between(shard, -(-tokens // tp) if job.sequence_parallel else tokens, ep)
        routing = KERNELS_OF_EXPERTS if model.experts else 0
        kernels = KERNELS_FORWARD + routing, KERNELS_BACKWARD + routing
        arithmetic = forward + attention_forward, data + weight + attention_backward
        forward_s, backward_s = (
            self._launched(busy + outer + inner, count, cp)
            for busy, (outer, inner), count in zip(arithmetic, between, kernels, strict=True)
        )
        once = gather_s(hardware, tokens * model.hidden * bytes_, tp, 1)
        forward_exposed, backward_exposed = self._tensor_exposed(once, tp, forward, data, weight)
        forward_exposed += self._context_exposed(shard, cp, tp, attention_forward)
        backward_exposed += 2 * self._context_exposed(shard, cp, tp, attention_backward / 2)
        sent = shard.rows * model.hidden * bytes_
        exchanges = EXPERT_MEETINGS / 2 * exchange_s(hardware, sent, ep, cp * tp)
        forward_exposed, backward_exposed = forward_exposed + exchanges, backward_exposed + exchanges
        recomputed = 0.0
        if recompute == "full":
            recomputed, backward_exposed = forward_s, backward_exposed + forward_exposed
        elif recompute == "selective" and job.fused_attention:
            mlp = sum(self._matmul(tokens, n, k) for n, k in shapes[2:]) + experts[0] + between[0][1]
            recomputed = forward_s - between[0][0] - (0 if model.mlp_module else mlp)
            # Attention waits for its collectives again, and so does an MLP that is a module.
            backward_exposed += forward_exposed * (1 if model.mlp_module else 0.5)
        elif recompute == "selective":
            recomputed = attention_forward
        return Block(forward_s, backward_s, recomputed, weight, forward_exposed, backward_exposed)

    def _between(self, shard: LayerShare, region: int, ep: int) -> tuple[tuple[float, float], tuple[float, float]]:
        """Return the seconds of the operations between products, as two pairs: forward, and backward.

        The first of a pair is norms, residual sums and rotations, the second is the MLP's activation and gate, and the
        rows of experts.
        """
        job, model, hardware, bytes_ = self.job, self.job.model, self.job.hardware, self.job.element_bytes
        elements = shard.tokens * shard.intermediate + shard.rows * model.intermediate
        moved = shard.rows * model.hidden * (ROW_PASSES if ep == 1 else ROW_PASSES_EP)
        rotated = (shard.heads + shard.kv_heads) * model.head_dim * shard.tokens
        activation = hardware.activation_forward_s, hardware.activation_backward_s
        forward, backward = (
            (
                elementwise_s(hardware, bytes_ * (passes.outer * region * model.hidden + passes.rotated * rotated)),
                elementwise_s(hardware, bytes_ * (passes.inner * elements + moved)) + elements * seconds,
            )
            for passes, seconds in zip(passes_of(job), activation, strict=True)
        )
        return forward, backward

    def _launched(self, seconds: float, kernels: int, cp: int) -> float:
        """Return the seconds of kernels with their launches.

        On a GPU the host launches ahead, and costs time only if kernels are shorter than their launch.
        """
        hardware = self.job.hardware
        launches = kernels * (hardware.context_launch_s if cp > 1 and hardware.context_launch_s else hardware.launch_s)
        return seconds + launches if self.job.eager else max(seconds, launches)

    def _attention(self, shard: LayerShare) -> tuple[float, float]:
        """Return the seconds of attention's core, forward and backward."""
        job, model, hardware = self.job, self.job.model, self.job.hardware
        rows = shard.tokens * shard.heads
        if job.fused_attention:
            forward = attention_s(hardware, job.peak_flops, rows, job.sequence_length, model.head_dim)
            return forward, CAUSAL_BACKWARD * forward
        scores = rows * job.sequence_length
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
        """Return the seconds that tensor parallelism waits, forward and backward.

        Forward gathers and scatters around attention and around the MLP. Backward does the same for the gradients, and
        gathers the inputs again during the gradients of the data (Korthikanti et al. 2022, section 4.2).

        Args:
            once: seconds of one all-gather of the activations.
        """
        if tp == 1:
            return 0.0, 0.0
        gathered_again = 2 * once if self.job.sequence_parallel else 0.0
        if self.job.overlap == "none":
            return 4 * once, 4 * once + gathered_again
        if self.job.overlap == "some":
            return 4 * once, 2 * once + beside(gathered_again, data) + beside(2 * once, weight)
        return beside(4 * once, forward), beside(4 * once + gathered_again, data + weight)

    def _context_exposed(self, shard: LayerShare, cp: int, tp: int, attention: float) -> float:
        """Return the seconds that a ring waits for keys and values beyond the attention that hides them."""
        if cp == 1:
            return 0.0
        size = 2 * shard.tokens * shard.kv_heads * self.job.model.head_dim * self.job.element_bytes
        ring = gather_s(self.job.hardware, size * cp, cp, tp)
        return beside(ring, attention * (cp - 1) / cp)

    def _head(self, cp: int, tp: int, micro_batch: int) -> Block:
        """Return the times of the output layer and the loss.

        The embedding is a lookup; its time is negligible.
        """
        job, model = self.job, self.job.model
        shard = LayerShare.of(job, cp, tp, micro_batch)
        forward = self._matmul(shard.tokens, shard.vocab, model.hidden)
        data = self._matmul(shard.tokens, model.hidden, shard.vocab)
        weight = self._matmul(shard.vocab, model.hidden, shard.tokens)
        loss = memory_s(job.hardware, LOSS_BYTES * shard.tokens * shard.vocab)
        once = gather_s(job.hardware, shard.tokens * model.hidden * job.element_bytes, tp, 1)
        return Block(forward + loss / 3, data + weight + loss * 2 / 3, 0.0, weight, once, once)

    def _transfers(self, layout: Layout) -> float:
        """Return the seconds that a micro-batch waits for the neighbouring stages.

        It waits for activations from one and for gradients from the other.
        """
        job = self.job
        shard = LayerShare.of(job, layout.cp, layout.tp, layout.micro_batch)
        whole = shard.tokens * job.model.hidden * job.element_bytes
        stride = layout.dp * layout.cp * layout.tp
        # Each tensor-parallel rank sends its part; without sequence parallelism it is gathered on arrival
        # (Narayanan et al. 2021, section 4.1).
        one = send_s(job.hardware, whole / layout.tp, stride)
        if not job.sequence_parallel:
            one += gather_s(job.hardware, whole, layout.tp, 1)
        return 2 * layout.chunks * one * (BESIDE_COST if job.overlap == "all" else 1)

    def _stage_parameters(self, pp: int, tp: int, ep: int) -> tuple[int, int]:
        """Return the numbers of parameters in a rank's part of the largest stage: without experts, and of experts."""
        model, shard = self.job.model, LayerShare.of(self.job, 1, tp, 1, ep)
        embedding = shard.vocab * model.hidden
        ends = embedding * (1 if model.tied_embeddings or pp > 1 else 2)
        layers = -(-model.layers // pp)
        return layers * shard.layer_parameters(model) + ends, layers * shard.experts * model.expert_parameters

    def _synchronisation(self, pp: int, dp: int, cp: int, tp: int, zero: int, ep: int = 1) -> tuple[float, float]:
        """Return the seconds of the gradients' sum over the data-parallel ranks, and of the optimizer's update.

        Experts have replicas on every ep-th of these ranks.
        """
        job, hardware = self.job, self.job.hardware
        common, experts = self._stage_parameters(pp, tp, ep)
        summed = [(common, dp * cp, tp), (experts, dp * cp // ep, tp * ep)]
        if ep == 1:
            summed = [(common + experts, dp * cp, tp)]

        def gathering(bytes_: int) -> float:
            return sum(gather_s(hardware, bytes_ * parameters, ranks, stride) for parameters, ranks, stride in summed)

        scattered = gathering(GRADIENT_BYTES)
        gathered = scattered if zero == 0 else gathering(job.element_bytes) if zero < 3 else 0.0
        held = sum(parameters / (ranks if zero else 1) for parameters, ranks, _ in summed)
        update = memory_s(hardware, update_bytes(job) * held)
        if zero == 2:  # scattered for each micro-batch, gathered once
            return scattered, update + gathered
        return scattered + gathered, update

    def _weights_gathered(self, layout: Layout, block: Block) -> float:
        """Return the seconds that a layer waits under ZeRO stage 3.

        Its weights are gathered twice and its gradients are scattered.
        """
        job, hardware = self.job, self.job.hardware
        shard = LayerShare.of(job, 1, layout.tp, 1)
        parameters = shard.layer_parameters(job.model) + shard.experts * job.model.expert_parameters
        weights = gather_s(hardware, job.element_bytes * parameters, layout.data_ranks, layout.tp)
        gradients = gather_s(hardware, GRADIENT_BYTES * parameters, layout.data_ranks, layout.tp)
        forward, backward = block.forward, block.backward + block.recomputed
        if job.overlap == "none":
            forward = backward = 0.0
        return beside(weights, forward) + beside(weights + gradients, backward)
