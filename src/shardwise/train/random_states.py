"""Random numbers over a save: under the same mesh they go on where they were, under another they are seeded anew.

Those that forwards draw (dropout) are not among them: the engine derives them from seed, step and microbatch, and saves
seed and step itself. What is left are those that an optimizer draws.
"""

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
        texts = channel.exchange(json.dumps(_states_here(channel)).encode(), purpose="random states of a save")
        return cls(mesh=mesh, device=channel.device.type, ranks=[json.loads(text) for text in texts])

    def restore(self, channel: Channel, mesh: str, *, seed: int, step: int) -> str | None:
        """Go on from these states. Under another mesh or device seed anew, and return words that say so.

        States that are those of this rank now, from which nothing was drawn since the model was built, stay.
        """
        if (mesh, channel.device.type, channel.size) != (self.mesh, self.device, len(self.ranks)):
            now = _states_here(channel)
            if all(states == now for states in self.ranks):
                return None
            torch.manual_seed(derived_seed(seed, step))
            return (
                "random numbers that are drawn outside of the model, as by an optimizer, are seeded anew: the run was "
                f"saved under mesh {self.mesh} on {self.device}, and goes on under mesh {mesh} on {channel.device.type}"
            )
        for name, text in self.ranks[channel.rank].items():
            state = torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
            if name == "cuda":
                torch.cuda.set_rng_state(state, channel.device)
            else:
                torch.set_rng_state(state)
        return None


def derived_seed(seed: int, step: int) -> int:
    """A seed of its own for each step of a run, the same on all ranks: replicas have to draw alike."""
    digest = hashlib.sha256(f"{seed} {step}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def _states_here(channel: Channel) -> dict[str, str]:
    states = {"cpu": torch.get_rng_state()}
    if channel.device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(channel.device)
    return {name: base64.b64encode(state.numpy().tobytes()).decode() for name, state in states.items()}
