"""Conversion: a checkpoint of any format becomes a save of ours, or a folder of another format, without a model.

A rewrite gives its tensors other names, shapes and dtypes on the way. The bytes go through two windows, however large
the tensors are.
"""

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, Self, TypeAlias, get_args

from shardwise.checkpoint.certificates import Certificate, certify_return
from shardwise.checkpoint.contents import Contents, is_model_name, model_name_of_master
from shardwise.checkpoint.destinations import (
    Copying,
    Progress,
    check_folder,
    check_numbered,
    check_save,
    leaving_no_folder,
    location_of,
    make_save,
    write_folder,
)
from shardwise.checkpoint.formats.format import FolderPlan, FolderRequest
from shardwise.checkpoint.formats.registry import folder_planners, read_foreign, recognise
from shardwise.checkpoint.formats.unread import no_checkpoint
from shardwise.checkpoint.forms import Likeness, casting, wanted_dtypes, with_averages, with_masters
from shardwise.checkpoint.model_files import ConfigPath, ModelFiles, as_extra, missing_files
from shardwise.checkpoint.outputs import Outputs, made_of, model_of, outputs_of, without_wrappers
from shardwise.checkpoint.passing_digests import PassingDigests
from shardwise.checkpoint.renamed_settings import with_vocabulary
from shardwise.checkpoint.saves import CERTIFICATE, folder_of, list_saves, read_save, remove_save
from shardwise.checkpoint.sources import read_contents
from shardwise.checkpoint.states import wrong_rewrite
from shardwise.checkpoint.stores import Address, Store, refusals, store_of
from shardwise.errors import CheckpointError
from shardwise.plan.dtypes import COMPUTE_DTYPES
from shardwise.plan.names import holds_weights
from shardwise.plan.saved_settings import CONFIG
from shardwise.rewrite import Rewrite
from shardwise.rewrite.sections import uncollected
from shardwise.rewrite.verbs.quantise import QUANTISED

ConvertTarget = Literal["pieces", "whole", "hf", "dcp", "torchtitan", "deepspeed-universal", "megatron"]
"""A save of ours that keeps the pieces of the source, a save of whole tensors, or a folder of another format: files of
Hugging Face, or a checkpoint from which torch.distributed.checkpoint, torchtitan, DeepSpeed or Megatron continues.
Formats of other packages add their own: see `formats.registry`.
"""

Weights: TypeAlias = Literal["current", "average"]
"""The weights as training left them, or the averages that it kept of them."""

MAX_SHARD_BYTES = 5 * 10**9
"""Tensors in one Hugging Face file: what `save_pretrained` took for long, and hubs advise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertReport:
    """What was converted."""

    source: str
    """Path or address of the save or folder that was read."""
    source_format: str
    """See `Contents.format`."""
    destination: str
    """Path or address of the folder of the save, or of the Hugging Face files."""
    num_tensors: int
    """That were written."""
    num_bytes: int
    """Bytes of these tensors."""
    read_bytes: int
    """Bytes of data files that were read to write them."""
    verified: bool
    """Whether all bytes were compared with checksums as they were read, which only saves of ours are."""
    aliases: Mapping[str, str]
    """Other names of tensors (ties): alias -> the name under which the tensor was written, once."""
    left_out: tuple[str, ...] = ()
    """Tensors that were not written because they are not the model's ("hf")."""
    num_masters: int = 0
    """How many of `left_out` are masters of parameters that were written in their own, lower precision."""
    dropped: tuple[str, ...] = ()
    """Tensors of the source that the rewrite drops (`a -> _`)."""
    notes: tuple[str, ...] = ()
    """What of the source is not written, or is a guess: see `Contents.notes`. And what may be wrong with the rewrite,
    though all fits, such as how many experts a star stands for."""
    from_masters: tuple[str, ...] = ()
    """Masters that were written, in the place of working copies of lower precision (`dtype`)."""
    cast: tuple[str, ...] = ()
    """Tensors that were cast, since `dtype` or `like` wanted it."""
    uncast: tuple[str, ...] = ()
    """Floats that were not, although `dtype` wanted it: codes of packed weights may need them as they are."""
    files: tuple[str, ...] = ()
    """Other files of the destination, or files that the save keeps."""
    missing: tuple[str, ...] = ()
    """Files without which `from_pretrained` does not load what was written, and which nothing was known of."""
    certificate: Certificate | None = None
    """What came back of the conversion, where that was asked for."""


@uncollected()
def convert(
    source: Address,
    destination: Address,
    *,
    to: ConvertTarget = "whole",
    rewrite: Rewrite | None = None,
    config: ConfigPath = None,
    dtype: str | None = None,
    like: Address | None = None,
    weights: Weights = "current",
    step: int | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    certify: bool = False,
    original: Address | None = None,
    progress: Progress = lambda done, total: None,
) -> ConvertReport:
    """Write the checkpoint at `source`, of any format that `open` reads, to `destination` in another form.

    to: "whole": a save of ours with every tensor whole in one file. "pieces": a save of ours with the source's pieces,
        in as many files. A tensor that a rewrite joins from others is whole in one of them. "hf": a folder with
        `model.safetensors`, or several such files and an index, for Hugging Face readers. It has the model's tensors
        only, each tied one once, under its own name. Without a rewrite that is the name without wrappers around
        modules, such as `torch.compile(layer)`, unless two would have one name.
        For programs that train, with the state of optimizers and with the values of masters in the place of working
        copies. "dcp": a folder that `torch.distributed.checkpoint` loads into {"model": ..., "optim": ...} of its
        `get_state_dict`, flattened or not. "torchtitan": the same under torchtitan's names. "deepspeed-universal": a
        universal checkpoint, which DeepSpeed loads with `load_universal` under ZeRO of any stage. "megatron": a folder
        that `dist_checkpointing` of megatron-core loads, of what has Megatron's names. In an object store the files of
        such a folder come one after the other, and last the one without which no program takes them.
    rewrite: its outputs are written. The save records it, so that the inverse knows shapes and dtypes: give
        `rewrite.inverse()` to go back. Parameters that it was not given come from `config.json`.
    config: a folder with `config.json` and the files of a tokenizer, or a configuration file. They go before what the
        source has. A save keeps the configuration.
    dtype: of the model's floats in formats of other programs; see `export_hf`.
    like: a checkpoint whose form "hf" takes, such as the folder from which a training began: its names and shapes,
        which the outputs must have, its dtypes of floats, the files in which its tensors are, and its configuration and
        tokenizer. `way_back` finds the rewrite that leads there.
    weights: "average": the model with the averages of its weights, which a run saves under `Plan(average=...)`, and
        without the state of optimizers. A save has them in their own dtype, as masters have it.
    step: the newest save of this step; the default is the newest of all.
    max_shard_bytes: bytes of the tensors in one file of "hf", "dcp", "torchtitan" and "megatron"; a larger tensor of
        "hf" has its own file.
    certify: read everything again afterwards, back through the inverse, and write `round-trip.json` next to the
        tensors; see `Certificate`. What does not come back, though the rewrite loses nothing of it, is an error, and
        leaves neither a save nor a folder.
    original: the origin of the source, such as the files of a hub. The certificate says which written tensors are the
        same there.

    A save of ours is made by the same rules as `save`: it is the newest of its folder, and older ones stay. It keeps
    step, extra, settings, ties and the words on the layout. The metadata of other formats is its extra. A folder of
    another format must not exist or be empty. Either is there as a whole or not at all. `config.json` and
    `generation_config.json` go along: a save of a folder keeps them in its extra, under "huggingface". The files of a
    tokenizer are in the folder of the saves. Saves of ours are verified as they are read. Memory stays below 64 MiB,
    with a rewrite below 128 MiB, plus names and plans of very many tensors.
    Raises CheckpointError when the source is damaged or incomplete, or the destination cannot be written. Raises
    RewriteError, with every finding, for a rewrite that does not fit the source.
    """
    _check_target(to)
    check_arguments(
        rewrite=rewrite, config=config, step=step, max_shard_bytes=max_shard_bytes, flags={"certify": certify}
    )
    conversion = Conversion.of(
        source, rewrite, to=to, config=config, dtype=dtype, like=like, weights=weights, step=step
    )
    conversion = replace(conversion, original=_original_at(original, certify=certify))
    return conversion.write(destination, to, max_shard_bytes=max_shard_bytes, certify=certify, progress=progress)


@uncollected()
def preview(
    source: Address,
    destination: Address | None = None,
    *,
    to: ConvertTarget = "whole",
    rewrite: Rewrite,
    config: ConfigPath = None,
    dtype: str | None = None,
    like: Address | None = None,
    weights: Weights = "current",
    step: int | None = None,
) -> str:
    """Say what `convert` would make of what with these arguments, as a table. Only metadata is read.

    destination: where it would be written; None: that is not known yet.
    Raises what `convert` would raise, as far as metadata shows it, and what is at the destination already.
    """
    _check_target(to)
    check_arguments(rewrite=rewrite, config=config, step=step, flags={})
    if rewrite is None:
        raise CheckpointError("rewrite is None, and there is nothing to preview without one; give sw.Rewrite(text)")
    conversion = Conversion.of(
        source, rewrite, to=to, config=config, dtype=dtype, like=like, weights=weights, step=step
    )
    checked = conversion.outputs.checked
    assert checked is not None, "a rewrite was given"
    if to != "pieces" and to != "whole":
        conversion.folder_plan(to, max_shard_bytes=MAX_SHARD_BYTES, reads=False)
        if destination is not None:
            check_folder(destination)
    elif destination is not None:
        check_save(destination)
    return checked.explain()


def import_hf(
    folder: Address,
    out: Address,
    rewrite: Rewrite | None = None,
    *,
    certify: bool = True,
    progress: Progress = lambda done, total: None,
) -> ConvertReport:
    """Make a save in `out` of the safetensors files in `folder`, one or several with an index.

    rewrite: what is saved are its outputs. Parameters that it was not given come from `config.json`, the nested
        `text_config` included.
    certify: read both again, the save back through the inverse of the rewrite. Write `round-trip.json` next to its
        manifest: for each tensor, whether it comes back; see `Certificate`. What should come back and does not is an
        error, and leaves no save.

    The save keeps `config.json` and `generation_config.json` in its extra, under "huggingface", so that `export_hf`
    can write them again. It is made whole or not at all, in bounded memory; see `convert`.
    Raises CheckpointError for a folder that holds no such files, or damaged ones, and RewriteError for a rewrite that
    does not fit them.
    """
    check_arguments(rewrite=rewrite, flags={"certify": certify})
    store = store_of(folder)
    # convert takes any format; here the user has said that it is a model of Hugging Face.
    if (kind := recognise(store)) != "safetensors":
        what = f"{store.location} is a {kind} checkpoint" if kind else no_checkpoint(store)
        way = "" if kind is None else ", or use convert (shardwise ckpt convert)"
        raise CheckpointError(f"{what}; give a folder of safetensors files{way}")
    conversion = Conversion.of(store, rewrite, to="whole")
    return conversion.write(out, "whole", certify=certify, progress=progress)


def export_hf(
    path: Address,
    out: Address,
    rewrite: Rewrite | None = None,
    *,
    config: ConfigPath = None,
    dtype: str | None = None,
    weights: Weights = "current",
    step: int | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    certify: bool = True,
    original: Address | None = None,
    progress: Progress = lambda done, total: None,
) -> ConvertReport:
    """Make a folder `out` of Hugging Face files of the model in the checkpoint at `path`, for `from_pretrained`.

    rewrite: its outputs are written. To undo that of an import, give its `inverse()`, which finds sizes and dtypes in
        the save. Parameters that it was not given come from `config.json`.
    config: what else belongs there: a folder whose `config.json` and files of the tokenizer are copied, or a
        configuration file. They go before what the save keeps: the `config.json` of the engine's model, or what
        `import_hf` has kept. Where there is none, `missing` of the report says so.
    dtype: in which floats are written, such as "float32": from the masters where the save has them. None: as the model
        computed with them, in the dtype in which they are stored. A `config.json` that says another dtype is corrected.
        Packed weights (codes of one byte, or with tensors under their names) and their modules keep their dtypes.
    weights, step, max_shard_bytes, original: see `convert`.
    certify: see `import_hf`; `round-trip.json` is one of the files.

    The model's tensors are written in the dtype in which they are stored, a tied one once, under its own name. The
    folder must not exist or be empty; it is made whole or not at all, in bounded memory.
    Raises CheckpointError and RewriteError as `convert` does.
    """
    # The general conversion with the defaults of an export: it certifies, and never writes the state of optimizers.
    return convert(
        path,
        out,
        to="hf",
        rewrite=rewrite,
        config=config,
        dtype=dtype,
        weights=weights,
        step=step,
        max_shard_bytes=max_shard_bytes,
        certify=certify,
        original=original,
        progress=progress,
    )


def _original_at(original: Address | None, *, certify: bool) -> tuple[Store, Contents] | None:
    """The checkpoint with which what is written is compared; None: there is none. Raises CheckpointError."""
    if original is None:
        return None
    if not certify:
        raise CheckpointError("original= is compared in the certificate, which certify=False leaves out")
    store = store_of(original)
    return store, read_contents(store)


def check_arguments(
    *,
    rewrite: object = None,
    config: object = None,
    step: object = None,
    max_shard_bytes: object = 1,
    flags: Mapping[str, object],
) -> None:
    """Raise CheckpointError, with all that is wrong, unless these can be the arguments of a conversion.

    flags: by name, what must be True or False.
    """
    # Every wrong argument at once, before anything is opened: a long conversion shall not fail at its end for a flag.
    problems = [] if rewrite is None else wrong_rewrite(rewrite)
    if config is not None and not isinstance(config, str | os.PathLike):
        problems.append(f"config is a {type(config).__name__}; give the path of a folder or a file, or None")
    # type, not isinstance: True is an int, and would be the save of step 1.
    if step is not None and type(step) is not int:
        problems.append(f"step is {step!r}, a {type(step).__name__}; give a whole number or None")
    if type(max_shard_bytes) is not int:
        what = f"{max_shard_bytes!r}, a {type(max_shard_bytes).__name__}"
        problems.append(f"max_shard_bytes is {what}; give a whole number")
    elif max_shard_bytes < 1:
        problems.append(f"files of {max_shard_bytes} bytes were asked for; give at least 1")
    problems += [f"{name} is {value!r}; give True or False" for name, value in flags.items() if type(value) is not bool]
    if problems:
        raise CheckpointError(*problems)


def _check_target(to: object) -> None:
    """Raise CheckpointError for what nothing can be converted to."""
    planners = folder_planners()
    ours = [each for each in get_args(ConvertTarget) if each in ("pieces", "whole") or each in planners]
    targets = [*ours, *(each for each in planners if each not in ours)]
    if to not in targets:
        raise CheckpointError(f"a conversion to {to!r} was asked for; it goes to {', '.join(targets)}")


def _check_form(to: ConvertTarget, *, dtype: str | None, like: Address | None) -> None:
    """Raise CheckpointError for a dtype, or a form, that cannot be asked for."""
    if dtype is not None and to in ("pieces", "whole"):
        raise CheckpointError(
            f"dtype={dtype!r} (--dtype) was asked for a save ({to}). A save has masters and working copies both; use "
            "--dtype with files of Hugging Face (hf). A rewrite casts single tensors: a -> a, dtype='bfloat16'"
        )
    if like is not None and to != "hf":
        raise CheckpointError(f"like={like} (--like) was asked for {to}; only files of Hugging Face (hf) take a form")
    if like is not None and dtype is not None:
        raise CheckpointError(
            f"dtype={dtype!r} (--dtype) and like={like} (--like) were asked for, and both say dtypes; leave one out"
        )
    if dtype is not None and dtype not in COMPUTE_DTYPES:
        raise CheckpointError(
            f"dtype {dtype!r} (--dtype) was asked for; floats are written in {', '.join(COMPUTE_DTYPES)}, or as stored"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """A conversion, planned from metadata alone."""

    store: Store
    """That of the source."""
    contents: Contents
    """All that the source holds."""
    files: ModelFiles
    """Other files that go along."""
    outputs: Outputs
    """What is written."""
    original: tuple[Store, Contents] | None = None
    """What the source was once made of, where that was given."""
    masters: tuple[str, ...] = ()
    """Masters that are written in the place of working copies."""
    cast: tuple[str, ...] = ()
    """Outputs that are cast to what `dtype` or `like` ask for."""
    uncast: tuple[str, ...] = ()
    """Outputs that are not, see `ConvertReport`."""
    places: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    """In which files of Hugging Face tensors are, see `shards_of`."""

    @classmethod
    def of(
        cls,
        source: Address,
        rewrite: Rewrite | None,
        *,
        to: ConvertTarget,
        config: ConfigPath = None,
        dtype: str | None = None,
        like: Address | None = None,
        weights: Weights = "current",
        step: int | None = None,
    ) -> Self:
        """Prepare it; the arguments are those of `convert`.

        Raises CheckpointError and RewriteError where nothing can be made of the source.
        """
        _check_form(to, dtype=dtype, like=like)
        if weights not in get_args(Weights):
            raise CheckpointError(f'weights is {weights!r}; give "current" or "average"')
        store = store_of(source)
        form = None if like is None else Likeness.of(like)
        contents = read_contents(store, step=step)
        if weights == "average":
            contents, dtypes = with_averages(contents)
            narrower = {name: each for name, each in dtypes.items() if each != contents.tensors[name].dtype}
            if narrower and to == "hf" and dtype is None and like is None:
                # In the dtypes in which the model computes, as without averages.
                rounding, rewrite = casting(narrower, contents.aliases), rewrite or without_wrappers(contents)
                rewrite = rounding if rewrite is None else rounding >> rewrite
        files = ModelFiles.of(store, contents, config, {} if form is None else form.files)
        parameters = files.config
        model_only = to == "hf"
        masters: tuple[str, ...] = ()
        kept = contents
        if to not in ("pieces", "whole", "hf"):
            # Other programs train masters alone, and make working copies of them.
            kept, masters = with_masters(contents, contents, dict.fromkeys(contents.tensors, "float32"))
            kept = replace(kept, tensors={name: each for name, each in kept.tensors.items() if not holds_weights(name)})
        if rewrite is None and to not in ("pieces", "whole"):
            rewrite = without_wrappers(model_of(kept))

        def made_by(rewrite: Rewrite | None) -> Contents:
            if rewrite is None:
                return model_of(kept) if model_only else kept
            return made_of(kept, rewrite, parameters, model_only=model_only)

        made = made_by(rewrite)
        uncast, casts = list[str](), dict[str, str]()
        if dtype is not None or form is not None:
            wanted, uncast = wanted_dtypes(kept, made, dtype, form)
            # Values come out of masters, which hold more than the working copies.
            kept, more = with_masters(kept, made, wanted)
            masters += more
            made = made_by(rewrite) if more else made
            casts = {name: each for name, each in wanted.items() if each != made.tensors[name].dtype}
        if casts:
            # Casts are statements behind the rewrite: what reads, casts and writes knows one kind of outputs.
            statements, before = casting(casts, made.aliases), made.effects.checked
            made = made_by(statements if before is None else before.rewrite >> statements)
        outputs = outputs_of(made, model_only=model_only)
        contents.check_tensors(outputs.tensors)
        if outputs.checked is not None:
            files = files.changed(partial(with_vocabulary, checked=outputs.checked))
        return cls(
            store=store,
            contents=contents,
            files=files,
            outputs=outputs,
            masters=masters,
            cast=tuple(casts),
            uncast=tuple(uncast),
            places={} if form is None else form.file_of,
        )

    def write(
        self,
        destination: Address,
        to: ConvertTarget,
        *,
        max_shard_bytes: int = MAX_SHARD_BYTES,
        certify: bool,
        progress: Progress,
    ) -> ConvertReport:
        """Make a save, or a folder of another format. Raises CheckpointError."""
        copying = Copying(self.store, self.outputs, progress, certify=certify)
        if to == "pieces" or to == "whole":
            return self._write_save(destination, to, copying)
        return self._write_folder(destination, to, copying, max_shard_bytes)

    def _write_save(self, destination: Address, to: Literal["pieces", "whole"], copying: Copying) -> ConvertReport:
        store = store_of(destination)
        self.outputs.check_agreement(self.store)
        with leaving_no_folder(store):
            kept = self.files.for_save()
            # Of our own saves the settings and the extra go along whole, with these files in them: they are not added
            # twice.
            has_them = self.contents.format == "shardwise" and kept == self.files.kept
            number = make_save(copying, store, to, {} if has_them else as_extra(kept))
            location = f"{store.location}/{folder_of(number)}".rstrip("/")
            certificate = None
            if copying.digests is not None:
                # In the folder of the save, so that pruning the save takes its certificate along.
                name = folder_of(number) + CERTIFICATE
                removed = "; without its certificate the save was removed again"
                with refusals(f"{store.location}/{name} cannot be written", lambda error: removed):
                    try:
                        # Read anew, not kept from the writing: what is certified is what a later reader finds.
                        certificate = self._certified(store, read_save(store, number), location, copying.digests)
                        store.create(name, certificate.pack())
                    except BaseException:  # Ctrl-C too: what was to be certified and is not must not stay
                        with contextlib.suppress(CheckpointError, OSError, EOFError):
                            remove_save(store, list_saves(store), number)
                        raise
        # Beside the saves, not in one: the tokenizer belongs to the model, and each save of the folder can use it.
        beside = {name: data for name, data in self.files.given.items() if name not in kept}
        for name, data in beside.items():
            with contextlib.suppress(FileExistsError):  # of an earlier save
                store.create(name, data)
        return self._report(location, copying.read_bytes, files=(*kept, *beside), certificate=certificate)

    def _write_folder(
        self, destination: Address, to: ConvertTarget, copying: Copying, max_shard_bytes: int
    ) -> ConvertReport:
        folder = check_folder(destination)
        beside = self.files.for_folder(self.outputs.main_dtype, is_dequantised=self._is_dequantised)
        plan = self.folder_plan(to, max_shard_bytes=max_shard_bytes)
        certificates: list[Certificate] = []

        def finish(store: Store) -> dict[str, bytes]:
            if copying.digests is None:
                return {}
            certificates.append(self._certified(store, read_foreign(store), location_of(folder), copying.digests))
            return {CERTIFICATE: certificates[0].pack()}

        self.outputs.check_agreement(self.store)
        check_numbered(folder, plan)
        write_folder(
            folder,
            plan.files,
            lambda file, writer: copying.fill(file.pieces, plan.filling(file, writer)),
            {**beside, **plan.last},
            finish,
        )
        missing = missing_files(beside) if to == "hf" else ()
        certificate = certificates[0] if certificates else None
        return self._report(
            location_of(folder), copying.read_bytes, files=tuple(beside), missing=missing, certificate=certificate
        )

    def folder_plan(self, to: ConvertTarget, *, max_shard_bytes: int, reads: bool = True) -> FolderPlan:
        """The folder in a format; see `FolderRequest`. Raises CheckpointError where it cannot be made."""
        if not any(is_model_name(name, self.contents.format) for name in self.outputs.tensors):
            raise CheckpointError(
                f"{self.outputs.contents.location} has no tensor of a model, so that there is nothing to write"
            )
        source = self.store if reads else None
        request = FolderRequest(max_file_bytes=max_shard_bytes, places=self.places, source=source)
        return folder_planners()[to](self.outputs, request)

    @property
    def _is_dequantised(self) -> bool:
        """Whether no narrow floats are written, though the configuration may say how they are scaled."""
        if any(tensor.dtype in QUANTISED for tensor in self.outputs.tensors.values()):
            return False
        config = self.files.kept.get(CONFIG)
        said = config.get("quantization_config") if isinstance(config, dict) else None
        # It may have been dequantised on the way into the save that is read now.
        is_of_narrow_floats = isinstance(said, dict) and said.get("quant_method") == "fp8"
        checked = self.outputs.checked
        return is_of_narrow_floats or (checked is not None and bool(checked.scales))

    def _certified(self, store: Store, written: Contents, location: str, digests: PassingDigests) -> Certificate:
        return certify_return(
            self.store,
            self.outputs.contents,
            store,
            written,
            location=location,
            known=digests.found,
            original=self.original,
        )

    def _report(
        self,
        location: str,
        read_bytes: int,
        *,
        files: tuple[str, ...],
        missing: tuple[str, ...] = (),
        certificate: Certificate | None,
    ) -> ConvertReport:
        outputs = self.outputs
        # A master that was written in the place of a working copy is not left out: its values are there.
        used, effects = {*outputs.contents.stored.tensors, *self.masters}, outputs.contents.effects
        left_out = tuple(name for name in self.contents.tensors if name not in used)
        return ConvertReport(
            source=self.contents.location,
            source_format=self.contents.format,
            destination=location,
            num_tensors=len(outputs.tensors),
            num_bytes=outputs.num_bytes,
            read_bytes=read_bytes,
            verified=self.contents.verifiable,
            aliases=dict(outputs.aliases),
            left_out=left_out,
            num_masters=sum(model_name_of_master(name) in used for name in left_out),
            dropped=tuple(sorted(effects.dropped)),
            notes=(*self.contents.notes, *effects.notes),
            from_masters=self.masters,
            cast=self.cast,
            uncast=self.uncast,
            files=files,
            missing=missing,
            certificate=certificate,
        )
