"""What a recorded channel has sent."""

import shardwise as sw


def sent_by(recorded: sw.Recorded) -> dict[str, int]:
    """Bytes sent, by what they are of; without those of the model's buffers."""
    return {
        what: sum(
            call.bytes_sent for call in recorded.calls if call.operation != "exchange" and call.purpose.startswith(what)
        )
        for what in ("parameters", "gradients")
    }
