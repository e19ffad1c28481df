"""The tables of a training configuration that the trainer itself reads: [model], [data], [train] and [checkpoint]."""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

PYTHON_DOCS = "python-docs"
BYTES = "bytes"
Decay = Literal["cosine", "linear", "constant"]


class Table(BaseModel):
    """One table of the file: no key it does not know, no value of another type."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


class ModelTable(Table):
    """[model]: what is trained."""

    factory: str
    """Where the model comes from: "package.module:name" or "file.py:name", a file being relative to the config."""
    config: dict[str, object] = Field(default_factory=dict)
    """Keyword arguments of the factory; of its configuration class for a model class of transformers."""
    initialise: Literal["whole", "by module"] = "whole"
    """"whole": `factory` gives the initial parameters, drawn one after the other; "by module": each module draws its
    own (`reset_parameters`, `_init_weights`), from `train.seed` and its name, so that no rank needs the others'."""
    loss: str | None = None
    """A callable f(output, batch) -> scalar, named like `factory`; left out: the model's output carries `.loss`."""


class DataTable(Table):
    """[data]: what it is trained on."""

    source: str = PYTHON_DOCS
    """A text file, a directory, a glob such as "texts/**/*.md", or "python-docs": the documentation and the standard
    library that ship inside CPython. Paths are relative to the config."""
    tokenizer: str = BYTES
    """"bytes" (256 tokens), or the JSON file of a `tokenizers` tokenizer."""
    sequence_length: int = Field(default=256, ge=2)
    """Tokens in a row of a batch."""
    held_out: float = Field(default=0.05, gt=0, le=0.5)
    """Fraction of the text that is never trained on and serves for evaluation."""

    @property
    def unit(self) -> str:
        """What a token is called."""
        return "byte" if self.tokenizer == BYTES else "token"


class TrainTable(Table):
    """[train]: how long, how fast, and what is written down."""

    steps: int = Field(ge=1)
    """Number of updates."""
    global_batch: int = Field(default=32, ge=1)
    """Rows that make one update, on all ranks together; the layout does not change it."""
    microbatch: int = Field(default=4, ge=1)
    """Rows that one rank computes at a time."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Decides the initial parameters and the order of the samples."""
    optimizer: str = "torch.optim:AdamW"
    """A callable f(parameter groups, lr=..., **optimizer_options) -> optimizer, named like `model.factory`."""
    optimizer_options: dict[str, object] = Field(default_factory=dict)
    """Further keyword arguments of the optimizer, such as betas = [0.9, 0.95]."""
    learning_rate: float = Field(default=1e-3, gt=0)
    """Learning rate at the end of the warm-up."""
    warmup_steps: int = Field(default=0, ge=0)
    """Updates over which the learning rate rises from 0."""
    decay: Decay = "cosine"
    """How the learning rate falls after the warm-up."""
    min_learning_rate: float = Field(default=0.1, ge=0, le=1)
    """Where the decay ends, as a fraction of `learning_rate`."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Weight decay of parameters with two dims or more; the others (biases, norms) have none."""
    clip_grad_norm: float | None = None
    """Largest norm of the gradient of all parameters; left out: no clipping."""
    evaluate_every: int = Field(default=100, ge=1)
    """Updates between two evaluations on held-out text; there is always one at the end."""
    evaluate_batches: int = Field(default=4, ge=1)
    """Global batches of held-out rows that one evaluation reads, at most; always the same ones."""
    log_every: int = Field(default=10, ge=1)
    """Updates between two lines of progress where there is no terminal."""
    output: str | None = None
    """Folder of metrics and pictures, relative to where the command runs; they are replaced by the next run, unless it
    resumes this one. Left out: "runs/<name of the config>"."""
    trace: bool = False
    """Measure what each stage of the pipeline does and when; a picture of the last update, and a trace of the last 20
    for Perfetto or Chrome, are left in `output`."""
    timeout_seconds: float = Field(default=120.0, gt=0)
    """How long a rank waits for another before it gives up."""


class CheckpointTable(Table):
    """[checkpoint]: what is kept of a run, so that it can go on."""

    every: int | None = Field(default=None, ge=1)
    """Updates between two saves; there is one after the last update too. Left out: nothing is saved."""
    keep: int = Field(default=2, ge=1)
    """Newest saves that stay. While the next one is written there is one more."""
    layout: Literal["pieces", "whole"] = "pieces"
    """"pieces": each rank writes what it holds; "whole": every tensor lies whole in one file."""
    background: bool = True
    """Training goes on while a save is written, from a copy in memory of what this rank writes."""
    path: str | None = None
    """Folder of the saves, relative to where the command runs, or an address such as "s3://bucket/run"; all ranks see
    it. Left out: "checkpoints" in `train.output`."""


def file_problems(model: ModelTable | None, data: DataTable | None, folder: Path) -> list[str]:
    """What the tables name and the disk does not hold."""
    problems: list[str] = []
    if data is not None:
        if data.source != PYTHON_DOCS and "*" not in data.source and not (folder / data.source).exists():
            problems.append(f'data.source: no file or directory {folder / data.source}; "{PYTHON_DOCS}" needs none')
        if data.tokenizer != BYTES and not (folder / data.tokenizer).is_file():
            problems.append(
                f'data.tokenizer: no file {folder / data.tokenizer}; give the JSON of a tokenizer or "{BYTES}"'
            )
        vocabulary = None if model is None else model.config.get("vocab_size")
        if data.tokenizer == BYTES and isinstance(vocabulary, int) and vocabulary < 256:
            problems.append(f"model.config.vocab_size: {vocabulary} given; bytes need at least 256")
    return problems
