"""The store of the default process group, which torch keeps private (torch 2.11 to 2.15)."""

from __future__ import annotations

from torch.distributed import Store  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import _get_default_store


def default_store() -> Store:
    """The store that the default process group was made with."""
    store: Store = _get_default_store()
    return store
