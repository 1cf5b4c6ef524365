"""One quiet, offline, single-threaded environment for all tests, set before anything heavy is imported."""

import atexit
import gc
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
from collections import Counter
from pathlib import Path

# Children inherit what a process ignores, as it does under `nohup` and after `&` in a script; tests send them signals.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)

SCRATCH = Path(tempfile.mkdtemp(prefix="hf_ext-tests-"))
atexit.register(shutil.rmtree, SCRATCH, ignore_errors=True)
os.environ.setdefault("MPLCONFIGDIR", str(Path("~/.cache/matplotlib").expanduser()))  # its font list takes seconds
os.environ.update(
    HOME=str(SCRATCH),  # default embedding cache, Hugging Face caches
    HF_HOME=str(SCRATCH / "huggingface"),
    HF_HUB_OFFLINE="1",
    HF_DATASETS_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    TOKENIZERS_PARALLELISM="false",
    OMP_NUM_THREADS="1",
)
for leaked in (
    *("ACCELERATE_MIXED_PRECISION", "XDG_CACHE_HOME", "TRANSFORMERS_CACHE", "HF_DATASETS_CACHE", "HF_HUB_CACHE"),
    *("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH", "HF_ENDPOINT"),
):
    os.environ.pop(leaked, None)

import pytest  # noqa: E402
import torch  # noqa: E402

torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of the cases of a test with the mark `sampled(n)`, every n-th stays; the others become nightly."""
    numbers: Counter = Counter()
    for item in items:
        mark = item.get_closest_marker("sampled")
        if mark is not None:
            name = item.nodeid.partition("[")[0]
            if numbers[name] % mark.args[0]:
                item.add_marker("nightly")
            numbers[name] += 1


def pytest_collection_finish() -> None:
    """Trainer collects garbage before each run: half a second over all that is imported by now, unless it is frozen."""
    gc.collect()
    gc.freeze()
    SETTINGS.update(read_torch_settings())
    note_holds()


def note_holds() -> None:
    """Of products of matrices, which a trainer that nobody ends holds as long as it lives."""
    from hf_ext.models.kernels.process_settings import HELD_MATMUL

    hold = HELD_MATMUL.acquire

    def noted(value):
        HOLDS.append(hold(value))
        return HOLDS[-1]

    HELD_MATMUL.acquire = noted


def read_signal_handlers() -> dict:
    return {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}


HANDLERS = read_signal_handlers()  # before any test, and any fixture that lives longer than one
SETTINGS: dict = {}  # the same of torch
HOLDS: list = []  # what lets go of them


@pytest.fixture(autouse=True)
def _leaves_the_process_as_it_was():
    """No test leaves a signal handler behind, nor a data worker."""
    before = set(multiprocessing.active_children())
    yield
    while HOLDS:
        HOLDS.pop()()
    restore_torch_settings(SETTINGS)  # a trainer that nobody ended keeps what its plan switched
    if "transformers" in sys.modules:  # settings that were refused live as long as their traceback, and are asked
        sys.modules["transformers"].integrations.deepspeed.unset_hf_deepspeed_config()
    if set(multiprocessing.active_children()) - before:
        from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

        for iterator in [one for one in gc.get_objects() if type(one) is _MultiProcessingDataLoaderIter]:
            iterator._shutdown_workers()  # of a test that failed, or that holds on to an exception
    handlers, workers = read_signal_handlers(), set(multiprocessing.active_children()) - before
    for number, handler in HANDLERS.items():
        signal.signal(number, handler)
    assert handlers == HANDLERS, "a signal handler stayed behind"
    assert not workers, "data workers stayed alive: end with trainer.end() or trainer.close()"


@pytest.fixture(scope="session")
def demo_encoders(tmp_path_factory) -> tuple[str, str]:
    """Folders of the BERT-style and the ESM-2-style demo encoder: 2 layers, 64 wide, random weights."""
    from hf_ext.data.demo import make_demo_encoders

    return make_demo_encoders(tmp_path_factory.mktemp("encoders"))


@pytest.fixture(scope="session")
def demo_rows():
    """200 demo rows as loading hands them to a Trainer: heavy, light, antigen, label."""
    from hf_ext.data.demo import make_demo_table

    return make_demo_table(num_rows=200).rename_column("pKd", "label")


@pytest.fixture(scope="session")
def make_affinity(demo_encoders):
    """Builds an AffinityModel on the demo encoders, and its collator: antibody tower, antigen tower, head of 8."""

    def make(antibody: str = "frozen", antigen: str = "frozen", seed: int = 0, **settings):
        from hf_ext.data.arguments import DataArguments
        from hf_ext.property.arguments import AffinityArguments
        from hf_ext.property.building import build_collator, build_model

        columns = ["heavy", "light", "antigen"]
        torch.manual_seed(seed)
        defaults = {
            "encoders": list(demo_encoders),
            "tower_inputs": ["heavy,light", "antigen"],
            "tower_training": [antibody, antigen],
            "head_sizes": [8],
            "head_dropout": 0.0,
        }
        model = build_model(AffinityArguments(**{**defaults, **settings}), columns)
        return model, build_collator(model, DataArguments(sequence_columns=columns))

    return make


@pytest.fixture
def blocked_in_float32(monkeypatch):
    """Makes `blocked` attention compute float32 itself, as it does beside oneDNN's products, without their rounding."""
    from hf_ext.models.kernels.process_settings import FAST_CPU

    monkeypatch.setattr("hf_ext.models.kernels.blocked_attention.read_matmul_precision", lambda: FAST_CPU)


@pytest.fixture
def bf16_cpu(monkeypatch):
    """A CPU that has bf16 instructions, as far as the plan knows; torch computes bf16 on any, only slower."""
    monkeypatch.setattr("hf_ext.hardware._cpu_flags", lambda: frozenset({"avx512_bf16", "amx_bf16"}))


@pytest.fixture
def torch_settings():
    """The process-wide torch settings that speed-ups may switch, as a function; put back after the test."""
    before = read_torch_settings()
    yield read_torch_settings
    restore_torch_settings(before)


def restore_torch_settings(before: dict) -> None:
    from hf_ext.models.kernels.process_settings import set_matmul_precision

    torch.backends.fp32_precision = before["general"]
    set_matmul_precision(before["matmul"])
    torch.use_deterministic_algorithms(before["deterministic"])
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = before["cudnn"]


def read_torch_settings() -> dict:
    from hf_ext.models.kernels.process_settings import read_matmul_precision

    return {
        "matmul": read_matmul_precision(),
        "general": torch.backends.fp32_precision,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "cudnn": (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark),
        "default_dtype": torch.get_default_dtype(),
    }
