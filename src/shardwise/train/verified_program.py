"""The run of a configuration as a program to verify: its model, its first batches, its optimizer and schedule."""

from functools import partial

from shardwise.data import DataPlace, first_batches
from shardwise.train.config import RunConfig
from shardwise.train.learning_rates import scheduler_maker
from shardwise.train.plateau_rates import plateau_of
from shardwise.train.run_build import build_loss_weight, build_model, optimizer_factory
from shardwise.train.run_data import build_data
from shardwise.train.turns import build_loss, build_turns
from shardwise.verification.program import PlainProgram, Subject


def configured(config: RunConfig, *, steps: int) -> Subject:
    """The first updates of the run, under the plan of `config`."""
    make_scheduler = scheduler_maker(config)
    program = PlainProgram(
        make_model=lambda: build_model(config),
        batches=first_batches(build_data(config).data, DataPlace(), steps),
        optimizer_of=lambda model: optimizer_factory(config, model),
        loss_of=partial(build_loss, config),
        # Without evaluations a plateau changes nothing.
        scheduler=(lambda optimizer: make_scheduler(optimizer, 0)) if plateau_of(config) is None else None,
        seed=config.train.seed,
        turns_of=lambda model: build_turns(config, model).of,
        settings={
            "loss_weight": build_loss_weight(config),
            "groups": config.model.groups,
            "rows": config.data.row_dims,
        },
    )
    program.check(config.plan)
    return Subject(program=program, plan=config.plan, num_updates=steps)
