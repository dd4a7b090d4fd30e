"""Hold `deepmrf predict --ray` to what it promises: the same files as one process, whatever is killed, and its speed.

    python benchmarks/cluster.py                            # 2,000 images of 64 x 48, all checks: some minutes
    python benchmarks/cluster.py --checks speed --images 200 --size 512 512 --model animals
    python benchmarks/cluster.py --s3 --checks same worker driver --images 600      # pip install s3fs 'moto[server]'

    same      the files of two workers equal those of one process, byte for byte
    worker    the same after one worker was killed in the middle; nothing is written twice
    driver    the same after the command was killed in the middle and typed again; nothing is written twice
    speed     images a second of one and of two workers, and processor seconds of an image

Everything runs on this machine. Other work on it disturbs the speed: the load average is printed beside it. With --s3,
images and results lie in a bucket of an S3 server, a process of its own on this machine.
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
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import fsspec
import numpy as np
from PIL import Image

CHECKS = ("same", "worker", "driver", "speed")
WORKER = b"_Worker"
"""In the title of a worker's process."""
THREADS = {"OMP_NUM_THREADS": "1"}
"""Of a process: a worker has one, too."""


def write_images(folder: Path, count: int, width: int, height: int) -> None:
    """Smooth random pictures."""
    folder.mkdir()
    random = np.random.default_rng(0)
    for number in range(count):
        colours = random.integers(0, 256, (6, 8, 3), dtype=np.uint8)
        Image.fromarray(colours).resize((width, height), Image.Resampling.BICUBIC).save(folder / f"{number:05d}.png")


@contextmanager
def s3_server() -> Iterator[str]:
    """The URL of an empty bucket on an S3 server of this machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(words, stderr=subprocess.DEVNULL)
    os.environ |= {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_DEFAULT_REGION": "us-east-1"}
    os.environ |= {"FSSPEC_S3_ENDPOINT_URL": f"http://127.0.0.1:{port}"}
    try:
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                time.sleep(0.1)
        fsspec.filesystem("s3", endpoint_url=os.environ["FSSPEC_S3_ENDPOINT_URL"]).mkdir("bucket")
        yield "s3://bucket"
    finally:
        server.terminate()
        server.wait()


def opened(place: str) -> tuple[fsspec.AbstractFileSystem, str]:
    """The file system of a folder or a URL, and its name there."""
    options = {"endpoint_url": os.environ["FSSPEC_S3_ENDPOINT_URL"]} if place.startswith("s3://") else {}
    files, name = fsspec.core.url_to_fs(place, **options)
    files.invalidate_cache()
    return files, name


def start(place: str, out: str, model: str, *options: str) -> subprocess.Popen[bytes]:
    """Start `deepmrf predict` on the folder "in" of a place, with results beside it."""
    words = [sys.executable, "-m", "deepmrf", "predict", f"{place}/in", "-o", f"{place}/{out}", "--model", model]
    return subprocess.Popen([*words, *options], stdout=subprocess.DEVNULL, env=os.environ | THREADS)


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
    return {name: str(f.get("ino") or f["LastModified"]) for name, f in facts.items() if name.endswith(".png")}


def wait_for_middle(folder: str, count: int) -> dict[str, str]:
    """Wait until a third of the images is done."""
    while len(done := finished(folder)) < count // 3:
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


def check_same(folder: str, expected: dict[str, bytes], before: dict[str, str] | None = None) -> str:
    """Compare a folder with what is expected, and the files that were done before with what they are now."""
    actual = contents(folder)
    if actual.keys() != expected.keys():
        raise SystemExit(f"{folder} has {len(actual)} files, not {len(expected)}.")
    different = [name for name in expected if actual[name] != expected[name]]
    if different:
        raise SystemExit(f"{len(different)} files differ from those of one process: {different[:3]}.")
    now = finished(folder)
    if again := [name for name, number in (before or {}).items() if now[name] != number]:
        raise SystemExit(f"{len(again)} images were segmented twice: {again[:3]}.")
    kept = f", {len(before)} done before and not again" if before else ""
    return f"{len(actual)} files equal those of one process{kept}"


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


def main() -> None:
    """Run the checks that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--size", type=int, nargs=2, default=(64, 48), metavar=("W", "H"))
    parser.add_argument("--model", default="animals")
    parser.add_argument("--checks", nargs="+", choices=CHECKS, default=CHECKS)
    parser.add_argument("--json", type=Path, help="also write the results here")
    parser.add_argument("--s3", action="store_true", help="images and results on an S3 server, but for the speed")
    options = parser.parse_args()
    results: dict[str, object] = {"images": options.images, "size": options.size, "model": options.model}
    with tempfile.TemporaryDirectory() as name, s3_server() if options.s3 else nullcontext(name) as place:
        folder, ray = Path(name), ("--ray", "local", "--workers", "2")
        write_images(folder / "in", options.images, *options.size)
        if options.s3:
            files, target = opened(f"{place}/in")
            files.put(str(folder / "in"), target, recursive=True)
        if {*options.checks} - {"speed"}:
            finish(start(place, "one", options.model))
            expected = contents(f"{place}/one")
        for check in options.checks:
            out = f"{place}/{check}"
            if check == "speed":
                runs = [[speed(folder, options.model, workers) for workers in (1, 2)] for _ in range(2)]  # by turns
                one, two = (max(rates, key=lambda run: run["images/s"]) for rates in zip(*runs, strict=True))
                ratio = two["images/s"] / one["images/s"]
                results[check] = {"1 worker": one, "2 workers": two, "ratio": ratio, "load": os.getloadavg()}
            else:
                process, before = start(place, check, options.model, *ray), None
                if check == "worker":
                    before = wait_for_middle(out, options.images)
                    kill_worker(process.pid)
                elif check == "driver":
                    wait_for_middle(out, options.images)
                    process.kill()
                    process.wait()
                    time.sleep(10)  # workers end when their driver is gone
                    before = finished(out)
                    process = start(place, check, options.model, *ray)
                finish(process)
                results[check] = check_same(out, expected, before)
            print(f"{check}: {results[check]}", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
