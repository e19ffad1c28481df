"""Files as users of `shardwise train` write them: nets, losses, optimizers, data sets, callbacks, schedules."""

NET = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256)

    def forward(self, input_ids):
        return self.head(self.norm(self.embedding(input_ids)))


def next_token(logits, batch):
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


class Mute(Net):
    def forward(self, input_ids):
        return {"scores": super().forward(input_ids)}


def next_score(output, batch):
    return next_token(output["scores"], batch)


class Noisy(Net):
    def forward(self, input_ids):
        return self.head(nn.functional.dropout(self.norm(self.embedding(input_ids)), 0.3, self.training))


class Stop(Exception):
    pass


stop_after = []  # calls that the loss still takes; nothing in it: no end
calls = []


def stops(logits, batch):
    calls.append(logits.requires_grad)
    if stop_after and sum(calls) > stop_after[0]:
        raise Stop
    return next_token(logits, batch)


def two_losses(logits, batch):
    loss = next_token(logits, batch)
    size = logits.square().mean()
    return {"loss": loss + 0.01 * size, "token": loss, "size": size}


def hits(logits, batch):
    return (logits[:, :-1].argmax(-1) == batch["labels"][:, 1:]).float().mean(-1)


class Lost(Net):
    def forward(self, input_ids):
        return super().forward(input_ids) * float("nan")


losses_seen = []


def second_is_infinite(logits, batch):
    losses_seen.append(0)
    return next_token(logits, batch) * (float("inf") if len(losses_seen) == 2 else 1.0)


class Bare(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))


def fails(logits, batch):
    raise KeyError("no such key")


def exits(**_):
    raise SystemExit(7)


class Drawing(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            parameter.add_(torch.randn_like(parameter), alpha=1e-3)
        return super().step(closure)


class Counting(torch.optim.SGD):
    def __init__(self, groups, lr, weight_decay=0.0):
        super().__init__(groups, lr=lr, weight_decay=weight_decay)
        for group in self.param_groups:
            group["count"] = 0

    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] += 1
        return super().step(closure)


def single(groups, lr, weight_decay=0.0, **_):
    # It forgets its groups.
    return torch.optim.AdamW([each for group in groups for each in group["params"]], lr=lr, weight_decay=weight_decay)

"""

ROWS = """
import datasets
import torch
from torch import nn


class Numbers(nn.Module):
    def __init__(self, width=4, classes=3):
        super().__init__()
        self.inner = nn.Linear(width, 8)
        self.head = nn.Linear(8, classes)

    def forward(self, inputs):
        return self.head(torch.tanh(self.inner(inputs)))


class Pixels(Numbers):
    def __init__(self):
        super().__init__(3 * 4 * 5)

    def forward(self, pixel_values):
        return super().forward(pixel_values.flatten(1))


class Mean(Numbers):
    def __init__(self, width=8, classes=3):
        super().__init__(width, classes)
        self.embedding = nn.Embedding(256, width)

    def forward(self, input_ids, attention_mask):
        mask = attention_mask[..., None]
        return super().forward((self.embedding(input_ids) * mask).sum(1) / mask.sum(1))


def label_loss(output, batch, smoothing=0.0):
    return nn.functional.cross_entropy(output, batch["labels"], label_smoothing=smoothing)


def rows(first, last):
    return [{"text": f"row {n} " + "abc" * (n % 5), "stars": n % 3, "features": [n / 9.0, 1.0, n % 4, 0.5]}
            for n in range(first, last)]


def listed(last):
    return datasets.Dataset.from_list(rows(0, last))


def streamed(last, first=0):
    return datasets.IterableDataset.from_generator(lambda: iter(rows(first, last)))


def raw_batch(samples, scale=1.0):
    return {"inputs": torch.tensor([each["features"] for each in samples]) * scale,
            "labels": torch.tensor([each["stars"] for each in samples])}


class Batcher:
    def __init__(self, tokenizer=None, scale=1.0):
        self.scale = scale

    def __call__(self, samples):
        return raw_batch(samples, self.scale)


class Sized:
    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return {"inputs": torch.linspace(-1, 1, 4) * (index % 7), "labels": index % 3}


class Stream:
    def __init__(self, size):
        self.size = size

    def open(self, position):
        return map(Sized(self.size).__getitem__, range(position, self.size))


class Endless:
    def __init__(self, size):
        self.rows = Sized(size)

    def __getitem__(self, index):
        return self.rows[index]


class Unopened(torch.utils.data.IterableDataset):
    def __init__(self, size):
        pass

    def __iter__(self):
        return iter([])


def named(size):
    rows = [Sized(size)[at] for at in range(size)]
    return {name: torch.stack([torch.as_tensor(row[name]) for row in rows]) for name in ("inputs", "labels")}


def failing(size):
    raise OSError("no such share")


def forgotten(size):
    named(size)


def accuracy(output, batch, scale=1.0):
    return (output.argmax(-1) == batch["labels"]).float() * scale


def pair(output, batch):
    return output.argmax(-1), batch["labels"]


class Error:
    def __init__(self, power=1):
        if not power:
            raise ValueError("no power")
        self.power = power

    def __call__(self, output, batch):
        return (output - batch["labels"][:, None]).abs() ** self.power


def tokens(batch):
    return (batch["labels"][:, 1:] != -100).sum()
"""

GAN = """
import torch
from torch import nn
from torch.nn.functional import softplus


class Gan(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4))
        self.critic = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, noise):
        return self.generator(noise)


def fools(fake, batch, model):
    return {"loss": softplus(-model.critic(fake)).mean(), "size": fake.square().mean()}


class TellsApart:
    def __init__(self, model, penalty):
        self.model, self.penalty = model, penalty

    def __call__(self, fake, batch):
        of_real = self.model.critic(batch["real"])
        wrong = softplus(-of_real).mean() + softplus(self.model.critic(fake)).mean()
        return {"loss": wrong + self.penalty * of_real.square().mean(), "wrong": wrong}


def two(groups, lr):
    weights = [each for group in groups for each in group["params"]]
    last = [each for each in weights if each.shape[0] in (1, 4)]
    return [torch.optim.AdamW(chosen, lr=lr, betas=(0.5, 0.9)) for chosen in (
        [each for each in weights if not any(each is other for other in last)], last)]


class Numbers:
    def __len__(self):
        return 60

    def __getitem__(self, at):
        return {"noise": torch.linspace(-1, 1, 3) * (at % 7), "real": torch.linspace(0, 1, 4) * (at % 5)}


class Frames(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Linear(5, 4)
        self.inner = nn.Linear(4, 2)

    def forward(self, frames, table):
        return self.inner(torch.tanh(frames + self.table(table))).mean(0)


def halves(output, batch):
    return (output - batch["wanted"]).square().mean()


def frames(samples):
    return {
        "frames": torch.stack([each["noise"][:, None].expand(3, 4) for each in samples], 1),
        "wanted": torch.stack([each["real"][:2] for each in samples]),
        "table": torch.linspace(-1, 1, 5),
    }
"""

CALLBACKS = """
from shardwise.train import Callback

log = []

class Mine(Callback):
    def __init__(self, name="mine", stop=0):
        self.name, self.stop_after, self.count = name, stop, 0

    def on_begin(self, loop):
        log.append((self.name, loop.engine.channel.rank, "begin", loop.position.step, self.count))

    def on_evaluation(self, loop, evaluation):
        log.append((self.name, loop.engine.channel.rank, "evaluation", evaluation.step, evaluation.loss))

    def on_step(self, loop, metrics):
        self.count += 1
        if metrics.step == self.stop_after and loop.engine.channel.rank == loop.engine.channel.size - 1:
            loop.stop("enough")

    def on_save(self, loop, report):
        log.append((self.name, loop.engine.channel.rank, "save", report.step))

    def on_end(self, loop, error):
        log.append((self.name, loop.engine.channel.rank, "end", loop.position.step))

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


def wrong():
    raise RuntimeError("no such thing")
"""

SCHEDULES = """
from torch.optim import lr_scheduler


def make(optimizer, steps, share=0.5):
    first = lr_scheduler.LinearLR(optimizer, start_factor=0.25, total_iters=2)
    then = lr_scheduler.CosineAnnealingLR(optimizer, T_max=int(steps * share))
    return lr_scheduler.SequentialLR(optimizer, [first, then], milestones=[2])


def none(optimizer, steps):
    return 3


def plateau(optimizer, steps):
    return lr_scheduler.ReduceLROnPlateau(optimizer)


class Halved(lr_scheduler.LRScheduler):
    def get_lr(self):
        return [group["lr"] * (0.5 if self.last_epoch else 1.0) for group in self.optimizer.param_groups]
"""

FILES = {"net.py": NET, "nets.py": ROWS, "gan.py": GAN, "mine.py": CALLBACKS, "schedules.py": SCHEDULES}
"""By their names in the folder of a configuration."""
