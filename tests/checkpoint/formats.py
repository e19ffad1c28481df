"""The formats that are read and written, as the libraries that they are of write them, or wrote them once."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

import shardwise as sw
from shardwise import checkpoint
from shardwise.plan.dtypes import ITEMSIZE_BYTES
from shardwise.testing.formats import Format, Made, Whole
from tests.checkpoint.cut_tensors import save_sharded
from tests.checkpoint.megatron.folders import folders
from tests.checkpoint.small_states import whole_state
from tests.checkpoint.stored_values import random_state, save_dcp

FILES = Path(__file__).with_name("foreign_files")
DEEPSPEED = Path(__file__).with_name("deepspeed") / "folders"
MEGATRON = folders()


def every_tensor(*, legacy: bool = False) -> dict[str, Any]:
    """Tensors of all dtypes, in all the ways in which they can be in memory."""
    torch.manual_seed(0)
    whole, shared = torch.randn(6, 8), torch.arange(20.0)
    state: dict[str, Any] = {
        "row-major": whole,
        "transposed": torch.randn(3, 5).T,
        "permuted": torch.randn(2, 3, 4).permute(1, 2, 0),
        "columns": whole[:, 2:5],
        "every other": whole[::2, ::3],
        "repeated": torch.randn(1, 3).expand(4, 3),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
        "of one": torch.randn(1, 1, 7, 1),
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "parameter": torch.nn.Parameter(torch.randn(4)),
        "frozen": torch.nn.Parameter(torch.randn(4), requires_grad=False),
        "first half": shared[:10],
        "overlapping": shared[5:15],
        "conjugated": torch.complex(torch.randn(3, 4), torch.randn(3, 4)).conj().movedim(0, -1),
        "negated": torch.complex(torch.randn(5, 1, 3), torch.randn(5, 1, 3)).conj().imag,
    }
    for name in ITEMSIZE_BYTES:
        # As bytes: some dtypes have no random numbers of their own. Old files have no storages without a dtype.
        if not legacy or (hasattr(torch, f"{name}Storage") and not name.startswith(("float8", "uint", "complex32"))):
            dtype = getattr(torch, name)
            state[name] = torch.randint(0, 2, (24, ITEMSIZE_BYTES[name]), dtype=torch.uint8).view(dtype).view(4, 6)
    return state


def without_complex128() -> dict[str, torch.Tensor]:
    return {name: each for name, each in random_state().items() if each.dtype != torch.complex128}


def turned() -> dict[str, torch.Tensor]:
    """Tensors that do not lie row-major, which are stored in many boxes that do."""
    images = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    return random_state() | {"turned": torch.randn(4, 3, 5).permute(2, 0, 1), "row": torch.randn(1, 5).t(), "i": images}


def writing(write: Callable[[Path, Any], object], state: Callable[[], Whole], name: str = "") -> Made:
    def made(folder: Path) -> tuple[Path, Whole]:
        tensors = state()
        write(folder / name if name else folder, tensors)
        return (folder / name if name else folder), tensors

    return made


def in_shards(write: Callable[[Any, Path], object], stem: str, ending: str) -> Callable[[Path, Any], None]:
    """Two files and their index, as a model of Hugging Face has them."""

    def made(folder: Path, state: Whole) -> None:
        names = list(state)
        files = {f"{stem}-{at}-of-00002.{ending}": held for at, held in (("00001", names[:5]), ("00002", names[5:]))}
        for file, held in files.items():
            write({name: state[name].contiguous() for name in held}, folder / file)
        weight_map = {name: file for file, held in files.items() for name in held}
        (folder / f"{stem}.{ending}.index.json").write_text(json.dumps({"weight_map": weight_map}))

    return made


def by_dcp(writer: str, **options: Any) -> Callable[[Path, Any], None]:
    """A checkpoint of torch.distributed by one process, with a writer of torch."""

    def made(folder: Path, state: Whole) -> None:
        from torch.distributed.checkpoint import filesystem, hf_storage  # many seconds of imports
        from torch.distributed.checkpoint.state_dict_saver import save

        if options.get("serialization_format"):
            options["serialization_format"] = filesystem.SerializationFormat.SAFETENSORS
        kind: Any = {"files": filesystem.FileSystemWriter, "hub": hf_storage.HuggingFaceStorageWriter}[writer]
        save(dict(state), storage_writer=kind(str(folder), **options), no_dist=True)

    return made


def loaded_dcp(model: str, state: Callable[[], Whole]) -> Callable[[Path], Whole]:
    """Read by torch. `model`: where the weights are in the dict, if not at the top."""

    def read(folder: Path) -> Whole:
        from torch.distributed.checkpoint.state_dict_loader import load

        tensors = {name: torch.zeros_like(each) for name, each in state().items()}
        load({model: tensors} if model else tensors, checkpoint_id=folder, no_dist=True)
        return tensors

    return read


def recorded(source: Path, reference: Callable[[Path], Whole]) -> Made:
    """A copy of what another program wrote; `reference`: the tensors of it."""

    def made(folder: Path) -> tuple[Path, Whole]:
        path = folder / source.name
        (shutil.copytree if source.is_dir() else shutil.copyfile)(source, path)
        return path, reference(path)

    return made


def with_numbers(model: Mapping[str, torch.Tensor], optimizer: Mapping[str, Any], **more: Any) -> Whole:
    """Weights, and state of the optimizer in the order of the parameters, or under their names."""
    found = dict(model)
    for name, state in zip(model, optimizer["state"].values(), strict=True):
        found |= {f"optimizer/{name}/{key}": each for key, each in state.items()}
    return found | {f"extra/{key}": each for key, each in more.items()}


def of_file(path: Path) -> Whole:
    """What torch.load gives of a file of a whole program."""
    file = torch.load(path, weights_only=False)
    if "state_dict" in file:
        return with_numbers(file["state_dict"], file["optimizer_states"][0])
    return with_numbers(file["model"], file["optimizer"], **({"rng": file["rng"]} if "rng" in file else {}))


def of_accelerate(path: Path) -> Whole:
    model, optimizer = (torch.load(path / f"{name}.bin", weights_only=False) for name in ("pytorch_model", "optimizer"))
    random = torch.load(path / "random_states_0.pkl", weights_only=False)["torch_manual_seed"]
    return with_numbers(model, optimizer, **{"random_states_0.torch_manual_seed": random})


def of_fsdp(path: Path) -> Whole:
    return of_file(FILES / "full_state.pt")


def fsdp_of_accelerate(folder: Path) -> tuple[Path, Whole]:
    """Weights and optimizer in a folder of DCP each."""
    full = torch.load(FILES / "full_state.pt", weights_only=False)
    for name, key in (("pytorch_model_fsdp_0", "model"), ("optimizer_0", "optimizer")):
        save_dcp(folder / name, {key: full[key]})
    return folder, of_fsdp(folder)


def of_titan(path: Path) -> Whole:
    full = torch.load(FILES / "full_state.pt", weights_only=False)
    # Without a dict around the optimizer nothing says that these tensors are one.
    states = full["optimizer"]["state"].items()
    return {**full["model"], **{f"state.{name}.{key}": each for name, state in states for key, each in state.items()}}


def of_gguf(path: Path) -> Whole:
    names = ("float32", "float16", "float64", "int8", "int16", "int32", "int64", "bfloat16")
    return {name: torch.arange(12).view(3, 4).to(getattr(torch, name)) for name in names}


SAME = {
    "z2-bf16-2-round-robin": "z2-bf16-2",
    "universal-z3-bf16-3": "z3-bf16-3",
    "universal-z2-bf16-4": "z2-bf16-4",
}
"""Folders with the values of others: the order in vectors changes no bit, and neither does DeepSpeed's converter."""


def deepspeed_reference(name: str) -> tuple[dict[str, torch.Tensor], list[float]]:
    """What the live engine had at the save, and its next losses."""
    tensors = safetensors.torch.load_file(DEEPSPEED / f"{SAME.get(name, name)}.safetensors")
    return tensors, tensors.pop("losses").tolist()


def of_deepspeed(path: Path) -> Whole:
    """Masters where there are some, else weights; and moments."""
    catalogue = checkpoint.open(path)
    found = {}
    for each, tensor in deepspeed_reference(path.name)[0].items():
        parameter, _, key = each.partition("/")
        stored = catalogue.contents.aliases.get(parameter, parameter)
        master = f"optimizer/{stored}/master"
        found[f"optimizer/{each}" if key else master if master in catalogue.tensors else parameter] = tensor
    return found


def megatron_reference(name: str) -> dict[str, torch.Tensor]:
    """What Megatron's loader gives, by the names of the state dict that a model of its local layers has."""
    return safetensors.torch.load_file(MEGATRON / f"{name}.safetensors")


def of_megatron(path: Path) -> Whole:
    """In files a norm before a linear layer has the layer's name."""
    there, found = checkpoint.open(path).tensors, {}
    for name, tensor in megatron_reference(path.name).items():
        parameter, _, key = name.partition("/")
        layer, norm, rest = parameter.partition(".input_layernorm.")
        parameter = f"{layer}.self_attention.linear_qkv.layer_norm_{rest}" if norm else parameter
        layer, norm, rest = parameter.partition(".pre_mlp_layernorm.")
        dense = f"{layer}.mlp.linear_fc1.layer_norm_{rest}"
        parameter = dense if norm and dense in there else parameter
        found[f"optimizer/{parameter}/{key}" if key else parameter] = tensor
    del found["logits"], found["losses"]
    # Optimizers whose state is in buckets, or in files of older versions, are left out.
    return {each: tensor for each, tensor in found.items() if "/" not in each or each in there}


GUESS = "is a guess"
FORMATS = [
    Format(
        name="pieces of ranks",
        kind="shardwise",
        made=writing(lambda folder, state: save_sharded(folder, state), lambda: whole_state(1)),
        has_checksums=True,
        knows_every_byte=True,
    ),
    Format(
        name="whole tensors",
        kind="shardwise",
        made=writing(lambda folder, state: sw.save(folder, dict(state), layout="whole", step=3), random_state),
        has_checksums=True,
        knows_every_byte=True,
        step=3,
    ),
    Format(
        name="safetensors",
        kind="safetensors",
        made=writing(lambda path, state: safetensors.torch.save_file(state, path), without_complex128, "x.safetensors"),
        to="hf",
        read=lambda folder: safetensors.torch.load_file(folder / "model.safetensors"),
    ),
    Format(
        name="safetensors with an index",
        kind="safetensors",
        made=writing(in_shards(safetensors.torch.save_file, "model", "safetensors"), without_complex128),
    ),
    Format(
        name="safetensors of ranks",
        kind="safetensors",
        made=writing(by_dcp("hub", save_distributed=True), without_complex128),
        notes=("if the file of the last rank never came",),
    ),
    Format(
        name="torch",
        kind="torch",
        made=writing(lambda path, state: torch.save(state, path), every_tensor, "x.pt"),
        has_checksums=True,
    ),
    Format(
        name="torch before 1.6",
        kind="torch",
        made=writing(
            lambda path, state: torch.save(state, path, _use_new_zipfile_serialization=False),
            lambda: every_tensor(legacy=True),
            "x.pt",
        ),
    ),
    Format(
        name="torch with an index",
        kind="torch",
        made=writing(in_shards(torch.save, "pytorch_model", "bin"), random_state),
        has_checksums=True,
    ),
    Format(
        name="dcp",
        kind="dcp",
        made=writing(save_dcp, turned),
        has_checksums=True,
        to="dcp",
        read=loaded_dcp("model", turned),
    ),
    Format(
        name="dcp in many files",
        kind="dcp",
        made=writing(by_dcp("files", single_file_per_rank=False), random_state),
        has_checksums=True,
        to="torchtitan",
        read=loaded_dcp("", random_state),
    ),
    Format(
        name="dcp in safetensors",
        kind="dcp",
        made=writing(by_dcp("files", serialization_format="safetensors", thread_count=3), without_complex128),
    ),
    Format(name="gguf", kind="gguf", made=recorded(FILES / "small.gguf", of_gguf)),
    *(
        Format(
            name=name, kind="torch", made=recorded(FILES / name, of_file), notes=notes, step=step, has_checksums=True
        )
        for name, notes, step in (
            ("single/plain.pt", (GUESS,), 3),
            ("full_state.pt", (), None),
            ("lightning.ckpt", (GUESS,), 3),
        )
    ),
    Format(
        name="accelerate",
        kind="torch",
        made=recorded(FILES / "accelerate_bin", of_accelerate),
        notes=(GUESS,),
        has_checksums=True,
        needs_all_files=False,
    ),
    Format(name="fsdp of accelerate", kind="dcp", made=fsdp_of_accelerate, has_checksums=True),
    *(
        Format(name=name, kind="dcp", made=recorded(FILES / name, reference), step=step, has_checksums=True)
        for name, reference, step in (
            ("fsdp1_dcp", of_fsdp, 3),
            ("flattened_dcp", of_titan, None),
        )
    ),
    *(
        Format(
            name=f"megatron {name}",
            kind="megatron",
            made=recorded(MEGATRON / name, of_megatron),
            has_more=True,
            has_checksums=True,
            step=3,
            notes=notes,
        )
        for name, notes in (
            ("llama-bf16-2-fully-reshardable", ("which parameters each group", "_extra_state/.* left out")),
            (
                "llama-bf16-3-dp-reshardable",
                (
                    "flat buckets that do not name their parameters.*--dist-ckpt-optim-fully-reshardable",
                    "_extra_state/.*",
                ),
            ),
            ("legacy-qwen3-4-tp-pp", ("optimizer",)),
        )
    ),
    *(
        Format(
            name=f"deepspeed {name}",
            kind="deepspeed",
            made=recorded(DEEPSPEED / name, of_deepspeed),
            has_more=True,
            has_checksums=True,
            step=3,
            notes=notes,
            needs_all_files="pipe" not in name,  # nothing but its file tells of a layer that is not trained
        )
        for name, notes in (
            ("z0-bf16-2", (GUESS,)),
            ("z2-bf16-4", ()),
            ("z3-bf16-3", ()),
            ("z1-bf16-4-pipe", ()),
            ("universal-z3-bf16-3", ()),
        )
    ),
]
