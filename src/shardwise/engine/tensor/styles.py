"""What is done around the forward of a module, by the style that the plan gives it.

`put_styles` puts one `Styled` layer per style around a module's forward. The module itself is not changed. It
runs its own code with this rank's portions, on inputs from the wrapper, and the wrapper completes the output. Errors
that come out of a cut module get a note with its rule and its shapes (`module_noted`).

Attention with 3 groups of key-value heads, 2 query heads each, head size 4, on 2 ranks (groups 0 1 | group 2):

    style             whole         rank 0            rank 1           around the forward
    column q          6 -> 24       6 -> 16           6 -> 8           copy_to_ranks(x) once for q, k and v
    column k, v       6 -> 12       6 -> 8            6 -> 4
    heads             num_heads 6   4                 2                attributes x (groups of the rank) / 3
    row o             24 -> 6       16 -> 6           8 -> 6           all_reduce(y), then + bias, once

Random numbers: all ranks along tp draw from one stream (see `engine.randomness`: the seed, the step and the microbatch
key it, no rank does). A dropout of a value that is whole on every rank has to drop the same places everywhere. With
other masks the replicas of activations and parameters would drift apart, and no collective would correct them.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import CO_VARARGS, CO_VARKEYWORDS
from types import FrameType
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from shardwise.comm import Channel
from shardwise.engine.forward.layers import (
    Layer,
    Place,
    in_backward,
    layers_of,
    wrap,
)
from shardwise.engine.forward.outline import innermost_module
from shardwise.engine.tensor.tp_collectives import TpCollectives, is_fake, uncompiled
from shardwise.engine.torch_private import assert_on_device, at_end_of_backward, tensor_leaves, tree_leaves, version_of
from shardwise.errors import ModelError, ShardwiseError
from shardwise.plan.tensor_plan import Ranges, Style, StyleKind, TensorPlan
from shardwise.space import even_cuts

Arguments = tuple[tuple[Any, ...], dict[str, Any]]

_Held = tuple[Mapping[str, object], Mapping[str, torch.Tensor | None]]
"""Plain attributes and parameters of a module, by name."""


class SharedInputs:
    """What was made of the last value that several modules read one after the other (query, key, value).

    One `copy_to_ranks` serves all readers of a value. Autograd adds their gradients first, on each rank, and the sum
    over the ranks is taken once:

        x -- copy_to_ranks --+-- q        backward: (dq + dk + dv) summed over the ranks, one message instead of three
                             +-- k
                             +-- v
    """

    def __init__(self) -> None:
        self._value: weakref.ref[torch.Tensor] | None = None
        self._known: tuple[int, object, torch.Tensor] | None = None
        self.made = uncompiled(self._made)

    def _made(self, value: torch.Tensor, how: object, make: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """`make(value)`, or what it gave the last time for the same value; `how`: equal where `make` does the same."""
        # Without a gradient nothing is saved by sharing, and nothing would say when to forget the value.
        if not (torch.is_grad_enabled() and value.requires_grad):
            return make(value)
        if self._known is not None and self._value is not None and self._value() is value:
            # The same object with other elements is another value: `_version` counts writes in place.
            version, known_how, made = self._known
            if (version, known_how) == (version_of(value), how):
                return made
        made = make(value)
        reference = self._value = weakref.ref(value, self._forget)
        self._known = (version_of(value), how, made)
        # What is made may be a view, which keeps the value alive: a weak reference alone would never end. Once backward
        # has been here nothing reads it any more.
        if not in_backward():
            made.register_hook(lambda _: self._forget(reference))
        else:
            # An activation checkpoint computes this forward again. Backward goes through the first graph and takes only
            # saved tensors from the second, so a hook here would not run.
            at_end_of_backward(lambda: self._forget(reference))
        return made

    def _forget(self, value: "weakref.ref[torch.Tensor]") -> None:
        if value is self._value:
            self._value = self._known = None


class Styled(Layer):
    """Runs a module on what this rank has, and gives what the modules around expect."""

    place = Place.TENSOR

    def __init__(self, name: str, style: Style, collectives: TpCollectives, shared: SharedInputs) -> None:
        self.name = name
        self.style = self.structure = style
        self.collectives = collectives
        self.shared = shared
        self._held: _Held | None = None
        """What the module itself holds, while it holds something else for a backward."""
        self._hold_in_backward = uncompiled(self._held_in_backward)
        self._run = _RUN[style.kind]

    @override
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._held is None:
            return self._run(self, args, kwargs)
        # A recomputation that goes through this layer finds the module with what a backward gave it. It starts from
        # the module's own: else heads, say, would be divided by the ranks twice.
        given = _put(self.module, self._held)
        try:
            return self._run(self, args, kwargs)
        finally:
            _put(self.module, given)

    def run_with(self, held: "_Held", args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the forward while the module holds something else, which it holds again in the backward of the answer.

        An activation checkpoint inside the module runs a part of its forward again in backward, without this layer:

            forward    [ num_heads = 4 ............ ] num_heads = 6
            backward   ... [ num_heads = 4: recomputed part of forward, its backward ] num_heads = 6
        """
        own = _put(self.module, held)
        try:
            answer = self.forward(*args, **kwargs)
        finally:
            _put(self.module, own)
        if torch.is_grad_enabled() and any(held):
            self._hold_in_backward(held, answer)
        return answer

    def _held_in_backward(self, held: "_Held", answer: Any) -> None:
        """The module holds it from where backward reaches the answer, up to the end of that backward."""

        def begin(_: torch.Tensor) -> None:
            # Several outputs, and several calls in one backward, all hook this: the first one changes the module.
            if self._held is None:
                self._held = _put(self.module, held)
                at_end_of_backward(end)

        def end() -> None:
            if self._held is not None:
                _put(self.module, self._held)
                self._held = None

        for each in tree_leaves(answer):
            if type(each) is torch.Tensor and each.grad_fn is not None:
                each.register_hook(begin)

    def on_output(self, output: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """The output of a module that gives one tensor, changed."""
        if not isinstance(output, torch.Tensor):
            raise ModelError(
                f"{self.name!r} has the style {self.style.kind!r} of tensor parallelism, which needs a tensor as "
                f"output, but it gave a {type(output).__name__}. Give the rule to a module inside it"
            )
        return change(output)

    def size_along(self, value: torch.Tensor, dim: int, *, has_features: bool = True) -> int:
        """How many positions a value has; `has_features`: its last dim holds features."""
        if dim < value.dim() - has_features:
            return value.shape[dim]
        last = " before the last, which is that of the features" if has_features else ""
        raise ModelError(
            f"{self.name!r}: its rule ({self.style.kind}) in tensor.rules has positions along dim {dim}, but the "
            f"tensor has the shape {tuple(value.shape)}; name a dim{last}"
        )

    def positions(self, size: int, dim: int, *, is_part: bool = False) -> Sequence[Ranges]:
        """The positions of each rank along `dim`, of `size` in all; `is_part`: this rank alone has `size`."""
        count = self.collectives.num_ranks
        # A rank that goes on with a part sees its own size only, and takes the whole for `size * count` when it
        # gathers. `sequence` gathers in the same call, where the size of the whole is still known.
        if not is_part and size % count and self.style.kind != "sequence":
            raise ModelError(
                f"{self.name!r}: {size} positions (dim {dim}) do not divide among {count} ranks along tp, as rules "
                "that leave them cut need. Pad the batch, or use 'sequence', which gathers them again"
            )
        return [(each,) for each in even_cuts(size * count if is_part else size, count)]

    def gathering(self, dim: int) -> Callable[[torch.Tensor], torch.Tensor]:
        """Puts the positions of all ranks together."""
        return lambda x: self.collectives.gather_to_ranks(
            x, dim, self.positions(self.size_along(x, dim), dim, is_part=True)
        )

    def summed(self, output: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks, or this rank's positions of it."""
        dim = self.style.scatter
        if dim is None:
            return self.collectives.all_reduce(output)
        return self.collectives.reduce_scatter(output, dim, self.positions(self.size_along(output, dim), dim))


def _column(styled: Styled, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A whole input, outputs of this rank."""
    style, collectives = styled.style, styled.collectives
    dim = style.gather
    if dim is None:
        args, kwargs = on_input(
            args, kwargs, lambda x: styled.shared.made(x, "copy_to_ranks", collectives.copy_to_ranks)
        )
    else:
        args, kwargs = on_input(
            args, kwargs, lambda x: styled.shared.made(x, ("gather_to_ranks", dim), styled.gathering(dim))
        )
    # Attributes of a module that counts its outputs itself (Conv1D of transformers has `nf`): this rank's count.
    sizes = dict.fromkeys(style.attributes, sum(b - a for a, b in style.ranges[collectives.rank]))
    output = styled.run_with((sizes, {}), args, kwargs)
    if style.gathers:
        return styled.on_output(output, lambda y: collectives.all_gather(y, y.dim() - 1, style.ranges))
    return output


def _row(styled: Styled, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Inputs of this rank, outputs summed; the bias is added once, after the sum."""
    style, module = styled.style, styled.module
    if style.splits:
        args, kwargs = on_input(args, kwargs, lambda x: styled.collectives.scatter(x, x.dim() - 1, style.ranges))
    bias = module._parameters.get("bias")
    # Each rank would add the bias to its term, and the sum would have it once per rank. So the forward runs without
    # it. torch's own takes None; a forward of another class may not, and adds zeros.
    absent = None if bias is None or type(module).forward is nn.Linear.forward else torch.zeros_like(bias)
    output = styled.run_with(({}, {} if bias is None else {"bias": absent}), args, kwargs)
    output = styled.on_output(output, styled.summed)
    # Under autocast the output is in half precision, as it would be with the bias inside of the product.
    return output if bias is None else output + bias.to(output.dtype)


def _vocab(styled: Styled, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An embedding whose rows are cut: each rank looks up its own tokens, gives zeros for others, and the sum has all.

    11 tokens, rank 1 has 6:11       tokens    3   7  10         looked up here   0   1   4   (row 0 stands in)
                                     foreign   x   -   -         given            0  r7  r10  + rank 0: r3  0  0
    """
    ranges = styled.style.ranges
    ((start, stop),) = ranges[styled.collectives.rank]
    foreign: list[torch.Tensor] = []

    def own(tokens: torch.Tensor) -> torch.Tensor:
        # As the embedding itself would: a token that no rank has is an error, not zeros.
        if found := span_outside(tokens, size := ranges[-1][-1][1]):
            raise IndexError(f"{styled.name!r} was given tokens from {found[0]} to {found[1]}; it has {size}")
        foreign.append((tokens < start) | (tokens >= stop))
        return (tokens - start).masked_fill(foreign[0], 0)

    args, kwargs = on_input(args, kwargs, own)
    # torch gives the row at padding_idx no gradient. The row has another number on the rank that holds it, and on
    # the others a row of their own, which must be trained, would have that number.
    padding = getattr(styled.module, "padding_idx", None)
    local = padding - start if padding is not None and start <= padding < stop else None
    output = styled.run_with(({} if padding is None else {"padding_idx": local}, {}), args, kwargs)
    # Adding zeros rounds nothing: the sum has the bits of the row. The mask also stops the gradient that tokens of
    # others would give to row 0.
    return styled.on_output(output, lambda y: styled.summed(y.masked_fill(foreign[0].unsqueeze(-1), 0)))


def _channels(styled: Styled, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An embedding whose columns are cut, and may be gathered."""
    output, style = styled.forward(*args, **kwargs), styled.style
    if not style.gathers:
        return output
    return styled.on_output(output, lambda y: styled.collectives.all_gather(y, y.dim() - 1, style.ranges))


def _sum(styled: Styled, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Any module that computes a term of a sum from bare parameters: experts, each cut over all ranks."""
    copy = styled.collectives.copy_to_ranks
    # All tensors, not only the first: the weights of the router reach every rank's term, too.
    args = tuple(copy(each) if isinstance(each, torch.Tensor) else each for each in args)
    kwargs = {key: copy(each) if isinstance(each, torch.Tensor) else each for key, each in kwargs.items()}
    output = styled.forward(*args, **kwargs)
    return None if output is None else styled.on_output(output, styled.collectives.all_reduce)


def _taken(styled: Styled, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A module that is whole on every rank before others that are cut.

    All ranks compute the same with it, so its gradients are complete on each, without a sum.
    """
    ranges = styled.style.ranges
    output = styled.forward(*args, **kwargs)
    return styled.on_output(output, lambda y: styled.collectives.scatter(y, y.dim() - 1, ranges))


def _gathered(styled: Styled, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The same, behind others that are cut."""
    ranges = styled.style.ranges
    args, kwargs = on_input(args, kwargs, lambda x: styled.collectives.all_gather(x, x.dim() - 1, ranges))
    return styled.forward(*args, **kwargs)


def _once(styled: Styled, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A module that all ranks compute alike, and that counts once in the sum around it."""
    return styled.on_output(styled.forward(*args, **kwargs), styled.collectives.on_first_rank)


def _hide(styled: Styled, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Single parameters that count once in the sum: zeros on all ranks but the first."""
    # Their gradients are zeros there too. The parameters count as summed along tp, so that all ranks get the gradients
    # of the first one, once.
    held: Mapping[str, Any] = styled.module._parameters
    seen = {key: styled.collectives.on_first_rank(held[key]) for key in styled.style.attributes}
    return styled.run_with(({}, seen), args, kwargs)


def _tail(styled: Styled, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A module that is whole on all ranks, and whose last outputs the heads of each rank read directly.

    Keys of multi-head latent attention: 5 compressed features go to a norm and a column, which has its own
    `copy_to_ranks`. All heads read the 2 last ones as they are, so only those 2 have their gradient summed here.
    """
    size = styled.style.size

    def copy_last(output: torch.Tensor) -> torch.Tensor:
        if size >= output.shape[-1]:
            raise ModelError(
                f"{styled.name!r}: its rule shares the last {size} outputs, but it has {output.shape[-1]}; give the "
                "number of outputs that every head reads: 'mla_kv_a_proj(size=...)'"
            )
        return styled.collectives.copy_last_to_ranks(output, size)

    return styled.on_output(styled.forward(*args, **kwargs), copy_last)


def _sequence(styled: Styled, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A module that treats each position alike: each rank computes its positions, which are gathered again."""
    dim = styled.style.dim
    found: list[Sequence[Ranges]] = []

    def own(value: torch.Tensor) -> torch.Tensor:
        found.append(styled.positions(styled.size_along(value, dim, has_features=False), dim))
        return styled.collectives.scatter(value, dim, found[0])

    args, kwargs = on_input(args, kwargs, own)
    output = styled.forward(*args, **kwargs)
    return styled.on_output(output, lambda y: styled.collectives.all_gather(y, dim, found[0]))


def _split(styled: Styled, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The module and what follows it work on this rank's positions."""
    dim = styled.style.dim
    taken: list[torch.Tensor] = []

    def own(value: torch.Tensor) -> torch.Tensor:
        taken.append(value)
        return styled.collectives.scatter(
            value, dim, styled.positions(styled.size_along(value, dim, has_features=False), dim)
        )

    args, kwargs = on_input(args, kwargs, own)
    output = styled.forward(*args, **kwargs)
    if isinstance(output, torch.Tensor) and not any(value.requires_grad for value in taken):
        # Nothing before needs a gradient (token numbers), so autograd recorded no `scatter`. The mark says to
        # `summed_gradients` that what follows is this rank's part.
        return styled.collectives.own_part(output)
    return output


def _heads(styled: Styled, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A module that works with heads and counts them itself: it has as many as this rank."""
    style = styled.style
    ((start, stop),) = style.ranges[styled.collectives.rank]
    # Every attribute is a multiple of the number of groups (the planner refuses others): 6 heads in 3 groups, of
    # which this rank has 2, are 6 * 2 // 3 = 4. A forward whose view has -1 for the heads needs no such rule.
    own = {name: getattr(styled.module, name) * (stop - start) // style.size for name in style.attributes}
    return styled.run_with((own, {}), args, kwargs)


_RUN: Mapping[StyleKind, Callable[[Styled, tuple[Any, ...], dict[str, Any]], Any]] = {
    "column": _column,
    "row": _row,
    "vocab": _vocab,
    "channels": _channels,
    "sum": _sum,
    "once": _once,
    "hide": _hide,
    "tail": _tail,
    "sequence": _sequence,
    "split": _split,
    "heads": _heads,
    "taken": _taken,
    "gathered": _gathered,
}
"""Runs a module under a style, while it holds its own attributes and parameters."""


def on_input(
    args: tuple[Any, ...], kwargs: dict[str, Any], change: Callable[[torch.Tensor], torch.Tensor]
) -> Arguments:
    """The arguments with the first tensor changed: positional ones first, then keywords in the order of the call."""
    for at, each in enumerate(args):
        if isinstance(each, torch.Tensor):
            return (*args[:at], change(each), *args[at + 1 :]), kwargs
    for key, each in kwargs.items():
        if isinstance(each, torch.Tensor):
            return args, {**kwargs, key: change(each)}
    return args, kwargs


def span_outside(values: torch.Tensor, size: int) -> tuple[int, int] | None:
    """The smallest and the largest of some indices, if one of them is not in `0:size`. Devices check themselves."""
    if is_fake(values) or values.numel() == 0:
        return None
    if values.device.type != "cpu":
        # Reading the values would make the host wait for the device at every call.
        assert_on_device(((values >= 0) & (values < size)).all())
        return None
    lowest, highest = int(values.min()), int(values.max())
    return None if 0 <= lowest <= highest < size else (lowest, highest)


def _put(module: nn.Module, held: _Held) -> _Held:
    """Let the module hold these attributes and parameters; what it held before."""
    attributes, parameters = held
    own: Any = module._parameters
    before = {key: getattr(module, key) for key in attributes}, {key: own[key] for key in parameters}
    for key, value in attributes.items():
        setattr(module, key, value)
    own.update(parameters)  # nn.Module.__setattr__ refuses zeros, a plain tensor, in the place of a bias
    return before


def put_styles(model: nn.Module, plan: TensorPlan, channel: Channel) -> None:
    """Put the styles of a plan around the modules of a model, whose parameters are this rank's portions."""
    # One for the whole model: the readers of a value run one after the other, whatever module they are in.
    shared = SharedInputs()
    for name, styles in plan.styles.items():
        module = model.get_submodule(name)
        collectives = TpCollectives(channel, f"tensor parallelism of {name or 'the model'}", module=name)
        # From the inside out: `wrap` puts each around the styles before it.
        for style in styles:
            wrap(module, Styled(name, style, collectives, shared))


def style_of_head(module: nn.Module) -> Styled | None:
    """How the outputs of a head are cut; None for a module that gives all of them."""
    found = (each for each in layers_of(module) if isinstance(each, Styled))
    return next((each for each in found if each.style.kind == "column" and not each.style.gathers), None)


@contextmanager
def module_noted(model: nn.Module) -> Iterator[None]:
    """Errors that come out of a module of `model` have a note about that module, where a plan cuts the model."""
    try:
        yield
    except ShardwiseError:
        raise  # it names the module or the setting itself
    except Exception as error:
        if (note := note_on(model, error)) is not None:
            error.add_note(note)
        raise


def note_on(model: nn.Module, error: Exception) -> str | None:
    """The module in which an error was raised, its rule and its shapes; None where no rule cuts the model."""
    # A note about missing rules would mislead where tensor parallelism is not in play.
    if not any(map(_rules, model.modules())):
        return None
    if (innermost := innermost_module(model, error.__traceback__)) is None:
        return None
    path, module, frame = innermost
    name = repr(path) if path else "the model itself"
    rules = _rules(module)
    said = f"with the style {' and '.join(map(repr, rules))}" if rules else "without a rule"
    given = [str(tuple(value.shape)) for value in _arguments(frame)]
    held = [f"{key} {tuple(each.shape)}" for key, each in module._parameters.items() if each is not None]
    return (
        f"shardwise: in {name} ({type(module).__name__}, {said} in tensor.rules), which was given "
        f"{', '.join(given) or 'no tensor'} and holds {', '.join(held) or 'no parameter'} on this rank along tp. A "
        "rule may be missing or wrong for it or for a module before it"
    )


def _rules(module: nn.Module) -> list[str]:
    return [each.style.kind for each in layers_of(module) if isinstance(each, Styled)]


def _arguments(frame: FrameType) -> list[torch.Tensor]:
    code = frame.f_code
    count = code.co_argcount + code.co_kwonlyargcount
    count += bool(code.co_flags & CO_VARARGS) + bool(code.co_flags & CO_VARKEYWORDS)
    return tensor_leaves([frame.f_locals.get(name) for name in code.co_varnames[:count]])
