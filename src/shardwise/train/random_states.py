"""Random numbers over a save: under the same mesh they go on where they were, under another they are seeded anew."""

import base64
import hashlib
import json

import torch
from pydantic import BaseModel, ConfigDict

from shardwise.comm import Channel


class RandomStates(BaseModel):
    """The states of torch's generators on every rank, and where they belong."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    mesh: str
    device: str
    """Kind of the device on which ranks compute: "cpu" or "cuda"."""
    ranks: list[dict[str, str]]
    """By rank: generator ("cpu", "cuda") -> its state in base64."""

    @classmethod
    def gathered(cls, channel: Channel, mesh: str) -> "RandomStates":
        """Those of all ranks, which call this together."""
        states = {"cpu": torch.get_rng_state()}
        if channel.device.type == "cuda":
            states["cuda"] = torch.cuda.get_rng_state(channel.device)
        mine = {name: base64.b64encode(state.numpy().tobytes()).decode() for name, state in states.items()}
        texts = channel.exchange(json.dumps(mine).encode(), purpose="random states of a save")
        return cls(mesh=mesh, device=channel.device.type, ranks=[json.loads(text) for text in texts])

    def restore(self, channel: Channel, mesh: str, *, seed: int, step: int, data_rank: int) -> str | None:
        """Go on from these states. Under another mesh or device seed anew, and return words that say so."""
        if (mesh, channel.device.type, channel.size) != (self.mesh, self.device, len(self.ranks)):
            torch.manual_seed(derived_seed(seed, step, data_rank))
            return (
                f"random numbers (dropout) are seeded anew: the run was saved under mesh {self.mesh} on {self.device}, "
                f"and goes on under mesh {mesh} on {channel.device.type}"
            )
        for name, text in self.ranks[channel.rank].items():
            state = torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
            if name == "cuda":
                torch.cuda.set_rng_state(state, channel.device)
            else:
                torch.set_rng_state(state)
        return None


def derived_seed(seed: int, step: int, data_rank: int) -> int:
    """A seed of its own for each data rank and step of a run."""
    digest = hashlib.sha256(f"{seed} {step} {data_rank}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
