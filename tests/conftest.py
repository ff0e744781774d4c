"""Settings of every test run. Those of ranks are environment variables, which spawned ranks inherit."""

import importlib.util
import os

import pytest

if importlib.util.find_spec("hypothesis"):  # tests/gpu runs without it
    from hypothesis import settings

    # The same examples in every run: `--hypothesis-profile=default` looks for new ones.
    settings.register_profile("graphshard", deadline=None, derandomize=True, database=None)
    settings.load_profile("graphshard")

os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks share the cores
os.environ.setdefault("GRAPHSHARD_VERIFY", "2")  # every invariant after every pass
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")  # else each process tries out what the processor can do
os.environ.setdefault("TORCH_WARM_POOL", "0")  # else each rank starts processes that would compile Triton kernels


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the files of tests/golden anew")


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    """Whether this run writes golden files instead of comparing with them."""
    return bool(request.config.getoption("--update-golden"))
