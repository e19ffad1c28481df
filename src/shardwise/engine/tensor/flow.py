"""Follows atoms through the operations of a forward: what each does to the atoms of its tensors.

Operations that move elements (views, slices, concatenation) are done on the atoms themselves. Element by element, atoms
that meet are tied. What mixes a dim (softmax, sums, products of matrices over it) ties all along it. What is unknown
forbids all atoms that reach it. Of a value that every rank has whole, a rank reads the same elements as the others: a
dim along which it differs cannot be cut in what it meets, so that atoms along it are tied.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary

from shardwise.engine.tensor.atoms import Atoms, slim, varies

_LARGEST_BARE = 1 << 20
"""Elements of a bare parameter that is followed element by element; larger ones are whole."""

_CONSTANT, _OF_PARAMETERS, _OF_ACTIVATIONS = range(3)
"""Where the gradient of a whole value goes."""

_SAME = frozenset(
    [
        "clone",
        "_to_copy",
        "contiguous",
        "detach",
        "alias",
        "lift_fresh",
        "masked_fill",
        "tril",
        "triu",
        "masked_fill_",
        "fill_",
        "zero_",
        "dropout",
        "floor_divide",
        "log_sigmoid_forward",
        "hardswish",
        "native_dropout",
        "nan_to_num_",
        "tril_",
        "triu_",
        "cumsum_placeholder",
    ]
)
_MOVED = frozenset(
    [
        "permute",
        "transpose",
        "t",
        "unsqueeze",
        "squeeze",
        "expand",
        "slice",
        "select",
        "split",
        "split_with_sizes",
        "unbind",
        "diagonal",
        "repeat",
        "unfold",
        "narrow",
        "chunk",
        "movedim",
        "swapaxes",
    ]
)
_REDUCED = frozenset(
    [
        "sum",
        "mean",
        "amax",
        "amin",
        "var",
        "std",
        "norm",
        "linalg_vector_norm",
        "prod",
        "any",
        "all",
        "argmax",
        "argmin",
        "logsumexp",
        "max",
        "min",
        "median",
        "var_mean",
        "nansum",
        "cumsum",
        "cumprod",
        "cummax",
        "logcumsumexp",
        "_softmax",
        "_log_softmax",
        "softmax",
        "log_softmax",
        "sort",
        "topk",
        "kthvalue",
        "mode",
        "roll",
        "flip",
        "softmax_backward",
        "renorm",
    ]
)
_ATTENTION = frozenset(
    [
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_attention_math",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
        "scaled_dot_product_attention",
    ]
)
_CONSTANTS = frozenset(
    [
        "zeros",
        "ones",
        "full",
        "zeros_like",
        "ones_like",
        "full_like",
        "new_zeros",
        "new_ones",
        "new_full",
        "scalar_tensor",
    ]
)


class Flow(TorchDispatchMode):
    """The mode under which a forward runs."""

    def __init__(self, atoms: Atoms, parameters: Mapping[int, tuple[str, str]], known: Iterable[str]) -> None:
        """parameters: id of each -> (module, attribute). known: modules that are followed as a whole."""
        super().__init__()
        self.atoms = atoms
        self.paused = 0
        self.where: list[str] = []
        """Names of the modules that run, from the outside in."""
        self.read_outside: set[str] = set()
        """Modules, followed as a whole, of which a parameter is read by another."""
        self.bare: dict[int, tuple[nn.Parameter, torch.Tensor]] = {}
        """Other parameters that were read, with the atom of each element."""
        self._parameters = parameters
        self._known = frozenset(known)
        self._numbers: Any = WeakIdKeyDictionary()
        self._free: Any = WeakIdKeyDictionary()
        """Of whole tensors that are alike along some dims: numbers that show along which."""
        self._levels: Any = WeakIdKeyDictionary()

    # What tensors carry -------------------------------------------------------------------------------------------

    def numbers(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The atoms of a tensor; None where it is whole on every rank."""
        found: torch.Tensor | None = self._numbers.get(tensor)
        return found

    def give(self, tensor: torch.Tensor, numbers: torch.Tensor | None) -> None:
        """Say what a module that is followed as a whole gives."""
        if numbers is not None:
            self._numbers[tensor] = numbers
        if tensor.is_floating_point():
            self._levels[tensor] = _OF_ACTIVATIONS

    # Operations ---------------------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        for each in given:
            if id(each) in self._parameters:
                self._read(each)
        output = func(*args, **kwargs)
        name = func._schema.name.removeprefix("aten::")
        made = [each for each in tree_leaves(output) if isinstance(each, torch.Tensor)]
        self._set_levels(name, given, made)
        if any(each in self._numbers for each in given):
            self._follow(func, name, args, kwargs, given, output, made)
        else:
            self._follow_whole(func, name, args, kwargs, given, output, made)
        return output

    def _read(self, parameter: torch.Tensor) -> None:
        """A parameter is read by an operation that is no part of a module followed as a whole."""
        module, _ = self._parameters[id(parameter)]
        if module in self._known:
            self.read_outside.add(module)
        elif parameter not in self._numbers and 1 < parameter.numel() <= _LARGEST_BARE:
            assert isinstance(parameter, nn.Parameter)
            numbers = self.atoms.fresh(parameter.numel()).view(parameter.shape)
            self._numbers[parameter] = numbers
            self.bare[id(parameter)] = parameter, numbers
        self._levels.setdefault(parameter, _OF_PARAMETERS)

    def _set_levels(self, name: str, given: Sequence[torch.Tensor], made: Sequence[torch.Tensor]) -> None:
        level = max((self._levels.get(each, _CONSTANT) for each in given), default=_CONSTANT)
        for each in made:
            if name != "detach" and level and each.is_floating_point():
                self._levels[each] = level

    def _follow_whole(
        self,
        func: Any,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        given: Sequence[torch.Tensor],
        output: Any,
        made: Sequence[torch.Tensor],
    ) -> None:
        """Keep what is known of dims along which a whole tensor is alike."""
        if func._schema.is_mutable:
            for each in list(self._free.keys()):
                if any(each.untyped_storage()._cdata == other.untyped_storage()._cdata for other in made):
                    del self._free[each]
            return
        if name in _CONSTANTS:
            for each in made:
                self._free[each] = torch.full((), -1).expand(each.shape)
            return
        if name == "expand" and given and given[0] not in self._free:
            base = given[0]
            if not all(size == 1 or stride for size, stride in zip(made[0].shape, made[0].stride(), strict=True)):
                distinct = -1 - torch.arange(base.numel()).view(base.shape)
                self._free[made[0]] = distinct.expand(made[0].shape)
            return
        held = [each for each in given if each in self._free]
        if len(given) == 1 and held:
            if name in _SAME or torch.Tag.pointwise in func.tags:
                self._free[made[0]] = self._free[given[0]]
            elif name in _MOVED or name in ("view", "_unsafe_view"):
                self._move(func, name, args, kwargs, output, self._free)

    def _follow(
        self,
        func: Any,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        given: Sequence[torch.Tensor],
        output: Any,
        made: Sequence[torch.Tensor],
    ) -> None:
        cut = [each for each in given if each in self._numbers]
        if not cut[0].numel() or not any(each.numel() for each in made):
            return
        is_written = func._schema.is_mutable
        if name in ("copy_", "copy"):
            self._elementwise(name, is_written, given, made)
        elif name in _SAME:
            self._only(name, is_written, cut, given, made)
        elif torch.Tag.pointwise in func.tags:
            self._elementwise(name, is_written, given, made)
        elif name in _MOVED or name in ("view", "_unsafe_view", "_reshape_alias"):
            self._move(func, name, args, kwargs, output, self._numbers)
        elif name in ("cat", "stack"):
            self._join(name, args, kwargs, made[0])
        elif name in _REDUCED:
            self._reduce(func, name, args, kwargs, made)
        elif name in ("native_layer_norm", "_fused_rms_norm"):
            self._normalize(name, args, given, made)
        elif name in ("mm", "bmm", "addmm", "baddbmm", "mv", "dot"):
            self._multiply(name, args, made[0])
        elif name in _ATTENTION:
            self._attend(name, args, kwargs, made)
        elif name.endswith("_like"):
            self._numbers[made[0]] = self._numbers[args[0]]
        elif name.startswith("new_") or not made:
            pass
        elif name == "constant_pad_nd":
            self._pad(name, args, made[0])
        elif name == "glu":
            self._gate(name, args, kwargs, made[0])
        elif name in ("index", "index_select", "gather"):
            self._pick(func, name, args, kwargs, made[0])
        elif name == "embedding" and args[0] in self._numbers and args[1] not in self._numbers:
            numbers = self._numbers[args[0]]
            self._numbers[made[0]] = slim(numbers[args[1].cpu()]) if not args[1].is_meta else None
        else:
            self._refuse(cut, f"'{name}'")

    def _why(self, what: str) -> str:
        return f"{what} in {self.where[-1] or 'the model itself'!r}" if self.where else what

    def _refuse(self, tensors: Iterable[torch.Tensor], what: str) -> None:
        for each in tensors:
            self.atoms.forbid(self._numbers[each], self._why(f"{what}, which is not followed,"))

    def _along(self, numbers: torch.Tensor, dim: int, what: str, *, is_product: bool = False) -> None:
        self.atoms.tie_along(numbers, dim, self._why(f"{what} over dim {dim}"), is_expected=is_product)

    def _only(
        self,
        name: str,
        is_written: bool,
        cut: Sequence[torch.Tensor],
        given: Sequence[torch.Tensor],
        made: Sequence[torch.Tensor],
    ) -> None:
        """One tensor in, the same elements out."""
        if len(given) > 1 or given[0].shape != made[0].shape:
            self._elementwise(name, is_written, given, made)
            return
        for each in made:
            if each.shape == given[0].shape:
                self._numbers[each] = self._numbers[cut[0]]

    def _elementwise(
        self, name: str, is_written: bool, given: Sequence[torch.Tensor], made: Sequence[torch.Tensor]
    ) -> None:
        shape = made[0].shape
        wholes = [each for each in given if each not in self._numbers]
        leading = [each for each in given if each in self._numbers]
        if activations := [each for each in leading if not self._is_parameter(each)]:
            for each in [each for each in leading if self._is_parameter(each) and not self._fits(each, activations)]:
                leading.remove(each)
                wholes.append(each)
                self.atoms.forbid(self._numbers[each], self._why(f"'{name}' with parts that it maps alike"))
        numbers = self._numbers[leading[0]].expand(shape)
        for each in leading[1:]:
            other = self._numbers[each].expand(shape)
            self.atoms.tie(numbers, other, self._why(f"'{name}'") if is_written else "")
            if numbers.stride() != other.stride() and _spread(other) > _spread(numbers):
                numbers = other
        for each in wholes:
            self._meet(name, each, numbers)
        if is_written and given[0] not in self._numbers:  # cut values written into a whole tensor
            self.atoms.forbid(numbers, self._why(f"'{name}' into a tensor that is whole"))
            return
        for each in made:
            if each.shape == shape:
                self._numbers[each] = numbers

    def _is_parameter(self, tensor: torch.Tensor) -> bool:
        """Whether it is one, or is made of parameters alone."""
        return bool(self._levels.get(tensor) == _OF_PARAMETERS)

    def _fits(self, parameter: torch.Tensor, others: Sequence[torch.Tensor]) -> bool:
        """Whether a bare parameter has an element of its own for all that varies in what it meets."""
        for each in others:
            numbers = self._numbers[each]
            for dim in range(1, numbers.dim() + 1):
                size = parameter.shape[-dim] if dim <= parameter.dim() else 1
                if size == 1 and varies(numbers, numbers.dim() - dim):
                    return False
        return True

    def _meet(self, name: str, whole: torch.Tensor, numbers: torch.Tensor) -> None:
        """A value that is whole on every rank meets one that is cut."""
        if self._levels.get(whole, _CONSTANT) == _OF_ACTIVATIONS:
            self.atoms.forbid(numbers, self._why(f"'{name}' with a whole value that has a gradient"))
            return
        free = self._free.get(whole)
        for dim in range(1, whole.dim() + 1):
            if whole.shape[-dim] > 1 and (free is None or varies(free, whole.dim() - dim)):
                if numbers.dim() < dim:
                    self.atoms.forbid(numbers, self._why(f"'{name}' with a whole value"))
                    return
                self._along(numbers, numbers.dim() - dim, f"'{name}' with a whole value")

    def _move(self, func: Any, name: str, args: Any, kwargs: Any, output: Any, held: Any) -> None:
        source = args[0]
        numbers = held[source]
        if name in ("view", "_unsafe_view", "_reshape_alias"):
            moved: Any = numbers.reshape(output.shape)
            if moved.data_ptr() != numbers.data_ptr():
                moved = slim(moved)
        else:
            moved = func(numbers, *args[1:], **kwargs)
            if name == "repeat":
                moved = slim(moved)
        if isinstance(output, torch.Tensor):
            held[output] = moved
        else:
            for each, own in zip(output, moved, strict=True):
                held[each] = own

    def _join(self, name: str, args: Any, kwargs: Any, made: torch.Tensor) -> None:
        parts: Sequence[torch.Tensor] = [each for each in args[0] if each.numel()]
        dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
        dim %= made.dim()
        known = [each for each in parts if each in self._numbers]
        model = self._numbers[known[0]]
        joined = []
        for each in parts:
            if (own := self._numbers.get(each)) is None:
                own = self._whole_part(name, each, model, dim)
            joined.append(own)
        numbers = torch.cat(joined, dim) if name == "cat" else torch.stack(joined, dim)
        self._numbers[made] = slim(numbers)

    def _whole_part(self, name: str, part: torch.Tensor, model: torch.Tensor, dim: int) -> torch.Tensor:
        """Numbers of a whole part beside a cut one: those of the cut one, where it is alike along what is cut."""
        if self._levels.get(part, _CONSTANT) == _OF_ACTIVATIONS:
            self.atoms.forbid(model, self._why(f"'{name}' with a whole value that has a gradient"))
            return torch.zeros((), dtype=torch.int64).expand(part.shape)
        free = self._free.get(part)
        for each in range(part.dim()):
            alike = part.shape[each] == 1 or (free is not None and not varies(free, each))
            if varies(model, each) and (not alike or (name == "cat" and each == dim)):
                return torch.zeros((), dtype=torch.int64).expand(part.shape)
        if name == "stack":
            return model
        return model.narrow(dim, 0, 1).expand(
            [n if at == dim else s for at, (n, s) in enumerate(zip(part.shape, model.shape, strict=True))]
        )

    def _reduce(self, func: Any, name: str, args: Any, kwargs: Any, made: Sequence[torch.Tensor]) -> None:
        source = args[0]
        numbers = self._numbers[source]
        dims = _dims_of(func, args, kwargs)
        if name in ("topk", "sort", "kthvalue", "mode") and dims is None:
            dims = [-1]
        every = range(source.dim()) if not dims else [each % source.dim() for each in dims]
        for dim in every:
            self._along(numbers, dim, f"'{name}'")
        for each in made:
            if each.shape == source.shape:
                self._numbers[each] = numbers
            elif each.dim() == source.dim():
                own = numbers
                for dim in every:
                    own = own.narrow(dim, 0, 1)
                self._numbers[each] = own.expand(each.shape)
            else:
                own = numbers
                for dim in sorted(every, reverse=True):
                    own = own.select(dim, 0)
                self._numbers[each] = own.expand(each.shape)

    def _normalize(self, name: str, args: Any, given: Sequence[torch.Tensor], made: Sequence[torch.Tensor]) -> None:
        for each in given:
            if each in self._numbers and self._is_parameter(each):
                self.atoms.forbid(self._numbers[each], self._why(f"'{name}'"))
        if (numbers := self._numbers.get(args[0])) is None or self._is_parameter(args[0]):
            return
        for dim in range(numbers.dim() - len(args[1]), numbers.dim()):
            self._along(numbers, dim, f"'{name}'")
        self._numbers[made[0]] = numbers

    def _multiply(self, name: str, args: Any, made: torch.Tensor) -> None:
        """Products of matrices, one or many: what is summed over is one group, and so are row and column."""
        tensors, added = list(args), None
        if name in ("addmm", "baddbmm"):
            if args[0] in self._numbers:
                self._refuse([args[0]], f"'{name}'")
            tensors = tensors[1:]
            added = args[0] if args[0] not in self._numbers else None
        one, other = tensors[:2]
        if name in ("mv", "dot"):
            self._refuse([each for each in (one, other) if each in self._numbers], f"'{name}'")
            return
        left, right = self._numbers.get(one), self._numbers.get(other)
        inner, outer = one.dim() - 1, one.dim() - 2
        for numbers, whole, dim in ((left, other, inner), (right, one, outer)):
            if numbers is not None:
                self._along(numbers, dim, f"'{name}'", is_product=True)
                if whole not in self._numbers:
                    self._meet_matrix(name, whole, numbers)
        rows = None if left is None else left.narrow(inner, 0, 1).expand(made.shape)
        columns = None if right is None else right.narrow(outer, 0, 1).expand(made.shape)
        if rows is not None and columns is not None:
            self.atoms.tie(rows, columns)
        numbers = columns if rows is None or (columns is not None and _spread(columns) > _spread(rows)) else rows
        assert numbers is not None
        if added is not None:
            self._meet(name, added, numbers)
        self._numbers[made] = numbers

    def _meet_matrix(self, name: str, whole: torch.Tensor, numbers: torch.Tensor) -> None:
        """A matrix that every rank has is multiplied with one that is cut."""
        if self._levels.get(whole, _CONSTANT) == _OF_ACTIVATIONS:
            self.atoms.forbid(numbers, self._why(f"'{name}' with a whole value that has a gradient"))
            return
        free = self._free.get(whole)
        if whole.dim() == 3 and whole.shape[0] > 1 and (free is None or varies(free, 0)):
            self._along(numbers, 0, f"'{name}' with a whole value")

    def _attend(self, name: str, args: Any, kwargs: Any, made: Sequence[torch.Tensor]) -> None:
        query, key, value, *rest = args
        tensors = (query, key, value)
        if any(each not in self._numbers for each in tensors):
            self._refuse([each for each in tensors if each in self._numbers], f"'{name}' with a whole value")
            return
        heads = []
        for each in tensors:
            numbers = self._numbers[each]
            for dim in range(2, numbers.dim()):
                self._along(numbers, dim, f"'{name}'", is_product=True)
            heads.append(numbers[:, :, 0, 0])
        for each in heads[1:]:
            if each.shape[1] != heads[0].shape[1]:
                each = each.repeat_interleave(heads[0].shape[1] // each.shape[1], dim=1)
            self.atoms.tie(heads[0], each)
        for each in [*rest, *kwargs.values()]:
            if isinstance(each, torch.Tensor):
                if each in self._numbers:
                    self.atoms.tie(
                        heads[0][:, :, None, None].expand(query.shape[:3] + (each.shape[-1],)),
                        self._numbers[each].expand(query.shape[:3] + (each.shape[-1],)),
                    )
                else:
                    self._meet(name, each, heads[0][:, :, None, None].expand(*query.shape[:3], each.shape[-1]))
        self._numbers[made[0]] = heads[0][:, :, None, None].expand(made[0].shape)

    def _pad(self, name: str, args: Any, made: torch.Tensor) -> None:
        numbers = self._numbers[args[0]]
        sizes: Sequence[int] = args[1]
        for at in range(len(sizes) // 2):
            dim = numbers.dim() - 1 - at
            if sizes[2 * at] or sizes[2 * at + 1]:
                self._along(numbers, dim, f"'{name}'")
                numbers = numbers.narrow(dim, 0, 1)
        self._numbers[made] = numbers.expand(made.shape)

    def _gate(self, name: str, args: Any, kwargs: Any, made: torch.Tensor) -> None:
        dim = args[1] if len(args) > 1 else kwargs.get("dim", -1)
        one, other = self._numbers[args[0]].chunk(2, dim)
        self.atoms.tie(one, other)
        self._numbers[made] = one

    def _pick(self, func: Any, name: str, args: Any, kwargs: Any, made: torch.Tensor) -> None:
        """Elements by their positions, which every rank counts from its own first."""
        source, given = args[0], [each for each in tree_leaves((args[1:], kwargs)) if isinstance(each, torch.Tensor)]
        if source not in self._numbers or any(each in self._numbers or each.is_meta for each in given):
            self._refuse([each for each in (source, *given) if each in self._numbers], f"'{name}'")
            return
        numbers = self._numbers[source]
        if name == "index":
            at = 0
            for each in args[1]:
                if each is not None and not self._is_parameter(source):
                    self._along(numbers, at, f"'{name}'")
                at += 1 if each is None or each.dtype is not torch.bool else each.dim()
        elif not self._is_parameter(source):
            self._along(numbers, args[1] % source.dim(), f"'{name}'")
            if name == "gather":
                for dim in range(source.dim()):
                    self._along(numbers, dim, f"'{name}'")
        on_cpu: Callable[[Any], Any] = lambda each: each.cpu() if isinstance(each, torch.Tensor) else each  # noqa: E731
        self._numbers[made] = slim(func(numbers, *tree_map(on_cpu, args[1:]), **tree_map(on_cpu, kwargs)))


def _spread(numbers: torch.Tensor) -> int:
    """How many elements it has of its own."""
    return sum(1 for dim in range(numbers.dim()) if numbers.stride(dim))


def _dims_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[int] | None:
    """The argument `dim` or `dims` of an operation."""
    for at, each in enumerate(func._schema.arguments):
        if each.name in ("dim", "dims"):
            found = kwargs.get(each.name, args[at] if at < len(args) else each.default_value)
            return None if found is None else [found] if isinstance(found, int) else list(found)
    return None
