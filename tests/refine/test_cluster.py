"""Images shared between the processes of a cluster: the files and reports of one process."""

from __future__ import annotations

import errno
import os
import pickle
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import typer
from PIL import Image
from typer.testing import CliRunner

from deepmrf.cli import app
from deepmrf.data.labels import LabelSet
from deepmrf.layers import MeanField
from deepmrf.predict.pipeline import Options, segment_files
from deepmrf.predict.remote import segment_anywhere
from deepmrf.predict.segmenter import load
from deepmrf.refine import cluster
from deepmrf.refine.apply import refine


@pytest.fixture
def images(tmp_path, monkeypatch):
    """Six pictures of two sizes, and a file that is none, in the folder "in"."""
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(0)
    Path("in").mkdir()
    for number in range(6):
        size = (9, 12, 3) if number % 2 else (10, 8, 3)
        Image.fromarray(random.integers(0, 256, size, dtype=np.uint8)).save(f"in/{number}.png")
    Path("in/bad.png").write_text("no picture")
    return Path("in")


@pytest.fixture
def predictions(images):
    """Probabilities of three labels for each of the pictures."""
    Path("p").mkdir()
    (images / "bad.png").unlink()
    for path in images.iterdir():
        width, height = Image.open(path).size
        np.save(f"p/{path.stem}.npy", torch.rand(3, height, width).softmax(0).numpy())
    np.save("p/5.npy", np.zeros((3, 2, 2), np.float32))
    return Path("p")


@pytest.fixture
def in_process(monkeypatch):
    """Run the shares one after the other, the last one first, each with a copy of the work."""

    def run(self, work, items, batch=1):
        work = pickle.loads(pickle.dumps(work))
        for share in reversed(cluster._shares(items, 2, batch)):
            yield work(share)

    monkeypatch.setattr(cluster._Pool, "__post_init__", lambda self: None)
    monkeypatch.setattr(cluster._Pool, "run", run)


def contents(folder):
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def same_reports(report, expected, folder):
    values, wanted = report.to_dict(), expected.to_dict()
    wanted["images"].sort(key=lambda image: image["image"])  # one process finishes them batch by batch
    assert str(values).replace(folder, "one") == str(wanted)


@pytest.mark.usefixtures("plain_torch")
@pytest.mark.parametrize("batch", [1, 2])
def test_shares_give_the_files_and_the_report_of_one_process(images, model_folder, in_process, batch):
    segmenter = load(model_folder, device="cpu")
    expected = segment_files(segmenter, [images], Path("one"), Options(batch=batch))
    counts = []
    report = cluster.predict(
        images,
        "two",
        segmenter,
        options=Options(batch=batch),
        progress=lambda done, total: counts.append((done, total)),
    )
    assert contents("two") == contents("one")
    same_reports(report, expected, "two")
    assert counts[-1] == (7, 7)
    assert [path.name for path, _ in report.failed] == ["bad.png"]
    again = cluster.predict(images, "two", segmenter)
    assert len(again.earlier) == 6
    assert not again.done


@pytest.mark.usefixtures("plain_torch")
def test_no_image_is_overwritten_by_the_result_of_another_share(images, model_folder, in_process):
    with pytest.raises(ValueError, match="would be overwritten"):
        cluster.predict([images / "0.png", images / "1.png"], images, model_folder)


@pytest.mark.usefixtures("plain_torch")
def test_refining_in_shares(images, predictions, in_process):
    mrf, labels = MeanField(3, window=5, context_size=3), LabelSet(("a", "b", "c"))
    expected = refine(mrf, labels, predictions, images, "one", overlays=True)
    report = cluster.refine(mrf, labels, predictions, images, "two", overlays=True)
    assert contents("two") == contents("one")
    assert report == expected
    assert len(report.done) == 5
    assert len(report.failed) == 1
    assert len(cluster.refine(mrf, labels, predictions, images, "two", gt_prob=0.8).skipped) == 5


@pytest.mark.usefixtures("plain_torch")
def test_shares_of_urls_give_the_files_of_one_process(images, model_folder, in_process, memory):
    segmenter = load(model_folder, device="cpu")
    memory.put("in", "/in", recursive=True)
    expected = segment_anywhere(segmenter, ["memory://in"], "memory://one")
    report = cluster.predict("memory://in", "memory://two", segmenter, options=Options(batch=2))
    one, two = ({path[5:]: memory.cat_file(path) for path in memory.find(folder)} for folder in ("/one", "/two"))
    assert one == two
    assert len(one) == 12
    same_reports(report, expected, "two")
    assert [path for path, _ in report.failed] == ["memory://in/bad.png"]
    assert len(cluster.predict("memory://in", "memory://two", segmenter).earlier) == 6


@pytest.mark.usefixtures("plain_torch")
def test_refining_shares_of_urls(images, predictions, in_process, memory):
    mrf, labels = MeanField(3, window=5, context_size=3), LabelSet(("a", "b", "c"))
    for folder in ("in", "p"):
        memory.put(folder, f"/{folder}", recursive=True)
    expected = refine(mrf, labels, predictions, images, "one")
    report = cluster.refine(mrf, labels, "memory://p", "memory://in", "memory://two")
    assert {path[5:]: memory.cat_file(path) for path in memory.find("/two")} == contents("one")
    assert report.done == expected.done
    assert [stem for stem, _ in report.failed] == ["5"]


@pytest.mark.parametrize(
    ("resources", "workers", "device", "expected"),
    [
        ({"CPU": 16.0}, None, None, ("cpu", 16, 0)),
        ({"CPU": 16.0}, 3, None, ("cpu", 3, 0)),
        ({"CPU": 16.0, "GPU": 4.0}, None, None, ("cuda", 4, 1)),
        ({"CPU": 16.0, "GPU": 4.0}, None, "cuda", ("cuda", 4, 1)),
        ({"CPU": 16.0, "GPU": 4.0}, 2, None, ("cuda", 2, 1)),
        ({"CPU": 16.0, "GPU": 4.0}, 8, None, ("cuda", 8, 1 / 2)),
        ({"CPU": 16.0, "GPU": 2.0}, 3, None, ("cuda", 3, 1 / 2)),
        ({"CPU": 16.0, "GPU": 4.0}, None, "cpu", ("cpu", 16, 0)),
    ],
)
def test_workers_ask_for_the_gpus_of_the_cluster(monkeypatch, resources, workers, device, expected):
    asked = {}

    class Dataset:
        context = SimpleNamespace()

        def map(self, function, **options):
            asked.update(options)
            return SimpleNamespace(iter_rows=lambda: iter([{"result": pickle.dumps("done")}]))

    data = SimpleNamespace(from_items=lambda rows, **_: Dataset(), ActorPoolStrategy=SimpleNamespace)
    ray = SimpleNamespace(
        cloudpickle=pickle,
        data=data,
        cluster_resources=lambda: resources,
        is_initialized=lambda: True,
        exceptions=SimpleNamespace(RayError=ConnectionError),
    )
    monkeypatch.setattr(cluster, "optional", lambda *names: ray)
    assert list(cluster._Pool(None, workers, device).run("work", range(1000))) == ["done"]
    device, count, gpus = expected
    assert asked["fn_constructor_args"][1] == device
    assert asked["compute"].max_size == asked["compute"].initial_size == count
    assert (asked["num_gpus"], asked["num_cpus"]) == (gpus, 1)
    per_gpu = int(1 / gpus) if gpus else 0
    assert not gpus or resources["GPU"] * per_gpu >= count, "every worker finds a GPU with room"


def test_no_gpu_where_one_was_asked_for(monkeypatch):
    ray = SimpleNamespace(cluster_resources=lambda: {"CPU": 2.0}, is_initialized=lambda: True)
    monkeypatch.setattr(cluster, "optional", lambda *names: ray)
    with pytest.raises(ValueError, match="the cluster has no GPU: choose 'cpu'"):
        list(cluster._Pool(None, None, "cuda").run("work", range(3)))


def test_shares_are_complete_batches_and_small():
    assert [len(share) for share in cluster._shares(range(10), 2, 4)] == [4, 4, 2]
    assert [len(share) for share in cluster._shares(range(3), 8, 1)] == [1, 1, 1]
    shares = cluster._shares(range(1000), 2, 1)
    assert max(map(len, shares)) == cluster.MAX_IMAGES_PER_SHARE
    assert [item for share in shares for item in share] == list(range(1000))


def test_an_error_of_a_worker_arrives_at_the_driver():
    pytest.importorskip("ray")

    def work(share):
        raise OSError(errno.ENOSPC, "No space left on device")

    work.to = lambda device: None
    from ray import cloudpickle

    folder = os.getcwd()
    worker = cluster._Worker(cloudpickle.dumps(work), "cpu", folder, [])
    error = cloudpickle.loads(worker({"share": cloudpickle.dumps([])})["result"])
    assert isinstance(error, OSError)
    assert error.errno == errno.ENOSPC

    def fail(device):
        raise RuntimeError("No CUDA GPUs are available\nand more")

    work.to = fail
    worker = cluster._Worker(cloudpickle.dumps(work), "cuda", folder, [])
    error = cloudpickle.loads(worker({"share": cloudpickle.dumps([])})["result"])
    assert re.fullmatch(r"A worker on \S+ does not start: No CUDA GPUs are available\.", str(error))


@pytest.mark.parametrize(
    ("words", "address", "inputs"),
    [
        (["a.png", "--ray"], "", ("a.png",)),
        (["--ray", "a.png"], "", ("a.png",)),
        (["a.png", "--ray", "auto"], "auto", ("a.png",)),
        (["--ray", "10.0.0.1:6379", "a.png"], "10.0.0.1:6379", ("a.png",)),
        (["--ray=ray://head:10001", "a.png"], "ray://head:10001", ("a.png",)),
        (["a.png", "--", "--ray"], None, ("a.png", "--ray")),
    ],
)
def test_the_address_may_be_left_out(words, address, inputs):
    command = typer.main.get_command(app).commands["predict"]
    context = command.make_context("predict", list(words))
    assert context.params["ray"] == address
    assert tuple(context.params["inputs"]) == inputs


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--workers", "0"], "workers=0 must be at least 1"),
        (["--device", "tpu"], "device='tpu' is unknown"),
        (["a.mp4"], "a.mp4 is a video, which one machine segments"),
        (["nonsense"], "--ray nonsense is neither a file nor an address: give HOST:PORT"),
        (["10.0.0.9"], "--ray 10.0.0.9 is neither a file nor an address"),
    ],
)
def test_what_a_cluster_cannot_do_is_one_sentence(images, monkeypatch, words, sentence):
    monkeypatch.setattr(cluster, "optional", lambda *names: None)
    Path("a.mp4").touch()
    result = CliRunner().invoke(app, ["predict", "in", "--model", "animals", "--ray", *words])
    assert result.exit_code == 2
    assert sentence in result.output


def test_two_processes_of_a_cluster(images, predictions, model_folder):
    """Six images on a real cluster of this machine, by both commands."""
    ray = pytest.importorskip("ray")
    pytest.importorskip("ray.data")
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        options = ["--predictions", "p", "--images", "in", "--preset", "voc"]
        for command in (["predict", "in", "--model", str(model_folder)], ["refine", *options]):
            for out in ([f"{command[0]}-one"], [f"{command[0]}-two", "--ray", "--workers", "2"]):
                result = CliRunner().invoke(app, [*command, "-o", *out])
                assert result.exit_code == (command[0] == "refine"), result.output  # one prediction is bad
            assert contents(f"{command[0]}-two") == contents(f"{command[0]}-one")
    finally:
        ray.shutdown()


@pytest.fixture
def bucket(monkeypatch):
    """s3://bucket on an S3 server, a process of its own."""
    pytest.importorskip("moto")
    s3fs = pytest.importorskip("s3fs")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    server = subprocess.Popen([sys.executable, "-m", "moto.server", "-p", port], stderr=subprocess.DEVNULL)
    variables = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_DEFAULT_REGION": "us-east-1"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    try:
        while True:
            try:
                socket.create_connection(("127.0.0.1", int(port))).close()
                break
            except OSError:
                assert server.poll() is None
                time.sleep(0.1)
        files = s3fs.S3FileSystem(skip_instance_cache=True)
        files.mkdir("bucket")
        yield files
    finally:
        server.terminate()
        server.wait()


def test_two_processes_and_a_bucket(images, model_folder, bucket):
    """benchmarks/cluster.py --s3 kills a worker and the command, too."""
    ray = pytest.importorskip("ray")
    pytest.importorskip("ray.data")
    bucket.put("in", "bucket/in", recursive=True)
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        for out in (["one"], ["two", "--ray", "--workers", "2"]):
            words = ["predict", "s3://bucket/in", "--model", str(model_folder), "-o", f"s3://bucket/{out[0]}", *out[1:]]
            result = CliRunner().invoke(app, words)
            assert "s3://bucket/in/bad.png cannot be read" in result.output
            assert result.exit_code == 1, result.output
        again = CliRunner().invoke(app, words)
        assert "6 there already, 1 failed" in again.output
    finally:
        ray.shutdown()
    bucket.invalidate_cache()
    one, two = ({path[11:]: bucket.cat_file(path) for path in bucket.find(f"bucket/{out}")} for out in ("one", "two"))
    assert one == two
    assert len(one) == 12
