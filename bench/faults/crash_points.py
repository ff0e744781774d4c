"""Ends a rank of the demo's trainer at a named point, from within: hooks of torch's, and CPython's audit events.

Nothing of the trainer knows of it. A file is cut off where a process has written so much of it, by the kernel's limit
on the size of files, whose signal kills.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from bench.faults import model as faults_model
from bench.faults.model import point
from graphshard.demo.checkpoints import LIST, METADATA, Checkpoints
from graphshard.demo.model import Decoder, ModelConfig

# Of a file that is cut off: of a rank's part of a checkpoint, of all others.
PART_BYTES, FEW_BYTES = 20_000, 40
COMPILER_S = 0.3

# Where a rank may end, in words. Only rank 0 writes metadata and the list of files, renames and removes.
POINTS = (
    "forward", "backward", "optimizer step", "before a save", "its own file", "behind its own file", "metadata",
    "list of files", "new name", "behind the new name", "removal", "tracing", "Inductor's code", "C++ compiler",
    "compiler's output", "plan entry", "plan entry's name", "Inductor's entry",
)  # fmt: skip


class Crasher:
    """Ends this process.

    Args:
        point: one of `POINTS`.
        number: the how manieth time that it comes there.
        end: does it.
    """

    def __init__(self, point: str, number: int, end: Callable[[], None]) -> None:
        if point not in POINTS:
            raise ValueError(f"crash: got {point!r}, want one of {', '.join(POINTS)}")
        self._point, self._number, self._end = point, number, end
        self._came: Counter[str] = Counter()

    def install(self) -> None:
        """Listens from now on, as long as the process lives."""
        names = {"forward": "forward", "backward": "backward", "compilation": "tracing"}
        faults_model.on_point.append(lambda where: self.at(names[where]))
        register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: self.at("optimizer step"))
        signal.signal(signal.SIGXFSZ, lambda number, frame: self._end())
        sys.addaudithook(self._audited)

    def at(self, where: str, end: Callable[[], None] | None = None) -> None:
        """This process has come somewhere."""
        if where == self._point:
            self._came[where] += 1
            if self._came[where] == self._number:
                (end or self._end)()

    def _audited(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(args[0], (str, os.PathLike)):
            if "w" in str(args[1] or "") or (args[2] or 0) & (os.O_WRONLY | os.O_RDWR):
                self._opened(Path(args[0]))
        elif event == "os.rename":
            self._renamed(str(args[0]), str(args[1]))
        elif event == "os.remove" and ".removed-" in str(args[0]) + _folder_of(args):
            self.at("removal")
        elif event == "subprocess.Popen":
            self._started([str(word) for word in args[1]])

    def _opened(self, path: Path) -> None:
        folder = path.parent.as_posix()
        if path.suffix == ".distcp":
            self.at("its own file", lambda: cut_off(PART_BYTES))
        elif path.name == f"{METADATA}.tmp":
            self.at("metadata", lambda: cut_off(FEW_BYTES))
        elif path.name == LIST:
            self.at("list of files", lambda: cut_off(FEW_BYTES))
        elif folder.startswith(_caches()) and "/graphshard/" in folder and not path.name.endswith(".begun"):
            self.at("plan entry", lambda: cut_off(FEW_BYTES))
        elif folder.startswith(_caches()) and "/fxgraph" in folder:
            self.at("Inductor's entry", lambda: cut_off(FEW_BYTES))
        elif folder.startswith(_caches()) and path.suffix == ".tmp":
            self.at("Inductor's code", lambda: cut_off(FEW_BYTES))

    def _renamed(self, old: str, new: str) -> None:
        if ".unfinished-" in Path(old).name:
            self.at("new name")
        elif "/graphshard/" in new and new.startswith(_caches()):
            self.at("plan entry's name")

    def _started(self, words: list[str]) -> None:
        """A program is about to be started. A compiler has `-o` before what it writes; a library that shows what
        the processor can do has another name.
        """
        outputs = [new for old, new in pairwise(words) if old == "-o" and new.endswith(".main.so")]
        if outputs:
            self.at("C++ compiler", lambda: threading.Timer(COMPILER_S, self._end).start())
            self.at("compiler's output", lambda: self._left(Path(outputs[0])))

    def _left(self, output: Path) -> None:
        """Where the compiler ends, too, as with its machine, or by the kernel for want of memory."""
        output.write_bytes(b"\x7fELF")
        self._end()


def _caches() -> str:
    return os.environ["TORCHINDUCTOR_CACHE_DIR"]


def _folder_of(args: tuple[Any, ...]) -> str:
    """`shutil.rmtree` names files within a folder that it has open."""
    if len(args) > 1 and isinstance(args[1], int) and args[1] >= 0:
        return str(Path(f"/proc/self/fd/{args[1]}").readlink())
    return ""


def cut_off(size_bytes: int) -> None:
    """The file that is written next gets no more than so many bytes; the signal of that ends the process."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


class CrashingDecoder(Decoder):
    """The demo's, with the point in its middle."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.blocks[config.n_layers // 2].register_forward_hook(_pass_point)


def _pass_point(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
    return point(output, "forward")


class CrashingCheckpoints(Checkpoints):
    """The demo's, between whose steps a rank may end. `at` is told where it is."""

    def __init__(self, folder: Path, keep: int, say: Callable[[str], None], at: Callable[[str], None]) -> None:
        super().__init__(folder, keep, say)
        self._at = at

    def write(self, unfinished: Path, state: Mapping[str, Any]) -> None:
        self._at("before a save")
        super().write(unfinished, state)
        self._at("behind its own file")

    def finish(self, unfinished: Path, final: Path, content: Mapping[str, Any]) -> None:
        super().finish(unfinished, final, content)
        self._at("behind the new name")
