"""Forms: the dtypes, names and files in which a conversion writes a model: those that are asked for, or another's.

of the original (like)   what is written
names, shapes            the same, or it is refused
dtypes of floats         the same: cast, out of masters where the source has them
files                    each tensor in a file of the same name; `config.json`, the tokenizer and their like as they are

The averages of its weights that a run has kept are the model for who asks for them::

    stored                                            here
    w                           bfloat16              w    float32, the elements of its average
    optimizer/w/weight_average  float32               -
    optimizer/w/master          float32               -
    optimizer/w/exp_avg, ..     and their settings    -    they belong to other weights
    optimizer/v/master          float32               the same: v is frozen, and has no average
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

from shardwise.checkpoint.contents import Contents, is_model_name
from shardwise.checkpoint.model_files import folder_files
from shardwise.checkpoint.outputs import model_of, sources_of
from shardwise.checkpoint.sources import read_contents
from shardwise.checkpoint.stores import Address, Store, store_of
from shardwise.errors import CheckpointError
from shardwise.plan.dtypes import COMPUTE_DTYPES, itemsize_bytes
from shardwise.plan.names import AVERAGE, MASTER, split_state_name, state_name
from shardwise.plan.saved_settings import OF_RUNS
from shardwise.rewrite import Rewrite
from shardwise.rewrite.metas import TensorMeta
from shardwise.rewrite.sections import mismatches
from shardwise.rewrite.spelling import quoted


@dataclass(frozen=True, slots=True, kw_only=True)
class Likeness:
    """The form of a model's checkpoint. Only metadata is read."""

    store: Store
    model: Contents
    """What of the checkpoint belongs to the model."""

    @classmethod
    def of(cls, original: Address) -> Self:
        """That of the checkpoint at `original`. Raises CheckpointError for what is none."""
        store = store_of(original)
        return cls(store=store, model=model_of(read_contents(store)))

    @property
    def files(self) -> dict[str, bytes]:
        """The configuration, the tokenizer and their like: name -> bytes."""
        return folder_files(self.store, self.model)

    @property
    def file_of(self) -> Mapping[str, tuple[str, int]]:
        """For each tensor the file that has it, and its place there; none where the original is cut in other ways."""
        tensors = self.model.tensors.values()
        if self.model.format != "safetensors":
            return {}
        return {each.name: (each.pieces[0].file, each.pieces[0].start) for each in tensors if each.pieces}

    def check(self, outputs: Contents) -> None:
        """Raise CheckpointError, with all that differs, where outputs have other names or shapes, or kinds of dtype."""
        made = {name: TensorMeta(each.shape, each.dtype) for name, each in outputs.tensors.items()}
        target = {
            name: TensorMeta(each.shape, self._dtype_for(name, made.get(name)))
            for name, each in self.model.tensors.items()
            # A tie is written once, also where the original has a copy for each name.
            if name not in outputs.aliases
        }
        problems = list(mismatches(made, (), self.model.aliases, target))
        if problems:
            raise CheckpointError(
                *problems, about=f"{outputs.location} cannot be written in the form of {self.model.location}"
            )

    def _dtype_for(self, name: str, made: TensorMeta | None) -> str:
        """The dtype that a tensor must have before casts, which turn floats into floats."""
        dtype = self.model.tensors[name].dtype
        return made.dtype if made is not None and made.dtype in COMPUTE_DTYPES and dtype in COMPUTE_DTYPES else dtype

    @property
    def dtypes(self) -> dict[str, str]:
        """The dtype of each tensor."""
        return {name: each.dtype for name, each in self.model.tensors.items()}


def wanted_dtypes(
    contents: Contents, made: Contents, dtype: str | None, like: Likeness | None
) -> tuple[dict[str, str], list[str]]:
    """The dtypes that are wanted of floats of a model, by name; and floats that keep theirs, although `dtype` wants it.

    made: what is written of the contents. Raises CheckpointError for contents that cannot take the form.
    """
    if like is not None:
        like.check(made)
    packed = _packed(contents, made) if dtype is not None else set()
    asked = dict.fromkeys(made.tensors.keys() - packed, dtype) if like is None else like.dtypes
    wanted = {
        name: wanted
        for name, each in made.tensors.items()
        if each.dtype in COMPUTE_DTYPES and is_model_name(name, made.format) and (wanted := asked.get(name)) is not None
    }
    return wanted, [name for name in sorted(packed) if made.tensors[name].dtype in {*COMPUTE_DTYPES} - {dtype}]


_CODE_WORDS = frozenset({"int16", "uint16", "int32", "uint32"})


def _packed(contents: Contents, made: Contents) -> set[str]:
    """Codes, and what may belong to them: under their names, or in their module. A cast would change what they mean.

    What an optimizer has state for was trained, so it is none of them.
    """
    held = {name: each for name, each in made.tensors.items() if is_model_name(name, made.format)}
    above = {name: {name[:at] for at, each in enumerate(name) if each == "."} for name in held}
    codes = {name for names in above.values() for name in names & held.keys()}
    # Words of several codes (GPTQ, AWQ, compressed-tensors) are whole numbers; those of 64 bits are indices.
    modules = {
        name.rpartition(".")[0]
        for name, each in held.items()
        if (each.dtype != "bool" and itemsize_bytes(each.dtype) == 1)
        or (each.dtype in _CODE_WORDS and len(each.shape) > 1)
    }
    found = {name for name in held if name in codes or above[name] & codes or name.rpartition(".")[0] in modules}
    checked = made.effects.checked
    trained = {split[0] for name in contents.tensors if (split := split_state_name(name)) is not None}
    return {name for name in found if trained.isdisjoint(sources_of(checked, name))}


def with_masters(contents: Contents, made: Contents, wanted: Mapping[str, str]) -> tuple[Contents, tuple[str, ...]]:
    """A checkpoint whose model has the values of masters where other dtypes are wanted; and these masters.

    made: what is written of the checkpoint, whose names `wanted` has. A tensor that is stored in its dtype keeps its
    own: a working copy is its master, rounded once.
    """
    tensors, checked = dict(contents.tensors), made.effects.checked
    used = []
    for output, dtype in wanted.items():
        for name in sorted(sources_of(checked, output)):
            tensor, master = tensors[name], contents.tensors.get(state_name(name, MASTER))
            # A working copy in the dtype that is asked for is its master rounded once: the same bits, and half of the
            # bytes to read.
            if master is not None and tensor.dtype in COMPUTE_DTYPES and tensor.dtype not in (dtype, master.dtype):
                tensors[name] = master.renamed(name)
                used.append(master.name)
    return replace(contents, tensors=tensors), tuple(used)


def with_averages(contents: Contents) -> tuple[Contents, Mapping[str, str]]:
    """The model, with averages where there are some; and the dtypes that those weights are stored in, by name.

    Raises CheckpointError for a checkpoint without averages.
    """
    splits = {name: split_state_name(name) for name in contents.tensors}
    average_of = {split[0]: name for name, split in splits.items() if split is not None and split[1] == AVERAGE}
    if not average_of:
        raise CheckpointError(
            f"{contents.location} has no averages of weights, for which weights='average' (--weights average) asks. A "
            "run keeps and saves them with average=sw.Average(...) in its plan, average.decay in TOML"
        )
    model = model_of(contents)
    tensors = {
        name: contents.tensors[average_of[name]].renamed(name) if name in average_of else each
        for name, each in contents.tensors.items()
        if name in model.tensors or ((split := splits[name]) and split[1] == MASTER and split[0] not in average_of)
    }
    settings = {key: each for key, each in contents.settings.items() if key not in OF_RUNS}
    dtypes = {name: model.tensors[name].dtype for name in average_of if name in model.tensors}
    return replace(model, tensors=tensors, settings=settings), dtypes


def casting(casts: Mapping[str, str], aliases: Mapping[str, str]) -> Rewrite:
    """A rewrite that casts outputs. A tie is cast under each of its names, and stays one."""
    every = {**casts, **{alias: casts[name] for alias, name in aliases.items() if name in casts}}
    return Rewrite([f"{quoted(name)} -> {quoted(name)}, dtype='{dtype}'" for name, dtype in every.items()])
