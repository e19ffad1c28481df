"""Which module runs on which stage of a pipeline: given by names, or balanced by load."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwise.plan.balance import balanced_stages
from shardwise.plan.given_stages import given_stages
from shardwise.plan.outlines import Outline
from shardwise.plan.specs import ByName, Pipeline
from shardwise.plan.toml_text import toml_text


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """On which stage each part of a model lies; stage s is run by the rank at coordinate `s % num_ranks` of `pp`.

    Modules that are neither placed nor inside a placed module run on every rank, as the code between modules does.
    """

    num_ranks: int
    num_stages: int
    modules: Mapping[str, int]
    """Placed module, by its first name -> stage; everything inside it belongs to the same stage."""
    parameters: Mapping[str, int]
    """Parameter that a module outside the placed ones holds itself -> stage."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "modules", ByName(self.modules))
        object.__setattr__(self, "parameters", ByName(self.parameters))

    def rank_of(self, stage: int) -> int:
        """The coordinate along `pp` of the rank that runs a stage."""
        return stage % self.num_ranks

    def text(self) -> str:
        """The placement as TOML, a line for each module and parameter in the order of the model."""
        lines = [f"num_ranks = {self.num_ranks}", f"num_stages = {self.num_stages}"]
        for kind, stages in (("modules", self.modules), ("parameters", self.parameters)):
            lines += [f"{kind}.{toml_text(name)} = {stage}" for name, stage in stages.items()]
        return "\n".join(lines) + "\n"


def place(
    outline: Outline,
    pipeline: Pipeline,
    *,
    num_ranks: int,
    work: Mapping[str, float] | None = None,
    order: Sequence[str] | None = None,
) -> Placement:
    """The stage of every module that holds parameters: as `pipeline.stages` says, else balanced.

    `work`: the load of each module with all that is in it, by its first name; None: its parameters' elements.
    `order`: names of the modules in the order in which they are first called; None: the order of registration.
    Raises PlanError with every finding: keys that match nothing or contradict each other, stages that own nothing,
    parameters without a stage, more stages than modules.
    """
    num_stages = num_ranks * pipeline.num_chunks
    if pipeline.stages is not None:
        modules, parameters = given_stages(outline, pipeline, num_ranks=num_ranks)
    else:
        modules, parameters = balanced_stages(outline, num_stages=num_stages, work=work, order=order)
    return Placement(num_ranks=num_ranks, num_stages=num_stages, modules=modules, parameters=parameters)
