"""Writes to buckets from outside of the engine: to masters, and those to working copies that torch does not count."""

from collections.abc import Callable, Collection, Iterator, Sequence

from shardwise.engine.forward.writes import FlatContents
from shardwise.engine.torch_private import version_of
from shardwise.engine.zero.bucket_memory import ShardedBucket, WholeBucket


class BucketWrites:
    """Finds them, for the buckets of one rank."""

    def __init__(self, buckets: Sequence[WholeBucket], *, is_on: bool = False, copied: Collection[str] = ()) -> None:
        """is_on: compare contents with what the engine wrote. copied: parameters that other ranks have too."""
        self._buckets = buckets
        self._trainable = [each for each in buckets if each.plan.trainable]
        # A single copy that is its own master holds what counts, whoever writes it. `free` compares a gathered one.
        whole = [each for each in buckets if not isinstance(each, ShardedBucket)]
        names = set(copied)
        read = [
            each for each in whole if is_on and (each.has_master or any(slot.name in names for slot in each.plan.slots))
        ]
        # Not on a device, which would have to be waited for.
        self._pieces = {each.number: each.pieces() for each in read if each.working.device.type == "cpu"}
        """Of each bucket whose working copy is compared, by its number."""
        apart = [each for each in self._trainable if is_on and each.has_master and each.master.device.type == "cpu"]
        spans = {each.number: each.owned_spans() for each in apart}
        self._working = FlatContents(
            [(each.working, [span for _, span in self._pieces.get(each.number, ())]) for each in buckets]
        )
        self._masters = FlatContents([(each.master, spans.get(each.number, ())) for each in buckets])
        """Those that are held apart."""
        seen = {at for at in self._pieces if self._working.are_whole[at]}
        self._seen_in_part = [each for each in whole if each.is_cast and each.number not in seen]
        self.note_contents(buckets)

    def note_contents(self, buckets: Sequence[WholeBucket]) -> None:
        """What buckets hold now is what they are to hold."""
        for each in buckets:
            each.master_memory.version, each.master_memory.is_reached = version_of(each.master), False
        numbers = [each.number for each in buckets]
        self._working.remember(numbers)
        self._masters.remember(numbers)

    def with_written_masters(self, counted: Callable[[], Sequence[str]]) -> list[WholeBucket]:
        """Buckets to whose masters somebody wrote. counted: the parameters to which torch has counted a write."""
        reached = [
            each.number
            for each in self._trainable
            if each.master_memory.is_reached or each.master_memory.version != version_of(each.master)
        ]
        written = {*reached, *self._masters.differing()}
        for at in self._working.differing():
            # In one memory: where the model's parameters count a write, it is one to them, and ranks compare. Without a
            # count, a write to the model changes what others own too, and ranks may have written unlike values.
            bucket = self._buckets[at]
            is_own = all(bucket.owns(self._pieces[at][piece][1]) for piece in self._working.different(at))
            if is_own and not bucket.has_master and not counted():
                written.add(at)
        return [each for each in self._trainable if each.number in written] if written else []

    def found(self, *, reads_all: bool) -> Iterator[str]:
        """Parameters with other elements in the working copy than the engine wrote there.

        reads_all: compare all elements with casts of masters, where contents are known in part.
        """
        other = self._working.differing()
        for at in other:
            yield from (self._pieces[at][piece][0] for piece in self._working.different(at))
        for each in self._seen_in_part:
            if reads_all or each.number in other:
                yield from each.other_than_casts()
