"""What is found by a forward: parameters that it does not read, and graph breaks."""

from __future__ import annotations

import logging
import sys
import textwrap
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from graphshard import fsdp2
from graphshard.capture.entry_code import entry_point
from graphshard.compat import fake_forward
from graphshard.compat.dynamo import capture_settings
from graphshard.compat.graph_breaks import GraphBreak, recorded_graph_breaks
from graphshard.examining.diagnosis import Finding
from graphshard.examining.plain_copy import plain_copy
from graphshard.examining.subject import Subject

_TORCH = str(Path(torch.__file__).parent)


class ForwardLook:
    """What two forwards of a copy show, one in eager and one under Dynamo; neither has data.

    Args:
        subject: the model.
        args: of its forward.
        kwargs: likewise.

    Attributes:
        findings: of them.
        not_looked_at: what the copy could not show, and why.
    """

    def __init__(self, subject: Subject, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._subject = subject
        self._args, self._kwargs = tuple(args), dict(kwargs)
        self._device = _device_of(subject, (args, kwargs))
        self.findings: list[Finding] = []
        self.not_looked_at: list[str] = []
        self._unread = set[str]()
        self._failed_at = set[str]()
        with fake_forward.same_random_state(), torch.enable_grad(), _quietly():
            try:
                self._copy()
            except (Exception, SystemExit) as error:  # of a user's class
                said = f"the model cannot be copied ({type(error).__name__}: {error})"
                self.not_looked_at.append(f"unused parameters and graph breaks: {said}")
                return
            self._look_for_unread()
            if "" in self._failed_at:
                self.not_looked_at.append("graph breaks: forward does not take these arguments")
            else:
                self._look_for_breaks()
        self.findings += self._unused()

    def _look_for_unread(self) -> None:
        mode, model = self._copy()
        named = dict(model.named_parameters())
        try:
            args, kwargs = fake_forward.fake_values(mode, (self._args, self._kwargs), self._device)
            with fake_forward.watched_reads(mode, named.values()) as read:
                model(*args, **kwargs)
        except (Exception, SystemExit) as error:
            self._give_up("unused parameters", error)
        else:
            self._unread = {fsdp2.without_wrappers(name) for name, param in named.items() if id(param) not in read}

    def _look_for_breaks(self) -> None:
        mode, model = self._copy()
        args, kwargs = fake_forward.fake_values(mode, (self._args, self._kwargs), self._device)

        def as_it_is(gm: GraphModule, inputs: Sequence[Any]) -> Any:
            return gm.forward

        run = torch.compile(entry_point(type(model), _call), backend=as_it_is)
        with recorded_graph_breaks() as breaks:
            try:
                with fake_forward.without_data(mode), capture_settings():
                    run(model, args, kwargs)
            except (Exception, SystemExit) as error:
                self._give_up("graph breaks behind that line", error)
        found = (_of_break(one) for one in breaks)
        self.findings += [one for one in found if self._failed_at.isdisjoint(one.where)]  # no break, but an error

    def _unused(self) -> Iterator[Finding]:
        if found := [owned.name for owned in self._subject.parameters if self._unread.intersection(owned.names)]:
            broken = any(finding.kind == "graph break" for finding in self.findings)
            yield Finding(
                "unused",
                tuple(found),
                "not read by this forward: it has no gradient, and "
                + ("is gathered with its unit, which graph breaks leave in parts" if broken else "stays sharded"),
                "handled",
                "if some ranks use it and others do not, see set_reduce_scatter_unused_params; else leave it out",
            )

    def _copy(self) -> tuple[fake_forward.FakeTensorMode, nn.Module]:
        mode = fake_forward.make_mode()

        def tensor_of(tensor: Tensor) -> Tensor:
            return fake_forward.fake_of(mode, tensor, self._device)

        def whole_of(param: fsdp2.ShardedParam) -> Tensor:
            with mode:
                full = torch.empty(param.size, dtype=param.parameter.dtype, device=self._device)
                return param.as_registered(full, param.parameter.requires_grad)

        return mode, plain_copy(self._subject.model, tensor_of, whole_of)

    def _give_up(self, what: str, error: BaseException) -> None:
        why, place = "the forward of a copy without data failed", _place_of(error)
        if isinstance(error, fake_forward.NEEDS_DATA):
            why = "forward looks at data, and the copy has none"
        elif isinstance(error, fake_forward.Communicates):
            why = "forward communicates by itself"
        else:
            self._failed_at.add(place)
        said = str(error).strip().split("\n")[0]
        self.not_looked_at.append(f"{what}: {why} ({place and f'{place}: '}{type(error).__name__}: {said:.120})")


def _call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return module(*args, **kwargs)


def _of_break(found: GraphBreak) -> Finding:
    why = found.reason if not found.explanation else f"{found.reason}: {found.explanation}"
    left = "; the whole function around it runs in eager" if found.leaves_frame else ""
    return Finding(
        "graph break",
        (f"{_shown(found.file)}:{found.line}" if found.file else "",),
        f"{textwrap.shorten(why, 200)}{left}; a unit of which one side uses a part is gathered and reduced as "
        "a whole, outside the graphs",
        "eager",
        found.hint,
    )


def _device_of(subject: Subject, inputs: Any) -> torch.device:
    """Where the copy computes: where parameters are, or the mesh, or inputs."""
    kinds = [owned.param.device for owned in subject.parameters if owned.param.device.type != "meta"]
    if subject.device_type and not (kinds and kinds[0].type == subject.device_type):
        return torch.device(subject.device_type)
    return kinds[0] if kinds else fake_forward.first_device(inputs)


def _place_of(error: BaseException) -> str:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not _is_inside(f.filename)]
    return f"{_shown(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""


def _is_inside(file: str) -> bool:
    """Whether it is torch's code, or graphshard's."""
    return file.startswith((_TORCH, str(Path(__file__).parents[1]), "<"))


def _shown(file: str) -> str:
    roots = [root for root in map(Path, (str(Path.cwd()), *sys.path)) if Path(file).is_relative_to(root)]
    return min((str(Path(file).relative_to(root)) for root in roots if root.is_absolute()), key=len, default=file)


@contextmanager
def _quietly() -> Iterator[None]:
    """Inside, torch gives no advice on what is traced."""
    logs = [logging.getLogger(name) for name in ("torch._dynamo", "torch._subclasses.fake_tensor")]
    disabled = [log.disabled for log in logs]
    for log in logs:
        log.disabled = True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for log, was in zip(logs, disabled, strict=True):
            log.disabled = was
