"""Receive the weights of a running trainer as an inference server holds them: Llama with the cuts of vLLM and SGLang.

A receiver says which elements each of its tensors has, as pieces, and calls `sw.stream` with the trainers. It loads
torch and the rooms of shardwise that move tensors: no engine, no trainer, no transformers. `serve` is all it does.

    python -m examples.train_and_serve     # four trainers and five of these, as simulated ranks

As a process of its own, beside trainers in the same world (environment of torchrun):

    python examples/inference_receiver.py --first-rank 4 --tp 4
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

import shardwise as sw
from shardwise.space import Portion, even_cuts

Range = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What `config.json` says of a Llama."""

    vocab_size: int = 500
    hidden_size: int = 64
    intermediate_size: int = 176
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    tie_word_embeddings: bool = False

    @property
    def head_size(self) -> int:
        """Rows of one head."""
        return self.hidden_size // self.num_attention_heads


PADDED_TO = 64  # rows of the vocabulary: vLLM and SGLang fill it up to a multiple of these


def portions(sizes: Sizes, rank: int, tp: int) -> Iterator[tuple[str, Portion]]:
    """What a tensor-parallel rank of a server has of each tensor, by the server's names."""

    def rows(*parts: tuple[int, Sequence[Range]]) -> Portion:
        """Of parts that lie one below the other in the whole tensor, the rank's rows of each."""
        ranges, start = [], 0
        for height, cuts in parts:
            ranges += [(start + first, start + last) for first, last in cuts]
            start += height
        return Portion((start, sizes.hidden_size), 0, tuple(ranges))

    def columns(width: int) -> Portion:
        return Portion((sizes.hidden_size, width), 1, (even_cuts(width, tp)[rank],))

    def heads(number: int) -> tuple[int, Sequence[Range]]:
        """Of so many heads those of the rank; where there are fewer than ranks, several ranks have the same one."""
        first, last = (rank * number // tp, (rank + 1) * number // tp) if number >= tp else (rank * number // tp,) * 2
        size = sizes.head_size
        return number * size, [(first * size, max(last, first + 1) * size)]

    norm = Portion((sizes.hidden_size,), 0, ((0, sizes.hidden_size),))
    up = sizes.intermediate_size, [even_cuts(sizes.intermediate_size, tp)[rank]]
    for layer in range(sizes.num_hidden_layers):
        prefix = f"model.layers.{layer}"
        queries, keys = heads(sizes.num_attention_heads), heads(sizes.num_key_value_heads)
        # The rank's query heads, then its key heads, then its value heads; and its gate, then its up.
        yield f"{prefix}.self_attn.qkv_proj.weight", rows(queries, keys, keys)
        yield f"{prefix}.self_attn.o_proj.weight", columns(sizes.num_attention_heads * sizes.head_size)
        yield f"{prefix}.mlp.gate_up_proj.weight", rows(up, up)
        yield f"{prefix}.mlp.down_proj.weight", columns(sizes.intermediate_size)
        yield f"{prefix}.input_layernorm.weight", norm
        yield f"{prefix}.post_attention_layernorm.weight", norm
    yield "model.norm.weight", norm
    per_rank = num_vocabulary_rows(sizes, tp)
    words = tuple(min(at, sizes.vocab_size) for at in (rank * per_rank, (rank + 1) * per_rank))
    for name in ("model.embed_tokens.weight", "lm_head.weight")[: 1 if sizes.tie_word_embeddings else 2]:
        yield name, rows((sizes.vocab_size, [(words[0], words[1])]))


def num_vocabulary_rows(sizes: Sizes, tp: int) -> int:
    """Rows of the vocabulary that a rank has memory for."""
    return -(-sizes.vocab_size // PADDED_TO) * PADDED_TO // tp


def tensors_of(sizes: Sizes, rank: int, tp: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The rank's tensors, as the server makes them: here zeros."""
    tensors = {name: torch.zeros(portion.shape, dtype=dtype) for name, portion in portions(sizes, rank, tp)}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in tensors:  # with the rows that fill up the vocabulary, which nobody sends
            tensors[name] = torch.zeros(num_vocabulary_rows(sizes, tp), sizes.hidden_size, dtype=dtype)
    return tensors


def target_of(tensors: dict[str, torch.Tensor], sizes: Sizes, rank: int, tp: int) -> dict[sw.Piece, torch.Tensor]:
    """The same tensors by piece: a fused one is several pieces, each a view of its own rows."""
    target = {}
    for name, portion in portions(sizes, rank, tp):
        tensor = tensors[name]
        for box, local in portion.boxes():
            piece = sw.Piece(
                name=name,
                dtype=str(tensor.dtype).removeprefix("torch."),
                global_shape=portion.global_shape,
                offset=box.offset,
                shape=box.shape,
            )
            target[piece] = tensor[local.slices()]
    return target


def serve(channel: sw.Channel, sizes: Sizes, rank: int, tp: int, num_updates: int) -> dict[str, torch.Tensor]:
    """Take as many updates as the trainers send; returns the tensors."""
    tensors = tensors_of(sizes, rank, tp, torch.bfloat16)
    target = target_of(tensors, sizes, rank, tp)
    report = None
    for _ in range(num_updates):
        # Here a server would finish its requests, and go on with them afterwards.
        report = sw.stream(None, target, channel=channel, delta=True, last=report)
        if rank == 0:
            print(f"tp={tp}: {report.sent_bytes} bytes for {report.needed_bytes}, digest {report.digest}")
    return tensors


def main() -> None:
    """Serve as one rank of a group that follows the trainers in the world."""
    asked = argparse.ArgumentParser()
    asked.add_argument(
        "--first-rank", type=int, required=True, help="the rank of the world with which the group begins"
    )
    asked.add_argument("--tp", type=int, required=True, help="ranks of the group")
    asked.add_argument("--updates", type=int, default=3)
    arguments = asked.parse_args()
    channel = sw.processes(timeout_seconds=300, device=torch.device("cpu"))
    serve(channel, Sizes(), channel.rank - arguments.first_rank, arguments.tp, arguments.updates)
    channel.close()


if __name__ == "__main__":
    main()
