"""`rules="auto"` on every architecture of transformers: two updates over two simulated ranks against one process.

    python -m benchmarks.survey_tensor [--only bert,gpt2] [--answers FILE] [--write]

Tiny models of random values, in float64 throughout (what models compute in float32 is computed in float64 too). An
architecture is right when losses, gradient norms and all parameters agree to 1e-9; refused when parallelize or the
first step says why not; wrong otherwise; not built when one process does not run it on the inputs that it is given.
Answers are kept in a file, and a second call goes on.
"""

import argparse
import json
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shardwise as sw
from shardwise.engine.samples import sample_for
from shardwise.errors import PeerError

TOLERANCE = 1e-9
SECONDS_EACH = 30
BATCH = 40
RESULTS = Path(__file__).parent / "results" / "tensor-auto.md"

_SMALL: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "text_vocab_size"), 64),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "emb_dim", "model_dim", "hidden_dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_decoder_layers", "num_encoder_layers", "text_layers", "num_block"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "num_decoder_attention_heads", "num_encoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "d_head", "attention_head_size", "kv_channels", "v_head_dim"), 8),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim"), 48),
    **dict.fromkeys(("ffn_hidden_size", "intermediate_size_mlp", "d_inner", "dim_feedforward", "hidden_dim_mlp"), 48),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_target_positions"), 64),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size", "moe_ffn_hidden_size"), 12),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "num_experts_per_token"), 2),
    **{"n_group": 1, "topk_group": 1, "n_shared_experts": 1, "moe_num_shared_experts": 1, "zero_expert_num": 2},
    **{"first_k_dense_replace": 1, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_head_dim": 16},
    **{"qk_nope_head_dim": 8, "sliding_window": 8, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 4},
    **{"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "state_size": 8, "n_groups": 1},
    **{"chunk_size": 4, "image_size": 32, "patch_size": 8, "num_mel_bins": 16, "max_source_positions": 16},
    **{"embedding_size": 32, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2, "num_labels": 3},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "sep_token_id": 3},
    **{"conv_dim": [16, 16], "conv_kernel": [10, 3], "conv_stride": [5, 2], "num_feat_extract_layers": 2},
    **{
        "vocab_size_per_layer_input": 64,
        "hidden_size_per_layer_input": 8,
        "type_vocab_size": 2,
        "mem_len": 0,
        "rotary_dim": 4,
    },
}
"""Small values of what configurations have; each takes those that it knows."""

_OTHER_RULES = {"dropout": 0.0, "layerdrop": 0.0, "apply_spec_augment": False}

Answer = dict[str, Any]


def architectures() -> list[str]:
    """Every type of model that some head of these kinds is made for, and every other that has a base model."""
    from transformers import CONFIG_MAPPING

    carrying = {key for key in CONFIG_MAPPING if getattr(CONFIG_MAPPING[key], "base_model_tp_plan", None)}
    return sorted(CONFIG_MAPPING.keys(), key=lambda key: (key in carrying, key))


def tiny_model(kind: str) -> nn.Module:
    """A model of this type with few, small layers."""
    import transformers

    config_class = transformers.CONFIG_MAPPING[kind]
    config = _tiny_config(config_class)
    config._attn_implementation = config._experts_implementation = "eager"
    for mapping in (
        "AutoModelForCausalLM",
        "AutoModelForSeq2SeqLM",
        "AutoModelForMaskedLM",
        "AutoModelForImageClassification",
        "AutoModelForSpeechSeq2Seq",
        "AutoModelForCTC",
        "AutoModelForAudioClassification",
        "AutoModel",
    ):
        known = getattr(transformers, mapping)
        if config_class in list(known._model_mapping.keys()):
            return known.from_config(config)  # type: ignore[no-any-return]
    raise LookupError("no automatic class makes a model of it")


def _tiny_config(config_class: Any) -> Any:
    standard = config_class()
    settings: dict[str, Any] = {}
    inner = getattr(config_class, "sub_configs", {})
    for key, value in standard.to_dict().items():
        if key in inner or isinstance(value, dict):
            continue
        small = _small(key, value)
        if small is not None:
            settings[key] = small
    for key in inner:
        if (part := getattr(standard, key, None)) is not None:
            settings[key] = _tiny_config(type(part))
    if "kv_lora_rank" in settings and "num_key_value_heads" in settings:
        settings["num_key_value_heads"] = settings["num_attention_heads"]
    for key in ("layer_types", "mlp_layer_types"):
        if listed := getattr(standard, key, None):
            kinds = list(dict.fromkeys(listed))
            settings[key] = (kinds * 2)[: max(2, len(kinds))]
            settings["num_hidden_layers"] = len(settings[key])
    return _first_that_builds(config_class, settings)


def _first_that_builds(config_class: Any, settings: dict[str, Any]) -> Any:
    """A configuration may refuse single settings: those are left out one by one."""
    try:
        return config_class(**settings)
    except Exception as error:
        said = str(error)
        for key in sorted(settings, key=lambda each: (each not in said, each)):
            try:
                return config_class(**{name: value for name, value in settings.items() if name != key})
            except Exception:
                continue
        raise


def _small(key: str, value: Any) -> Any:
    if key in _SMALL:
        small = _SMALL[key]
        if isinstance(value, list | tuple):
            return small if isinstance(small, list) else [small] * len(value)
        return (
            small if value is not None and not isinstance(small, list) else (small if isinstance(value, list) else None)
        )
    if "drop" in key and isinstance(value, float):
        return 0.0
    return _OTHER_RULES.get(key)


def survey_one(kind: str) -> Answer:
    """What becomes of one type of model."""

    def made() -> nn.Module:
        torch.manual_seed(0)
        model = tiny_model(kind).double()
        with torch.no_grad():  # what begins as zeros or ones hides what is wrong
            for each in model.parameters():
                each.add_(torch.randn_like(each) * 0.05)
        return model.train()

    try:
        model = made()
        if not _attends(model):
            return {"kind": kind, "verdict": "no attention", "why": ""}
        batch = sample_for(model)
        if batch is None:
            return {"kind": kind, "verdict": "not built", "why": "no inputs known"}
        carried = _carries(model)
        alone = _trained(1, made, batch, None)
    except Exception as error:
        return {"kind": kind, "verdict": "not built", "why": _first_line(error)}
    answer: Answer = {"kind": kind, "source": "carried" if carried else "inferred", "attention": _attends(model)}
    started = time.perf_counter()
    try:
        cut = _trained(2, made, batch, "auto")
    except PeerError as error:
        return {**answer, "verdict": "out of time", "why": _first_line(error)}
    except sw.ShardwiseError as error:
        return {**answer, "verdict": "refused", "why": _first_line(error)}
    except Exception as error:
        return {**answer, "verdict": "failed", "why": f"{type(error).__name__}: {_first_line(error)}"}
    largest = max(_difference(one, other) for one, other in zip(alone[0], cut[0], strict=True))
    share = f"{cut[1]:.0%} of the elements cut"
    verdict = "right" if largest <= TOLERANCE else "wrong"
    why = share if verdict == "right" else f"differs by {largest:.1e}; {share}"
    return {**answer, "verdict": verdict, "why": why, "seconds": round(time.perf_counter() - started, 1)}


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:240] if str(error).strip() else type(error).__name__


def _carries(model: nn.Module) -> bool:
    from shardwise.engine.tensor.cut_outline import tensor_outline

    return bool(tensor_outline(model).carried)


def _attends(model: nn.Module) -> bool:
    return any("attention" in type(each).__name__.lower() or "attn" in name for name, each in model.named_modules())


def _trained(num_ranks: int, made: Any, batch: Any, rules: Any) -> tuple[list[torch.Tensor], float]:
    """Losses, norms and parameters after two updates, and the share of elements that are cut."""
    building = threading.Lock()

    def run(channel: sw.Channel) -> tuple[list[torch.Tensor], float]:
        with building:  # ranks are threads, and draw from one generator
            model = made()
        engine = sw.parallelize(
            model,
            sw.Plan(mesh=sw.Mesh(tp=num_ranks), tensor=sw.Tensor(rules=rules)),
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05),
            loss=lambda output, _: _loss(output),
            channel=channel,
        )
        reports = [engine.step(batch) for _ in range(2)]
        values = [torch.tensor([each.loss, each.grad_norm], dtype=torch.float64) for each in reports]
        whole = [tensor.double() for _, tensor in sw.full(engine)]
        cuts = engine.tensor_decision.plan.cuts
        shapes = [each.shape for each in cuts.values()]
        share = sum(torch.Size(shape).numel() for shape in shapes) / max(1, sum(each.numel() for each in whole))
        return [*values, *whole], share

    return sw.simulate(num_ranks, run, timeout_seconds=SECONDS_EACH)[0]


def _loss(output: Any) -> torch.Tensor:
    """A number that depends on every element of what the model gives first."""
    values = list(output.values()) if isinstance(output, dict) else [output]
    first = next(each for each in values if isinstance(each, torch.Tensor) and each.is_floating_point())
    weights = torch.linspace(0.5, 1.5, first.numel(), dtype=first.dtype).view(first.shape)
    return (first.double() * weights).square().mean() + (first * weights).mean()


def _difference(one: torch.Tensor, other: torch.Tensor) -> float:
    if one.shape != other.shape:
        return float("inf")
    if not one.numel():
        return 0.0
    same = (one == other) | (one.isnan() & other.isnan())
    apart = (one - other).abs().masked_fill(same, 0.0)
    return float(apart.max() / max(1.0, float(one.abs().nan_to_num(0).max())))


def _compute_in_float64() -> None:
    """What models compute in float32, they compute in float64 here, so that a difference is an error."""
    torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign]
    torch.float32 = torch.float = torch.float64


def _survey_here(kinds: Sequence[str]) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    _compute_in_float64()
    torch.set_default_dtype(torch.float64)
    import transformers

    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    for kind in kinds:
        signal.alarm(SECONDS_EACH * 2)  # the process ends
        print(json.dumps(survey_one(kind)), flush=True)


def _surveyed(kinds: Sequence[str]) -> Iterator[Answer]:
    """Batch by batch in processes of their own; one that dies costs its architecture."""
    pending = list(kinds)
    while pending:
        batch, pending = pending[:BATCH], pending[BATCH:]
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.survey_tensor", "--here", ",".join(batch)]
        count = 0
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith("{"):
                    count += 1
                    yield json.loads(line)
        left = batch[count:]
        if left:
            late = process.returncode == -signal.SIGALRM
            why = f"more than {2 * SECONDS_EACH} s" if late else f"the process ended with {process.returncode}"
            yield {"kind": left[0], "verdict": "out of time" if late else "failed", "why": why}
            pending = left[1:] + pending


def _table(answers: Sequence[Answer]) -> str:
    import transformers

    counts = Counter(each["verdict"] for each in answers)
    attending = [each for each in answers if each.get("attention") and each["verdict"] != "out of time"]
    right = sum(each["verdict"] == "right" for each in attending)
    lines = [
        '# `rules="auto"` on every architecture of transformers',
        "",
        f"`python -m benchmarks.survey_tensor --write`, transformers {transformers.__version__}, torch "
        f"{torch.__version__}: tp=2 against one process, two updates in float64.",
        "",
        ", ".join(f"{verdict}: {count}" for verdict, count in sorted(counts.items()))
        + f". Of {len(attending)} with attention that one process runs in time, {right} are right.",
        "",
        "| architecture | plan | verdict | |",
        "|---|---|---|---|",
    ]
    for each in answers:
        why = str(each["why"]).replace("|", "/")
        lines.append(f"| {each['kind']} | {each.get('source', '')} | {each['verdict']} | {why} |")
    return "\n".join(lines) + "\n"


def _asked(only: str) -> list[str]:
    return only.split(",") if only else architectures()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--here", default="")
    parser.add_argument("--answers", default="tensor-auto.jsonl")
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    if given.here:
        _survey_here(given.here.split(","))
        return
    path = Path(given.answers)
    known = {each["kind"]: each for each in map(json.loads, path.read_text().splitlines())} if path.exists() else {}
    with path.open("a") as kept:
        for each in _surveyed([kind for kind in _asked(given.only) if kind not in known]):
            known[each["kind"]] = each
            kept.write(json.dumps(each) + "\n")
            kept.flush()
            print(f"{each['kind']:28} {each.get('source', ''):9} {each['verdict']:10} {each['why']}", flush=True)
    answers = list(known.values())
    if given.write:
        RESULTS.write_text(_table(answers), encoding="utf-8")


if __name__ == "__main__":
    main()
