"""Modules that stay in float32 among others in bfloat16, and models of transformers in bfloat16, unmodified."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import shardwise as sw
from tests.engine.expected import adamw
from tests.engine.models import Batch
from tests.engine.oracle import RankOrder
from tests.engine.ranks import assert_same_bits, train_on_ranks


class Routed(nn.Module):
    """Modules that users keep in float32: a batch norm, an RMS norm, and a router between experts."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 3)
        self.batch_norm = nn.BatchNorm2d(4)
        self.rms_norm = nn.RMSNorm(4)
        self.router = nn.Linear(4, 2)
        self.experts = nn.ModuleList([nn.Linear(4, 3) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.rms_norm(self.batch_norm(self.convolution(x)).mean((2, 3)))
        share = self.router(hidden).softmax(-1)
        return torch.stack([share[:, at, None] * expert(hidden) for at, expert in enumerate(self.experts)]).sum(0)


def routed() -> Routed:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Routed()


def images(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(12, 3, 6, 6, generator=generator),
        "y": torch.randint(0, 3, (12,), generator=generator),
    }


def image_loss(output: torch.Tensor, batch: Batch) -> torch.Tensor:
    return nn.functional.cross_entropy(output.float(), batch["y"])


def keep_by_hand(model: nn.Module, kept: tuple[str, ...]) -> None:
    """Give the named modules float32 inputs, and their outputs back in bfloat16."""
    for name, module in model.named_modules():
        if any(part in name.rsplit(".", 1)[-1] for part in kept) and list(module.parameters(recurse=False)):
            module.forward = _kept_forward(module.forward)


def _kept_forward(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda x: forward(x.float()).bfloat16()


@pytest.mark.parametrize("kept", [("batch_norm",), ("batch_norm", "rms_norm", "router")])
def test_kept_modules_compute_in_float32_and_give_back_bfloat16(kept: tuple[str, ...]) -> None:
    batches = [images(seed) for seed in range(3)]
    reference = routed()
    keep_by_hand(reference, kept)
    expected = RankOrder(
        model=reference,
        make_optimizer=adamw,
        loss_of=lambda model, batch: image_loss(model(batch["x"].bfloat16()), batch),
        working=lambda name: torch.float32 if name.startswith(kept) else torch.bfloat16,
    ).train(batches)
    plan = sw.Plan(precision=sw.Precision(compute="bfloat16", keep=kept))
    got = train_on_ranks(routed, plan, batches, optimizer=adamw, loss=image_loss)
    assert_same_bits(got, expected)


def test_outputs_of_kept_modules_are_in_the_compute_dtype() -> None:
    model = routed()
    kept = ("batch_norm", "rms_norm", "router")
    seen: dict[str, tuple[torch.dtype, torch.dtype]] = {}

    def watch(name: str) -> Callable[[nn.Module, tuple[torch.Tensor, ...], torch.Tensor], None]:
        def note(module: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            seen[name] = (inputs[0].dtype, output.dtype)

        return note

    plan = sw.Plan(precision=sw.Precision(compute="bfloat16", keep=kept))
    engine = sw.parallelize(model, plan, optimizer=adamw, loss=image_loss)
    for name in (*kept, "convolution"):
        model.get_submodule(name).register_forward_hook(watch(name))
    engine.evaluate(images(0))
    assert {name: output for name, (_, output) in seen.items()} == dict.fromkeys(seen, torch.bfloat16)
    assert {name: given for name, (given, _) in seen.items()} == {
        **dict.fromkeys(kept, torch.float32),
        "convolution": torch.bfloat16,
    }


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A tiny model of transformers, and what its norms are called."""

    model: str
    config: str
    settings: dict[str, Any]
    norms: str


KINDS = {
    "llama": Kind(
        model="LlamaForCausalLM",
        config="LlamaConfig",
        settings={
            "vocab_size": 61,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
        },
        norms="*norm*",
    ),
    "gpt2": Kind(
        model="GPT2LMHeadModel",
        config="GPT2Config",
        settings={
            "vocab_size": 61,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 32,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "loss_type": "ForCausalLM",
        },
        norms="*ln_*",
    ),
    "t5": Kind(
        model="T5ForConditionalGeneration",
        config="T5Config",
        settings={
            "vocab_size": 61,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 48,
            "num_layers": 2,
            "num_heads": 4,
            "dropout_rate": 0.0,
            "decoder_start_token_id": 0,
        },
        norms="*layer_norm*",
    ),
    "vit": Kind(
        model="ViTForImageClassification",
        config="ViTConfig",
        settings={
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": 16,
            "patch_size": 8,
            "num_labels": 5,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
        },
        norms="*layernorm*",
    ),
}


def transformer(name: str) -> nn.Module:
    import transformers as tf  # seconds, which to collect tests does not take

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        kind = KINDS[name]
        model: nn.Module = getattr(tf, kind.model)(getattr(tf, kind.config)(**kind.settings))
        return model


def batch_for(name: str, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    if name == "vit":
        pixels = torch.randn(4, 3, 16, 16, generator=generator)
        return {"pixel_values": pixels, "labels": torch.randint(0, 5, (4,), generator=generator)}
    words = torch.randint(1, 61, (4, 12), generator=generator)
    return {"input_ids": words, "labels": words}


def parameters_in(module: nn.Module, patterns: tuple[str, ...]) -> Iterator[tuple[str, nn.Module]]:
    """Modules whose own name fits a pattern and which hold parameters."""
    for name, each in module.named_modules():
        last = name.rsplit(".", 1)[-1]
        if any(fnmatchcase(last, pattern) for pattern in patterns) and list(each.parameters(recurse=False)):
            yield name, each


@pytest.mark.parametrize("keeps_norms", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_a_transformer_in_bfloat16_trains_as_written_by_hand(name: str, keeps_norms: bool) -> None:
    patterns = (KINDS[name].norms,) if keeps_norms else ()
    batches = [batch_for(name, seed) for seed in range(3)]
    reference = transformer(name)
    kept = list(parameters_in(reference, patterns))
    assert bool(kept) == keeps_norms
    for _, module in kept:
        module.forward = _kept_forward(module.forward)
    names = tuple(f"{module_name}." for module_name, _ in kept)

    def loss_of(model: nn.Module, batch: Batch) -> torch.Tensor:
        given = {key: value.bfloat16() if value.is_floating_point() else value for key, value in batch.items()}
        loss: torch.Tensor = model(**given).loss
        return loss

    expected = RankOrder(
        model=reference,
        make_optimizer=adamw,
        loss_of=loss_of,
        num_microbatches=2,
        clip=1.0,
        working=lambda each: torch.float32 if each.startswith(names) else torch.bfloat16,
    ).train(batches)
    plan = sw.Plan(
        merge=sw.Merge(microbatches=2),
        precision=sw.Precision(compute="bfloat16", keep=patterns),
        clip_grad_norm=1.0,
    )
    got = train_on_ranks(lambda: transformer(name), plan, batches, optimizer=adamw, loss=None)
    assert_same_bits(got, expected)
    assert got.losses == pytest.approx(expected.losses, rel=1e-12)


@pytest.mark.parametrize("name", KINDS)
def test_a_transformer_in_bfloat16_learns_on_two_ranks(name: str) -> None:
    plan = sw.Plan(
        mesh=sw.Mesh(dp_shard=2),
        precision=sw.Precision(compute="bfloat16", keep=(KINDS[name].norms,)),
        clip_grad_norm=1.0,
    )
    batches = [batch_for(name, 0)] * 6
    trained = train_on_ranks(lambda: transformer(name), plan, batches, optimizer=adamw, loss=None)
    assert trained.losses[-1] < 0.9 * trained.losses[0]


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize(
    "made", [parametrizations.weight_norm, parametrizations.spectral_norm, parametrizations.orthogonal]
)
def test_parametrized_modules_may_be_kept(made: Any, stage: int) -> None:
    """They compute in float32, and the weight that is computed stays in it."""

    def run(channel: sw.Channel) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6), made(nn.Linear(6, 4)))
        dtypes: list[torch.dtype] = []
        model[1].register_forward_pre_hook(lambda module, _: dtypes.append(module.weight.dtype))
        plan = sw.Plan(
            mesh=sw.Mesh(dp_shard=2),
            sharding=sw.Sharding(stage=stage),
            precision=sw.Precision(compute="bfloat16", keep=("1",)),
        )
        engine = sw.parallelize(
            model,
            plan,
            optimizer=lambda each: torch.optim.SGD(each, lr=0.1),
            loss=lambda output, _: output.float().square().mean(),
            channel=channel,
        )
        losses = [engine.step({"input": torch.linspace(-1, 1, 48).view(8, 6)}).loss for _ in range(2)]
        assert set(dtypes) == {torch.float32}
        return losses

    assert len(sw.simulate(2, run)) == 2
