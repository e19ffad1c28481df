"""Ways back: the rewrites that lead from a checkpoint to the tensors that its values were once made of.

A save keeps the rewrite by which its values were made. Training, relayouts and further saves hand it on. It does not
keep all facts of what was before. Those come from the checkpoint to go back to, where one is given.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from shardwise.checkpoint.contents import Contents
from shardwise.checkpoint.model_files import model_files
from shardwise.checkpoint.outputs import made_of, model_of
from shardwise.checkpoint.renamed_settings import rewrite_of_record
from shardwise.checkpoint.sources import read_contents
from shardwise.checkpoint.stores import Address, store_of
from shardwise.errors import CheckpointError, RewriteError
from shardwise.plan.saved_settings import BEFORE, CONFIG, SEVERAL, a_mapping, record_in
from shardwise.rewrite import Rewrite

Lossy = Literal["refuse", "allow"]


def recorded_rewrite(source: Address, *, step: int | None = None) -> Rewrite:
    """The rewrite by which the save at `source` was made; its `inverse()` leads back.

    Raises CheckpointError for a checkpoint that was made without one, and for one whose values came by several loads.
    """
    return _recorded(read_contents(store_of(source), step=step))


def _recorded(contents: Contents) -> Rewrite:
    found = rewrite_of_record(contents.settings)
    if found is None:
        named = (
            "name the rewrite to undo (--rewrite NAME --inverse). If the inverse needs the tensors of before, add "
            "--like ORIGINAL"
        )
        if loads := _several(contents):
            raise CheckpointError(
                f"the values of {contents.location} came by {len(loads)} loads, and each left some as they were: "
                f"{'; then '.join(loads)}. No single record undoes these; {named}"
            )
        raise CheckpointError(f"{contents.location} does not say which rewrite made it; {named}")
    return found


def _several(contents: Contents) -> list[str]:
    """Each of several loads, in words."""
    loads = record_in(contents.settings).get(SEVERAL)
    return [_in_words(each) for each in loads if isinstance(each, dict)] if isinstance(loads, list) else []


def _in_words(record: dict[str, Any]) -> str:
    lines = [line.strip() for line in str(record.get("text", "")).splitlines() if line.strip()]
    if not lines:
        return "one without a rewrite"
    more = f" and {len(lines) - 1} more statements" if len(lines) > 1 else ""
    return f"one by `{lines[0]}`{more}"


def inverse_like(rewrite: Rewrite, original: Address, *, lossy: Lossy = "refuse") -> Rewrite:
    """The way back of a rewrite to the names, shapes and dtypes of the checkpoint at `original`; see `Checked.inverse`.

    Only metadata is read. Parameters that the rewrite lacks come from its `config.json`. lossy: as for that.
    Raises CheckpointError, and RewriteError for a rewrite that does not fit it or loses something of it.
    """
    store = store_of(original)
    contents = read_contents(store)
    config = model_files(store, contents).get(CONFIG)
    return made_of(contents, rewrite, config, model_only=True).checked.inverse(lossy=lossy)


def way_back(source: Address, original: Address, *, step: int | None = None, lossy: Lossy = "refuse") -> Rewrite | None:
    """The rewrite from the save at `source` back to the form of the checkpoint at `original`, by the save's own record.

    None: the save was made without a rewrite, and its model has the names of the original. Where a save was made of a
    save that a rewrite had made, the way leads through all rewrites that are on record, as far as the original is.
    lossy: see `Checked.inverse`.
    Raises CheckpointError where no rewrite is on record, and RewriteError where the recorded one does not fit.
    """
    contents, wanted = read_contents(store_of(source), step=step), read_contents(store_of(original))
    known = record_in(contents.settings)
    if not known and model_of(contents).tensors.keys() == model_of(wanted).tensors.keys():
        return None
    newest = _recorded(contents)
    problem: RewriteError | None = None
    for each in _longer(newest, known):
        try:
            return inverse_like(each, original, lossy=lossy)
        except RewriteError as error:
            problem = problem or error
    assert problem is not None, "at least the newest was tried"
    raise RewriteError(
        *problem.problems,
        about=f"the rewrite that {contents.location} has on record does not lead back to {wanted.location}",
    )


def _longer(newest: Rewrite, record: Mapping[str, Any]) -> Iterator[Rewrite]:
    """The newest rewrite on record; then the one before and it; and so on."""
    yield newest
    rewrite = newest
    while isinstance((record := a_mapping(record.get(BEFORE))).get("text"), str):
        rewrite = Rewrite.from_record(record) >> rewrite
        yield rewrite
