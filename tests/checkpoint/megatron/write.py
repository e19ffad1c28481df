"""Writes the folders of `folders.tar.xz` with the real megatron-core, and what they have to be read as.

    python3.11 -m venv V; V/bin/pip install torch==2.13.0 megatron-core==0.16.1 safetensors
    V/bin/python -m tests.checkpoint.megatron.write [--reference] [NAME ...]

Each folder is what `dist_checkpointing.save` left after `STEPS` updates. Beside it, `NAME.safetensors` has what
Megatron's own loader makes of it, in one process: the state dict of the model, masters and moments under its names, the
logits of a batch, and the losses of the next updates. Megatron wants GPUs: here its CUDA calls land on the processor.
Cases of older versions were written by this file as it was then (see its history), and are not written again.
"""

import argparse
import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn
from torch.overrides import TorchFunctionMode

from tests.checkpoint.megatron.cases import (
    CASES,
    DECAY,
    LENGTH,
    LR,
    MODELS,
    MORE_STEPS,
    PADDED,
    ROWS,
    STEPS,
    Case,
    batch_of,
)
from tests.checkpoint.megatron.folders import changed_folders


class OnTheProcessor(TorchFunctionMode):
    """Makes tensors for CUDA on the processor."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if "cuda" in str(kwargs.get("device", "")):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


class NoStream:
    """A stream on which nothing runs."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


def without_cuda() -> None:
    """Let CUDA calls of Megatron do nothing, or the same on the processor."""
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.Stream = torch.cuda.current_stream = lambda *_, **__: NoStream()  # type: ignore[assignment, misc]
    torch.cuda.stream = lambda *_: contextlib.nullcontext()  # type: ignore[assignment]
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    kind = torch.Tensor.type

    def type_of(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found = kind(self, *args, **kwargs)
        return (
            found.replace("torch.cuda.", "torch.").replace("torch.", "torch.cuda.") if isinstance(found, str) else found
        )

    torch.Tensor.type = type_of  # type: ignore[method-assign, assignment]


class Run:
    """A model and its optimizer in Megatron, on the ranks that there are."""

    def __init__(self, case: Case, *, tp: int, pp: int, ep: int) -> None:
        from megatron.core import parallel_state
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.distributed.finalize_model_grads import finalize_model_grads
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
        from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
        from megatron.core.transformer import TransformerConfig
        from megatron.core.transformer.moe import moe_utils

        moe_utils.te_general_gemm = None  # left undefined without transformer_engine
        set_state = DistributedOptimizer._set_main_param_and_optimizer_states

        def set_all(self: Any, parameter: Any, tensors: dict[str, Any]) -> None:
            # It loads the count of updates of torch's AdamW before, and then wants it among what it loads.
            if hasattr(self.optimizer, "state"):
                tensors = {**self._get_main_param_and_optimizer_states(parameter), **tensors}
            set_state(self, parameter, tensors)

        DistributedOptimizer._set_main_param_and_optimizer_states = set_all
        CudaRNGStatesTracker.fork = lambda *_: contextlib.nullcontext()  # nothing here is random
        parallel_state.initialize_model_parallel(tp, pp, expert_model_parallel_size=ep)
        self.case = case
        self.data = dist.get_world_size() // (tp * pp)
        self.data_rank = parallel_state.get_data_parallel_rank()
        self.tp_rank = parallel_state.get_tensor_model_parallel_rank()
        self.first, self.last = (
            parallel_state.is_pipeline_first_stage(),
            parallel_state.is_pipeline_last_stage(),
        )
        dtype = torch.bfloat16 if case.bf16 else torch.float32
        self.config = TransformerConfig(
            **MODELS[case.model],
            use_cpu_initialization=True,
            pipeline_dtype=dtype,
            params_dtype=dtype,
            bf16=case.bf16,
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=pp,
            expert_model_parallel_size=ep,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            gradient_accumulation_fusion=False,
            masked_softmax_fusion=False,
            bias_activation_fusion=False,
            bias_dropout_fusion=False,
            apply_rope_fusion=False,
            persist_layer_norm=False,
            batch_p2p_comm=False,
            moe_token_dispatcher_type="allgather",
            moe_aux_loss_coeff=0.0,
        )
        distributed = bool(case.form)
        self.inner = self.model_of()
        ddp = DistributedDataParallelConfig(use_distributed_optimizer=distributed, overlap_grad_reduce=False)
        self.model = DistributedDataParallel(self.config, ddp, self.inner)
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=LR,
                weight_decay=DECAY,
                bf16=case.bf16,
                params_dtype=dtype,
                use_distributed_optimizer=distributed,
                clip_grad=0.0,
            ),
            [self.model],
        )
        # It also gives each group its decay.
        self.scheduler = OptimizerParamScheduler(
            self.optimizer,
            **{"init_lr": LR, "max_lr": LR, "min_lr": LR, "lr_warmup_steps": 0, "lr_decay_steps": 1000},
            **{"start_wd": DECAY, "end_wd": DECAY, "wd_incr_steps": 1000},
            lr_decay_style="constant",
            wd_incr_style="constant",
        )
        self.config.finalize_model_grads_func = finalize_model_grads
        self.config.grad_scale_func = self.optimizer.scale_loss

    def model_of(self) -> Any:
        """The part of the model that a stage has."""
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

        spec = get_gpt_layer_local_spec(
            num_experts=self.config.num_moe_experts,
            moe_grouped_gemm=False,
            qk_layernorm=self.config.qk_layernorm,
            normalization=self.config.normalization,
        )
        if self.case.te_names:
            del spec.submodules.sharded_state_dict_keys_map["pre_mlp_layernorm."]
        torch.manual_seed(0)
        model: Any = GPTModel(
            self.config,
            spec,
            vocab_size=PADDED,
            max_sequence_length=LENGTH,
            pre_process=self.first,
            post_process=self.last,
            position_embedding_type="learned_absolute" if self.case.model == "gpt" else "rope",
            share_embeddings_and_output_weights=self.case.tied,
        )
        with torch.no_grad():  # biases and norms too: of zeros and ones nothing could be told
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(0.1 * torch.randn(parameter.shape))
        if self.case.bf16:
            model = model.bfloat16()
        return model

    def update(self, step: int) -> float:
        """Train with a batch; returns the mean loss before."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        batch = {key: each.chunk(self.data)[self.data_rank] for key, each in batch_of(step).items()}
        num_rows = ROWS // self.data
        microbatches = self.config.pipeline_model_parallel_size
        parts = iter([{key: each.chunk(microbatches)[at] for key, each in batch.items()} for at in range(microbatches)])

        def forward(part: Iterator[dict[str, torch.Tensor]], model: Any) -> tuple[torch.Tensor, Any]:
            words = next(part)
            output = model(words["input"], positions(words["input"]), None, labels=words["target"])

            def loss_of(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
                loss = losses.float().mean()
                return loss, {"loss": loss.detach().clone()}  # it is divided in place

            return output, loss_of

        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        losses = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=parts,
            model=self.model,
            num_microbatches=microbatches,
            seq_length=LENGTH,
            micro_batch_size=num_rows // microbatches,
            forward_only=False,
        )
        self.optimizer.step()
        self.scheduler.step(ROWS)
        return sum(float(each["loss"]) for each in losses) / microbatches if losses else 0.0

    def metadata(self) -> dict[str, Any]:
        """What Megatron says of a save."""
        form = {"distrib_optim_sharding_type": self.case.form} if self.case.form else {}
        return {**dict.fromkeys((*self.case.metadata, "chained_optim_avoid_prefix"), True), **form}

    def sharded(self, *, is_loading: bool) -> dict[str, Any]:
        """What is given to the save and to the load."""
        model = self.model.module.sharded_state_dict(metadata=self.metadata())
        optimizer = self.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=self.metadata())
        return {"model": model, "optimizer": optimizer}

    def load(self, folder: Path, *, model_only: bool = False) -> None:
        """Load a save."""
        from megatron.core import dist_checkpointing

        if model_only:
            model = self.model.module.sharded_state_dict(metadata=self.metadata())
            self.model.module.load_state_dict(dist_checkpointing.load({"model": model}, str(folder))["model"])
            return
        if self.case.form:
            self.update(0)  # there has to be a state, into which it loads
        loaded = dist_checkpointing.load(self.sharded(is_loading=True), str(folder))
        self.model.module.load_state_dict(loaded["model"])
        self.optimizer.load_state_dict(loaded["optimizer"])
        # Without Apex, the distributed optimizer gives all parameters one tensor as the count of updates, and each of
        # them then adds one to it.
        for optimizer in self.optimizer.chained_optimizers:
            for state in optimizer.optimizer.state.values():
                state["step"] = state["step"].clone()


def positions(words: torch.Tensor) -> torch.Tensor:
    """The place of each word in its row."""
    return torch.arange(words.shape[1]).expand(words.shape)


def started(rank: int, ranks: int, folder: str) -> None:
    """Make the process a rank."""
    os.environ.update(LOCAL_RANK=str(rank), RANK=str(rank), WORLD_SIZE=str(ranks))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous{ranks}", rank=rank, world_size=ranks)
    without_cuda()


def write_case(rank: int, name: str, folder: str) -> None:
    """Train and save, on one rank."""
    case = CASES[name]
    started(rank, case.ranks, folder)
    with OnTheProcessor():
        from megatron.core import dist_checkpointing

        run = Run(case, tp=case.tp, pp=case.pp, ep=case.ep)
        for step in range(STEPS):
            run.update(step)
        saved = Path(folder) / "saved" / f"iter_{STEPS:07d}"
        saved.mkdir(parents=True, exist_ok=True)
        args = argparse.Namespace(num_layers=2, padded_vocab_size=PADDED, tensor_model_parallel_size=case.tp)
        values = {"args": args, "checkpoint_version": 3.0, "iteration": STEPS}
        values["opt_param_scheduler"] = run.scheduler.state_dict()
        place = saved
        if case.kind == "legacy":
            write_legacy(run, saved)
            place = Path(folder) / "twin"  # from which the reference is made
            place.mkdir(exist_ok=True)
        sharded = run.sharded(is_loading=False)
        dist_checkpointing.save({**values, **sharded}, str(place), ("torch_dist", 1), content_metadata=run.metadata())
        if case.ep > 1:  # its optimizer loads on as many ranks alone, so that this run goes on
            losses = torch.tensor([run.update(STEPS + step) for step in range(MORE_STEPS)], dtype=torch.float64)
            dist.all_reduce(losses)
            torch.save(losses / case.ranks, f"{folder}/losses.pt")
        if rank == 0:
            (saved.parent / "latest_checkpointed_iteration.txt").write_text(str(STEPS))
    dist.barrier()
    dist.destroy_process_group()


def write_legacy(run: Run, saved: Path) -> None:
    """What Megatron-LM writes with `--ckpt-format torch`: a file of each model-parallel rank."""
    from megatron.core import parallel_state

    tp, pp = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_pipeline_model_parallel_rank()
    place = saved / (f"mp_rank_{tp:02d}_{pp:03d}" if run.case.pp > 1 else f"mp_rank_{tp:02d}")
    place.mkdir(exist_ok=True)
    args = argparse.Namespace(
        num_layers=2,
        swiglu=bool(MODELS[run.case.model].get("gated_linear_unit")),
        tensor_model_parallel_size=run.case.tp,
        pipeline_model_parallel_size=run.case.pp,
        padded_vocab_size=PADDED,
        num_attention_heads=4,
    )
    model = run.model.module.state_dict_for_save_checkpoint()
    state = {"args": args, "checkpoint_version": 3.0, "iteration": STEPS, "model": model}
    if parallel_state.get_data_parallel_rank() == 0:
        torch.save({**state, "optimizer": run.optimizer.state_dict()}, place / "model_optim_rng.pt")


def write_reference(rank: int, name: str, folder: str) -> None:
    """Load with Megatron in one process, and go on."""
    case = CASES[name]
    started(rank, 1, folder)
    with OnTheProcessor():
        run = Run(case, tp=1, pp=1, ep=1)
        twin = Path(folder) / "twin"
        saved = twin if twin.exists() else Path(folder) / name / f"iter_{STEPS:07d}"
        run.load(saved, model_only=case.ep > 1)
        made = dict(values_of(run))
        if case.ep > 1:
            made |= moments_in(saved)
        batch = batch_of(0)
        with torch.no_grad():
            made["logits"] = run.inner(batch["input"][:2], positions(batch["input"][:2]), None).float()
        if case.ep > 1:
            made["losses"] = torch.load(f"{folder}/losses.pt")
        else:
            made["losses"] = torch.tensor([run.update(STEPS + step) for step in range(MORE_STEPS)], dtype=torch.float64)
        from safetensors.torch import save_file

        save_file({key: each.clone().contiguous() for key, each in made.items()}, f"{folder}/{name}.safetensors")
    dist.destroy_process_group()


def values_of(run: Run) -> Iterator[tuple[str, torch.Tensor]]:
    """The state dict of the model, masters and moments."""
    for name, tensor in run.inner.state_dict().items():
        if isinstance(tensor, torch.Tensor):
            yield name, tensor.detach().clone()
    for optimizer in run.optimizer.chained_optimizers:
        for name, parameter in run.inner.named_parameters():
            state = state_of(optimizer, parameter)
            for key, each in (state or {}).items():
                if key in ("exp_avg", "exp_avg_sq") or (key == "param" and each.dtype != parameter.dtype):
                    whole = each.detach().clone().view(parameter.shape)
                    yield f"{name}/{'master' if key == 'param' else key}", whole


def moments_in(folder: Path) -> dict[str, torch.Tensor]:
    """The moments in a save of experts on several ranks, as Megatron loads them: layers and experts are stacks."""
    from megatron.core import dist_checkpointing

    found: dict[str, torch.Tensor] = {}
    for key, tensor in dist_checkpointing.load_plain_tensors(str(folder)).items():
        if not key.startswith("optimizer.state."):
            continue
        moment, _, name = key.removeprefix("optimizer.state.").partition(".")
        before, stack, rest = name.partition("layers.")
        for layer, of_layer in enumerate(tensor) if stack else [(0, tensor)]:
            called = f"{before}layers.{layer}.{rest}" if stack else name
            called = called.replace("self_attention.linear_qkv.layer_norm_", "input_layernorm.")
            parts = [(called, of_layer)]
            if "experts.experts." in called:
                parts = [
                    (called.replace("experts.experts.", f"experts.local_experts.{number}."), each)
                    for number, each in enumerate(of_layer)
                ]
            found |= {f"{each}/{moment}": part for each, part in parts}
    return found


def state_of(optimizer: Any, parameter: torch.Tensor) -> dict[str, torch.Tensor] | None:
    """The master and the moments of a parameter; None where another optimizer has them."""
    if hasattr(optimizer, "_get_main_param_and_optimizer_states"):
        if parameter not in optimizer.model_param_gbuf_map:
            return None
        return dict(optimizer._get_main_param_and_optimizer_states(parameter))
    master = getattr(parameter, "main_param", parameter)
    state = optimizer.optimizer.state.get(master)
    return {"param": master, **state} if state else None


def write_folder(name: str, into: Path, only: str) -> None:
    """Write one folder anew, and its reference; only: "reference", of the folder that is there."""
    case = CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        if only != "reference":
            spawn(write_case, (name, folder), nprocs=case.ranks)
            shutil.rmtree(into / name, ignore_errors=True)
            shutil.copytree(f"{folder}/saved", into / name)
        shutil.copytree(into / name, f"{folder}/{name}")
        spawn(write_reference, (name, folder), nprocs=1)
        shutil.copyfile(f"{folder}/{name}.safetensors", into / f"{name}.safetensors")


if __name__ == "__main__":
    first, *names = [*sys.argv[1:], ""]
    only = "reference" if first == "--reference" else ""
    names = [each for each in (*names, "" if only else first) if each]
    with changed_folders() as place:
        for each in names or [name for name, case in CASES.items() if case.version == "0.16"]:
            write_folder(each, place, only)
