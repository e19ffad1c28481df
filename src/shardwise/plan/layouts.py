"""Which layout? What every layout of some ranks holds and sends, and about how long an update takes under it.

The bytes of parameters, gradients, masters and the optimizer are those that `memory` gives a run. The model is known by
its sizes alone, so it is a stack of equal blocks between an embedding and a head. The rest is estimated:

    activations of a block    (10 + 24 / tp) T h bytes, or 2 T h where it runs again   T tokens, h wide
    logits                    10 V T bytes on the last stage                           V words
    an update                 computing 6 N T, a third of the blocks more where they run again,
                              waiting by the formula of 1f1b, and all that is sent, as if nothing hid it

The first line is that of Korthikanti et al., 2022 (arXiv:2205.05198, section 4.2), with an attention that keeps no
scores. Such an estimate puts layouts in order. A measured step says how long one takes.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

from shardwise.errors import PlanError, plural
from shardwise.plan.buckets import OwnedLayout, plan_ownership
from shardwise.plan.memory import footprint, traffic
from shardwise.plan.outlines import Outline, describe
from shardwise.plan.residency import count_gathers
from shardwise.plan.specs import Activations, Merge, Pipeline, Plan, Precision, Sharding, Tensor
from shardwise.plan.stages import place
from shardwise.plan.timeline import ideal_bubble
from shardwise.plan.units import plan_units, unit_of
from shardwise.space import Mesh

GB = 1e9


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """A decoder by its sizes: an embedding, equal blocks, a head."""

    parameters: int
    layers: int
    hidden: int
    vocabulary: int = 32_000
    heads: int | None = None
    kv_heads: int | None = None
    """None: as many as heads."""
    is_tied: bool = False
    """The head is the embedding."""
    active_part: float = 1.0
    """The part of a block's parameters that one token uses: less than 1 where there are experts."""

    def __post_init__(self) -> None:
        problems = [
            f"{name}: {value!r} is not a whole number of at least 1"
            for name in ("parameters", "layers", "hidden", "vocabulary", "heads", "kv_heads")
            if (value := getattr(self, name)) is not None and (type(value) is not int or value < 1)
        ]
        if not problems and self.block < 2 * self.hidden:
            problems.append(
                f"parameters: {self.parameters} in all leave {self.block} for each of {plural(self.layers, 'layer')}, "
                f"besides {self.outer} of the embedding and the head; is one of the numbers wrong?"
            )
        if problems:
            raise PlanError(*problems)

    @classmethod
    def from_config(cls, config: Mapping[str, Any], *, parameters: int | None = None, **given: int) -> "ModelSize":
        """The sizes in a `config.json`, under the names that are in use; raises PlanError where one is missing.

        parameters: None: estimated from the other sizes, with three matrices in each feed-forward part. given: sizes
        that come before those of the file.
        """
        of_text = config.get("text_config")
        config = {**config, **(of_text if isinstance(of_text, Mapping) else {})}

        def known(*names: str) -> int | None:
            found = (config.get(name) for name in names)
            return next((value for value in found if type(value) is int and value > 0), None)

        needed = {
            "layers": given.get("layers") or known("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
            "hidden": given.get("hidden") or known("hidden_size", "n_embd", "d_model", "dim"),
            "vocabulary": given.get("vocabulary") or known("vocab_size"),
        }
        if missing := [name for name, value in needed.items() if value is None]:
            raise PlanError(f"config.json does not say {', '.join(missing)}; give --{' and --'.join(missing)}")
        heads = given.get("heads") or known("num_attention_heads", "n_head", "num_heads", "n_heads")
        kv_heads = known("num_key_value_heads")
        layers, hidden, vocabulary = (int(value or 0) for value in needed.values())
        # Files of transformers leave out what is true by default.
        is_tied = bool(config.get("tie_word_embeddings", True))
        head_width = known("head_dim") or (hidden // heads if heads else hidden)
        queries, values = (heads or 1) * head_width, (kv_heads or heads or 1) * head_width
        attention = 2 * hidden * (queries + values)
        experts = known("num_local_experts", "num_experts", "n_routed_experts") or 1
        inner = known("moe_intermediate_size") if experts > 1 else None
        inner = inner or known("intermediate_size", "n_inner", "ffn_dim", "d_ff") or 4 * hidden
        used, expert = min(experts, known("num_experts_per_tok", "top_k") or experts), 3 * hidden * inner
        block = attention + experts * expert + 2 * hidden
        outer = vocabulary * hidden * (1 if is_tied else 2)
        return cls(
            parameters=parameters or outer + layers * block,
            layers=layers,
            hidden=hidden,
            vocabulary=vocabulary,
            heads=heads,
            kv_heads=kv_heads,
            is_tied=is_tied,
            active_part=(attention + used * expert) / (attention + experts * expert),
        )

    @property
    def outer(self) -> int:
        """Parameters of the embedding and the head."""
        return self.vocabulary * self.hidden * (1 if self.is_tied else 2)

    @property
    def block(self) -> int:
        """Parameters of a block."""
        return (self.parameters - self.outer) // self.layers

    @cached_property
    def outline(self) -> Outline:
        """The model as planners see it."""
        words = self.vocabulary * self.hidden
        blocks = tuple(
            Outline(
                name=f"layers.{at}",
                kind="Block",
                own_parameters=tuple((f"layers.{at}.{name}", count) for name, count in self.matrices.items()),
            )
            for at in range(self.layers)
        )
        head = (("head.weight", 0 if self.is_tied else words),)
        return Outline(
            name="",
            kind="Decoder",
            children=(
                Outline(name="embedding", kind="Embedding", own_parameters=(("embedding.weight", words),)),
                Outline(name="layers", kind="ModuleList", is_container=True, children=blocks),
                Outline(name="head", kind="Linear", own_parameters=head),
            ),
        )

    @cached_property
    def matrices(self) -> dict[str, int]:
        """The parameters of a block: four matrices of the attention, three behind it, and norms."""
        kv = self.hidden * self.hidden * (self.kv_heads or 1) // (self.heads or 1) if self.kv_heads else self.hidden**2
        attention = {"q": self.hidden**2, "k": kv, "v": kv, "o": self.hidden**2}
        rest = self.block - 2 * self.hidden - sum(attention.values())
        if rest < 0:
            attention, rest = {}, self.block - 2 * self.hidden
        thirds = {"gate": rest // 3, "up": rest // 3, "down": rest - 2 * (rest // 3)}
        return {**attention, **thirds, "norms": 2 * self.hidden}


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What is trained on what."""

    ranks: int
    memory_bytes: float
    """Of one rank. A tenth of it stays free: for the driver, messages, and what lies between blocks of memory."""
    tokens: int = 4096
    """Of one microbatch on one data rank."""
    batch_tokens: int | None = None
    """Of an update on all data ranks; None: four microbatches for each rank."""
    ranks_per_host: int = 8
    compute: str = "bfloat16"
    flops: float = 4e14
    """Of one rank, as reached and not as sold, per second."""
    host_bandwidth: float = 3e11
    """Bytes per second from a rank to another one of its host."""
    bandwidth: float = 2.5e10
    """To a rank of another host."""

    @property
    def update_tokens(self) -> int:
        """Tokens of an update on all data ranks."""
        return self.batch_tokens or 4 * self.tokens * self.ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """A plan with what it costs: of the rank that holds most, and of an update."""

    plan: Plan
    held: Mapping[str, float]
    """Part -> bytes."""
    sent: Mapping[str, float]
    """Axis -> bytes that a rank sends per update."""
    seconds: Mapping[str, float]
    """Part of an update -> estimated seconds."""

    @property
    def total_bytes(self) -> float:
        """All that a rank holds."""
        return sum(self.held.values())

    @property
    def total_seconds(self) -> float:
        """Of an update."""
        return sum(self.seconds.values())

    @property
    def complexity(self) -> tuple[int, int]:
        """What there is to understand: axes besides data, then stages above 1 and blocks that run again."""
        mesh, runs_again = self.plan.mesh, self.plan.activations.checkpoint is not None
        return (mesh.pp > 1) + (mesh.tp > 1), (self.plan.sharding.stage > 1) + runs_again

    def fits(self, job: Job) -> bool:
        """Whether a tenth of the memory stays free."""
        return self.total_bytes <= 0.9 * job.memory_bytes

    def slower_by(self, other: "Layout") -> str:
        """What costs it most of the time that it takes longer than another layout."""
        more = {name: self.seconds[name] - other.seconds[name] for name in self.seconds}
        return max(more, key=lambda name: more[name])


def layouts(size: ModelSize, job: Job) -> list[Layout]:
    """All layouts: those that fit, the fastest first, then the others, the smallest first.

    Raises PlanError for numbers that cannot hold.
    """
    numbers = (job.ranks, job.ranks_per_host, job.tokens, job.memory_bytes)
    rates = (job.flops, job.host_bandwidth, job.bandwidth)
    if not all(0 < each < math.inf for each in (*numbers, *rates)):
        raise PlanError("ranks, ranks per host, tokens, memory, flops and bandwidths are numbers above 0")
    found = [_costed(size, job, plan) for plan in _plans(size, job)]
    if not found:
        whole = job.tokens * job.ranks
        raise PlanError(
            f"no layout of {plural(job.ranks, 'rank')} cuts an update of {job.update_tokens} tokens into microbatches "
            f"of {job.tokens}; take a multiple of {whole}, such as {max(1, round(job.update_tokens / whole)) * whole}"
        )
    return sorted(
        found, key=lambda each: (not each.fits(job), each.total_seconds if each.fits(job) else each.total_bytes)
    )


def best_of(found: Sequence[Layout], job: Job) -> Layout | None:
    """The simplest layout among those that are at most a tenth slower than the fastest; None where none fits."""
    fitting = [each for each in found if each.fits(job)]
    limit = 1.1 * min((each.total_seconds for each in fitting), default=0.0)
    near = [each for each in fitting if each.total_seconds <= limit]
    return min(near, key=lambda each: (each.complexity, each.total_seconds), default=None)


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def _plans(size: ModelSize, job: Job) -> Iterator[Plan]:
    for tp in _divisors(min(job.ranks, job.ranks_per_host)):
        cuts_heads = all(count is None or count % tp == 0 for count in (size.heads, size.kv_heads))
        for pp in _divisors(job.ranks // tp) if job.ranks % tp == 0 and cuts_heads else ():
            data = job.ranks // (tp * pp)
            microbatches, rest = divmod(job.update_tokens, data * job.tokens)
            if pp > size.layers or microbatches < 1 or rest:
                continue
            for stage, replicas in _shardings(data, tp, job):
                for checkpoint in (None, "blocks"):
                    yield Plan(
                        mesh=Mesh(pp=pp, dp_replicate=replicas, dp_shard=data // replicas, tp=tp),
                        sharding=Sharding(stage=stage, owners="dp_shard" if replicas > 1 else "all"),
                        merge=Merge(microbatches=microbatches),
                        precision=Precision(compute=job.compute),
                        pipeline=Pipeline(schedule="1f1b"),
                        tensor=Tensor(rules="auto" if tp > 1 else None),
                        activations=Activations(checkpoint=checkpoint),
                    )


def _shardings(data: int, tp: int, job: Job) -> Iterator[tuple[int, int]]:
    """Stages, and how many replicas the owners have."""
    yield from ((stage, 1) for stage in ((1, 2, 3) if data > 1 else (1,)))
    within = job.ranks_per_host // tp
    if within > 1 and data > within and data % within == 0:
        yield 3, data // within  # what is gathered stays on a host


def _costed(size: ModelSize, job: Job, plan: Plan) -> Layout:
    mesh, k = plan.mesh, plan.merge.microbatches
    runs_again = plan.activations.checkpoint is not None
    wide = job.tokens * size.hidden
    of_block = (10 + 24 / mesh.tp) * wide
    worst: dict[str, float] = {}
    between = within = 0.0
    for stage, part in enumerate(_parts(size, mesh.pp)):
        owned = _owned(size, part, mesh, plan.sharding, plan.precision, k)
        in_flight = min(mesh.pp - stage, k)
        saved = in_flight * part.num_blocks * (2 * wide if runs_again else of_block)
        held = {
            **owned.held,
            "activations": saved + (of_block if runs_again and part.num_blocks else 0.0),
            "logits": 10.0 * size.vocabulary * job.tokens if part.has_head else 0.0,
        }
        worst = max(worst, held, key=lambda each: sum(each.values()))
        within, between = max(within, owned.sent_within), max(between, owned.sent_between)
    # Two sums over tp in a forward and two in its backward, each a reduce-scatter and an all-gather.
    num_sums = (6 if runs_again else 4) * -(-size.layers // mesh.pp) * k
    of_tensor = num_sums * 2 * (mesh.tp - 1) / mesh.tp * 2 * wide
    of_pipeline = 2.0 * k * 2 * wide if mesh.pp > 1 else 0.0
    blocks = size.layers * size.block * size.active_part
    per_rank = job.update_tokens / job.ranks / job.flops
    one = 6 * (blocks + size.vocabulary * size.hidden) * per_rank
    again = 2 * blocks * per_rank if runs_again else 0.0
    bubble = ideal_bubble("1f1b", num_ranks=mesh.pp, num_chunks=1, num_microbatches=k)

    def bandwidth(span: int) -> float:
        return job.host_bandwidth if span <= job.ranks_per_host else job.bandwidth

    # Ranks stand in the order pp, dp_replicate, dp_shard, tp: the last are neighbours.
    return Layout(
        plan=plan,
        held=worst,
        sent={"data": within + between, "tensor": of_tensor, "pipeline": of_pipeline},
        seconds={
            "computing": one,
            "recomputing": again,
            "pipeline bubble": (one + again) * bubble / (1 - bubble),
            "sent along dp": within / bandwidth(mesh.tp * mesh.dp_shard)
            + between / bandwidth(mesh.tp * mesh.num_data_ranks),
            "sent along tp": of_tensor / bandwidth(mesh.tp),
            "sent along pp": of_pipeline / bandwidth(mesh.size),
        },
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Part:
    """What a stage has of a model."""

    num_blocks: int
    has_embedding: bool
    has_head: bool


def _parts(size: ModelSize, num_stages: int) -> list[_Part]:
    """By stage, as a pipeline is balanced where nothing is said of it."""
    names = [each.name for each in size.outline.modules() if each.own_parameters]
    stages = (
        place(size.outline, Pipeline(), num_ranks=num_stages).modules if num_stages > 1 else dict.fromkeys(names, 0)
    )
    of_stage = [[name for name in names if stages[name] == stage] for stage in range(num_stages)]
    return [
        _Part(
            num_blocks=sum(name.startswith("layers.") for name in each),
            has_embedding="embedding" in each,
            has_head="head" in each,
        )
        for each in of_stage
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Owned:
    """What does not depend on activations."""

    held: Mapping[str, float]
    sent_within: float
    """Among owners."""
    sent_between: float
    """Among replicas of owners."""


@cache
def _owned(
    size: ModelSize, part: _Part, mesh: Mesh, sharding: Sharding, precision: Precision, num_microbatches: int
) -> _Owned:
    outline = replace(
        size.outline,
        children=tuple(
            replace(each, children=each.children[: part.num_blocks])
            for each in size.outline.children
            if {"embedding": part.has_embedding, "head": part.has_head}.get(each.name, True)
        ),
    )
    # A head that is tied to an embedding on another stage is a copy.
    sizes = {name: count for each in outline.modules() for name, count in each.own_parameters}
    if size.is_tied and part.has_head and not part.has_embedding:
        sizes["head.weight"] = size.vocabulary * size.hidden
    parameters = [
        describe(
            name=name,
            aliases=(),
            shape=(count if name.endswith("norms") else -(-count // mesh.tp),),
            dtype="float32",
            trainable=True,
            precision=precision,
        )
        for name, count in sizes.items()
        if count
    ]
    num_owners = math.prod(getattr(mesh, axis) for axis in sharding.owner_axes)
    stage = sharding.stage if num_owners > 1 else min(sharding.stage, 1)
    # Its gradient is complete at the end of an update only: it stays whole, apart from all others.
    is_apart = size.is_tied and part.has_embedding != part.has_head
    late = frozenset({"embedding.weight", "head.weight"} & sizes.keys() if is_apart else ())
    in_units = replace(outline, children=tuple(each for each in outline.children if f"{each.name}.weight" not in late))
    first_names = {name: name if count else "embedding.weight" for name, count in sizes.items()}
    units = plan_units(in_units, first_names=first_names) if stage == 3 else ()
    layout = OwnedLayout(
        ownership=plan_ownership(
            parameters,
            sharding,
            num_owners=num_owners,
            num_replicas=mesh.num_data_ranks // num_owners,
            units=unit_of(units) | dict.fromkeys(late, "several stages") if stage > 1 else {},
        ),
        stage=stage,
        units=units,
        late=late,
    )
    # From the third microbatch on, each is like the one before.
    one, two, three = (
        count_gathers({0: range(len(units))}, [("F", 0), ("B", 0)] * k, keeps=sharding.keep_gathered, ahead=True)
        for k in (1, 2, 3)
    )
    gathers = {
        unit.name: one[at] if num_microbatches == 1 else two[at] + (num_microbatches - 2) * (three[at] - two[at])
        for at, unit in enumerate(units)
    }
    size_of = footprint(layout, 0, precision, num_microbatches=num_microbatches, sums=precision.sums)
    alone = replace(layout, ownership=replace(layout.ownership, num_replicas=1))
    within, all_sent = (
        each.reduce_bytes + each.gather_bytes
        for each in (
            traffic(of, 0, precision, num_microbatches=num_microbatches, gathers=gathers) for of in (alone, layout)
        )
    )
    return _Owned(
        held={
            "weights": float(size_of.working_bytes),
            "gradients": float(size_of.gradient_bytes),
            "masters, AdamW": size_of.master_bytes + 8.0 * size_of.owned_elements,
            "moving": float(size_of.reducing_bytes + size_of.gathered_bytes),
        },
        sent_within=float(within),
        sent_between=float(all_sent - within),
    )
