"""What a forward logs, while Dynamo captures it."""

from __future__ import annotations

import functools
import logging
from typing import Any

import pytest
import torch
import torch._dynamo.config as dynamo_config
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from graphshard.compat.dynamo import capture_settings


class Logger(logging.Logger):
    @functools.lru_cache(None)  # noqa: B019
    def warning_once(self, *args: Any, **kwargs: Any) -> None:
        self.warning(*args, **kwargs)


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.fixture
def logger() -> Logger:
    return Logger("of.a.model")


def graphs_of(forward: Any, logger: logging.Logger, calls: int = 3) -> tuple[int, list[str]]:
    """How many graphs are captured, and what is logged."""
    torch._dynamo.reset()
    counter, handler = CompileCounter(), Lines()
    logger.addHandler(handler)
    compiled = torch.compile(forward, backend=counter)
    for length in range(2, 2 + calls):
        with capture_settings():
            compiled(torch.ones(length))
    return counter.frame_count, handler.lines


def test_message_that_is_logged_once_breaks_no_graph(logger: Logger) -> None:
    what = "one"

    def forward(x: Tensor) -> Tensor:
        y = x + 1
        logger.warning_once("of %s", what, extra=None)
        return y.sin()

    assert graphs_of(forward, logger, calls=1) == (1, ["of one"])
    assert graphs_of(forward, logger, calls=1) == (1, [])


@pytest.mark.parametrize("level", [logging.WARNING, logging.ERROR])
def test_level_of_a_logger_changes_no_graph(logger: Logger, level: int) -> None:
    def forward(x: Tensor) -> Tensor:
        y = x + 1
        logger.warning_once("once")
        return y.sin()

    logger.setLevel(level)
    assert graphs_of(forward, logger, calls=1)[0] == 1


def test_message_of_symbolic_sizes_is_left_out_with_a_line(logger: Logger, caplog: pytest.LogCaptureFixture) -> None:
    def forward(x: Tensor) -> Tensor:
        y = x + 1
        logger.warning_once("of length %s", x.shape[0])
        return y.sin()

    graphs, lines = graphs_of(forward, logger)
    assert (graphs, lines) == (2, ["of length 2"])
    assert "of.a.model: warning_once of a message that is not constant, in forward" in caplog.text


def test_other_messages_break_graphs_and_are_logged_each_time(logger: Logger) -> None:
    def forward(x: Tensor) -> Tensor:
        y = x + 1
        logger.warning("each time")
        return y.sin()

    assert graphs_of(forward, logger, calls=1) == (2, ["each time"])


def test_what_the_user_leaves_out_stays_so(logger: Logger) -> None:
    def forward(x: Tensor) -> Tensor:
        y = x + 1
        logger.warning("each time")
        return y.sin()

    before, grads = dynamo_config.ignore_logging_functions, dynamo_config.trace_autograd_ops
    dynamo_config.trace_autograd_ops = False
    dynamo_config.ignore_logging_functions = mine = {logging.Logger.warning}
    try:
        assert graphs_of(forward, logger, calls=1) == (1, [])
        assert dynamo_config.ignore_logging_functions is mine
        assert dynamo_config.trace_autograd_ops is False
        assert dynamo_config.use_numpy_random_stream is False
    finally:
        dynamo_config.ignore_logging_functions = before
        dynamo_config.trace_autograd_ops = grads
