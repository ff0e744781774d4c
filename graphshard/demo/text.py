"""English text that ships with CPython: the Python reference, topic by topic, as bytes."""

import pydoc_data.topics

import torch
from torch import Tensor


def load_bytes() -> Tensor:
    """All help topics in the order of their names, as one uint8 tensor `[n_bytes]` (about 465,000 in Python 3.11)."""
    topics: dict[str, str] = pydoc_data.topics.topics
    text = "\n\n".join(topics[name] for name in sorted(topics))
    return torch.frombuffer(bytearray(text, "utf-8"), dtype=torch.uint8)


class Batches:
    """Windows of the text, drawn at random but the same in every run: what all ranks take together depends on the step
    alone, and each takes its rows of it. So ranks in another number go on with the same data.
    """

    def __init__(self, rank: int, world_size: int, batch_size: int, seq_len: int) -> None:
        self._text = load_bytes()
        self._rows = slice(rank * batch_size, (rank + 1) * batch_size)
        self._all_rows = world_size * batch_size
        self._seq_len = seq_len

    def draw(self, step: int, microbatch: int) -> tuple[Tensor, Tensor]:
        """The tokens and the targets (the next byte of each) of one microbatch, each int64 `[batch_size, seq_len]`."""
        generator = torch.Generator().manual_seed((step << 16) + microbatch)
        starts = torch.randint(self._text.numel() - self._seq_len, (self._all_rows, 1), generator=generator)
        window = self._text[starts[self._rows] + torch.arange(self._seq_len + 1)].long()
        return window[:, :-1], window[:, 1:]
