"""The program that a configuration describes."""

import numpy as np
from torch.optim.lr_scheduler import LambdaLR

from shardwise.train.config import RunConfig
from shardwise.train.corpus import read_corpus
from shardwise.train.learning_rate import LearningRateSchedule
from shardwise.train.loop import as_batch
from shardwise.train.run_build import build_loss, build_model, optimizer_factory
from shardwise.train.verification.program import Program


def configured(config: RunConfig, *, steps: int) -> Program:
    """The first updates of the run, under the plan of `config`."""
    corpus = read_corpus(config.data, config.folder)
    rows = config.train.global_batch
    schedule = LearningRateSchedule.of(config.train)
    return Program(
        make_model=lambda: build_model(config),
        plan=config.plan,
        batches=[
            as_batch(corpus.rows(np.arange(step * rows, (step + 1) * rows, dtype=np.int64), seed=config.train.seed))
            for step in range(steps)
        ],
        optimizer=optimizer_factory(config),
        loss=build_loss(config),
        scheduler=lambda optimizer: LambdaLR(optimizer, schedule),
        seed=config.train.seed,
    )
