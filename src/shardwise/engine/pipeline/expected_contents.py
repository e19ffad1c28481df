"""Contents of messages that a device receives before it needs them: one ahead, by the list of the last step.

A transfer between devices begins behind what the receiver's device had to do when it was called. So a receive that is
called where its content is needed waits for all computation before that, and none of it hides the transfer::

    in time    host     take V 0 | launch F 0 | take V 1
               device            | F 0 ...... |          | transfer of V 1 | F 1
    one ahead  host     take V 0, post V 1 | launch F 0 | take V 1, post V 2
               device                      | F 0 .......| F 1
               transfers                   | V 1 |      | V 2 |

Steps of as many microbatches send the same messages. Both sides of a direction list what goes, so both know which
content comes next without asking. What differs from the list costs one content without a meaning:

    listed    V 0, V 1, V 2     the receiver has posted room for the next one from the beginning of the step on
    sent      V 0, W 1, V 2     header of W 1 | content for the room of V 1 | content of W 1; the list is left
    sent      V 0, V 1          end of the step | content for the room of V 2
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch


class ContentPlace(NamedTuple):
    """The layout of a content in memory, and what it is for."""

    purpose: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    lead: int
    """Elements before it, from the last aligned address on."""
    dtype: torch.dtype


class ContentList:
    """The contents of one direction, as both sides list them; None: a message that brings no content to a device."""

    def __init__(self) -> None:
        self._of_last: dict[int, Sequence[ContentPlace | None]] = {}
        """By the number of microbatches of the step."""
        self._num_microbatches = 0
        self._listed: Sequence[ContentPlace | None] = ()
        self._seen: list[ContentPlace | None] = []
        self._is_followed = False

    @property
    def next(self) -> ContentPlace | None:
        """What the next message brings, as far as the messages of this step are those of the list."""
        at = len(self._seen)
        return self._listed[at] if self._is_followed and at < len(self._listed) else None

    def begin(self, num_microbatches: int) -> None:
        """A step begins."""
        self._num_microbatches = num_microbatches
        self._listed = self._of_last.get(num_microbatches, ())
        self._seen = []
        self._is_followed = True

    def note(self, place: ContentPlace | None) -> None:
        """A message has come or gone."""
        at = len(self._seen)
        self._is_followed = self._is_followed and at < len(self._listed) and self._listed[at] == place
        self._seen.append(place)

    def end(self) -> None:
        """The step is done: its messages are the list for the next one."""
        # Evaluations and predictions are not listed: they call no `begin`.
        if self._num_microbatches:
            self._of_last[self._num_microbatches] = self._seen
        self.forget()

    def forget(self) -> None:
        """Expect nothing, until the next step begins."""
        self._num_microbatches, self._listed, self._seen, self._is_followed = 0, (), [], False
