"""Fixtures for all tests. Nothing here imports torch unless a test does."""

from __future__ import annotations

import fcntl
import gc
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from xdist.remote import Producer  # type: ignore[import-untyped]

    from mesh_attention.report.facts import ReportFacts
    from support.pool import WorkerPool

# Tests start many processes, and each, as all that collect tests, would compile the package and
# its tests anew: 15 seconds of a core for the tests alone.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Without a GPU our Triton kernels run in its interpreter. Triton asks for this when it is imported.
if not any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/dxg")):
    os.environ.setdefault("TRITON_INTERPRET", "1")
# cuDNN Frontend compiles for many seconds in every process, unless they share what they made.
os.environ.setdefault("FLEX_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--screenshots", help="folder for what tests marked browser saw")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> object:
    """With `--dist loadgroup` one worker has all tests whose ranks share a GPU, which run one at a
    time in any case, and starts their processes once. Not by marks: with pytest 9.1 pytest-xdist
    loses them in silence (its issue 1386)."""
    if config.getoption("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

    class ByRanks(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return _pool_of(Path(nodeid.partition("::")[0]).stem) or nodeid

    return ByRanks(config, log)


# By the pool of processes that tests ask for: files, and the worker that has all of them.
RANKS_ON_A_GPU = {
    "gpu_pool": (
        "deterministic",
        "documents",
        "keep",
        "keep_attention",
        "nccl",
        "nccl_ranks",
        "profile",
        "ranks",
        "same_bits",
        "sinks",
        "symmetric",
    ),
    "gpu_pool_in_turns": ("compile", "huggingface", "losses", "nccl_faults"),
}


def _pool_of(file: str) -> str | None:
    name = file.removeprefix("test_gpu_")
    return next((pool for pool, files in RANKS_ON_A_GPU.items() if name in files), None)


# Plans, like modules and tests, are many small objects without cycles: what searches all of memory
# for cycles, again and again, takes a tenth of the time. It does so rarely here.
gc.set_threshold(50_000, 20, 20)


def pytest_collection_finish() -> None:
    """What is imported is left out of that search."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    if "torch" in sys.modules:
        import torch

        torch.set_num_threads(1)


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all processes of pytest in a run."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.fixture(scope="session")
def pool(shared_folder: Path) -> Iterator[WorkerPool]:
    """Processes that form gloo groups; started when the first test asks for them."""
    from support.pool import WorkerPool

    workers = WorkerPool(address_file=shared_folder / "pool")
    yield workers
    workers.close()


@pytest.fixture(scope="session")
def compiling_pool(shared_folder: Path) -> Iterator[WorkerPool]:
    """The same for code that is compiled: PyTorch cannot trace what measures coverage, so where
    that is measured these have a server of their own."""
    from support.pool import WorkerPool

    server = "compiling" if "SLIPCOVER_ENABLED" in os.environ else "pool"
    workers = WorkerPool(measured=False, address_file=shared_folder / server)
    yield workers
    workers.close()


@pytest.fixture(scope="session")
def model_pool(shared_folder: Path) -> Iterator[WorkerPool]:
    """The same with transformers, which takes seconds to import: once for all of them."""
    from support.pool import WorkerPool

    workers = WorkerPool(
        {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"},
        modules=("support.tiny_trainer", "support.tiny_trl", "support.swept_models"),
        seconds=180.0,
        address_file=shared_folder / "models",
    )
    yield workers
    workers.close()


@pytest.fixture(scope="session")
def report_cluster(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with a cluster of small nodes and a hostile name."""
    from support.report_case import write_cluster

    return write_cluster(tmp_path_factory.mktemp("cluster") / "cluster.toml")


@pytest.fixture(scope="session")
def report_facts(report_cluster: Path) -> ReportFacts:
    """Of one small problem, which takes two seconds to search."""
    from support.report_case import facts_of_a_small_problem

    return facts_of_a_small_problem(report_cluster)


@pytest.fixture(autouse=True)
def _the_gpu(request: pytest.FixtureRequest) -> Iterator[None]:
    """Nothing skips in silence: without a CUDA device tests marked gpu fail. Ranks that share the
    GPU wait for each other, so there is one test of a group of them at a time."""
    if request.node.get_closest_marker("gpu") is None:
        yield
        return
    import torch

    if not torch.cuda.is_available():
        pytest.fail("tests marked gpu need a CUDA device; deselect them with -m 'not gpu'")
    pools = [pool for pool in RANKS_ON_A_GPU if pool in request.fixturenames]
    file = request.path.stem
    assert pools in ([], [_pool_of(file)]), f"RANKS_ON_A_GPU does not have {file} under {pools}"
    with ExitStack() as held:
        for name in pools:
            path = Path(tempfile.gettempdir(), f"mesh_attention-{name}.lock")
            fcntl.flock(held.enter_context(open(path, "w")), fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="session")
def gpu_pool() -> Iterator[WorkerPool]:
    """Processes that share one GPU: PyTorch lets them share its symmetric memory, and NCCL takes
    them for nodes on a network, see `support.worker`. Where there is CUDA's multi-process service
    their kernels run at once, several times faster than in turns."""
    from sockets import MpsDaemon

    mps = MpsDaemon()
    workers = _ranks_on_a_gpu(mps.environment)
    yield workers
    workers.close()
    mps.close()


@pytest.fixture(scope="session")
def gpu_pool_in_turns() -> Iterator[WorkerPool]:
    """The same without that service, in which ranks that are killed would take others with them;
    and beside it, for tests of whole models, which mostly keep the host busy."""
    workers = _ranks_on_a_gpu({})
    yield workers
    workers.close()


def _ranks_on_a_gpu(environment: dict[str, str]) -> WorkerPool:
    from support.pool import WorkerPool

    return WorkerPool(
        {
            "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
            "NCCL_SOCKET_IFNAME": "lo",
            "NCCL_IB_DISABLE": "1",
            "NCCL_MAX_NCHANNELS": "1",  # or kernels that wait for each other fill the GPU
        }
        | environment
    )
