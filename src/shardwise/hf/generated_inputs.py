"""Trainers that generate what they train on, such as TRL's GRPOTrainer: their `_prepare_inputs`, over the plan's ranks.

    generate        engine.generate: the live weights, with equal draws along tp and others on each data rank
    log-probs       engine.predict: of the policy, or of its base where the trainer switches adapters off
    rewards         gathered over the data ranks; of ranks along tp the first one's count
    advantages      of all rows; each data rank takes its own, and all have as many

Code of trainers calls `self.model` and functions of accelerate by name. Inside of `_sw_preparing` both mean the plan's.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import accelerate.utils
import torch
import xxhash

from shardwise.comm.accelerators import random_sources, random_states, set_random_states
from shardwise.engine.step.channels import stopping_peers
from shardwise.errors import ConfigError
from shardwise.hf.borrowed_names import Place, instead, original
from shardwise.hf.rank_accelerator import PlanAccelerator

_OPERATIONS = ("gather", "gather_object", "pad_across_processes", "reduce")


class PredictedModel:
    """In the place of the model outside of steps: a call goes through the engine, and gives its whole output."""

    is_gradient_checkpointing = False
    """The engine computes in evaluation mode, in which nothing is checkpointed."""

    def __init__(self, engine: Any, **generation: Any) -> None:
        """generation: of `engine.generate`."""
        self._engine = engine
        self._generation = generation

    @property
    def predicted(self) -> Any:
        """The model itself."""
        return self._engine.model

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The model's class: trainers ask whether a model has adapters."""
        return type(self.predicted)

    def __call__(self, *args: Any, **inputs: Any) -> Any:
        """The model's output, which all ranks along pp and tp get."""
        model = self.predicted
        return self._engine.predict(
            {"args": args, "inputs": inputs}, lambda each: model(*each["args"], **each["inputs"])
        )

    def generate(self, inputs: Any = None, **kwargs: Any) -> Any:
        """What the model's `generate` gives, in `engine.generate`."""
        if inputs is not None:
            return self._engine.generate(inputs, **self._seeded(), **kwargs)
        tensors = {name: each for name, each in kwargs.items() if isinstance(each, torch.Tensor)}
        rest = {name: each for name, each in kwargs.items() if name not in tensors}
        return self._engine.generate(tensors, **self._seeded(), **rest)

    def _seeded(self) -> dict[str, Any]:
        if not self._generation:
            return {}
        # From the draws around it: a second call of the same step draws others.
        return self._generation | {"seed": int(torch.randint(1 << 62, (), device="cpu"))}

    def __getattr__(self, name: str) -> Any:
        if name in ("_engine", "_generation"):
            raise AttributeError(name)
        return getattr(self.predicted, name)


class GeneratedInputs:
    """The part of a trainer that generates what it trains on."""

    _sw_generates = False
    """Whether the class of trainers does, and there are several ranks."""
    _sw_operations: Sequence[Place] = ()
    """Where its modules have functions of accelerate."""

    def _sw_generate_over_ranks(self: Any, last: type) -> None:
        """Have the methods of the classes before `last` work over the plan's ranks. Raises ConfigError."""
        self._sw_generates = True
        modules = {sys.modules[each.__module__] for each in type(self).__mro__[: type(self).__mro__.index(last)]}
        places = [(module, name) for module in modules for name in _OPERATIONS]
        self._sw_operations = [each for each in places if original(each) is getattr(accelerate.utils, each[1])]
        args, ranks = self.args, self._sw_ranks.count
        steps = getattr(args, "steps_per_generation", None)
        if steps is None:
            return
        # The arguments have counted every rank of the launcher, also those along tp; or one, where ranks are simulated.
        args.generation_batch_size = args.train_batch_size * steps * ranks
        size = args.train_batch_size
        what = f"per_device_train_batch_size = {size} and steps_per_generation = {steps}"
        rows = {"num_generations": (args.generation_batch_size, what)}
        if args.eval_strategy != "no":
            size = args.eval_batch_size
            rows["num_generations_eval"] = (size * ranks, f"per_device_eval_batch_size = {size}")
        for name, (total, what) in rows.items():
            wanted = getattr(args, name, None) or getattr(args, "num_generations", 1)
            if total % wanted:
                raise ConfigError(
                    f"{what} on {ranks} data ranks are {total} answers, and {name} = {wanted} does not divide them: "
                    "a group of answers would be cut. Change one of these numbers"
                )

    @contextmanager
    def _sw_predicting(self: Any, **generation: Any) -> Iterator[Any]:
        """Inside, `self.model` goes through the engine. generation: of `engine.generate`."""
        trainer = self
        before = trainer.model, trainer.model_wrapped
        trainer.model = trainer.model_wrapped = PredictedModel(trainer.engine, **generation)
        try:
            yield trainer.model
        finally:
            trainer.model, trainer.model_wrapped = before

    @contextmanager
    def _sw_preparing(self: Any, *place: object) -> Iterator[None]:
        """Inside, all ranks prepare inputs together. place: by which this time differs from others of the run."""
        if not self._sw_generates:
            yield
            return
        ranks, device = self._sw_ranks, self.accelerator.device
        gather = "once" if getattr(self.args, "ds3_gather_for_generation", True) else "each"
        seed = xxhash.xxh3_64_intdigest(" ".join(map(str, (self.args.seed, ranks.rank, *place))).encode())
        states = random_states(device)
        operations = {place: partial(_over_ranks, self.accelerator, place[1]) for place in self._sw_operations}
        try:
            for source in random_sources(device).values():
                source.manual_seed(seed)
            # A reward may fail on one rank alone, while the others wait for it.
            with (
                self._sw_predicting(gather=gather),
                self.accelerator.preparing(),
                instead(operations),
                stopping_peers(ranks.world, "what a trainer generates"),
            ):
                yield
        finally:
            set_random_states(device, states)


def _over_ranks(accelerator: PlanAccelerator, name: str, _: Any, *args: Any, **kwargs: Any) -> Any:
    """Called instead of a function of accelerate in a module of trainers; works over data ranks."""
    return getattr(accelerator, name)(*args, **kwargs)
