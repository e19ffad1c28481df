"""A run of the command line that takes no time: its net, which fails where a test asks for it, and its files."""

from pathlib import Path

NET = """
import os
import signal
import threading
import torch
from torch import nn

RANK = os.environ.get("RANK", "0")
SENT = []


def send(name, to):
    # Return when the signal has come back to this process: a launcher passes it on when it gets to it.
    number = getattr(signal, name)
    handle, has_come = signal.getsignal(number), threading.Event()
    signal.signal(number, lambda *of_call: (has_come.set(), handle(*of_call)))
    os.kill(os.getppid() if to == "parent" else os.getpid(), number)
    SENT.append(number)
    while not has_come.wait(0.01):
        pass


class Layer(nn.Module):
    def __init__(self, fault="", at=0):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.fault, self.at, self.calls = fault, at, 0

    def forward(self, states):
        self.calls += self.training
        if self.calls == self.at and self.fault == "raise":
            raise RuntimeError("the layer went wrong")
        if self.calls == self.at and self.fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.calls == self.at and self.fault == "SIGTERM" and not SENT:
            send("SIGTERM", "parent")
        if self.calls == self.at and self.fault == "SIGUSR1" and not SENT:
            send("SIGUSR1", "rank")
        return states + nn.functional.dropout(self.linear(states), 0.3, self.training)


class Net(nn.Module):
    # fault: of the last layer in its training call `at`, or "build"; on `rank`, or on every one that has this layer
    def __init__(self, fault="", rank="", at=0):
        super().__init__()
        fault = fault if rank in ("", RANK) else ""
        if fault == "build":
            raise ValueError("this net cannot be built")
        self.embedding = nn.Embedding(256, 8)
        self.layers = nn.ModuleList([Layer(), Layer(), Layer(), Layer(fault, at)])
        self.head = nn.Linear(8, 256)

    def forward(self, input_ids):
        states = self.embedding(input_ids)
        for layer in self.layers:
            states = layer(states)
        return self.head(states)


def loss(logits, batch):
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
"""

MODEL = 'model = {factory = "net.py:Net", loss = "net.py:loss"}\n'
DATA = 'data = {source = "net.py", sequence_length = 16, held_out = 0.2}\n'


def written(folder: Path, tables: str, *, model: str = MODEL, net: str = NET) -> Path:
    """The configuration of a run of the net in an empty folder."""
    folder.mkdir(exist_ok=True)
    (folder / "net.py").write_text(net)
    (folder / "run.toml").write_text(f"{model}{DATA}{tables}")
    return folder / "run.toml"


def words(config: Path, *more: str, output: Path | None = None) -> list[str]:
    """The command line that trains it."""
    return ["train", str(config), "--set", f"train.output={output or config.parent / 'out'}", *more]
