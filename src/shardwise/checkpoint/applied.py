"""Applied: a rewrite, put to the tensors of a checkpoint that is converted."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from shardwise.checkpoint.addresses import Address, store_of
from shardwise.checkpoint.contents import Contents
from shardwise.checkpoint.model_config import CONFIG, model_files, parameters_of
from shardwise.checkpoint.outputs import model_of
from shardwise.checkpoint.renamed_settings import (
    names_state,
    record_of,
    recorded_metas,
    renamed_settings,
    rewrite_of_record,
)
from shardwise.checkpoint.rewritten import metas_of_contents
from shardwise.checkpoint.sources import read_contents
from shardwise.errors import CheckpointError, RewriteError
from shardwise.rewrite import Checked, Rewrite

__all__ = ["Applied", "inverse_like", "recorded_rewrite"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """A rewrite and the checkpoint that it fits. Only metadata has been read."""

    contents: Contents
    """What it is put to: all tensors, or the model's where only these are written."""
    rewrite: Rewrite
    """With its parameters."""
    checked: Checked
    settings: Mapping[str, Any]
    """Those of the checkpoint, under the names of the outputs, and the record of the rewrite."""

    @classmethod
    def to(cls, contents: Contents, rewrite: Rewrite, config: Any, *, model_only: bool) -> "Applied":
        """Put a rewrite to a checkpoint. Raises RewriteError with every finding, and CheckpointError for settings.

        config: the configuration of the model, or None; parameters that the rewrite lacks are looked up there.
        """
        if lacking := rewrite.parameters_needed - rewrite.parameters.keys():
            found = parameters_of(config, lacking)
            _check_parameters(sorted(lacking - found.keys()), contents, has_config=config is not None)
            rewrite = rewrite.with_parameters(found)
        if model_only and not names_state(rewrite):
            contents = model_of(contents)
        metas = metas_of_contents(contents)
        checked = rewrite.apply(metas, recorded=recorded_metas(contents.settings, rewrite), aliases=contents.aliases)
        if checked.added:
            raise CheckpointError(
                f"the rewrite adds {', '.join(sorted(checked.added))}, which keep the values that they have in what is "
                "loaded into; a conversion has no such values: leave these statements (`_ -> ...`) out, or load with "
                "this rewrite"
            )
        stored = {} if model_only else contents.settings  # optimizers are of no matter to files that have none
        settings, findings = renamed_settings(stored, checked, contents.aliases)
        if findings:
            raise CheckpointError(*findings, about=f"the rewrite does not fit the optimizers of {contents.location}")
        return cls(
            contents=contents,
            rewrite=rewrite,
            checked=checked,
            settings={**settings, **record_of(rewrite, metas)},
        )


def _check_parameters(lacking: Sequence[str], contents: Contents, *, has_config: bool) -> None:
    if lacking:
        where = (
            f"which {CONFIG} does not say" if has_config else f"and {contents.location} has no {CONFIG} that says them"
        )
        raise RewriteError(
            f"the rewrite needs {', '.join(lacking)}, {where}; give them: Rewrite(..., parameters={{...}}), or on the "
            f"command line {' '.join(f'--set {name}=...' for name in lacking)}, or a {CONFIG} that does (--config)"
        )


def recorded_rewrite(source: Address, *, step: int | None = None) -> Rewrite:
    """The rewrite by which the save at `source` was made; its `inverse()` leads back.

    Raises CheckpointError for a checkpoint that was made without one.
    """
    contents = read_contents(store_of(source), step=step)
    found = rewrite_of_record(contents.settings)
    if found is None:
        raise CheckpointError(
            f"{contents.location} does not say by which rewrite it was made; name the one to undo (--rewrite NAME "
            "--inverse, and --like ORIGINAL where it has to know what was there before)"
        )
    return found


def inverse_like(rewrite: Rewrite, original: Address, *, lossy: Literal["refuse", "allow"] = "refuse") -> Rewrite:
    """The way back of a rewrite to the names, shapes and dtypes of the checkpoint at `original`; see `Checked.inverse`.

    Only metadata is read. Parameters that the rewrite lacks come from its `config.json`. lossy: as for that.
    Raises CheckpointError, and RewriteError for a rewrite that does not fit it or loses something of it.
    """
    store = store_of(original)
    contents = read_contents(store)
    config = model_files(store, contents).get(CONFIG)
    return Applied.to(contents, rewrite, config, model_only=True).checked.inverse(lossy=lossy)
