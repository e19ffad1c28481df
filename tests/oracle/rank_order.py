"""One process with the sums and the roundings that ranks have: what an engine must equal to the bit.

Stages 0 and 1 add up a rank's microbatches, then the ranks (of a group of owners), then the groups. Stages 2 and 3 add
each microbatch up over the ranks, then the rounds. Where a plan cuts along tp, or a tie lies on two stages of a
pipeline, sums have another order that no simple program has: there only closeness can be asked, in float64.

    in_rank_order(program, plan)        # what `plan` has to give
"""

import math
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import reduce

import torch
from torch import nn

import shardwise as sw
from tests.oracle.batches import Batch, count_rows, factors_of, microbatches_of
from tests.oracle.one_process import Trained, state_under_names, values_of
from tests.oracle.program import Program

Gradients = dict[str, torch.Tensor]


def in_rank_order(program: Program, plan: sw.Plan) -> Trained:
    """What `plan` has to give, to the bit; `comparison.py` says for which plans."""
    return RankOrder(program, plan).train()


class RankOrder:
    """Masters, working copies and sums in one process, with the order and the roundings that ranks have."""

    def __init__(self, program: Program, plan: sw.Plan) -> None:
        """Each parameter computes in the dtype that the plan's precision says."""
        mesh, sharding, precision = plan.mesh, plan.sharding, plan.precision
        self.program, self.plan = program, plan
        self.num_ranks, self.num_microbatches = mesh.num_data_ranks, plan.merge.microbatches
        num_owners = mesh.dp_shard if sharding.owners == "dp_shard" else self.num_ranks
        self.ranks_per_sum = num_owners if sharding.stage > 0 and num_owners > 1 else self.num_ranks
        """So many ranks are summed first, then their sums are (replicas of owners)."""
        self.rounds = sharding.stage > 1 and num_owners > 1
        """Whether each microbatch is summed over the ranks of a group before the next one is."""
        self.compute = getattr(torch, precision.compute) if precision.compute else None
        self.master, self.accumulate, self.reduce = (
            getattr(torch, each) for each in (precision.master, precision.accumulate, precision.reduce)
        )
        self.models = [program.oracle(has_stages=mesh.pp > 1) for _ in range(self.num_ranks)]
        self.model = self.models[0]
        self.dtypes = {name: each.dtype for name, each in self.model.named_parameters()}
        self.weigh = program.loss_weight or count_rows

    def working(self, name: str) -> torch.dtype:
        """The dtype in which a parameter computes."""
        around = [name[:at] for at, letter in enumerate(name) if letter == "."]
        kept = self.plan.precision.keep
        is_kept = any(fnmatchcase(each, glob) for glob in kept for each in (name, *around))
        return self.dtypes[name] if self.compute is None or is_kept else self.compute

    def train(self) -> Trained:
        """One update per batch, and the loss that is evaluated at the end."""
        trained, masters, clip = Trained(), self._masters(), self.plan.clip_grad_norm
        assert isinstance(clip, float | None)
        optimizer = self.program.optimizer(list(masters.values()))
        for at, batch in enumerate(self.program.batches):
            if self.program.counts is not None:
                self.num_microbatches = self.program.counts[at]
            total, loss = self._gradients(batch)
            divisor = self.num_ranks * (self.num_microbatches if self.plan.merge.average else 1)
            for name, parameter in self.model.named_parameters():
                master = masters[name]
                master.grad = total[name].to(master.dtype) / divisor if name in total else None
                if master.dtype == parameter.dtype:  # what a forward wrote
                    master.data.copy_(parameter.data)
            trained.losses.append(loss)
            trained.grad_norms.append(self._clip([each for each in masters.values() if each.grad is not None], clip))
            optimizer.step()
            self._hand_out(masters)
            trained.states.append(self._state(masters, optimizer))
        trained.parameters = values_of(self.model)
        trained.held_out = self._evaluate()
        return trained

    def _loss_of(self, model: nn.Module, part: Batch) -> torch.Tensor:
        return self.program.loss_of(model, part, dtype=self.compute)

    def _evaluate(self) -> float:
        """The mean loss of the first batch, each rank with its model on its rows."""
        losses, weights = [], []
        shares = microbatches_of(self.program.batches[0], self.num_ranks, self.plan.merge.microbatches)
        for model, parts in zip(self.models, shares, strict=True):
            model.eval()
            for part in parts:
                weights.append(self.weigh(part))
                with torch.no_grad():
                    losses.append(self._loss_of(model, part).item() if weights[-1] else 0.0)
        return math.fsum(loss * weight for loss, weight in zip(losses, weights, strict=True)) / math.fsum(weights)

    def _masters(self) -> dict[str, nn.Parameter]:
        """Of all parameters; those of floating point compute in their working dtype from now on."""
        masters: dict[str, nn.Parameter] = {}
        for name, parameter in self.model.named_parameters():
            is_float = parameter.is_floating_point()
            dtype = torch.promote_types(self.master, self.working(name)) if is_float else parameter.dtype
            masters[name] = nn.Parameter(parameter.detach().to(dtype, copy=True), requires_grad=is_float)
        for model in self.models:
            for name, parameter in model.named_parameters():
                if parameter.is_floating_point():
                    parameter.data = parameter.data.to(self.working(name))
        return masters

    def _hand_out(self, masters: Mapping[str, nn.Parameter]) -> None:
        """The new values to the models of all ranks, and the first one's buffers."""
        buffers = dict(self.model.named_buffers())
        for model in self.models:
            for name, parameter in model.named_parameters():
                if masters[name].grad is not None:
                    parameter.data.copy_(masters[name].data)
            for name, buffer in model.named_buffers() if model is not self.model else ():
                buffer.data = buffers[name].detach().clone()

    def _state(self, masters: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
        state = state_under_names(self.model, masters, optimizer)
        for name, parameter in self.model.named_parameters():
            if masters[name].dtype != parameter.dtype and parameter.numel():
                state[f"optimizer/{name}/master"] = masters[name].detach().clone()
        return state

    def _gradients(self, batch: Batch) -> tuple[Gradients, float]:
        """The sum over all microbatches, and the mean loss."""
        parts = microbatches_of(batch, self.num_ranks, self.num_microbatches)
        weights = [self.weigh(part) for of_rank in parts for part in of_rank]
        factors = factors_of(weights)
        losses = [0.0] * len(weights)

        def computed(rank: int, number: int) -> Gradients:
            """The gradients of one microbatch of one rank."""
            at, model = rank * self.num_microbatches + number, self.models[rank]
            if not weights[at]:
                return {}
            loss = self._loss_of(model, parts[rank][number])
            if loss.requires_grad:
                (loss if factors[at] == 1.0 else loss * factors[at]).backward()
            losses[at] = loss.item()
            taken: Gradients = {}
            for name, parameter in model.named_parameters():
                if parameter.grad is not None:
                    taken[name], parameter.grad = parameter.grad.to_dense(), None
            return taken

        group = self.ranks_per_sum
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

    def _clip(self, masters: Sequence[nn.Parameter], clip: float | None) -> float:
        """Clip by the norm that torch takes in one process; over ranks it is summed in float64 and rounded once."""
        gradients = [each.grad for each in masters if each.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if self.num_ranks > 1:
            squares = math.fsum(float(each.double().square().sum()) for each in gradients)
            widest = reduce(torch.promote_types, [each.dtype for each in gradients], torch.float32)
            norm = torch.tensor(math.sqrt(squares), dtype=widest)
        if clip is not None:
            torch.nn.utils.clip_grads_with_norm_(masters, clip, norm)
        return float(norm)


def _sum(terms: Sequence[Gradients]) -> Gradients:
    """Added in order."""
    total = dict(terms[0])
    for term in terms[1:]:
        for name, value in term.items():
            total[name] = total[name] + value if name in total else value
    return total
