"""Pipeline: a model's layers on ranks in sequence, each batch cut into micro-batches that follow one another.

The schedules are those of torch.distributed.pipelining. weft cuts the model, sums the gradients of tied parameters and
measures the time of each action.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_flatten, tree_leaves

from weft._C import CommError
from weft.comm.communicator import Communicator
from weft.comm.registry import communicator
from weft.context_parallel.region import agreed, share_in_stages
from weft.data_parallel.bucket_comm import transport_to
from weft.data_parallel.buckets import Slot
from weft.data_parallel.consensus import mark_of_batch, warn_of_same_batch
from weft.data_parallel.fully_sharded import ShardedParameters, obstacle_of
from weft.data_parallel.grad_norm import mark_invariant
from weft.data_parallel.reducer import Reducer
from weft.invariant.unit_outputs import mean_of_units
from weft.ops.invariant import Units
from weft.pipeline.balance import never_read, undisturbed
from weft.pipeline.cut import call_with, check_arguments, cut_of, dimensions_of, sharing_of
from weft.pipeline.forward_cut import device_of
from weft.pipeline.forward_plan import Call, ForwardPlan
from weft.pipeline.microbatches import check_means, microbatches_of
from weft.pipeline.model_stage import ModelStage, outside_of_inference
from weft.pipeline.schedules import SCHEDULES
from weft.pipeline.stage_boundary import Made, differentiable
from weft.pipeline.stage_params import StageParams
from weft.pipeline.tied_params import Ties, users_of
from weft.pipeline.timeline import Timeline
from weft.pipeline.timing import ClockedStage, StageClock
from weft.pipeline.transfers import Transfers
from weft.pipeline.transformers_stages import refuse_layerdrop, refuse_records
from weft.pipeline.unit_gradients import UnitGradients, check_alike, microbatches_in_units, name_modules_in_stages
from weft.pipeline.walk import walk
from weft.replicas import SameCalls, check_replicas
from weft.rng import next_seed
from weft.sharding.optimizer_check import refuse_replaced
from weft.sharding.owners import mark
from weft.sharding.shard import shard_of

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Inputs = torch.Tensor | Sequence[torch.Tensor] | Mapping[str, Any]


@dataclass
class _BuiltSchedule:
    """What a step of inputs of certain shapes needs.

    Attributes:
        of_torch: torch's schedule.
        running: this rank's stages in it, by number.
        entering: by stage, the values that it takes, on the meta device.
        plan: the values that cross stages.
    """

    of_torch: Any
    running: dict[int, ClockedStage]
    entering: dict[int, tuple]
    plan: ForwardPlan


_MOST_SCHEDULES = 8  # for as many shapes of batches; a schedule keeps buffers of what stages send
_BUCKET_BYTES = 25 << 20  # as weft.DataParallel and DDP


class Pipeline(nn.Module):
    """This rank's stages of a model, and a step that runs through the stages of all ranks.

        mesh = weft.init_mesh(pp=4)
        pipe = weft.Pipeline(model, mesh, schedule="1f1b", microbatches=8, loss=nn.functional.cross_entropy)
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-3)
        loss = pipe.step(inputs, targets)  # of the whole batch, on every rank; so are the gradients
        optimizer.step()

    Models of transformers compute the loss themselves:

        pipe = weft.Pipeline(model, mesh, microbatches=8)
        loss = pipe.step({"input_ids": tokens, "attention_mask": mask, "labels": tokens})

    Parameters keep the model's names. The state_dicts of all ranks together are the model's state_dict. A parameter
    that several stages use (tied embeddings) has a copy on the rank of each stage; after a step every copy has the sum
    of all gradients, with the same bits.

    To split layers over "tp" and the sequence over "cp" as well, call `weft.parallelize(model, mesh["cp", "tp"])`
    first. With parts=True in its context, inputs and targets are this rank's parts, and the loss is the sum over the
    parts of these ranks.

    If the mesh has "dp", each of its ranks gives its own part of the batch. Gradients and the loss are averaged over
    "dp", or added up with reduction="sum". See docs/pipeline.md.

    Args:
        model: the same whole model on every rank. It is changed: it becomes this rank's part, without the parameters
            of other ranks.
        mesh: a mesh of init_mesh, or its "pp" alone.
        schedule: "afab" (GPipe), "1f1b", "interleaved", "zero-bubble", "zbv" or "dualpipev".
        microbatches: number of equal parts, along the first dimension, into which a step cuts inputs and targets. With
            invariant it is the number of units of a rank, and can be left out.
        loss: loss(output, targets) -> scalar, of a micro-batch. None: the model returns it, as `.loss`
            or as the only scalar of its output.
        reduction: "mean": the loss is a mean over the micro-batch, and the loss of a step is the mean of these. "sum":
            losses add up, for a loss that is divided by its own count (tokens that are not padding).
        balance: "parameters": the largest stage has as few parameters as possible. "time": the slowest stage takes as
            little forward time as possible. Every rank measures every layer on `example`, so that a slow rank gets
            fewer layers. Or a list: the number of layers of each stage.
        memory: for balance="time" and one stage on a rank: bytes that a step may take on this rank. Ranks may have
            different limits. Counted are parameters, gradients and AdamW's two moments, and what autograd keeps of the
            micro-batches that the schedule has under way, measured on `example`.
        example: a micro-batch of inputs; a dict gives arguments by name. Needed for balance="time", and if the forward
            calls its layers in another order than the model has them and no guessed inputs run.
        layers: names of the modules that a stage runs as a whole, `*` for the elements of a list: ["embedding",
            "blocks.*", "head"]. The default is the elements of the outermost lists, and what is beside these lists.
        stages_per_rank: for "interleaved" (2 by default) and "zero-bubble" (1).
        checks: as in `weft.parallelize`. Each step counts as a call; its inputs and targets are compared over "pp" and
            "tp".
        invariant: a number V of units of the batch, which the size of "dp" must divide. Each micro-batch is a unit, and
            losses and gradients have the bits of `weft.DataParallel(model, invariant=V)` on any number of ranks
            (docs/invariance.md). On CPUs.

    Raises:
        ValueError: the mesh has no "pp", there are more stages than layers, the schedule needs more micro-batches, or
            the model cannot be cut; raised before any rank sends. Also if ranks pass different arguments; raised on
            every rank.

    Examples:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        >>> pipe = weft.Pipeline(model, weft.init_mesh(pp=2), microbatches=2, loss=nn.functional.mse_loss)
        >>> loss = pipe.step(torch.ones(4, 4), torch.zeros(4, 4))
        >>> loss.shape
        torch.Size([])
    """

    @torch.inference_mode(False)
    def __init__(
        self,
        model: nn.Module,
        mesh: DeviceMesh,
        *,
        schedule: str = "1f1b",
        microbatches: int | None = None,
        loss: Loss | None = None,
        reduction: str = "mean",
        balance: str | Sequence[int] = "parameters",
        memory: float | None = None,
        example: Inputs | None = None,
        layers: Sequence[str] | None = None,
        stages_per_rank: int | None = None,
        checks: str = "first",
        invariant: int | None = None,
    ):
        super().__init__()
        check_arguments(model, schedule, loss, reduction)
        along = dimensions_of(mesh)
        if invariant is not None:
            microbatches = microbatches_in_units(model, along, invariant, microbatches, reduction)
        if microbatches is None:
            raise TypeError("Pipeline: microbatches is missing: the number of parts of a batch")
        self._units = None if invariant is None else Units(invariant)
        self._ranks: Communicator = communicator(along["pp"])
        self._replicas = communicator(along["dp"]) if "dp" in along and along["dp"].size() > 1 else None
        self._plan, self._microbatches, self._reduction = SCHEDULES[schedule], microbatches, reduction
        self._device = device_of(mesh)
        self._name = schedule
        self._loss = None if loss is None else partial(loss)  # a loss that is a module must not become a submodule
        self._sharing = sharing_of(model, along)
        fp64 = all(parameter.dtype == torch.float64 for parameter in model.parameters())  # before the cut: all stages
        self._loss_type = torch.float64 if fp64 else torch.float32
        self._cut, stages = cut_of(
            model,
            along,
            schedule,
            microbatches,
            stages_per_rank,
            layers,
            balance,
            memory,
            example,
            self._loss,
            self._device,
        )
        self._total, self.layers_per_stage = len(stages), self._cut.layers_per_stage
        parameters = list(model.parameters())
        self._keep_own_stages(stages)
        refuse_replaced(parameters, self, "weft.Pipeline")
        self._clock = StageClock(self._device)
        self._schedules: dict[str, _BuiltSchedule] = {}  # by the shapes of a batch, the last used one at the end
        self._reducer: Reducer | None = None  # over "dp", made with the first step
        self._sharded: ShardedParameters | None = None
        self._kinds: list[tuple] = []  # of each parameter then: requires_grad, dtype, device
        if self._units is not None:
            self._shared_by = self._ranks, communicator(along["dp"])  # ranks that the units lie on
            mark_invariant(self, self._units.total)
            name_modules_in_stages(self._cut)
            for stage in self._stages.values():
                stage.first_unit = self._units.here(self._shared_by[1]).start
        shards = [shard for shard in map(shard_of, self.parameters()) if shard is not None]
        splitters = {shard.communicator for shard in shards if shard.replicas is None}  # ranks of "ep" have own batches
        self._compared = False  # a batch over "dp"
        self._same_calls = SameCalls(dict.fromkeys([self._ranks, *splitters], False), checks)

    def shard_parameters(self, mesh: DeviceMesh, experts: DeviceMesh | None, options: Mapping[str, Any]) -> None:
        """Share the parameters over ranks of "dp" and "cp", layer by layer: parallelize's zero=3. A collective call.

        Args:
            mesh: these ranks.
            experts: the ranks that share parameters of experts over "ep".
            options: further options of `torch.distributed.fsdp.fully_shard`.

        Raises:
            ValueError: a rank has several stages, or the schedule splits backward; a parameter is outside of the
                layers, or of several; the layers cannot be wrapped. Raised on every rank.
        """
        if self._total != self._ranks.world_size or self._name == "zero-bubble":
            raise ValueError(
                f"Pipeline: zero=3 is not supported with the schedule {self._name!r}, whose ranks have several stages "
                'or take backward in two halves: use "afab" or "1f1b"'
            )
        here = {id(module) for stage in self._stages.values() for module in stage.modules()}
        layers = {name: layer for name, layer in self._cut.layers.items() if id(layer) in here}
        trained = {name: layer for name, layer in layers.items() if any(True for _ in layer.parameters())}
        if obstacle := next(filter(None, self._ranks.all_gather_object(obstacle_of(self, trained))), ""):
            raise ValueError(f"Pipeline: {obstacle}")
        replicas = 1 if self._replicas is None else self._replicas.world_size
        average = self._reduction == "mean"
        self._sharded = ShardedParameters(self, mesh, experts, replicas, options, average, trained)
        self._renew()

    def step(
        self, inputs: Inputs, targets: torch.Tensor | None = None, *, record_timeline: bool = False
    ) -> torch.Tensor:
        """Run forward and backward of a batch. A collective call.

        Args:
            inputs: the arguments of the model: a tensor or several, or a dict by name, [batch, ...] each. Numbers and
                flags go to every micro-batch. The same on every rank of the pipeline.
            targets: [batch, ...], read by the rank of the last stage. None if the model computes its loss.
            record_timeline: measure the actions of this step, for `timeline`. The ranks then wait for one another at
                its start, and all pass the same.

        Returns:
            The batch's loss, a detached fp32 scalar (fp64 for an fp64 model), the same on every rank. The gradients are
            added to `.grad`, over "dp" in memory that the next step writes to again, as with `weft.DataParallel`.

        Raises:
            ValueError: the batch is not a multiple of the micro-batches; the micro-batches of a model with its own loss
                have different numbers of labels that count; the forward runs other layers than when it was cut. Raised
                on every rank before activations are sent.
            RankLostError: a rank is lost.
        """
        self._renew()
        given = self._checked(inputs, targets)
        self._same_calls.look(self, "Pipeline", (inputs, targets))
        if self._replicas is not None and not self._compared:
            self._compared = True
            warn_of_same_batch(self._replicas, mark_of_batch((inputs, targets)))
        schedule = self._schedule_for(given, self._begun(inputs, given, targets))
        gradients = None if self._units is None else self._gradients_of_units(schedule, self._units)
        self._clock.runs = record_timeline
        if record_timeline:
            dist.barrier(self._ranks.group)  # the clocks of all ranks start here
            self._clock.start()
        earlier = self._put_aside()
        reducer = self._reducer_over_replicas()
        if self._sharded is not None:
            self._sharded.average_whole()
        for running in schedule.running.values():
            running.reducer, running.backwards_left = reducer, self._microbatches
        if reducer is not None:
            reducer.begin()
        losses: list[torch.Tensor] = []
        self._of_units: list[torch.Tensor] = []
        numbers = torch.arange(self._microbatches)  # the stages have their micro-batches; torch deals out their numbers
        batch = (numbers,) if 0 in self._stages else ()
        ends = {"target": numbers, "losses": losses} if self._ends_here else {}
        try:
            schedule.of_torch.step(*batch, return_outputs=False, **ends)
            if reducer is not None:
                reducer.finish()
            if gradients is not None:
                gradients.finish(self._shared_by)
        except RuntimeError as error:
            for parameter, gradient in earlier.items():
                parameter.grad = gradient
            _raise_cause(error)
        finally:
            for running in schedule.running.values():
                running.reducer = None
        if gradients is None:
            self._ties.sum()
        for parameter, gradient in earlier.items():
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        return self._loss_everywhere(losses)

    @torch.no_grad()
    def evaluate(self, inputs: Inputs, targets: torch.Tensor | None = None) -> torch.Tensor:
        """Return the batch's loss as `step` does, without gradients. A collective call.

        Micro-batches follow one another through the stages, so that all ranks compute.
        """
        with outside_of_inference((inputs, targets)) as (inputs, targets):
            return self._evaluated(inputs, targets)

    def _evaluated(self, inputs: Inputs, targets: torch.Tensor | None) -> torch.Tensor:
        self._renew()
        given = self._checked(inputs, targets)
        schedule = self._schedule_for(given, self._begun(inputs, given, targets))
        group, sends = self._ranks.p2p_group(self._device), []
        ready: dict[tuple[int, int], tuple[torch.Tensor, ...]] = {}
        losses: list[torch.Tensor] = []
        self._of_units = []
        # Every rank goes through its work in this order, so each message is sent before a later one is waited for.
        work = sorted((number + part, number, part) for number in self._stages for part in range(self._microbatches))
        for _, number, part in work:
            stage = self._stages[number]
            values = ready.pop((number, part), ())
            if number > 0 and self._owner(number - 1) != self._ranks.rank:
                values = tuple(torch.empty_like(x, device=self._device) for x in schedule.entering[number])
                for value in values:
                    dist.recv(value, group=group, group_src=self._owner(number - 1))
            stage.microbatch = part
            output = stage(*values)
            if stage.last:
                losses.append(self._scaled_loss(output))
            elif self._owner(number + 1) == self._ranks.rank:
                ready[number + 1, part] = output
            else:
                to = self._owner(number + 1)
                sends += [(dist.isend(value, group=group, group_dst=to), value) for value in output]
        for sending, _ in sends:
            assert sending is not None  # this rank is in the group
            sending.wait()
        return self._loss_everywhere(losses)

    def timeline(self) -> Timeline:
        """Return the last step with record_timeline=True as it ran on all ranks. A collective call.

        Raises:
            ValueError: no such step has run.
        """
        actions = self._ranks.all_gather_object(self._clock.actions(self._ranks.rank))
        if not all(actions):
            raise ValueError("Pipeline.timeline: no step was recorded; call step(..., record_timeline=True) first")
        return Timeline(self._name, len(actions), self._total, self._microbatches, tuple(chain.from_iterable(actions)))

    def __deepcopy__(self, memo):
        raise TypeError("a Pipeline cannot be copied: copy the model first, and cut both")

    def forward(self, *inputs: Any, **options: Any) -> NoReturn:
        raise TypeError(
            "a Pipeline has no forward of its own: call step(inputs, targets), or evaluate(inputs, targets)"
        )

    def _keep_own_stages(self, stages: Sequence[ModelStage]) -> None:
        numbers = self._plan.stages_of(self._ranks.rank, self._ranks.world_size, self._total)
        self._stages = {number: stages[number] for number in numbers}
        users = users_of(stages, self._owner)  # before the tensors of other stages are left out
        self._held = StageParams(self, self._cut, list(self._stages.values()))
        mark({parameter: set(of_stages.values()) for parameter, of_stages in users.items()}, self._ranks)
        share_in_stages(self, self._sharing)
        self._ranks.p2p_group(self._device)  # with all ranks: a tie has messages of a few
        self._ties = Ties(users, self._ranks)
        self._ties.align()
        self._parameters_here = list(self.parameters())

    def _owner(self, stage: int) -> int:
        return self._plan.rank_of(stage, self._ranks.world_size)

    def check_replicas(self) -> None:
        """Check that replicas agree, as `weft.check_replicas` does."""
        check_replicas(self)

    @property
    def reduction(self) -> str:
        """How the micro-batches' losses become the batch's: "mean" or "sum"."""
        return self._reduction

    @property
    def own_loss(self) -> bool:
        """Whether the model computes its loss."""
        return self._loss is None

    @property
    def replicas(self) -> Communicator | None:
        """The ranks of "dp", which have the same stages."""
        return self._replicas

    @property
    def _ends_here(self) -> bool:
        return self._total - 1 in self._stages

    def train(self, mode: bool = True) -> "Pipeline":
        cut = vars(self).get("_cut")
        if cut is not None:
            cut.model.train(mode)  # its own code may read `training`
        return super().train(mode)

    def _checked(self, inputs: Inputs, targets: torch.Tensor | None) -> list[Call]:
        """Check a batch; return the arguments of the model by micro-batch."""
        call = call_with(inputs)
        refuse_records(self._cut.of_transformers, call[1])
        refuse_layerdrop(self._cut.of_transformers)
        if self._loss is not None and not isinstance(targets, torch.Tensor):
            raise TypeError(f"Pipeline: targets must be a tensor [batch, ...], got {type(targets).__name__}")
        if self._loss is None and self._reduction == "mean" and self._units is None:  # units have equal weights
            check_means(call[1], self._microbatches)
        given = list(microbatches_of(call, targets, self._microbatches))
        if self._units is not None:
            batch = next(x.size(0) for x in tree_leaves(given) if isinstance(x, torch.Tensor) and x.dim())
            check_alike(self._units.total, batch, self._shared_by, self._device)
        if elsewhere := [parameter for parameter in self._summed() if hasattr(parameter, "main_grad")]:
            name = next(name for name, parameter in self.named_parameters() if parameter is elsewhere[0])
            raise ValueError(
                f"Pipeline: the gradient of {name} goes to main_grad, and only .grad is summed over tied copies "
                'and "dp": remove main_grad, or use dp=1 and no ties'
            )
        return given

    def _renew(self) -> None:
        """Take the parameters as they are now: users replace them, by values for a model on the meta device."""
        changed = self._held.renew()
        if changed is None:
            return
        self._ties.renew(changed)
        parameters = list(self.parameters())
        if list(map(id, parameters)) != list(map(id, self._parameters_here)):  # not only buffers
            self._reducer, self._parameters_here = None, parameters

    def _reducer_over_replicas(self) -> Reducer | None:
        """Return what sums gradients over "dp" as they become ready; None without "dp" and in units."""
        if self._replicas is None or self._units is not None or self._sharded is not None:
            return None
        kinds = [(parameter.requires_grad, parameter.dtype, parameter.device) for parameter in self._parameters_here]
        if not any(kind[0] for kind in kinds):
            return None
        if self._reducer is None or kinds != self._kinds:
            named = enumerate(self.named_parameters())
            divisor = self._replicas.world_size if self._reduction == "mean" else 1
            self._reducer = Reducer(
                [Slot(number, name, parameter) for number, (name, parameter) in named],
                transport_to(self._device, self._replicas)(self._replicas, None, divisor, False),
                bucket_bytes=_BUCKET_BYTES,
                overlap=True,
                unused="others",
                check_gradients=False,
                by_hand=True,
            )
        self._kinds = kinds
        return self._reducer

    def _gradients_of_units(self, schedule: "_BuiltSchedule", units: Units) -> UnitGradients:
        """Return where this step's stages leave their gradients."""
        own = {number: stage.submod for number, stage in schedule.running.items()}
        named = dict(self.named_parameters())
        gradients = UnitGradients(units, self._shared_by[1], own, named, self._ties, self._device)
        for stage in schedule.running.values():
            stage.gradients = gradients
        self._cut.watched = gradients.without_draws
        return gradients

    def _summed(self) -> Sequence[nn.Parameter]:
        """Return the parameters whose gradients a step sums over ranks."""
        alone = self._replicas is None and self._units is None
        return [tie.parameter for tie in self._ties.ties] if alone else self._parameters_here

    def _put_aside(self) -> dict[nn.Parameter, torch.Tensor]:
        """Take off and return the gradients of earlier steps that ranks have summed, and must not sum again."""
        earlier = {parameter: parameter.grad for parameter in self._summed() if parameter.grad is not None}
        if self._reducer is not None:  # the next gradients go to the memory of these
            earlier = {parameter: gradient.clone() for parameter, gradient in earlier.items()}
        for parameter in earlier:
            parameter.grad = None
        return earlier

    def _begun(self, inputs: Inputs, given: list[Call], targets: torch.Tensor | None) -> tuple:
        """Return the arguments of ModelStage.begin for a batch; note how its sequence is shared. A collective call."""
        if self._units is None:
            seed = self._seed(inputs, targets)
        else:
            before = torch.get_rng_state()  # one process draws the seed alone, and in training alone
            self._seed(inputs, targets)
            torch.set_rng_state(before)
            own = any(part.training for part in self.modules()), next_seed()
            found = torch.tensor([own], device=self._ranks.device_of_numbers(self._device))
            for ranks in self._shared_by:
                found = ranks.all_gather(found, 0, [len(found)] * ranks.world_size)
            trains = bool(found[:, 0].any())
            if not trains:
                torch.set_rng_state(before)
            seed = int(found[0, 1]) if trains else 0
        return given, () if targets is None else targets.chunk(self._microbatches), seed

    def _seed(self, inputs: Inputs, targets: torch.Tensor | None) -> int:
        """Return a seed that is the same on all stages, where the code between layers must draw alike."""
        shared = None
        if self._sharing is not None:
            alike = [x for x in tree_leaves((inputs, targets)) if isinstance(x, torch.Tensor)]
            shared = agreed("Pipeline", self._sharing, inputs, alike)
        self._cut.shared = shared
        seed = torch.randint(2**62, (1,)) if shared is None else torch.tensor([shared.seed])
        return int(self._ranks.broadcast_(seed.to(self._ranks.device_of_numbers(self._device)), 0))

    def _schedule_for(self, given: list[Call], begun: tuple) -> "_BuiltSchedule":
        """Return the schedule for inputs of these shapes, and let the stages begin a batch.

        A new schedule is built for other shapes, and for other dtypes of the values that stages send.
        """
        kind = self._device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        leaves, structure = tree_flatten(given[0])
        shapes = [(x.shape, x.dtype) if isinstance(x, torch.Tensor) else x for x in leaves]
        dtypes = [parameter.dtype for parameter in self._parameters_here]
        key = repr((shapes, structure, autocast, dtypes, self.training, torch.is_grad_enabled()))
        for stage in self._stages.values():
            stage.begin(*begun)
        schedule = self._schedules.pop(key, None) or self._built(self._planned())
        self._schedules[key] = schedule
        for old in list(self._schedules)[:-_MOST_SCHEDULES]:
            del self._schedules[old]
        self._cut.draws = schedule.plan.draws
        for stage in self._stages.values():
            stage.follow(schedule.plan)
        return schedule

    def _planned(self) -> ForwardPlan:
        """Run a micro-batch through the stages, and return what crosses them."""
        if self._cut.stage_of_layer:
            self._cut.names, self._cut.stages = [], []
        with undisturbed(self._cut.model), saved_tensors_hooks(lambda _: None, never_read):
            transfers = Transfers(self._ranks, self._device)
            plan, _ = walk(self._cut, lambda run: self._stages[run.stage].run(run, 0), transfers)
        return plan

    def _built(self, plan: ForwardPlan) -> "_BuiltSchedule":
        """Build torch's schedule for stages that take and give tensors of these shapes."""
        leaving = [plan.leaving(stage) for stage in range(self._total - 1)]
        sent = [tuple(_sent(plan.made(root)) for root in roots) for roots in leaving]
        ends = (torch.zeros(1, dtype=torch.int64),), (torch.zeros((), dtype=self._loss_type, requires_grad=True),)
        crossings = [tuple(x.to("meta") for x in ends[0]), *sent, ends[1]]
        entering = {number: crossings[number] for number in self._stages}
        running: dict[int, ClockedStage] = {}
        for number, module in self._stages.items():
            running[number] = stage = ClockedStage(
                module,
                number,
                self._total,
                self._device,
                input_args=entering[number],
                output_args=crossings[number + 1],
                group=self._ranks.p2p_group(self._device),
            )
            stage.clock = self._clock
        built = list(running.values())
        of_torch = self._plan.kind(
            built[0] if self._plan.single else built,
            self._microbatches,
            loss_fn=self._timed_loss,
            scale_grads=False,
        )
        return _BuiltSchedule(of_torch, running, entering, plan)

    def _scaled_loss(self, value: torch.Tensor, _=None) -> torch.Tensor:
        if self._units is not None:
            self._of_units.append(value.detach())
            return value / self._units.total
        return value / self._microbatches if self._reduction == "mean" else value * 1.0

    def _timed_loss(self, value: torch.Tensor, _) -> torch.Tensor:
        value = self._scaled_loss(value)
        self._clock.extend()
        return value

    def _loss_everywhere(self, losses: list[torch.Tensor]) -> torch.Tensor:
        loss = torch.zeros((), device=self._device, dtype=self._loss_type)
        if self._ends_here and self._units is not None:
            loss = mean_of_units(self._shared_by[1], self._units, self._of_units).to(loss.dtype)
        elif self._ends_here:
            loss = torch.stack([value.detach().to(loss.dtype) for value in losses]).sum()
        loss = self._ranks.broadcast_(loss, self._owner(self._total - 1))
        if self._sharing is not None and self._sharing.parts:
            loss = self._sharing.ranks.all_reduce_(loss)
        if self._replicas is None or self._units is not None:
            return loss
        self._replicas.all_reduce_(loss)
        return loss.div_(self._replicas.world_size) if self._reduction == "mean" else loss


def _sent(made: Made) -> torch.Tensor:
    x = made.empty("meta")
    return x.requires_grad_(differentiable(x))


def _raise_cause(error: RuntimeError) -> None:
    """Raise the error of weft under torch's wrapping, if there is one: it names a lost rank, or what to change."""
    if "'_input_metadata' is invalid" in str(error):
        raise RuntimeError(
            f"this schedule takes a backward in two, which torch {torch.__version__} cannot do where a layer is an "
            "autograd function of Python, as split layers are; use torch 2.13, or schedule='1f1b' or 'interleaved'"
        ) from error
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, CommError) and not str(cause).startswith("Pipeline: "):
        cause = cause.__cause__
    raise cause if cause is not None else error
