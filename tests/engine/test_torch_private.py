"""What the engine takes from torch by private names does what the engine needs of it: what fails here says what breaks.

Not asked here are nests of values and fake tensors, which almost every other test of the engine needs.
"""

import sys
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from shardwise.engine import torch_private as private


class Answering(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return "the class"


class Described(Answering):
    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise AssertionError(func)


class AnsweringMode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return "the mode"


class Operators(private.TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def leaf() -> torch.Tensor:
    return torch.ones(3, requires_grad=True)


def test_neither_classes_nor_modes_answer_where_they_are_switched_off() -> None:
    """Otherwise a parameter at rest would refuse the engine's own questions, and modes would see its work."""
    tensor = torch.ones(2).as_subclass(Answering)
    with private.DisableTorchFunctionSubclass():
        assert isinstance(tensor.sum(), torch.Tensor)
    plain = torch.ones(2)
    with AnsweringMode():
        with private.DisableTorchFunctionSubclass():
            assert torch.sum(plain) == "the mode"
        with private.DisableTorchFunction():
            assert isinstance(torch.sum(plain), torch.Tensor)


def test_modes_are_taken_off_and_put_back_in_order() -> None:
    """Otherwise trials of calls would be seen by modes of the program, and threads would compute without these."""
    with AnsweringMode() as lower, AnsweringMode() as upper:
        assert private.function_modes() == [lower, upper]
        assert private.num_function_modes() == 2
        assert private.function_mode_at(1) is upper
        assert [private.pop_function_mode() for _ in (upper, lower)] == [upper, lower]
        assert isinstance(torch.ones(2), torch.Tensor)
        for each in (lower, upper):
            private.push_function_mode(each)
        assert private.function_modes() == [lower, upper]
    with Operators() as mode:
        assert private.dispatch_modes() == [mode]
        private.pop_dispatch_mode()
        torch.ones(2)
        private.push_dispatch_mode(mode)
        with private.without_dispatch_modes():
            torch.ones(2)
        assert not mode.seen
        torch.ones(2)
    assert mode.seen


def test_operators_say_what_they_write_to() -> None:
    """Otherwise writes of a forward would not be seen."""
    with Operators() as mode:
        torch.ones(2).add_(1)
    add = mode.seen[-1]
    schema = private.schema_of(add)
    assert isinstance(add, private.Operator)
    assert add is torch.ops.aten.add_.Tensor
    assert (schema.name, schema.overload_name, schema.is_mutable) == ("aten::add_", "Tensor", True)
    assert [each.name for each in schema.arguments if each.alias_info and each.alias_info.is_write] == ["self"]
    assert add.overloadpacket.__name__ == "add_"


def test_a_write_to_a_view_is_counted_for_its_base_too() -> None:
    base = torch.zeros(4)
    view, other = base[1:], torch.zeros(4)
    before = private.version_of(base)
    view.add_(1)
    assert private.version_of(base) == private.version_of(view) > before
    assert private.storage_id(view.untyped_storage()) == private.storage_id(base.untyped_storage())
    assert private.storage_id(other.untyped_storage()) != private.storage_id(base.untyped_storage())
    assert private.base_of(view) is base
    on_meta = [torch.zeros(4, device="meta") for _ in range(2)]
    assert len({private.storage_id(each.untyped_storage()) for each in on_meta}) == 2


def test_tensors_are_made_of_classes_without_their_constructors() -> None:
    made = private.make_subclass(Answering, torch.ones(2), True)
    with private.DisableTorchFunctionSubclass():
        assert (type(made), made.requires_grad, made.is_leaf) == (Answering, True, True)
    empty = private.make_wrapper_subclass(Described, (3, 5), dtype=torch.float16)
    with private.DisableTorchFunctionSubclass():
        assert (type(empty), empty.shape, empty.dtype) == (Described, (3, 5), torch.float16)
    marked = torch.ones(2)
    private.mark_as_parameter(marked)
    assert isinstance(marked, nn.Parameter)


def test_elements_are_read_conjugated_or_negated_as_they_are_marked() -> None:
    tensor = torch.tensor([1 + 2j])
    assert private.flagged(tensor, is_conj=True, is_neg=False) is tensor
    assert (tensor.is_conj(), tensor.item()) == (True, 1 - 2j)
    private.flagged(tensor, is_conj=True, is_neg=True)
    assert (tensor.is_neg(), tensor.item()) == (True, -1 + 2j)
    private.flagged(tensor, is_conj=False, is_neg=False)
    assert tensor.item() == 1 + 2j


def test_tensors_without_elements_are_grouped_by_dtype_as_gradients_are() -> None:
    """Otherwise the norm of gradients of several stages would differ from that of one process in its last bit."""
    kinds = [torch.float32, torch.float64, torch.float32, torch.bfloat16]
    found = [
        [numbers for _, numbers in private.group_by_device_and_dtype([tensors], with_indices=True).values()]  # type: ignore[list-item]
        for tensors in ([torch.ones(size, dtype=each) for each in kinds] for size in (3, 0))
    ]
    assert found[0] == found[1]
    assert sorted(found[0]) == [[0, 2], [1], [3]]


def test_hooks_of_gradients_are_found_and_called() -> None:
    seen: list[str] = []
    tensor = leaf()
    assert private.backward_hooks(tensor) is private.gradient_hooks(tensor) is None
    tensor.register_hook(lambda _: seen.append("hook"))
    setattr(tensor, private.GRADIENT_HOOKS, OrderedDict())
    handle = tensor.register_post_accumulate_grad_hook(lambda _: seen.append("gradient"))
    assert len(private.backward_hooks(tensor) or ()) == 1
    assert list(private.gradient_hooks(tensor) or ()) == [handle.id]
    made = tensor * 2
    private.on_gradient(made, lambda gradient: seen.append(f"made {gradient[0]}"))
    private.on_gradient(made, lambda _: seen.append("made again"))
    made.register_hook(lambda _: seen.append("torch's"))
    made.register_hook(lambda _: private.at_end_of_backward(lambda: seen.append("end")))
    made.sum().backward()
    assert seen == ["made 1.0", "made again", "torch's", "hook", "gradient", "end"]


def test_a_forward_in_a_backward_is_known_by_its_task() -> None:
    tasks: list[int] = []

    def forward(value: torch.Tensor) -> torch.Tensor:
        tasks.append(private.graph_task())
        return value.exp()

    checkpoint(forward, leaf(), use_reentrant=False).sum().backward()
    assert tasks[0] == -1 != tasks[1]


def test_hooks_of_saved_tensors_are_pushed_popped_and_found() -> None:
    def same(value: Any) -> Any:
        return value

    kept: list[torch.Tensor] = []
    assert private.top_saved_hooks(True) is None
    private.push_saved_hooks(lambda value: kept.append(value) or value, same)  # type: ignore[func-returns-value]
    try:
        leaf().exp()
        assert private.top_saved_hooks(True)[1] is same
    finally:
        private.pop_saved_hooks()
    assert len(kept) == 1
    assert private.top_saved_hooks(True) is None


def test_a_custom_function_is_known_by_its_nodes_and_inherits_apply_where_that_is_replaced() -> None:
    class Custom(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
            return value.clone()

    node = Custom.apply(leaf()).grad_fn  # type: ignore[no-untyped-call]
    assert isinstance(node, private.backward_class(Custom))
    assert not isinstance(leaf().exp().grad_fn, private.backward_class(Custom))
    private.AutogradFunction.apply = classmethod(lambda *_: "replaced")  # type: ignore[attr-defined]
    try:
        assert Custom.apply() == "replaced"  # type: ignore[no-untyped-call]
    finally:
        del private.AutogradFunction.apply  # type: ignore[attr-defined]


def test_transformed_functions_are_known_and_left() -> None:
    asked: list[tuple[bool, bool, bool]] = []

    def function(value: torch.Tensor) -> torch.Tensor:
        with private.transformations_left():
            is_left = not private.is_transformed()
        asked.append((bool(private.is_transformed()), private.is_wrapped_by_transformation(value), is_left))
        return value.sum()

    torch.func.grad(function)(torch.ones(2))
    torch.func.vmap(function)(torch.ones(2, 2))
    assert asked == [(True, True, True)] * 2
    assert not private.is_transformed()


def test_what_takes_a_tensor_into_a_transformation_is_replaced() -> None:
    """Otherwise torch.func would take a parameter at rest for a tensor with memory."""
    before = private.eager_transforms._wrap_for_grad, private.predispatch._add_batch_dim_impl  # type: ignore[attr-defined]
    taken: list[str] = []

    def around(wrap: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: taken.append(wrap.__name__) or wrap(*args)  # type: ignore[func-returns-value]

    private.stand_around_transformations(around)
    try:
        torch.func.grad(torch.sum)(torch.ones(2))
        torch.func.vmap(torch.sum)(torch.ones(2, 2))
    finally:
        private.eager_transforms._wrap_for_grad, private.predispatch._add_batch_dim_impl = before  # type: ignore[attr-defined]
    assert len(taken) == 2


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # by the compiler itself
def test_compiled_modules_are_known_by_their_names() -> None:
    module = nn.Linear(2, 2)
    assert private.compiled_call(module) is None
    setattr(module, private.COMPILED_CALL, lambda *_: "compiled")
    assert module(torch.ones(2)) == "compiled"
    assert [name for name, _ in torch.compile(nn.Linear(2, 2)).named_children()] == [private.ORIGINAL_MODULE]  # type: ignore[attr-defined]
    assert private.COMPILER in sys.modules
    private.skip_code(leaf.__code__)


def test_hooks_of_modules_are_found_by_their_numbers() -> None:
    module = nn.Linear(2, 2)
    before = module.register_forward_pre_hook(lambda *_: None)
    plain = module.register_forward_hook(lambda *_: None)
    named = module.register_forward_hook(lambda *_: None, with_kwargs=True)
    assert [*private.forward_pre_hooks(module)] == [before.id]
    assert [*private.forward_hooks(module)] == [plain.id, named.id]
    assert [*private.hooks_with_keywords(module)] == [named.id]
    assert {private.FORWARD_HOOKS, private.FORWARD_PRE_HOOKS} < private.HOOKS_OF_MODULES
    module.register_state_dict_pre_hook(lambda *_: None)
    module.register_load_state_dict_pre_hook(lambda *_: None)
    assert len(private.state_dict_pre_hooks(module)) == len(private.load_state_dict_pre_hooks(module)) == 1
    of_all = nn.modules.module.register_module_forward_hook(lambda *_: None)
    before_all = nn.modules.module.register_module_forward_pre_hook(lambda *_: None)
    assert ([*private.hooks_of_all_forwards], [*private.hooks_before_all_forwards]) == ([of_all.id], [before_all.id])
    of_all.remove()
    before_all.remove()


def test_calls_of_modules_are_found_on_the_stack() -> None:
    names = []

    class Looking(nn.Module):
        def forward(self) -> None:
            frame = sys._getframe(1)
            names.append(frame.f_code.co_name)
            while frame.f_code is not private.CALL_CODE:
                frame = frame.f_back  # type: ignore[assignment]
            assert frame.f_code.co_name in private.CALL_METHODS

    Looking()()
    assert set(names) <= set(private.CALL_METHODS)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.zeros(2))
        self.register_buffer("left", torch.zeros(2), persistent=False)
        self.norm = nn.BatchNorm1d(2)


class Loading(nn.Module):
    def _load_from_state_dict(self, *args: Any) -> None:
        args[-1].append("an error of its own")


def test_buffers_states_and_norms_are_asked_as_torch_asks_them() -> None:
    net = Net()
    assert private.not_in_files(net) == {"left"} == {*dict(net.named_buffers(recurse=False))} - {*net.state_dict()}
    assert isinstance(net.norm, private.NormWithStatistics)
    assert isinstance(nn.InstanceNorm1d(2), private.NormWithStatistics)
    assert private.loads_as_torch_does(net)
    assert not private.loads_as_torch_does(Loading())
    assert private.load_alone(net, {"kept": torch.ones(2)}) == []
    assert net.get_buffer("kept").tolist() == [1, 1]
    assert private.load_alone(Loading(), {}) == ["an error of its own"]
    private.change_tensors(net, torch.Tensor.double)
    assert {each.dtype for each in net.buffers() if each.is_floating_point()} == {torch.float64}


def test_truncated_draws_come_from_the_function_of_this_name() -> None:
    original = getattr(nn.init, private.TRUNCATED_NORMAL)
    setattr(nn.init, private.TRUNCATED_NORMAL, lambda tensor, *_, **__: tensor.fill_(7))
    try:
        assert nn.init.trunc_normal_(torch.zeros(1)).item() == 7
    finally:
        setattr(nn.init, private.TRUNCATED_NORMAL, original)


def test_weights_of_parametrizations_are_computed_anew_and_put_back_through_one_function() -> None:
    net = parametrizations.orthogonal(nn.Linear(2, 2))
    with parametrize.cached():
        kept = net.weight
        with private.parametrizations_uncached():
            assert net.weight is not kept
        assert net.weight is kept
    before, calls = parametrize._maybe_set, []
    private.stand_around_set(lambda set_to: lambda *args: calls.append(args) or set_to(*args))  # type: ignore[func-returns-value]
    try:
        parametrize.register_parametrization(nn.Linear(2, 2), "weight", nn.Identity())
    finally:
        parametrize._maybe_set = before
    assert calls


def test_hooks_of_optimizers_are_found_and_scaled_steps_are_theirs() -> None:
    optimizer = torch.optim.SGD([leaf()])
    for kind in ("step_pre", "step_post", "state_dict_pre", "load_state_dict_pre"):
        assert private.optimizer_hooks(optimizer, kind, None) == {}
        handle = getattr(optimizer, f"register_{kind}_hook")(lambda *_: None)
        assert [*private.optimizer_hooks(optimizer, kind, {})] == [handle.id]
    before = register_optimizer_step_pre_hook(lambda *_: None)
    after = register_optimizer_step_post_hook(lambda *_: None)
    assert ([*private.hooks_before_all_steps], [*private.hooks_after_all_steps]) == ([before.id], [after.id])
    before.remove()
    after.remove()
    torch.optim.lr_scheduler.ConstantLR(optimizer)
    assert getattr(optimizer.step, private.OF_SCHEDULERS) is True
    assert getattr(torch.optim.SGD([leaf()], fused=True), private.TAKES_SCALE) is True
