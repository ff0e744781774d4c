"""Entries of a cache beside Inductor's, which `torch.compiler.save_cache_artifacts` carries with the others."""

from __future__ import annotations

import logging
from functools import cache
from pathlib import Path
from uuid import uuid4

import torch
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch.compiler._cache import CacheArtifact, CacheArtifactFactory, CacheArtifactManager

from graphshard.files import read_limited

log = logging.getLogger(__name__)

_TYPE = "graphshard"
# Of an entry.
MAX_BYTES = 64 * 2**20


@CacheArtifactFactory.register
class PlanArtifact(CacheArtifact):
    """An entry on its way to another machine."""

    def populate_cache(self) -> None:
        """Writes it into the cache of this one."""
        if self.key.isascii() and self.key.isalnum() and len(self.content) <= MAX_BYTES:
            _write(self.key, self.content)
        else:
            log.warning("graphshard: cache: artifact %.40r is ignored: that is no key, or no entry", self.key)

    @staticmethod
    def type() -> str:
        """Its name among the artifacts."""
        return _TYPE


def read_entry(key: str) -> bytes | None:
    """What was written under a key, by any process; None: nothing, or caches are off."""
    if torch.compiler.config.force_disable_caches:
        return None
    try:
        return read_limited(_path(key), MAX_BYTES, follow=False)
    except (OSError, ValueError):
        return None


def carry_entry(key: str, content: bytes) -> None:
    """Has an entry that was read, and found good, saved with the artifacts of this process."""
    CacheArtifactManager.record_artifact(_TYPE, key, content)


def write_entry(key: str, content: bytes) -> None:
    """Keeps `content` for later processes: all of it, or, where this one dies or the disk is full, nothing."""
    if torch.compiler.config.force_disable_caches:
        return
    carry_entry(key, content)
    _write(key, content)


def is_first_to_ask(key: str) -> bool:
    """Whether no process has asked this for `key` in this cache before; True, too, where that cannot be told.

    It is a hint and no lock: whoever was first may be long gone, with or without a result.
    """
    if torch.compiler.config.force_disable_caches:
        return True
    try:
        begun = _path(f"{key}.begun")
        begun.parent.mkdir(parents=True, exist_ok=True)
        return _created(begun)
    except OSError as error:
        _say_unshared(str(error))
        return True


@cache
def _say_unshared(why: str) -> None:
    """Once for each reason."""
    log.warning("graphshard: cache: what other ranks compile cannot be told, so each compiles all: %s", why)


def _created(path: Path) -> bool:
    try:
        path.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _write(key: str, content: bytes) -> None:
    try:
        path = _path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f"{key}.{uuid4().hex}")
        try:
            unfinished.write_bytes(content)
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)
    except OSError as error:
        log.warning("graphshard: cache: entry %s cannot be written: %s", key[:16], error)


def _path(key: str) -> Path:
    return Path(cache_dir(), "graphshard", key[:2], key)
