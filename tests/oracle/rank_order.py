"""One process with the sums and the roundings that ranks have: what an engine must equal to the bit.

Stages 0 and 1 add up a rank's microbatches, then the ranks (of a group of owners), then the groups. Stages 2 and 3 add
each microbatch up over the ranks, then the rounds. Where a plan cuts along tp, or a tie lies on two stages of a
pipeline, sums have another order that no simple program has: there only closeness can be asked, in float64.

    in_rank_order(program, plan)        # what `plan` has to give
"""

import math
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import reduce

import torch
from torch import nn

import shardwise as sw
from tests.oracle.batches import Batch, count_rows, factors_of, microbatches_of
from tests.oracle.one_process import Trained, state_under_names, values_of
from tests.oracle.program import Optimizers, Program

Gradients = dict[str, torch.Tensor]


@dataclass(kw_only=True)
class RankOrder:
    """Masters, working copies and sums in one process, with the order and the roundings that ranks have.

    `model` is built in its own dtype and converted: each parameter computes in `working(name)`.
    """

    model: nn.Module
    make_optimizer: Optimizers
    loss_of: Callable[[nn.Module, Batch], torch.Tensor]
    """The loss of the model on one microbatch."""
    num_ranks: int = 1
    ranks_per_sum: int | None = None
    """So many ranks are summed first, then their sums are (replicas of owners); None: all in one sum."""
    rounds: bool = False
    """Whether each microbatch is summed over the ranks of a group before the next one is."""
    num_microbatches: int = 1
    average: bool = True
    clip: float | None = None
    loss_weight: Callable[[Batch], float] = count_rows
    working: Callable[[str], torch.dtype] = lambda _: torch.float32
    master: torch.dtype = torch.float32
    accumulate: torch.dtype = torch.float32
    reduce: torch.dtype = torch.float32
    of_ranks: Sequence[nn.Module] = ()
    """A model for each rank, of which `model` is the first; none: copies of it."""
    optimizer: torch.optim.Optimizer = field(init=False)

    def train(self, batches: Sequence[Batch], *, counts: Sequence[int] | None = None) -> Trained:
        """One update per batch; `counts`: the number of microbatches of each, where it changes."""
        trained = Trained()
        if not self.of_ranks:
            others = range(1, self.num_ranks)
            has_state = any(True for _ in self.model.buffers())
            self.of_ranks = [self.model, *(deepcopy(self.model) if has_state else self.model for _ in others)]
        masters = self._masters()
        self.optimizer = self.make_optimizer(list(masters.values()))
        for at, batch in enumerate(batches):
            if counts is not None:
                self.num_microbatches = counts[at]
            total, loss = self._gradients(batch)
            divisor = self.num_ranks * (self.num_microbatches if self.average else 1)
            for name, parameter in self.model.named_parameters():
                master = masters[name]
                master.grad = total[name].to(master.dtype) / divisor if name in total else None
                if master.dtype == parameter.dtype:  # what a forward wrote
                    master.data.copy_(parameter.data)
            trained.losses.append(loss)
            trained.grad_norms.append(self._clip([each for each in masters.values() if each.grad is not None]))
            self.optimizer.step()
            self._hand_out(masters)
            trained.states.append(self._state(masters))
        trained.parameters = values_of(self.model)
        return trained

    def _masters(self) -> dict[str, nn.Parameter]:
        """Of all parameters; those of floating point compute in their working dtype from now on."""
        masters: dict[str, nn.Parameter] = {}
        for name, parameter in self.model.named_parameters():
            is_float = parameter.is_floating_point()
            dtype = torch.promote_types(self.master, self.working(name)) if is_float else parameter.dtype
            masters[name] = nn.Parameter(parameter.detach().to(dtype, copy=True), requires_grad=is_float)
        for model in self.of_ranks:
            for name, parameter in model.named_parameters():
                if parameter.is_floating_point():
                    parameter.data = parameter.data.to(self.working(name))
        return masters

    def _hand_out(self, masters: Mapping[str, nn.Parameter]) -> None:
        """The new values to the models of all ranks, and the first one's buffers."""
        buffers = dict(self.model.named_buffers())
        for model in self.of_ranks:
            for name, parameter in model.named_parameters():
                if masters[name].grad is not None:
                    parameter.data.copy_(masters[name].data)
            for name, buffer in model.named_buffers() if model is not self.model else ():
                buffer.data = buffers[name].detach().clone()

    def _state(self, masters: dict[str, nn.Parameter]) -> dict[str, torch.Tensor]:
        state = state_under_names(self.model, masters, self.optimizer)
        for name, parameter in self.model.named_parameters():
            if masters[name].dtype != parameter.dtype and parameter.numel():
                state[f"optimizer/{name}/master"] = masters[name].detach().clone()
        return state

    def _gradients(self, batch: Batch) -> tuple[Gradients, float]:
        """The sum over all microbatches, and the mean loss."""
        parts = microbatches_of(batch, self.num_ranks, self.num_microbatches)
        weights = [self.loss_weight(part) for of_rank in parts for part in of_rank]
        factors = factors_of(weights)
        losses = [0.0] * len(weights)

        def computed(rank: int, number: int) -> Gradients:
            """The gradients of one microbatch of one rank."""
            at, model = rank * self.num_microbatches + number, self.of_ranks[rank]
            if not weights[at]:
                return {}
            loss = self.loss_of(model, parts[rank][number])
            if loss.requires_grad:
                (loss if factors[at] == 1.0 else loss * factors[at]).backward()
            losses[at] = loss.item()
            taken: Gradients = {}
            for name, parameter in model.named_parameters():
                if parameter.grad is not None:
                    taken[name], parameter.grad = parameter.grad.to_dense(), None
            return taken

        group = self.ranks_per_sum or self.num_ranks
        groups = [range(first, first + group) for first in range(0, self.num_ranks, group)]
        sums = [(self._by_rounds if self.rounds else self._by_ranks)(ranks, computed) for ranks in groups]
        total = math.fsum(loss * weight for loss, weight in zip(losses, weights, strict=True) if weight)
        return _sum(sums), total / math.fsum(weights)

    def _by_ranks(self, ranks: range, computed: Callable[[int, int], Gradients]) -> Gradients:
        """Each rank adds up its microbatches, and then the ranks are added."""
        sums = []
        for rank in ranks:
            held: Gradients = {}
            for number in range(self.num_microbatches):
                for name, gradient in computed(rank, number).items():
                    if name in held:
                        held[name] += gradient
                    elif self.num_microbatches == 1:
                        held[name] = gradient
                    else:
                        held[name] = gradient.to(torch.promote_types(gradient.dtype, self.accumulate))
            sums.append(held)
        if self.num_ranks > 1:
            sums = [{name: self._travel(each) for name, each in held.items()} for held in sums]
        return _sum(sums)

    def _by_rounds(self, ranks: range, computed: Callable[[int, int], Gradients]) -> Gradients:
        """Each microbatch is added up over the ranks, and then the rounds are added."""
        held: Gradients = {}
        for number in range(self.num_microbatches):
            terms = [{name: self._travel(each) for name, each in computed(rank, number).items()} for rank in ranks]
            for name, value in _sum(terms).items():
                if name in held:
                    held[name] += value
                else:
                    dtype = torch.promote_types(self.working(name), self.accumulate)
                    held[name] = value.to(dtype if self.num_microbatches > 1 else value.dtype)
        return {name: each.to(torch.promote_types(self.working(name), self.master)) for name, each in held.items()}

    def _travel(self, gradient: torch.Tensor) -> torch.Tensor:
        """Rounded to `reduce` where that is narrower, and back to add."""
        if torch.promote_types(gradient.dtype, self.reduce) == gradient.dtype != torch.float64:
            gradient = gradient.to(self.reduce)
        return gradient.to(torch.promote_types(gradient.dtype, self.master))

    def _clip(self, masters: Sequence[nn.Parameter]) -> float:
        """Clip by the norm that torch takes in one process; over ranks it is summed in float64 and rounded once."""
        gradients = [each.grad for each in masters if each.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if self.num_ranks > 1:
            squares = math.fsum(float(each.double().square().sum()) for each in gradients)
            widest = reduce(torch.promote_types, [each.dtype for each in gradients], torch.float32)
            norm = torch.tensor(math.sqrt(squares), dtype=widest)
        if self.clip is not None:
            torch.nn.utils.clip_grads_with_norm_(masters, self.clip, norm)
        return float(norm)


def _sum(terms: Sequence[Gradients]) -> Gradients:
    """Added in order."""
    total = dict(terms[0])
    for term in terms[1:]:
        for name, value in term.items():
            total[name] = total[name] + value if name in total else value
    return total


def in_rank_order(program: Program, plan: sw.Plan) -> Trained:
    """What `plan` has to give, to the bit; `comparison.py` says for which plans."""
    mesh, sharding, precision = plan.mesh, plan.sharding, plan.precision
    num_ranks = mesh.num_data_ranks
    num_owners = mesh.dp_shard if sharding.owners == "dp_shard" else num_ranks
    in_groups = sharding.stage > 0 and 1 < num_owners < num_ranks
    assert isinstance(plan.clip_grad_norm, float | None)
    models = [program.oracle(has_stages=mesh.pp > 1) for _ in range(num_ranks)]

    def working(name: str) -> torch.dtype:
        around = [name[:at] for at, letter in enumerate(name) if letter == "."]
        is_kept = any(fnmatchcase(each, kept) for kept in precision.keep for each in (name, *around))
        own = dtypes[name]
        return own if compute is None or is_kept else compute

    dtypes = {name: each.dtype for name, each in models[0].named_parameters()}
    compute = getattr(torch, precision.compute) if precision.compute else None
    order = RankOrder(
        model=models[0],
        of_ranks=models,
        make_optimizer=program.optimizer,
        loss_of=lambda model, part: program.loss_of(model, part, dtype=compute),
        num_ranks=num_ranks,
        ranks_per_sum=num_owners if in_groups else None,
        rounds=sharding.stage > 1 and num_owners > 1,
        num_microbatches=plan.merge.microbatches,
        average=plan.merge.average,
        clip=plan.clip_grad_norm,
        loss_weight=program.loss_weight or count_rows,
        working=working,
        master=getattr(torch, precision.master),
        accumulate=getattr(torch, precision.accumulate),
        reduce=getattr(torch, precision.reduce),
    )
    trained = order.train(program.batches, counts=program.counts)
    trained.held_out = _evaluated(order, program, models, plan.merge.microbatches)
    return trained


def _evaluated(order: RankOrder, program: Program, models: Sequence[nn.Module], k: int) -> float:
    """The mean loss of the first batch, each rank with its model on its rows."""
    losses, weights = [], []
    for model, parts in zip(models, microbatches_of(program.batches[0], len(models), k), strict=True):
        model.eval()
        for part in parts:
            weights.append((program.loss_weight or count_rows)(part))
            with torch.no_grad():
                losses.append(order.loss_of(model, part).item() if weights[-1] else 0.0)
    return math.fsum(loss * weight for loss, weight in zip(losses, weights, strict=True)) / math.fsum(weights)
