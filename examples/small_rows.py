"""Models and losses for `text_classes.toml` and `image_classes.toml`; run alone, it writes the rows of both."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

TOPICS = {
    "billing": ("the invoice {n} is wrong", "charged twice for order {n}", "refund the payment of {n} euros"),
    "delivery": ("parcel {n} has not come", "where is my delivery {n}", "the courier left box {n} outside"),
    "login": ("cannot sign in since update {n}", "code {n} is not accepted", "reset the password of user {n}"),
}


class TextClasses(nn.Module):
    """The mean of the vectors of all bytes and of all pairs of bytes, and a class from it."""

    def __init__(self, width: int = 32, num_classes: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.pairs = nn.Conv1d(width, width, 2)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_classes)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Tokens [rows, length] and the mask of those that count -> logits [rows, num_classes]."""
        mask = attention_mask[:, None].to(self.embedding.weight.dtype)
        pairs = torch.relu(self.pairs(self.embedding(input_ids).transpose(1, 2) * mask)) * mask[..., 1:]
        logits: torch.Tensor = self.head(self.norm(pairs.sum(-1)))
        return logits


class ImageClasses(nn.Module):
    """Two convolutions and a class."""

    def __init__(self, width: int = 16, num_classes: int = 3) -> None:
        super().__init__()
        self.edges = nn.Conv2d(1, width, 3, padding=1)
        self.corners = nn.Conv2d(width, width, 3, padding=1)
        self.head = nn.Linear(width, num_classes)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Images [rows, 1, height, width] -> logits [rows, num_classes]."""
        found = torch.relu(self.corners(torch.relu(self.edges(pixel_values))))
        logits: torch.Tensor = self.head(found.amax((2, 3)))
        return logits


def class_loss(logits: torch.Tensor, batch: Mapping[str, torch.Tensor], smoothing: float = 0.0) -> torch.Tensor:
    """Mean cross-entropy."""
    return nn.functional.cross_entropy(logits, batch["labels"], label_smoothing=smoothing)


def accuracy(logits: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """1 for each row whose class is found."""
    return (logits.argmax(-1) == batch["labels"]).float()


def write_rows(folder: Path) -> None:
    """Write `tickets.jsonl` and the folders of `shapes`."""
    from PIL import Image, ImageDraw

    lines = [
        json.dumps({"text": texts[n % 3].format(n=n * 7 % 90), "topic": topic})
        for n in range(40)
        for topic, texts in TOPICS.items()
    ]
    (folder / "tickets.jsonl").write_text("\n".join(lines) + "\n")
    for name in ("circle", "cross", "square"):
        (folder / "shapes" / name).mkdir(parents=True, exist_ok=True)
        for n in range(30):
            picture = Image.new("L", (16, 16))
            draw, left, top, size = ImageDraw.Draw(picture), n % 5, n % 4, 8 + n % 3
            box = (left, top, left + size, top + size)
            if name == "circle":
                draw.ellipse(box, outline=255)
            elif name == "square":
                draw.rectangle(box, outline=255)
            else:
                draw.line(box, fill=255)
                draw.line((left, top + size, left + size, top), fill=255)
            picture.save(folder / "shapes" / name / f"{n:02}.png")


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    write_rows(folder)
    print(f"wrote tickets.jsonl and shapes into {folder}")
