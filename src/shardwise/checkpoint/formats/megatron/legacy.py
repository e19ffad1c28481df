"""The older checkpoints of Megatron: a file of `torch.save` for each model-parallel rank, with its part of the model.

    mp_rank_00/model_optim_rng.pt           one pipeline stage
    mp_rank_01_002/model_optim_rng.pt       tensor-parallel rank 1 of stage 2

    linear_qkv.weight      cut along dim 0            tp 0 | tp 1
    linear_fc1.weight      gate and up on each rank   gate 0, up 0 | gate 1, up 1   ->   gate 0, gate 1, up 0, up 1
    linear_fc2.weight      cut along dim 1
    layer_norm_weight      the same on all

Each stage numbers its layers from 0. Weights are read; the optimizer numbers its parameters, and is left out.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from shardwise.checkpoint.contents import Contents, StoredPiece, StoredTensor
from shardwise.checkpoint.formats.megatron.names import with_norms
from shardwise.checkpoint.formats.megatron.optimizer import arguments_of
from shardwise.checkpoint.formats.state_dicts import plain_values
from shardwise.checkpoint.formats.strided import TensorPlace, pieces_of
from shardwise.checkpoint.formats.torch_files.saved_values import read_file
from shardwise.checkpoint.manifest import packed
from shardwise.checkpoint.stores import Findings, OpenFile, Store, about
from shardwise.errors import CheckpointError, few_of
from shardwise.plan.dtypes import itemsize_bytes
from shardwise.space import Piece

_FILE = re.compile(r"mp_rank_(\d{2,6})(?:_(\d{3,6}))?(?:_(\d{3,6}))?/model(?:_optim)?_rng\.pt")
_LAYER = re.compile(r"((?:.*\.)?decoder\.layers\.)(\d{1,9})(\..*)", re.DOTALL)
_CUT: tuple[tuple[re.Pattern[str], int | None], ...] = tuple(
    (re.compile(rf"(?:.*\.)?(?:{pattern})", re.DOTALL), dim)
    for pattern, dim in (
        (r"linear_(?:qkv|fc1|q_proj|q_up_proj|kv_up_proj)\.(?:weight|bias)", 0),
        (r"(?:word_embeddings|output_layer)\.weight|output_layer\.bias", 0),
        (r"linear_(?:proj|fc2)\.weight", 1),
        (r"linear_(?:proj|fc2)\.bias|position_embeddings\.weight|router\.(?:weight|bias|expert_bias)", None),
        (r"(?:\w*norm\w*|\w*layer_norm)\.(?:weight|bias)|layer_norm_(?:weight|bias)", None),
    )
)
"""The dim along which tensor-parallel ranks cut a tensor; None: all have the same."""
_GATED = re.compile(r"(?:.*\.)?linear_fc1\.(?:weight|bias)", re.DOTALL)


def is_file(name: str) -> bool:
    """Whether a file is one of those, by its name in the folder of a save."""
    return _FILE.fullmatch(name) is not None


@dataclass(frozen=True, slots=True)
class _RankFile:
    """What a model-parallel rank has saved."""

    file: str
    values: dict[Any, Any]

    @property
    def arguments(self) -> Mapping[str, Any]:
        return arguments_of(self.values)

    def model(self) -> dict[str, TensorPlace]:
        """Its part of the model; raises CheckpointError for what is none."""
        if virtual := sorted(key for key in self.values if isinstance(key, str) and re.fullmatch(r"model\d+", key)):
            raise CheckpointError(
                f"{self.file} has {len(virtual)} virtual stages ({few_of(virtual, quotes=False)}): layers of one rank "
                "are not neighbours, and nothing says which they are. Load the save with Megatron, and save it with "
                "--ckpt-format torch_dist"
            )
        model = self.values.get("model")
        if not isinstance(model, dict) or "language_model" in model:
            kind = "a model of Megatron-LM before megatron-core" if isinstance(model, dict) else "no model"
            raise CheckpointError(
                f"{self.file} has {kind}; convert the save with Megatron's tools/checkpoint/convert.py --saver core"
            )
        return {
            name: place
            for name, place in model.items()
            if isinstance(name, str) and isinstance(place, TensorPlace) and not name.endswith("._extra_state")
        }


def read_contents(store: Store, folder: str) -> Contents:
    """Return the weights in a folder of a save ("" or "iter_0000010/"), by their names in the whole model.

    Raises `CheckpointError`, with all findings, when a file is missing or damaged, and for what is not understood.
    """
    location = f"{store.location}/{folder}".rstrip("/")
    files, sizes = _read_files(store, folder)
    with about(location):
        stages = _stages(files)
        first = stages[0][0]
        tensors: dict[str, StoredTensor] = {}
        at = 0
        for ranks in stages:
            parts = [rank.model() for rank in ranks]
            for name in dict.fromkeys(name for part in parts for name in part):
                joined = _joined(_shifted(name, at), name, ranks, parts)
                # With tied embeddings the last stage has a copy.
                if tensors.setdefault(joined.name, joined) is not joined:
                    raise CheckpointError(f"it has two tensors {joined.name}")
            at += 1 + max((int(match[2]) for name in parts[0] if (match := _LAYER.fullmatch(name))), default=-1)
        num_layers = first.arguments.get("num_layers", at)
        if at != num_layers:
            raise CheckpointError(f"its stages have {at} layers together, and the model had {num_layers!r:.20}")
        if first.arguments.get("untie_embeddings_and_output_weights") is False:
            tensors.pop("output_layer.weight", None)
        notes: list[str] = []
        left = ""
        if any(rank.values.get("optimizer") for ranks in stages for rank in ranks):
            left = (
                "the optimizer is left out: it numbers its parameters. Load the save with Megatron, and save it with "
                "--ckpt-format torch_dist"
            )
            notes.append(left)
        kept = {key: each for key, each in first.values.items() if key not in ("model", "optimizer")}
        iteration = first.values.get("iteration")
        values = packed(plain_values(kept, notes), "its values")
        return Contents(
            format="megatron",
            location=location,
            tensors=with_norms(tensors),
            file_sizes=sizes,
            extra={"objects": values} if values else {},
            step=iteration if type(iteration) is int else None,
            layout=f"tp={len(stages[0])} pp={len(stages)}",
            notes=tuple(notes),
            left_state=left,
        )


def _read_files(store: Store, folder: str) -> tuple[dict[tuple[int, int], _RankFile], dict[str, int]]:
    """What each file says, by stage and tensor-parallel rank, and the bytes of each."""
    files: dict[tuple[int, int], _RankFile] = {}
    sizes: dict[str, int] = {}
    problems = Findings()
    for name in store.names(folder.rstrip("/")):
        if (match := _FILE.fullmatch(name.removeprefix(folder))) is None:
            continue
        with problems.collecting(), OpenFile(store, name) as opened, about(opened.place):
            values = read_file(opened.read, opened.size)
            if not isinstance(values, dict):
                raise CheckpointError("it is no dict, which Megatron writes")
            arguments = arguments_of(values)
            if match[3] is not None or (arguments.get("expert_model_parallel_size") or 1) != 1:
                raise CheckpointError(
                    "it has experts of one of several ranks, which are not joined. Load the save with Megatron, "
                    "and save it with --ckpt-format torch_dist"
                )
            files[int(match[2] or 0), int(match[1])] = _RankFile(name, values)
            sizes[name] = opened.size
    problems.check()
    return files, sizes


def _stages(files: Mapping[tuple[int, int], _RankFile]) -> list[list[_RankFile]]:
    """The files of each pipeline stage, by tensor-parallel rank."""
    arguments = next(iter(files.values())).arguments
    tp, pp = (
        said if type(said := arguments.get(f"{kind}_model_parallel_size")) is int else 1 + max(held)
        for kind, held in (("tensor", [rank for _, rank in files]), ("pipeline", [stage for stage, _ in files]))
    )
    wanted = ((stage, rank) for stage in range(pp) for rank in range(tp))
    if lacking := next((each for each in wanted if each not in files), None):
        what = "that of mp_rank_{1:02d}_{0:03d} is missing".format(*lacking)
        raise CheckpointError(f"{tp} tensor-parallel ranks of {pp} stages wrote it, in a file each, and {what}")
    if len(files) > tp * pp:
        raise CheckpointError(f"{tp} tensor-parallel ranks of {pp} stages wrote it, and it has {len(files)} files")
    return [[files[stage, rank] for rank in range(tp)] for stage in range(pp)]


def _shifted(name: str, by: int) -> str:
    """The name in the whole model of a stage's own."""
    match = _LAYER.fullmatch(name)
    return name if match is None else f"{match[1]}{int(match[2]) + by}{match[3]}"


def _joined(name: str, own: str, ranks: list[_RankFile], parts: list[dict[str, TensorPlace]]) -> StoredTensor:
    """A tensor, from the parts that tensor-parallel ranks have of it under the stage's own name."""
    if lacking := [rank.file for rank, part in zip(ranks, parts, strict=True) if own not in part]:
        raise CheckpointError(f"{few_of(lacking)} has no {own}, which other tensor-parallel ranks have")
    places = [part[own] for part in parts]
    dim = _dim_of(own) if len(places) > 1 else None
    one = places[0]
    if any((place.dtype, place.shape) != (one.dtype, one.shape) for place in places):
        raise CheckpointError(f"{own} has different shapes or dtypes on tensor-parallel ranks")
    shape = tuple(size * (len(places) if at == dim else 1) for at, size in enumerate(one.shape))
    num_parts = 2 if dim == 0 and _GATED.fullmatch(own) and _is_gated(ranks[0], own) else 1
    pieces: list[StoredPiece] = []
    for number, (rank, place) in enumerate(zip(ranks, places, strict=True)):
        if dim is None and number:
            break
        for part in range(num_parts):
            pieces += _pieces(name, rank.file, place, shape, dim, part * len(places) + number, part, num_parts)
    return StoredTensor(name=name, dtype=one.dtype, shape=shape, pieces=tuple(pieces))


def _dim_of(name: str) -> int | None:
    for pattern, dim in _CUT:
        if pattern.fullmatch(name):
            return dim
    raise CheckpointError(
        f"{name} is on several tensor-parallel ranks, and it is not known along which dim they cut it. Load the save "
        "with Megatron, and save it with --ckpt-format torch_dist"
    )


def _is_gated(rank: _RankFile, name: str) -> bool:
    """Whether a rank has gates above what they gate."""
    gated = rank.arguments.get("swiglu")
    if gated is None:
        raise CheckpointError(f"the arguments in {rank.file} do not say whether {name} has gates (swiglu)")
    return bool(gated)


def _pieces(
    name: str, file: str, place: TensorPlace, shape: tuple[int, ...], dim: int | None, at: int, part: int, parts: int
) -> Iterator[StoredPiece]:
    """Part `part` of `parts` of a rank's tensor, which is box `at` of the whole along a dim."""
    sizes = list(place.shape)
    offset = [0] * len(sizes)
    start = place.start
    if dim is not None:
        if sizes[dim] % parts:
            raise CheckpointError(f"{name} has {sizes[dim]} rows on a rank, which are no two halves")
        sizes[dim] //= parts
        offset[dim] = at * sizes[dim]
        start += part * sizes[dim] * place.strides[dim] * itemsize_bytes(place.dtype)
    piece = Piece(name=name, dtype=place.dtype, global_shape=shape, offset=offset, shape=sizes)
    if math.prod(sizes):
        yield from pieces_of(replace(place, shape=tuple(sizes), start=start), piece, file)
