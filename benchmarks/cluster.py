"""Hold `deepmrf predict --ray` and `refine --ray` to what they promise: the files of one process, whatever is killed.

    python benchmarks/cluster.py                            # 2,000 images of 64 x 48, all checks: some minutes
    python benchmarks/cluster.py --checks speed --images 200 --size 512 512 --model animals
    python benchmarks/cluster.py --store s3 --images 300    # pip install s3fs 'moto[server]'
    python benchmarks/cluster.py --store gs --images 300 --command refine     # pip install gcsfs gcp-storage-emulator

    process   one process that is killed in the middle and typed again: the files of an uninterrupted one, none twice
    same      the files of two workers equal those of one process, byte for byte
    worker    the same after one worker was killed in the middle; nothing is written twice
    driver    the same after the command was killed in the middle and typed again; nothing is written twice
    speed     images a second of one and of two workers, and processor seconds of an image; not of a store or of refine

Everything runs on this machine. Other work on it disturbs the speed: the load average is printed beside it. With
--store, images and results lie in a bucket of a server, a process of its own on this machine. The files of one process
are then compared with those of local folders first.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import fsspec
import numpy as np
from PIL import Image

from deepmrf.predict.notes import FIELD

CHECKS = ("process", "same", "worker", "driver", "speed")
LABELS = ("sky", "road", "tree", "car")
"""Of the predictions that are refined."""
WORKER = b"_Worker"
"""In the title of a worker's process."""
GS_SERVER = """
from http.server import HTTPServer
from gcp_storage_emulator.__main__ import main
HTTPServer.request_queue_size = 1000  # with its 5, connections of many threads are lost and never answered
main()
"""
THREADS = {"OMP_NUM_THREADS": "1"}
"""Of a process: a worker has one, too."""


def write_inputs(folder: Path, count: int, width: int, height: int) -> None:
    """Smooth random pictures, and predictions of their labels."""
    for name in ("in", "predictions"):
        (folder / name).mkdir()
    (folder / "labels.json").write_text(json.dumps({"names": LABELS}))
    random = np.random.default_rng(0)
    for number in range(count):
        colours = random.integers(0, 256, (6, 8, 3), dtype=np.uint8)
        picture = Image.fromarray(colours).resize((width, height), Image.Resampling.BICUBIC)
        picture.save(folder / "in" / f"{number:05d}.png")
        scores = random.normal(0, 1, (len(LABELS), height, width)) + np.asarray(picture)[..., 0] / 64
        np.save(folder / "predictions" / f"{number:05d}.npy", scores.astype(np.float16))


@contextmanager
def store(protocol: str) -> Iterator[str]:
    """The URL of an empty bucket on a server of this machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    if protocol == "s3":
        os.environ |= {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_DEFAULT_REGION": "us-east-1"}
        os.environ["FSSPEC_S3_ENDPOINT_URL"] = url
        words = ["-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    else:
        os.environ |= {"STORAGE_EMULATOR_HOST": url, "FSSPEC_GS_TOKEN": "anon"}
        os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"  # the server has no gRPC
        words = ["-c", GS_SERVER, "start", "-q", "--in-memory", "--host", "127.0.0.1", "--port", str(port)]
    server = subprocess.Popen([sys.executable, *words], stderr=subprocess.DEVNULL)
    fsspec.config.set_conf_env(fsspec.config.conf)
    try:
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                time.sleep(0.1)
        fsspec.filesystem(protocol).mkdir("bucket")
        yield f"{protocol}://bucket"
    finally:
        server.terminate()
        server.wait()


def opened(place: str) -> tuple[fsspec.AbstractFileSystem, str]:
    """The file system of a folder or a URL, and its name there."""
    files, name = fsspec.core.url_to_fs(place)
    files.invalidate_cache()
    return files, name


@dataclass(frozen=True)
class Command:
    """`deepmrf predict` or `deepmrf refine` on images of a place, with results beside them."""

    name: str
    model: str
    """Of `predict`."""
    labels: Path
    """Of `refine`."""

    def start(self, place: str, out: str, *options: str) -> subprocess.Popen[bytes]:
        """Start it on the folder "in"."""
        if self.name == "predict":
            words = [f"{place}/in", "--model", self.model]
        else:
            words = ["--preset", "voc", "--predictions", f"{place}/predictions", "--images", f"{place}/in"]
            words += ["--labels", str(self.labels)]
        words = [sys.executable, "-m", "deepmrf", self.name, *words, "-o", f"{place}/{out}", *options]
        return subprocess.Popen(words, stdout=subprocess.DEVNULL, env=os.environ | THREADS)


def finish(process: subprocess.Popen[bytes]) -> None:
    """Wait for a command that must succeed."""
    if process.wait():
        raise SystemExit(f"{' '.join(map(str, process.args))} ended with {process.returncode}.")


def contents(folder: str) -> dict[str, bytes]:
    """Every file of a folder; what killed processes left half written is hidden and does not count."""
    files, name = opened(folder)
    names = {path.rpartition("/")[2]: path for path in files.find(name)}
    return {name: files.cat_file(path) for name, path in names.items() if not name.startswith(".")}


def finished(folder: str) -> dict[str, str]:
    """The images that are done, by their label maps, with what a second writing changes."""
    files, name = opened(folder)
    facts = {path.rpartition("/")[2]: facts for path, facts in files.find(name, detail=True).items()}
    return {
        name: str(f.get("ino") or f.get("generation") or f["LastModified"])
        for name, f in facts.items()
        if name.endswith(".png")
    }


def without_source(content: bytes) -> object:
    """A result, without what the note of a label map says of the image's name and date."""
    if not content.startswith(b"\x89PNG"):
        return content
    with Image.open(BytesIO(content)) as picture:
        note = json.loads(picture.info.get(FIELD, "{}")) | {"of": ""}
        return picture.tobytes(), picture.getpalette(), note


def wait_for_middle(process: subprocess.Popen[bytes], folder: str, count: int) -> dict[str, str]:
    """Wait until a third of the images is done."""
    while len(done := finished(folder)) < count // 3:
        if process.poll() is not None:
            raise SystemExit(f"{' '.join(map(str, process.args))} ended with {process.returncode}, too early.")
        time.sleep(0.05)
    return done


def descendants(pid: int) -> list[int]:
    """The processes that a process has started, directly or not."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has just ended
            continue
    family = [pid]
    for member in family:
        family += [child for child, parent in parents.items() if parent == member]
    return family[1:]


def kill_worker(driver: int) -> int:
    """Kill one of the driver's workers with SIGKILL; return its process id."""
    for pid in descendants(driver):
        if WORKER in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(pid, signal.SIGKILL)
            return pid
    raise SystemExit("There is no worker to kill.")


def check_same(actual: Mapping[str, object], expected: Mapping[str, object]) -> str:
    """Compare files with those that are expected."""
    if actual.keys() != expected.keys():
        raise SystemExit(f"There are {len(actual)} files, not {len(expected)}.")
    different = [name for name in expected if actual[name] != expected[name]]
    if different:
        raise SystemExit(f"{len(different)} of {len(expected)} files differ: {different[:3]}.")
    return f"{len(actual)} files are equal"


def check_not_again(folder: str, before: dict[str, str]) -> str:
    """Compare the images that were done before with what they are now."""
    now = finished(folder)
    if again := [name for name, number in before.items() if now[name] != number]:
        raise SystemExit(f"{len(again)} images were done twice: {again[:3]}.")
    return f", {len(before)} done before and not again" if before else ""


def processor_seconds(driver: int) -> float:
    """Seconds that the processors have worked for the driver's workers so far."""
    ticks = 0
    for pid in descendants(driver):
        try:
            if WORKER in Path(f"/proc/{pid}/cmdline").read_bytes():
                ticks += sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]))
        except OSError:  # it has just ended
            continue
    return ticks / os.sysconf("SC_CLK_TCK")


def speed(folder: Path, model: str, workers: int) -> dict[str, float]:
    """Images a second and processor seconds of an image between a quarter and three quarters of the images.

    Before, workers start; after, one may have nothing left to do. Other programs change the processor seconds little.
    """
    from deepmrf import cluster

    states: list[tuple[int, float, float]] = []
    begin = time.perf_counter()
    out = folder / f"speed-{workers}"

    def progress(done: int, total: int | None) -> None:
        states.append((done, time.perf_counter(), processor_seconds(os.getpid())))

    cluster.predict(folder / "in", out, model, workers=workers, address="local", device="cpu", progress=progress)
    shutil.rmtree(out)
    count = states[-1][0]
    first, last = (next(state for state in states if state[0] >= count * part) for part in (0.25, 0.75))
    images = last[0] - first[0]
    rates = {"images/s": images / (last[1] - first[1]), "processor s/image": (last[2] - first[2]) / images}
    return rates | {"seconds": time.perf_counter() - begin}


def run_with_kill(command: Command, place: str, check: str, count: int) -> dict[str, str]:
    """Run a command to its end, with what the check kills on the way; return the images that were done before."""
    options = () if check == "process" else ("--ray", "local", "--workers", "2")
    process, before = command.start(place, check, *options), {}
    if check != "same":
        before = wait_for_middle(process, f"{place}/{check}", count)
    if check == "worker":
        kill_worker(process.pid)
    elif check in ("process", "driver"):
        process.kill()
        process.wait()
        time.sleep(10 if check == "driver" else 0)  # workers end when their driver is gone
        before = finished(f"{place}/{check}")
        process = command.start(place, check, *options)
    finish(process)
    return before


def main() -> None:
    """Run the checks that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--size", type=int, nargs=2, default=(64, 48), metavar=("W", "H"))
    parser.add_argument("--model", default="animals")
    parser.add_argument("--command", choices=("predict", "refine"), default="predict")
    parser.add_argument("--checks", nargs="+", choices=CHECKS, help="all by default, without the speed for a store")
    parser.add_argument("--json", type=Path, help="also write the results here")
    parser.add_argument("--store", choices=("s3", "gs"), help="images and results in a bucket of a server")
    options = parser.parse_args()
    local = options.store is None
    checks = options.checks or (CHECKS if local and options.command == "predict" else CHECKS[:-1])
    results: dict[str, object] = {"images": options.images, "size": options.size, "model": options.model}
    results |= {"command": options.command, "store": options.store}
    with tempfile.TemporaryDirectory() as name, nullcontext(name) if local else store(options.store) as place:
        folder = Path(name)
        command = Command(options.command, options.model, folder / "labels.json")
        write_inputs(folder, options.images, *options.size)
        if {*checks} - {"speed"}:
            finish(command.start(name, "one"))
            expected = contents(f"{name}/one")
        if not local:
            for inputs in ("in", "predictions"):
                files, target = opened(f"{place}/{inputs}")
                files.put(f"{folder / inputs}/", f"{target}/", recursive=True)
            finish(command.start(place, "one"))
            here, there = ({n: without_source(c) for n, c in f.items()} for f in (expected, contents(f"{place}/one")))
            print(f"one process, local and {options.store}: {check_same(there, here)}", flush=True)
            expected = contents(f"{place}/one")
        for check in checks:
            if check == "speed":
                runs = [[speed(folder, options.model, workers) for workers in (1, 2)] for _ in range(2)]  # by turns
                one, two = (max(rates, key=lambda run: run["images/s"]) for rates in zip(*runs, strict=True))
                ratio = two["images/s"] / one["images/s"]
                results[check] = {"1 worker": one, "2 workers": two, "ratio": ratio, "load": os.getloadavg()}
            else:
                before = run_with_kill(command, place, check, options.images)
                out = f"{place}/{check}"
                results[check] = check_same(contents(out), expected) + check_not_again(out, before)
            print(f"{check}: {results[check]}", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
