"""What c10d asks of every process group that is written in Python."""

from __future__ import annotations

import torch.distributed as dist


class PythonGroup(dist.ProcessGroup):
    """A process group without its collectives.

    Args:
        rank: this rank.
        size: number of ranks.
        backend: its name, as c10d knows it.
    """

    def __init__(self, rank: int, size: int, backend: str) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._rank, self._size, self._backend = rank, size, backend
        self._names = {"name": "", "description": ""}

    def getRank(self) -> int:  # noqa: N802
        return self._rank

    def getSize(self) -> int:  # noqa: N802
        return self._size

    def getBackendName(self) -> str:  # noqa: N802
        return self._backend

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._names["name"] = name

    def getGroupName(self) -> str:  # noqa: N802
        return self._names["name"]

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        self._names["description"] = description

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._names["description"]

    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)
