"""Devices, dtypes, one table of tolerances, and the paper's neighbourhoods and update equation as plain loops."""

from __future__ import annotations

import itertools
import os
import re
import signal
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from deepmrf import ops

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)
os.environ["ACCELERATE_USE_CPU"] = "true"  # training on a GPU does not repeat its bits

TOLERANCES = {
    torch.float64: 1e-10,
    torch.float32: 2e-5,
    torch.bfloat16: 3e-2,
    torch.float16: 4e-3,
}
"""The largest error allowed, relative to the largest value."""


LONG_TESTS = ("tests/ops/test_interpreted.py", "tests/export/", "tests/training/test_loop.py")
"""They begin first: a worker that begins one at the end keeps the other waiting."""


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: not item.nodeid.startswith(LONG_TESTS))


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


ROOMS_THAT_CHOOSE_A_DEVICE = ("app", "cli", "evaluation", "models", "predict", "refine", "training", "video")


@pytest.fixture(autouse=True)
def cpu_by_default(request):
    """Hide the GPU from tests of rooms that would choose it: they compare with results of the CPU.

    The patch is not that of the fixture `monkeypatch`, which would then outlive the fixtures of a test.
    """
    with pytest.MonkeyPatch.context() as patch:
        if request.path.parent.name in ROOMS_THAT_CHOOSE_A_DEVICE:
            patch.setattr(torch.cuda, "is_available", lambda: False)
        yield


@pytest.fixture
def full_disk():
    """with full_disk(): no file grows, or only to so many bytes; as on a full disk, new names are possible."""
    resource = pytest.importorskip("resource")

    @contextmanager
    def limit(most=0):
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    return limit


@pytest.fixture
def pipe():
    """pipe(path): a named pipe, which blocks whoever opens it; a test that does is stopped after a minute."""
    if not hasattr(os, "mkfifo"):
        pytest.skip("needs named pipes")

    def stop(*_):
        raise TimeoutError("A pipe was opened.")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(60)
    yield os.mkfifo
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(params=["cpu", *["cuda"] * torch.cuda.is_available()])
def device(request):
    return torch.device(request.param)


@pytest.fixture(params=[torch.float32, torch.float64], ids=["float32", "float64"])
def dtype(request):
    return request.param


@pytest.fixture
def memory():
    """fsspec's files in memory, at memory://, without any."""
    import fsspec

    files = fsspec.filesystem("memory")
    files.store.clear()
    files.pseudo_dirs[:] = [""]
    yield files
    files.store.clear()


@pytest.fixture
def plain_torch():
    """Run the plain PyTorch evaluations, whatever else is installed."""
    with ops.use("torch"):
        yield


@pytest.fixture
def double_default():
    """Layers made and used in float64: parameters then hold their starting values to all digits."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def agree():
    """agree(actual, expected): same shape, and the largest error small for the dtype (or under `tolerance`)."""

    def check(actual, expected, tolerance=None):
        expected = torch.as_tensor(expected)
        assert actual.shape == expected.shape
        tolerance = TOLERANCES[actual.dtype] if tolerance is None else tolerance
        actual, expected = actual.detach().cpu().double(), expected.detach().cpu().double()
        error, largest = (actual - expected).abs().max().item(), expected.abs().max().item()
        assert error <= tolerance * max(largest, 1e-3), f"error {error:.3g} beside values up to {largest:.3g}"

    return check


def _pixels(size):
    return list(itertools.product(*[range(n) for n in size]))


def _neighbours(j, window, size):
    return list(
        itertools.product(
            *[range(max(0, x - m // 2), min(n, x - m // 2 + m)) for x, m, n in zip(j, window, size, strict=True)]
        )
    )


@pytest.fixture
def pixels():
    """pixels(size): every pixel of an image, as index tuples."""
    return _pixels


@pytest.fixture
def neighbours():
    """neighbours(j, window, size): N(j), the pixels of the window at j that lie inside the image."""
    return _neighbours


@pytest.fixture
def newq():
    """Eqn (newq), the paper's mean-field update, as loops over k, v, j and z for every pixel i and label u."""

    def update(phi, q, d, mu, bias, window, context_size, gate=True, z_is_j=True):
        """The next q (L, *S) from phi = -ln p and q, with d(j, z), mu(k, i, u, j, v), bias (L, K)."""
        labels, *size = q.shape
        contexts = bias.shape[1]
        energy = phi.copy()
        for i in _pixels(size):
            for u in range(labels):
                penalties = []
                for k in range(contexts):
                    penalty = bias[u, k]
                    for v in range(labels):
                        for j in _neighbours(i, context_size, size):
                            for z in _neighbours(j, window, size):
                                if z_is_j or z != j:
                                    q_j = q[(v, *j)] if gate else 1.0
                                    penalty += mu(k, i, u, j, v) * d(j, z) * q_j * q[(v, *z)]
                    penalties.append(penalty)
                energy[(u, *i)] += min(penalties)  # lambda_k: the component that costs least is active
        unnormalised = np.exp(-energy)
        return unnormalised / unnormalised.sum(0)

    return update


@pytest.fixture
def python_blocks():
    """python_blocks("docs/video.md", image=...): run every Python block of a document as one session, with these names.

    Returns the names that the session has at its end.
    """

    def run(document, **scope):
        blocks = re.findall(r"```python\n(.*?)```", (Path(__file__).parents[1] / document).read_text(), re.S)
        assert blocks, f"{document} has no Python"
        for block in blocks:
            exec(compile(block, document, "exec"), scope)
        return scope

    return run


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    """A saved model that has learned nothing, yet finds every one of its labels somewhere."""
    from deepmrf.data.labels import ANIMALS
    from deepmrf.models.parsing_network import DeepParsingNetwork, write_model

    torch.manual_seed(1)
    model = DeepParsingNetwork.build(
        "fast", ANIMALS, {"width": 16}, {"window": 5, "contexts": 2, "context_size": 3, "kernel": "distance"}
    )
    with torch.no_grad():
        model.unary.classify[1].weight.mul_(200)
        model.mean_field.label_contexts.weight.normal_(std=0.3)
    folder = tmp_path_factory.mktemp("models") / "tiny"
    write_model(model.eval(), folder)
    return folder


@pytest.fixture
def untaught(tmp_path, monkeypatch, model_folder):
    """An empty current folder, where "animals" is a model that has learned nothing."""
    from deepmrf.models import names as models

    monkeypatch.chdir(tmp_path)
    bundled = tmp_path / ".bundled"
    bundled.mkdir()
    (bundled / "animals").symlink_to(model_folder, target_is_directory=True)
    monkeypatch.setattr(models, "PRETRAINED", bundled)
