"""Settings of every test run. They are environment variables, so that spawned ranks inherit them."""

import os

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks share the cores
os.environ.setdefault("GRAPHSHARD_VERIFY", "2")  # every invariant after every pass


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the files of tests/golden anew")


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    """Whether this run writes golden files instead of comparing with them."""
    return bool(request.config.getoption("--update-golden"))
