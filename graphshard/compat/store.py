"""The store of the default process group, which torch keeps private (torch 2.11 to 2.15)."""

from __future__ import annotations

from datetime import timedelta

from torch.distributed import Store  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import _get_default_store


def default_store() -> Store:
    """The store that the default process group was made with."""
    store: Store = _get_default_store()
    return store


def own_connection(timeout_s: float) -> Store:
    """The same store on a connection of its own, which gives up after `timeout_s` seconds.

    Raises:
        RuntimeError: the store has none, or is not there.
    """
    store: Store = default_store().clone()  # type: ignore[attr-defined]
    store.set_timeout(timedelta(seconds=timeout_s))
    return store
