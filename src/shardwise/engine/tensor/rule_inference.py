"""Rules of tensor parallelism for any model, from one forward: what "auto" gives a model that carries no plan.

One forward is traced (`forward_recording`), rules are inferred from the trace, and a plan by these rules is rehearsed
(`rehearsal`). A trace cannot show how a forward counts. After `q(x).view(b, -1, self.num_heads, 4)` a rank with half of
the heads has to find half in `num_heads`. So a rehearsal that fails is answered with attempts:

    rehearsal 1   q k v column, o row                          "what 'o' reads is not its part"
    rehearsal 2   ... and heads(attributes=num_heads)          passes: this is the plan
    else          heads and widths, widths, ...                the last one fails: q k v o are whole, with the reason

An attempt for one layer holds for all equal ones, so a model of 96 layers takes as many attempts as one layer. For a
model of transformers without a sample, `sample_for` makes one by its configuration.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from shardwise.engine.forward.trial_runs import aside
from shardwise.engine.tensor.forward_recording import record
from shardwise.engine.tensor.rehearsal import RehearsalError, rehearse
from shardwise.errors import PlanError, in_words
from shardwise.plan.outlines import TensorModule, TensorOutline, parents
from shardwise.plan.tensor_cuts import GROUPS, HEADS, WORDS, plan_tensor
from shardwise.plan.tensor_inference import ForwardTrace, MapFamily, RuleInference, infer_rules
from shardwise.plan.tensor_matching import modules_around
from shardwise.plan.tensor_plan import TensorPlan

_MOST_REHEARSALS = 64
"""Each costs a forward per rank, in every process."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorDecision:
    """How a model is cut, and where that comes from."""

    plan: TensorPlan
    inferred: Mapping[str, str] = field(default_factory=dict)
    """The rules that "auto" inferred; they may be given as `tensor.rules` as they are."""
    left: Mapping[str, str] = field(default_factory=dict)
    """What "auto" left whole, and modules whose adapters cannot be cut as a rule says -> why."""

    def text(self) -> str:
        """What "auto" inferred and what it left whole, a line each; "" where it inferred nothing."""
        lines = [f"{name}: {rule}" for name, rule in self.inferred.items()]
        return "\n".join([*lines, *(f"{name}: whole, {why}" for name, why in self.left.items())])


def infer_plan(model: nn.Module, outline: TensorOutline, call: Callable[[], Any], *, num_ranks: int) -> TensorDecision:
    """The plan that one forward of the model allows; it has been rehearsed. `call()` runs the model.

    Raises PlanError, with the reasons, where nothing can be cut.
    """
    try:
        trace = record(model, outline, call)
    except Exception as error:
        raise PlanError(
            f'tensor.rules: "auto" runs the model once on a sample, and it raised {in_words(error)}. Give a batch '
            "that the model takes, parallelize(..., sample=batch), or {name: rule}"
        ) from error
    return _Search(model, outline, call, trace, num_ranks).run()


@dataclass
class _Search:
    """Infers, plans and rehearses until a plan holds, and gives up what fails."""

    model: nn.Module
    outline: TensorOutline
    call: Callable[[], Any]
    trace: ForwardTrace
    num_ranks: int
    choices: dict[object, list[Mapping[str, tuple[str, ...]]]] = field(default_factory=dict)
    """Of families that are alike, in layer after layer: attributes that count heads, by the class of the module that
    has them. The first ones are tried."""
    without: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.modules: dict[str, TensorModule] = {each.name: each for each in self.outline.modules}

    def run(self) -> TensorDecision:
        # Each turn begins anew from the trace, with what has been given up left out: without one map another family may
        # fit that was refused before.
        for _ in range(_MOST_REHEARSALS):
            inference = infer_rules(self.trace, num_ranks=self.num_ranks, without=self.without)
            rules = inference.rules
            if not rules:
                break
            heads = [self._heads_of(family) for family in inference.families]
            for each in heads:
                rules |= each
            try:
                plan = plan_tensor(self.outline, rules, num_ranks=self.num_ranks)
            except PlanError as error:
                # What a trace shows, the planner takes; else all that it was asked for is whole.
                self.without |= dict.fromkeys(inference.rules, error.problems[0])
                continue
            try:
                rehearse(self.model, self.outline, plan, self.call)
            except RehearsalError as wrong:
                self._learn(inference, wrong)
                continue
            return TensorDecision(plan=plan, inferred=rules, left=inference.left)
        raise PlanError(_nothing(infer_rules(self.trace, num_ranks=self.num_ranks, without=self.without).left))

    # Heads --------------------------------------------------------------------------------------------------------

    def _kind_of(self, family: MapFamily) -> object:
        # Layers are alike where the classes of their maps and of what holds them are, and the groups: names differ.
        around = [modules_around(self.modules, each)[:2] for each in family.columns]
        kinds = frozenset(tuple(module.kind for module in each) for each in around)
        kind = (kinds, family.num_groups, family.widths)
        if kind not in self.choices:
            self.choices[kind] = list(self._choices(family))
        return kind

    def _around(self, family: MapFamily) -> dict[str, TensorModule]:
        """The modules that hold the maps, or hold what holds them, and may count their features."""
        found = {}
        for each in (*family.columns, *family.rows):
            for name in [*parents(each), ""][:2]:
                if name in self.modules:
                    found[name] = self.modules[name]
        return found

    def _choices(self, family: MapFamily) -> Iterator[Mapping[str, tuple[str, ...]]]:
        """Sets of attributes that may count what is cut: none, heads, heads and widths, widths."""
        yield {}
        groups, around = family.num_groups, self._around(family)

        def chosen(accept: Callable[[str, int], bool]) -> dict[str, tuple[str, ...]]:
            found: dict[str, tuple[str, ...]] = {}
            for module in around.values():
                names = tuple(key for key, value in module.numbers.items() if _counts(value) and accept(key, value))
                if names:
                    found[module.kind] = names
            return found

        def _counts(value: int) -> bool:
            return value > 0 and value % groups == 0

        # From the likeliest to the odd. Words that mean heads come first; then any number that is a width of what is
        # cut (`inner`, `embed_dim`), and last a number that happens to be that of the groups.
        heads = frozenset((*HEADS, *GROUPS))
        sizes = frozenset(WORDS) - heads
        tried = [
            chosen(lambda key, _: key in heads),
            chosen(lambda key, value: key in heads or (value in family.widths and key not in sizes)),
            chosen(lambda key, value: value in family.widths and key not in heads | sizes),
            chosen(lambda key, value: key in heads or (value in family.widths | {groups} and key not in sizes)),
            chosen(lambda key, value: value == groups and key not in sizes),
        ]
        yield from (each for at, each in enumerate(tried) if each and each not in tried[:at])

    def _heads_of(self, family: MapFamily) -> dict[str, str]:
        attributes = next(iter(self.choices[self._kind_of(family)]), {})
        return {
            name: f"heads(attributes={'+'.join(attributes[module.kind])}, groups={family.num_groups})"
            for name, module in self._around(family).items()
            if module.kind in attributes
        }

    # What fails ---------------------------------------------------------------------------------------------------

    def _learn(self, inference: RuleInference, wrong: RehearsalError) -> None:
        """Try the next numbers of heads for the families of the module where it shows, or leave them whole."""
        families = self._at(inference, wrong.module)
        if not families:
            # It shows in a module that holds nothing that is cut: no family can be blamed, so all are whole.
            names = {name for family in inference.families for name in (*family.columns, *family.rows)}
            self.without |= dict.fromkeys(names or inference.vocabulary, f"with it cut, {_said(wrong)}")
            return
        # All families of a module are moved on together: a rehearsal says where it fails, not which of them is wrong.
        for kind in dict.fromkeys(map(self._kind_of, families)):
            self.choices[kind] = self.choices[kind][1:]
            if not self.choices[kind]:
                for family in [each for each in inference.families if self._kind_of(each) == kind]:
                    self.without |= dict.fromkeys((*family.columns, *family.rows), f"with it cut, {_said(wrong)}")

    def _at(self, inference: RuleInference, name: str) -> list[MapFamily]:
        """Families of a module, or of what is in the nearest module around it that holds any."""
        for around in (name, *parents(name)):
            if around in inference.vocabulary:
                self.without[around] = "a rehearsal shows that it is no lookup"
            inside = [
                family
                for family in inference.families
                if any(each == around or each.startswith(f"{around}.") for each in (*family.columns, *family.rows))
            ]
            if inside and around:
                return inside
        return []


def _said(wrong: RehearsalError) -> str:
    return f"{wrong.module or 'the model itself'!r} computes something else: {wrong.why}"


def _nothing(left: Mapping[str, str]) -> str:
    shown = [f"{name!r}: {why}" for name, why in list(left.items())[:8]]
    more = f"; and {len(left) - 8} more" if len(left) > 8 else ""
    return (
        'tensor.rules: the model carries no plan, and "auto" finds nothing in it to cut; give {name: rule}, '
        f"or leave mesh.tp at 1. It found: {'; '.join(shown) or 'no linear map ran'}{more}"
    )


# Samples --------------------------------------------------------------------------------------------------------------

# Small: the model runs on it once to be traced, and once per rank in each rehearsal.
_ROWS = 2
_TOKENS = 8


def sample_for(model: nn.Module) -> dict[str, torch.Tensor] | None:
    """A small batch by the names of the forward's arguments and the sizes of `model.config`.

    Tokens are arbitrary numbers; pixels and sounds are random. It is the same on every rank, and the model runs on it:
    None where no batch is found on which it does.
    """
    if getattr(model, "config", None) is None or not hasattr(model, "dummy_inputs"):
        return None
    device = next((each.device for each in model.parameters()), torch.device("cpu"))
    for names in _candidates(model):
        batch = {name: each.to(device) for name, each in _made(model, names).items()}
        try:
            with aside(model):
                model.eval()(**batch)
        except Exception:
            # A model that wants other arguments raises what it likes; the next candidate has more of them.
            continue
        return batch
    return None


def _candidates(model: nn.Module) -> Iterator[list[str]]:
    """Arguments to give: the main input of the model and those without a default; then all that are known."""
    parameters = inspect.signature(model.forward).parameters
    main = getattr(model, "main_input_name", "input_ids")
    needed = [name for name, each in parameters.items() if each.default is each.empty and name in _MAKERS]
    least = list(dict.fromkeys([main, *needed, *(name for name in _BESIDE if name in parameters)]))
    yield [name for name in least if name in _MAKERS]
    yield [name for name in parameters if name in _MAKERS]


def _made(model: nn.Module, names: Iterable[str]) -> dict[str, torch.Tensor]:
    # A generator of its own: all ranks make one sample, infer one plan, and the random state of the program stays.
    generator = torch.Generator().manual_seed(0)
    sizes = _ConfigSizes(model.config)
    dtype = next((each.dtype for each in model.parameters() if each.is_floating_point()), torch.float32)
    made = {name: _MAKERS[name](sizes, generator) for name in names}
    return {name: each.to(dtype) if each.is_floating_point() else each for name, each in made.items()}


class _ConfigSizes:
    """Numbers of a configuration, or of one inside it."""

    def __init__(self, config: Any) -> None:
        self._configs = [config]
        for key in ("text_config", "vision_config", "audio_config", "encoder", "decoder", "backbone_config"):
            inner = getattr(config, key, None)
            if inner is not None and not isinstance(inner, Mapping | int | float | str | bool):
                self._configs.append(inner)

    def number(self, *names: str, default: int) -> int:
        """The first of these that some configuration has."""
        for config in self._configs:
            for name in names:
                value = getattr(config, name, None)
                if isinstance(value, list | tuple) and value and all(type(each) is int for each in value):
                    value = value[0]
                if type(value) is int and value > 0:
                    return value
        return default


def _tokens(sizes: _ConfigSizes, generator: torch.Generator) -> torch.Tensor:
    count = sizes.number("vocab_size", default=16)
    # Not from 0: small numbers are special tokens (padding, start), which masks may leave out of the computation.
    return torch.randint(min(5, count - 1), count, (_ROWS, _TOKENS), generator=generator)


def _pixels(sizes: _ConfigSizes, generator: torch.Generator) -> torch.Tensor:
    size = sizes.number("image_size", "img_size", "input_size", default=32)
    return torch.randn(_ROWS, sizes.number("num_channels", "in_channels", default=3), size, size, generator=generator)


def _frames(sizes: _ConfigSizes, generator: torch.Generator) -> torch.Tensor:
    images = [_pixels(sizes, generator) for _ in range(sizes.number("num_frames", default=2))]
    return torch.stack(images, 1)


def _mel(sizes: _ConfigSizes, generator: torch.Generator) -> torch.Tensor:
    bins = sizes.number("num_mel_bins", "feature_size", "n_mels", default=16)
    # An encoder with a fixed number of positions (Whisper) halves its frames by a convolution before it adds them.
    if (positions := sizes.number("max_source_positions", default=0)) > 0:
        return torch.randn(_ROWS, bins, 2 * positions, generator=generator)
    return torch.randn(_ROWS, 32, bins, generator=generator)


def _sound(sizes: _ConfigSizes, generator: torch.Generator) -> torch.Tensor:
    """A wave, or a spectrogram where frequencies are counted."""
    if (bins := sizes.number("num_mel_bins", default=0)) and (length := sizes.number("max_length", default=0)):
        return torch.randn(_ROWS, length, bins, generator=generator)
    return torch.randn(_ROWS, 2000, generator=generator)


def _boxes(sizes: _ConfigSizes, generator: torch.Generator) -> torch.Tensor:
    corner = torch.randint(0, 4, (_ROWS, _TOKENS, 2), generator=generator)
    return torch.cat([corner, corner + 3], -1)


_MAKERS: dict[str, Callable[[_ConfigSizes, torch.Generator], torch.Tensor]] = {
    "input_ids": _tokens,
    "decoder_input_ids": _tokens,
    "pixel_values": _pixels,
    "pixel_values_videos": _frames,
    "input_features": _mel,
    "input_values": _sound,
    "bbox": _boxes,
}
"""Arguments of forwards, by the names that they have in transformers."""

_BESIDE = ("decoder_input_ids", "bbox")
"""What a forward needs though it has a default."""
