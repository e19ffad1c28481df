"""What operations do to the atoms of their tensors (see `atoms`).

    moves elements          view, slice, cat             done on the atoms themselves: they go where the elements go
    element by element      a * b                        atoms that meet are tied
    mixes a dim             softmax, sum, sort           all atoms along the dim are tied
    product                 a @ b                        all atoms along the inner dim are tied; rows and columns stay
    picks by position       a[:, [3]], gather            tied along the dim: a rank would count from its own first one
    anything else                                        forbids all atoms that reach it: they stay whole

Scores of 2 heads, query and key (rows, heads, tokens, 3), atoms of one token:

    query  [a b c] [d e f]      q @ k^T ties a b c, g h i and a-g (head 0), d e f, j k l and d-j (head 1)
    key    [g h i] [j k l]      -> groups {a b c g h i}, {d e f j k l}: 2 groups, so at most 2 ranks

A rule may tie too much, and a map stays whole that could be cut. It must never tie too little: the plan would compute
something else. Rehearsals and the proof stand behind it, but see only what a sample shows.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from shardwise.engine.tensor.auto.atoms import TensorFlow, TracedOperation, slim, varies
from shardwise.engine.torch_private import tensor_leaves, tree_map

Numbers = torch.Tensor
"""An atom for each element."""

# Views are apart from the other moves: func of a view may refuse numbers whose strides (0) cannot be viewed so.
_VIEWS = frozenset({"view", "_unsafe_view", "_reshape_alias"})

_MOVES = frozenset(
    {
        *("permute", "transpose", "t", "unsqueeze", "squeeze", "expand", "slice", "select", "split"),
        *("split_with_sizes", "unbind", "diagonal", "repeat", "unfold", "narrow", "chunk"),
    }
)
# tril and fill_ change values and no feature: an element that is 0 now still has its place. zeros_like has the shape of
# its model, which on each rank is that of the part.
_COPIES = frozenset(
    {
        *("clone", "_to_copy", "contiguous", "detach", "alias", "lift_fresh", "tril", "triu", "tril_", "triu_"),
        *("fill_", "zero_", "zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like"),
    }
)
_ELEMENTWISE = frozenset(
    {
        *("masked_fill", "masked_fill_", "copy_", "copy", "hardswish", "floor_divide", "log_sigmoid_forward"),
        *("native_dropout", "nan_to_num_", "where"),
    }
)
# roll and flip move elements, but a rank would turn its own part around, not the whole: tied like a sum.
_MIXES = frozenset(
    {
        *("sum", "mean", "amax", "amin", "var", "std", "norm", "linalg_vector_norm", "prod", "any", "all", "argmax"),
        *("argmin", "logsumexp", "max", "min", "median", "var_mean", "nansum", "cumsum", "cumprod", "cummax"),
        *("logcumsumexp", "_softmax", "_safe_softmax", "_log_softmax", "sort", "topk", "kthvalue", "mode"),
        *("roll", "flip"),
    }
)
_ATTENTION = frozenset(
    {
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
    }
)


def follow(flow: TensorFlow, operation: TracedOperation) -> None:
    """Give what an operation made the atoms that it has, and tie what it brings together."""
    name = operation.name
    if name in _FOLLOWED:
        _FOLLOWED[name](flow, operation)
    elif name in _VIEWS | _MOVES | _COPIES:
        _move(flow, operation)
    elif name in _ELEMENTWISE or torch.Tag.pointwise in operation.func.tags:
        _meet_elementwise(flow, operation)
    elif name in _MIXES:
        _mix(flow, operation)
    elif name in _ATTENTION:
        _attend(flow, operation)
    # new_zeros and its kin take a device and a dtype from the tensor, and nothing else.
    elif not name.startswith("new_"):
        refuse(flow, operation.given, name)


def refuse(flow: TensorFlow, tensors: Iterable[torch.Tensor], name: str) -> None:
    """All atoms that reach an operation that is not followed are whole."""
    for each in flow.cut(tensors):
        flow.forbid(flow.numbers[each], f"'{name}', which is not followed,")


def moved(operation: TracedOperation, numbers: Numbers) -> Sequence[Numbers]:
    """The numbers of the outputs of an operation that moves elements of one tensor; nothing for other operations."""
    name = operation.name
    if name in _VIEWS:
        # view(dtype) of another width has more or fewer elements than atoms.
        if operation.output.numel() != numbers.numel():
            return ()
        answer = numbers.reshape(operation.output.shape)
        # A reshape that had to copy has lost its strides of 0, and holds an atom for every token: made slim again.
        return [answer if answer.data_ptr() == numbers.data_ptr() else slim(answer)]
    if name in _MOVES:
        made: Any = operation.func(numbers, *operation.args[1:], **operation.kwargs)
        return [slim(made) if name == "repeat" else made] if isinstance(made, torch.Tensor) else list(made)
    if name in _COPIES or torch.Tag.pointwise in operation.func.tags:
        return [numbers for each in operation.made if each.shape == numbers.shape]
    return ()


def _move(flow: TensorFlow, operation: TracedOperation) -> None:
    (source,) = flow.cut(operation.given)
    answers = moved(operation, flow.numbers[source])
    if not answers:
        refuse(flow, [source], operation.name)
        return
    for each, numbers in zip(operation.made, answers, strict=True):
        flow.numbers[each] = numbers


# Element by element ---------------------------------------------------------------------------------------------------


def _meet_elementwise(flow: TensorFlow, operation: TracedOperation) -> None:
    name, made = operation.name, operation.made
    shape = made[0].shape
    leading = flow.cut(operation.given)
    wholes = [each for each in operation.given if flow.numbers.get(each) is None]
    # A parameter that is smaller than what it meets (the scale of a norm, the same for each head) would have to be on
    # every rank: cut, it would lack the numbers for other heads. Then the parameter is whole, and what it meets is
    # free.
    if activations := [each for each in leading if not flow.is_parameter(each)]:
        for each in [each for each in leading if flow.is_parameter(each) and not _fits(flow, each, activations)]:
            leading = [other for other in leading if other is not each]
            wholes.append(each)
            flow.forbid(flow.numbers[each], f"'{name}' with parts that it maps alike")
    # After the ties one of the tensors stands for all: their groups are the same.
    numbers = flow.numbers[leading[0]].expand(shape)
    for each in leading[1:]:
        other = flow.numbers[each].expand(shape)
        flow.atoms.tie(numbers, other)
        numbers = _finer(numbers, other)
    for each in wholes:
        flow.meet(name, each, numbers)
    # A rank would write its part into a tensor of the whole size.
    if operation.is_writing and flow.numbers.get(operation.given[0]) is None:
        flow.forbid(numbers, f"'{name}' into a whole tensor")
        return
    for each in made:
        if each.shape == shape:
            flow.numbers[each] = numbers


def _fits(flow: TensorFlow, parameter: torch.Tensor, others: Sequence[torch.Tensor]) -> bool:
    """Whether a parameter has separate elements for all differences in the values that it meets."""
    for each in others:
        numbers = flow.numbers[each]
        for dim in range(1, numbers.dim() + 1):
            size = parameter.shape[-dim] if dim <= parameter.dim() else 1
            if size == 1 and varies(numbers, numbers.dim() - dim):
                return False
    return True


def _finer(one: Numbers, other: Numbers) -> Numbers:
    """Of numbers that are tied, those that differ along more dims."""
    return max(one, other, key=lambda each: sum(map(bool, each.stride())))


# Side by side ---------------------------------------------------------------------------------------------------------


def _join(flow: TensorFlow, operation: TracedOperation) -> None:
    name, made = operation.name, operation.made[0]
    parts = [each for each in operation.args[0] if each.numel()]
    dim = operation.argument("dim") % made.dim()
    model = flow.numbers[flow.cut(parts)[0]]
    joined = []
    for each in parts:
        own = flow.numbers.get(each)
        joined.append(_beside(flow, name, each, model, dim) if own is None else own)
    flow.numbers[made] = slim(torch.cat(joined, dim) if name == "cat" else torch.stack(joined, dim))


def _beside(flow: TensorFlow, name: str, part: torch.Tensor, model: Numbers, dim: int) -> Numbers:
    """The numbers of a whole part next to a cut one, whose numbers they are where the whole part is alike."""
    whole = torch.zeros((), dtype=torch.int64).expand(part.shape)
    # The same reason as in `TensorFlow.meet`: its gradient would be a part on each rank.
    if flow.is_activation(part):
        flow.forbid(model, f"'{name}' with a whole value that has a gradient")
        return whole
    for each in range(part.dim()):
        if varies(model, each) and (flow.differs(part, each) or (name == "cat" and each == dim)):
            return whole
    return model if name == "stack" else model.narrow(dim, 0, 1).expand(part.shape)


def _pad(flow: TensorFlow, operation: TracedOperation) -> None:
    numbers = flow.numbers[operation.args[0]]
    sizes: Sequence[int] = operation.args[1]
    for at in range(len(sizes) // 2):
        dim = numbers.dim() - 1 - at
        # Each rank would pad its own part, so that the whole had paddings in the middle.
        if sizes[2 * at] or sizes[2 * at + 1]:
            flow.along(numbers, dim, f"'{operation.name}'")
            numbers = numbers.narrow(dim, 0, 1)
    flow.numbers[operation.made[0]] = numbers.expand(operation.made[0].shape)


def _gate(flow: TensorFlow, operation: TracedOperation) -> None:
    # glu pairs the first half with the second: each pair is one group, and the halves are two parts of one map.
    one, other = flow.numbers[operation.args[0]].chunk(2, operation.argument("dim"))
    flow.atoms.tie(one, other)
    flow.numbers[operation.made[0]] = one


# Along a dim ----------------------------------------------------------------------------------------------------------


def _mix(flow: TensorFlow, operation: TracedOperation) -> None:
    source = operation.args[0]
    numbers = flow.numbers[source]
    given = operation.argument("dim", operation.argument("dims"))
    listed = [given] if isinstance(given, int) else list(given or range(source.dim()))
    dims = sorted({each % max(1, source.dim()) for each in listed}, reverse=True)
    for dim in dims:
        flow.along(numbers, dim, f"'{operation.name}'")
    for each in operation.made:
        own = numbers
        if each.shape != source.shape:
            for dim in dims:
                own = own.narrow(dim, 0, 1) if each.dim() == source.dim() else own.select(dim, 0)
        flow.numbers[each] = own.expand(each.shape)


def _normalize(flow: TensorFlow, operation: TracedOperation) -> None:
    for each in flow.cut(operation.given):
        if flow.is_parameter(each):
            flow.forbid(flow.numbers[each], f"'{operation.name}'")
    source = operation.args[0]
    numbers = flow.numbers.get(source)
    # A norm over heads mixes what is in a head only: its dims are tied, and the heads stay apart. Its weights are
    # whole, since every head reads all of them.
    if numbers is None or flow.is_parameter(source):
        return
    for dim in range(numbers.dim() - len(operation.args[1]), numbers.dim()):
        flow.along(numbers, dim, f"'{operation.name}'")
    flow.numbers[operation.made[0]] = numbers


def _pick(flow: TensorFlow, operation: TracedOperation) -> None:
    """Elements by their positions."""
    name, source = operation.name, operation.args[0]
    positions = tensor_leaves((operation.args[1:], operation.kwargs))
    # Positions that depend on cut values differ by rank; those of a meta tensor are unknown.
    if flow.numbers.get(source) is None or flow.cut(positions) or any(each.is_meta for each in positions):
        refuse(flow, operation.given, name)
        return
    numbers = flow.numbers[source]
    if not flow.is_parameter(source):
        # x[:, [3]] is feature 3 of the whole, and on rank 1 it would be the third of its own. Slices are not tied: the
        # sizes in them may come from attributes that the rule `heads` changes, and a rehearsal shows whether they do.
        for dim in _picked_dims(operation, source):
            flow.along(numbers, dim, f"'{name}'")
    args, kwargs = tree_map(_on_cpu, (operation.args[1:], operation.kwargs))
    flow.numbers[operation.made[0]] = slim(operation.func(numbers, *args, **kwargs))


def _picked_dims(operation: TracedOperation, source: torch.Tensor) -> list[int]:
    if operation.name == "index_select":
        return [operation.args[1] % source.dim()]
    if operation.name == "gather":
        return list(range(source.dim()))
    dims, at = [], 0
    for each in operation.args[1]:
        count = each.dim() if each is not None and each.dtype in (torch.bool, torch.uint8) else 1
        dims += [] if each is None else list(range(at, at + count))
        at += count
    return dims


def _look_up(flow: TensorFlow, operation: TracedOperation) -> None:
    weight, tokens = operation.args[:2]
    if flow.numbers.get(weight) is None or flow.numbers.get(tokens) is not None or tokens.is_meta:
        refuse(flow, operation.given, operation.name)
        return
    flow.numbers[operation.made[0]] = slim(flow.numbers[weight][tokens.cpu()])


def _on_cpu(value: Any) -> Any:
    return value.cpu() if isinstance(value, torch.Tensor) else value


# Products -------------------------------------------------------------------------------------------------------------


def _multiply(flow: TensorFlow, operation: TracedOperation) -> None:
    """Matrices, one pair or many: what is summed over is one group, and so are the row and the column that meet."""
    name, made = operation.name, operation.made[0]
    added = operation.args[0] if name in ("addmm", "baddbmm") else None
    if added is not None and flow.numbers.get(added) is not None:
        refuse(flow, [added], name)
        added = None
    one, other = operation.args[:2] if name in ("mm", "bmm") else operation.args[1:3]
    left, right = flow.numbers.get(one), flow.numbers.get(other)
    for numbers, whole, dim in ((left, other, one.dim() - 1), (right, one, one.dim() - 2)):
        if numbers is not None:
            flow.along(numbers, dim, f"'{name}'", is_product=True)
            if flow.numbers.get(whole) is None:
                # The inner dim is tied just above, and the free dim of the whole matrix meets nothing that is cut.
                # A batch of matrices (heads, say) meets the other batch.
                flow.meet(name, whole, numbers, dims=[-3] if whole.dim() == 3 else [])
    # Behind the tie along the inner dim any of its atoms stands for the group: the first one.
    rows = None if left is None else left.narrow(-1, 0, 1).expand(made.shape)
    columns = None if right is None else right.narrow(-2, 0, 1).expand(made.shape)
    if rows is not None and columns is not None:
        flow.atoms.tie(rows, columns)
        numbers = _finer(rows, columns)
    else:
        numbers = rows if rows is not None else columns
    if numbers is not None:
        if added is not None:
            flow.meet(name, added, numbers)
        flow.numbers[made] = numbers


def _attend(flow: TensorFlow, operation: TracedOperation) -> None:
    """Attention of [rows, heads, positions, dims]: a head is one group, as are query, key and value of one."""
    name = operation.name
    tensors = operation.args[:3]
    # Keys and values of a cache or of another branch may be whole: each rank would attend with its heads to all of
    # theirs, and their gradients would be parts.
    if len(flow.cut(tensors)) < len(tensors):
        refuse(flow, tensors, f"{name} with a whole value")
        return
    heads = []
    for each in tensors:
        numbers = flow.numbers[each]
        for dim in range(2, numbers.dim()):
            flow.along(numbers, dim, f"'{name}'", is_product=True)
        own = numbers[:, :, 0, 0]
        # Grouped-query attention: 2 key heads serve 6 query heads, so a key head is one group with 3 of them.
        heads.append(own.repeat_interleave(operation.made[0].shape[1] // own.shape[1], dim=1))
    for own in heads[1:]:
        flow.atoms.tie(heads[0], own)
    numbers = heads[0][:, :, None, None]
    for each in operation.given:
        if not any(each is other for other in tensors):
            shape = torch.broadcast_shapes(each.shape, numbers.shape)
            if (mask := flow.numbers.get(each)) is not None:
                flow.atoms.tie(numbers.expand(shape), mask.expand(shape))
            else:
                flow.meet(name, each, numbers.expand(shape))
    flow.numbers[operation.made[0]] = numbers.expand(operation.made[0].shape)


_FOLLOWED: Mapping[str, Callable[[TensorFlow, TracedOperation], None]] = {
    **dict.fromkeys(("cat", "stack"), _join),
    **dict.fromkeys(("native_layer_norm", "_fused_rms_norm"), _normalize),
    **dict.fromkeys(("mm", "bmm", "addmm", "baddbmm"), _multiply),
    **dict.fromkeys(("index", "index_select", "gather"), _pick),
    "constant_pad_nd": _pad,
    "glu": _gate,
    "embedding": _look_up,
}
