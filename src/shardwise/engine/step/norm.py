"""The norm of the whole gradient, and the clip by it: every element counts once, on any rank.

Squares that the ranks of a mesh of 2 owners, 2 replicas and tp = 2 count; `w` is cut along tp, `b` is whole on both:

                 tp 0            tp 1
    owner 0      w 9  + b 16     w 1       the b of tp 1 is the same tensor once more
    owner 1      w 4  + b 4      w 2
    replicas     0               0         of the same masters; so for both owners

    exchange     25 + 8 + 1 + 2 = 36       norm 6.0 on every rank

Squares are summed in float64, which makes the float32 norm independent of the cut. Where one data rank has whole
gradients the norm is that of one process to the last bit, and so is taken as torch takes it: norms of the parameters
first, then the norm of these, in torch's order (`alike`, `total_of_norms`).

Norms of parts of a model may be asked for, in a report, or to clip by them. Parts may overlap. The squares of each atom
are summed, in the pass that takes the whole norm; a part is some atoms:

    parts    "first" = a.w, a.b      "weights" = a.w, c.w
    atoms    0: a.b (first)    1: a.w (first, weights)    2: c.w (weights)    3: all others
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from itertools import chain, pairwise
from typing import TypeAlias

import torch

from shardwise.engine.forward.trained_parameters import Groups, TrainedSet, groups_in, meant_by_globs
from shardwise.engine.step.exchange import Numbers, exact_sum
from shardwise.engine.torch_private import group_by_device_and_dtype, storage_id
from shardwise.engine.zero.flat_params import Owned, Run, runs_of
from shardwise.engine.zero.grad_buffers import KeptNumbers
from shardwise.errors import PlanError, few_of
from shardwise.plan import Ownership, Parameter
from shardwise.plan.buckets import ALIGNMENT_ELEMENTS

_BLOCK_ELEMENTS = 1 << 18
"""Elements converted to float64 at a time: 2 MiB, which stay in cache."""


def squares_of_atoms(
    runs: Iterable[tuple[torch.Tensor, int]], divisor: float, device: torch.device, *, num_atoms: int
) -> list[float]:
    """Divide gradients in place, and sum |g|^2 over all elements of each atom.

    runs: flat gradients with the number of their atom, below 0 where they do not count; padding between them is
    divided too. The sums are taken in float64, so that they do not depend on how elements are cut over ranks. Both are
    done block by block, while a block is in the cache.
    """
    block = torch.empty(0, dtype=torch.float64, device=device)
    squares: list[torch.Tensor] = []
    atoms: list[int] = []
    # One pass over memory for the division and the sum: gradients are too large for the cache, and each pass over
    # them costs as much as the arithmetic.
    for flat, spans in _blocks(runs):
        if divisor != 1:
            flat.div_(divisor)
        if not spans:
            continue
        if not block.numel():
            block = block.new_empty(_BLOCK_ELEMENTS)
        if flat.is_complex():
            flat, spans = torch.view_as_real(flat).view(-1), [(2 * a, 2 * b, atom) for a, b, atom in spans]
        double = block[: flat.numel()]
        double.copy_(flat)
        # Stays a tensor: a Python float per block would wait for the device each time.
        squares += [torch.dot(each, each) for each in _cut(double, spans)]
        atoms += [atom for *_, atom in spans]
    # Added one after the other, in the order of the runs.
    sums = [0.0] * num_atoms
    for atom, square in zip(atoms, torch.stack(squares).tolist() if squares else (), strict=True):
        sums[atom] += square
    return sums


_Span: TypeAlias = tuple[int, int, int]
"""From, to, and the atom."""


def _blocks(runs: Iterable[tuple[torch.Tensor, int]]) -> Iterator[tuple[torch.Tensor, list[_Span]]]:
    """The memory of all runs in parts of at most a block, and the spans in each that count.

    A call of torch costs the host some microseconds, whatever the size: small runs with nothing but padding between
    them are one part.
    """
    first, num_elements, spans, storage = torch.empty(0), 0, list[_Span](), 0
    for run, atom in runs:
        most = _BLOCK_ELEMENTS // 2 if run.is_complex() else _BLOCK_ELEMENTS
        size, held = run.numel(), storage_id(run.untyped_storage())
        at = int(run.storage_offset()) - int(first.storage_offset())
        if not (
            held == storage
            and run.dtype == first.dtype
            and 0 <= at - num_elements < ALIGNMENT_ELEMENTS
            and at + size <= most
        ):
            if num_elements:
                yield first.as_strided((num_elements,), (1,)), spans
            *full, first = run.split(most)
            for each in full:
                yield each, [(0, most, atom)] if atom >= 0 else []
            at, size, spans, storage = 0, first.numel(), [], held
        if atom >= 0:
            spans.append((at, at + size, atom))
        num_elements = at + size
    if num_elements:
        yield first.as_strided((num_elements,), (1,)), spans


def _cut(flat: torch.Tensor, spans: Sequence[_Span]) -> Sequence[torch.Tensor]:
    if len(spans) == 1:
        return [flat[slice(*spans[0][:2])]]
    ends = [0, *chain.from_iterable(span[:2] for span in spans), flat.numel()]
    parts: Sequence[torch.Tensor] = flat.split([stop - start for start, stop in pairwise(ends)])
    return parts[1::2]


def norm_dtype(gradients: Iterable[torch.dtype]) -> torch.dtype:
    """The dtype in which torch takes their norm in one process: the widest, real, float32 at least."""
    return reduce(torch.promote_types, (each.to_real() for each in gradients), torch.float32)


def norm_of(squares: Sequence[float] | Numbers, dtype: torch.dtype) -> float:
    """The 2-norm from the ranks' sums of squares, rounded to `dtype`: the same on every rank, for every partition.

    The sum is exact up to float64 rounding of each rank's share, some 1e-16 of it, far below half a float32 step.
    """
    total = exact_sum(squares)
    return float(torch.tensor(math.sqrt(total), dtype=dtype)) if math.isfinite(total) else math.nan


@lru_cache(maxsize=8)
def alike(numbers: tuple[int, ...], dtypes: tuple[torch.dtype, ...], device: torch.device) -> list[list[int]]:
    """The parameters of one dtype each, in the order in which `torch.nn.utils.get_total_norm` adds their norms.

    dtypes: of the gradients of all parameters.
    """
    # Some gradients are on other stages. Torch groups tensors by dtype before it stacks their norms, and the order of
    # the stack decides the last bit: tensors without elements make it group alike.
    stand_ins = [torch.empty(0, dtype=dtypes[at], device=device) for at in numbers]
    groups = group_by_device_and_dtype([stand_ins], with_indices=True) if stand_ins else {}  # type: ignore[list-item]
    return [[numbers[at] for at in indices] for _, indices in groups.values()]


def clip_values(parts: Sequence[torch.Tensor], most: float) -> None:
    """Bring every element between -most and most, as `torch.nn.utils.clip_grad_value_` does; flat memory."""
    if parts:
        torch._foreach_clamp_min_(list(parts), -most)
        torch._foreach_clamp_max_(list(parts), most)


# The host reads none of these ---------------------------------------------------------------------------------------


def norm_on_device(runs: Sequence[torch.Tensor], kept: KeptNumbers, *, out: torch.Tensor, of: str = "") -> None:
    """The 2-norm of all elements in float64, as one number on the device; `of`: names its places."""
    if not runs:
        out.zero_()
        return
    # One call for all runs: block by block, as on the CPU, the launches would grow with the elements. It takes a place
    # for each norm by itself, and torch has none that does not.
    real = [torch.view_as_real(each) if each.is_complex() else each for each in runs]
    norms = torch._foreach_norm(real, 2, torch.float64)
    stacked = torch.stack(norms, out=kept.place(f"norms{of}", len(norms), dtype=torch.float64))
    torch.linalg.vector_norm(stacked, out=out)


def norms_of(gradients: Mapping[int, torch.Tensor], groups: Iterable[Sequence[int]]) -> dict[int, torch.Tensor]:
    """The 2-norm of each gradient by its number; groups: from `alike`."""
    norms: dict[int, torch.Tensor] = {}
    for group in groups:
        norms |= zip(group, torch._foreach_norm([gradients[at] for at in group]), strict=True)
    return norms


def total_of_norms(
    norms: Mapping[int, torch.Tensor | float], kept: KeptNumbers, *, dtypes: Sequence[torch.dtype], of: str = ""
) -> torch.Tensor:
    """The 2-norm of gradients as `torch.nn.utils.get_total_norm` takes it, bit for bit, but for the places.

    norms: in the order of `alike`; those of other ranks in float64, which holds them exactly, or as Python's floats.
    dtypes: of the gradients of all parameters.
    """
    if not norms:
        return kept.place(f"norm{of}", dtype=torch.float32).zero_()
    dtype = reduce(torch.promote_types, [each.to_real() for each in {dtypes[at] for at in norms}])
    stacked = kept.place(f"norms{of}", len(norms), dtype=dtype)
    tensors = [each for each in norms.values() if isinstance(each, torch.Tensor)]
    if tensors:
        torch.stack(tensors, out=stacked)
    else:
        stacked.copy_(torch.tensor(list(norms.values()), dtype=torch.float64))
    norm: torch.Tensor = torch.linalg.vector_norm(stacked, out=kept.place(f"norm{of}", dtype=dtype))
    return norm


def clip(parts: Sequence[torch.Tensor], norm: torch.Tensor, max_norm: float, kept: KeptNumbers) -> None:
    """Scale gradients by min(1, max_norm / (norm + 1e-6)), as `torch.nn.utils.clip_grad_norm_` does; flat memory.

    norm: in the dtype that torch would have, in which the factor is rounded. They stay as they are where it is nan.
    """
    if not parts:
        return
    # The operations of torch, so that the factor has the same bits, but for the last: the smaller one that is no nan.
    factor = torch.add(norm, 1e-6, out=kept.place("factor of the clip", dtype=norm.dtype))
    torch.fmin(factor.reciprocal_().mul_(max_norm), kept.one(norm.dtype), out=factor)
    if factor.device.type == "cpu" and factor == 1:  # a pass over memory that changes nothing
        return
    torch._foreach_mul_(list(parts), factor)


# Norms of parts ------------------------------------------------------------------------------------------------------


Norms: TypeAlias = str | Mapping[str, str | Sequence[str]]
"""What a step reports: "groups", "layers" or "parameters", or {name: glob or globs of parameters or modules}."""

Key: TypeAlias = tuple[str, str]
"""("report" or "clip", the name of the part)."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class NormParts:
    """Some parts. All but `runs` is the same on all ranks."""

    members: Mapping[Key, frozenset[str]]
    """Of each part its parameters that can be trained."""
    numbers: Mapping[Key, frozenset[int]]
    """The same by their numbers among all of those."""
    atoms: Mapping[Key, tuple[int, ...]]
    num_atoms: int
    runs: Sequence[Run[int]]
    """What this rank owns, in as few runs of memory as can be; each with its atom, or ~atom where another counts it."""

    def reported(self, norms: Mapping[Key, float], trained: TrainedSet) -> dict[str, float]:
        """Those that a report has, by name: of parts with something that is trained."""
        shown = {key for key, each in self.members.items() if key[0] == "report" and each and trained.meets(each)}
        return {key[1]: norm for key, norm in norms.items() if key in shown}


def norm_parts(
    members: Mapping[Key, Collection[str]],
    names: Sequence[str],
    owned: Sequence[Owned],
    ownership: Ownership,
    *,
    counts: Callable[[str], bool],
) -> NormParts:
    """The parts with these parameters. names: all that are trained. counts: whether this rank counts a parameter."""
    held = {key: frozenset(names).intersection(each) for key, each in members.items()}
    signatures = {name: tuple(key for key, each in held.items() if name in each) for name in names}
    atom_of = {signature: at for at, signature in enumerate(dict.fromkeys(signatures.values()))}

    def mark(name: str) -> int:
        atom = atom_of[signatures[name]]
        return atom if counts(name) else ~atom

    return NormParts(
        members=held,
        numbers={key: frozenset(at for at, name in enumerate(names) if name in each) for key, each in held.items()},
        atoms={key: tuple(at for signature, at in atom_of.items() if key in signature) for key in held},
        num_atoms=len(atom_of),
        runs=runs_of(owned, ownership, counts=mark),
    )


def reported_parts(asked: Norms, groups: Groups, specs: Sequence[Parameter]) -> dict[Key, Collection[str]]:
    """The parts that a report shows. Raises PlanError for what names none."""
    if isinstance(asked, Mapping):
        return {("report", name): group.names for name, group in groups_in(asked, specs, setting="norms").items()}
    if asked == "groups":
        if not groups:
            raise PlanError('step(norms="groups"): parallelize was given no groups; give groups={"name": "glob"}')
        return {("report", name): group.names for name, group in groups.items()}
    if asked not in ("layers", "parameters"):
        raise PlanError(
            f"step(norms={asked!r}) is neither 'groups', 'layers' nor 'parameters'; a mapping of names to globs of "
            "parameters gives others"
        )
    found: dict[Key, list[str]] = {}
    for spec in specs:
        name = spec.name if asked == "parameters" else spec.name.rpartition(".")[0]
        found.setdefault(("report", name), []).append(spec.name)
    return dict(found)


def clipped_parts(
    limits: Mapping[str, float], groups: Groups, specs: Sequence[Parameter]
) -> dict[Key, Collection[str]]:
    """The parts that a plan clips by their norms. Raises PlanError for names without a match, and for an overlap."""
    found: dict[Key, Collection[str]] = {}
    for name in limits:
        group = groups.get(name)
        members = meant_by_globs((name,), specs, role="clip_grad_norm") if group is None else group.names
        found["clip", name] = members
    seen: dict[str, str] = {}
    for (_, name), held in found.items():
        if twice := [each for each in held if seen.setdefault(each, name) != name]:
            raise PlanError(
                f"clip_grad_norm: {few_of(sorted(twice))} belongs to {seen[twice[0]]!r} and to {name!r}; a gradient is "
                "clipped by one norm"
            )
    return found
