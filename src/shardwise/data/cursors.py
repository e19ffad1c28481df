"""How far a run has read, and which rows of a global batch are those of a rank. Neither depends on the layout."""

from dataclasses import dataclass
from typing import Any, Self

from shardwise.errors import DataError


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """The first sample that is not consumed."""

    epoch: int = 0
    position: int = 0
    """Samples of the epoch before it."""

    def advanced(self, num_samples: int, size: int | None) -> "Cursor":
        """So many samples on; size: samples in an epoch, None where they have no end."""
        if size is None:
            return Cursor(epoch=self.epoch, position=self.position + num_samples)
        epochs, position = divmod(self.position + num_samples, size)
        return Cursor(epoch=self.epoch + epochs, position=position)

    @classmethod
    def read(cls, values: Any) -> Self:
        """From JSON values. Raises DataError for others than `sw.Data` gives."""
        try:
            epoch, position = values["epoch"], values["position"]
        except (TypeError, KeyError, IndexError):
            raise DataError(f"{values!r} is no cursor of sw.Data: it has no epoch and position") from None
        if any(type(each) is not int or each < 0 for each in (epoch, position)):
            raise DataError(f"a cursor has an epoch and a position from 0 on, not {epoch!r} and {position!r}")
        return cls(epoch=epoch, position=position)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataPlace:
    """Which rows are this rank's."""

    data_rank: int = 0
    num_data_ranks: int = 1

    def rows(self, num_rows: int) -> range:
        """The rows of a batch of `num_rows`. Those of two data ranks differ by one row at most."""
        return range(
            num_rows * self.data_rank // self.num_data_ranks, num_rows * (self.data_rank + 1) // self.num_data_ranks
        )
