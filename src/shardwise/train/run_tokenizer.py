"""The tokenizers that [data] may name: bytes, the JSON file of `tokenizers`, a folder of transformers.

All are read from disk: nothing is downloaded, and no code of a folder is run.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from shardwise.errors import DataError
from shardwise.train.data_settings import BYTES, DataTable

Tokens = npt.NDArray[np.integer[Any]]


class RunTokenizer(Protocol):
    """Text to tokens and back."""

    @property
    def size(self) -> int:
        """Tokens are below this."""

    @property
    def pad(self) -> int:
        """The token that fills rows up."""

    @property
    def end(self) -> Sequence[int]:
        """What stands between texts that are packed; nothing where the tokenizer names no token for it."""

    @property
    def inner(self) -> Any:
        """The object of the library that made it; None for bytes."""

    def encode(self, text: str) -> Tokens:
        """The tokens of a text, [num_tokens]."""

    def messages(self, messages: Sequence[Mapping[str, Any]]) -> Tokens:
        """The tokens of messages, [num_tokens]. Raises DataError where there is no template for them."""

    def decode(self, tokens: list[int]) -> str:
        """The text of tokens."""


def tokenizer_of(data: DataTable, folder: Path) -> RunTokenizer:
    """The one that [data] names. Raises DataError."""
    if data.tokenizer == BYTES:
        return ByteTokens()
    path = folder / data.tokenizer
    return TokenizerFolder(path) if path.is_dir() else TokenizerFile(path)


class ByteTokens:
    """A token for each byte of UTF-8."""

    size, pad, end, inner = 256, 0, (), None

    def encode(self, text: str) -> Tokens:
        """See `RunTokenizer`."""
        return np.frombuffer(text.encode(), dtype=np.uint8)

    def messages(self, messages: Sequence[Mapping[str, Any]]) -> Tokens:
        """See `RunTokenizer`."""
        raise DataError("data.messages: bytes have no template of messages; give a folder as data.tokenizer")

    def decode(self, tokens: list[int]) -> str:
        """The text; bytes that are not UTF-8 become replacement marks, as do tokens behind the bytes."""
        # Vocabularies are larger than 256 where their size is rounded up; 0xFF is no byte of UTF-8.
        return bytes(min(token, 0xFF) for token in tokens).decode("utf-8", errors="replace")


class TokenizerFile:
    """The JSON of a tokenizer."""

    end = ()

    def __init__(self, path: Path) -> None:
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise DataError(
                "data.tokenizer: a tokenizer file needs the package tokenizers; pip install tokenizers"
            ) from error
        try:
            self.inner: Any = Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises bare Exception for every fault of a file
            raise DataError(f"data.tokenizer: {path} is not the JSON of a tokenizer: {error}") from error
        self.size = int(self.inner.get_vocab_size())
        # The file says which token pads only where it pads by itself; libraries agree on these names.
        found = [self.inner.token_to_id(name) for name in ("<pad>", "[PAD]", "<|pad|>")]
        self.pad = next((each for each in found if each is not None), 0)

    def encode(self, text: str) -> Tokens:
        """See `RunTokenizer`."""
        return np.asarray(self.inner.encode(text).ids, dtype=np.int32)

    def messages(self, messages: Sequence[Mapping[str, Any]]) -> Tokens:
        """See `RunTokenizer`."""
        raise DataError("data.messages: a tokenizer file has no template of messages; give a folder as data.tokenizer")

    def decode(self, tokens: list[int]) -> str:
        """See `RunTokenizer`."""
        return str(self.inner.decode(tokens))


class TokenizerFolder:
    """A folder that `save_pretrained` of a tokenizer wrote."""

    def __init__(self, path: Path) -> None:
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise DataError(
                'data.tokenizer: a folder needs the package transformers; pip install "shardwise[train]"'
            ) from error
        try:
            self.inner: Any = AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
        except Exception as error:  # transformers raises whatever a file makes it raise
            raise DataError(f"data.tokenizer: {path} holds no tokenizer of transformers: {error}") from error
        self.size = len(self.inner)
        last = self.inner.eos_token_id
        self.end = () if last is None else (int(last),)
        found = (self.inner.pad_token_id, last, 0)
        self.pad = int(next(each for each in found if each is not None))

    def encode(self, text: str) -> Tokens:
        """See `RunTokenizer`."""
        return self._tokens(text, adds_special_tokens=True)

    def messages(self, messages: Sequence[Mapping[str, Any]]) -> Tokens:
        """See `RunTokenizer`."""
        if self.inner.chat_template is None:
            raise DataError("data.messages: the tokenizer of data.tokenizer has no chat_template; save it with one")
        # As text first: the template has its special tokens in it.
        return self._tokens(self.inner.apply_chat_template(messages, tokenize=False), adds_special_tokens=False)

    def decode(self, tokens: list[int]) -> str:
        """See `RunTokenizer`."""
        return str(self.inner.decode(tokens))

    def _tokens(self, text: str, *, adds_special_tokens: bool) -> Tokens:
        # `verbose`: a text that is longer than the model takes is cut, or packed, afterwards.
        found = self.inner(text, add_special_tokens=adds_special_tokens, verbose=False)
        return np.asarray(found["input_ids"], dtype=np.int32)
