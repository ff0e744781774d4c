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
    """Windows of one rank's slice of the text, drawn at random but the same in every run."""

    def __init__(self, rank: int, world_size: int, batch_size: int, seq_len: int) -> None:
        self._slice = load_bytes().tensor_split(world_size)[rank]
        self._rank = rank
        self._batch_size = batch_size
        self._seq_len = seq_len

    def draw(self, step: int, microbatch: int) -> tuple[Tensor, Tensor]:
        """The tokens and the targets (the next byte of each) of one microbatch, each int64 `[batch_size, seq_len]`."""
        generator = torch.Generator().manual_seed((step << 32) + (microbatch << 16) + self._rank)
        starts = torch.randint(self._slice.numel() - self._seq_len, (self._batch_size, 1), generator=generator)
        window = self._slice[starts + torch.arange(self._seq_len + 1)].long()
        return window[:, :-1], window[:, 1:]
