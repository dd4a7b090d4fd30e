"""The server as browsers use it: over HTTP here, and in headless Chromium where that is installed.

Gradio is no part of the developers' environment: pip install '.[app]' playwright, and Chromium, to run all of this.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import numpy as np
import pytest
from PIL import Image

from tests.cli.page.test_uploads import upload, write_clip

pytest.importorskip("gradio")
MAX_BYTES = 200_000
PROGRAM = f"""
import sys
from deepmrf import ops
from deepmrf.cli.page.server import serve
from deepmrf.cli.page.uploads import Limits
with ops.use("torch"):
    limits = Limits(file_bytes={MAX_BYTES})
    serve(sys.argv[1:], port=0, device="cpu", limits=limits, ready=lambda url: print(url, flush=True))
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Empty folders for temporary files and as the current one; at the end of the server's life both are empty."""
    return tmp_path_factory.mktemp("temporary"), tmp_path_factory.mktemp("current")


@pytest.fixture(scope="module")
def url(model_folder, folders):
    """The address of a server with the model that has learned nothing, in a process of its own."""
    temporary, current = folders
    environment = {
        **os.environ,
        "TMPDIR": str(temporary),
        "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)),
    }
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(model_folder)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=current,
        env=environment,
    )
    try:
        yield process.stdout.readline().strip()
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    finally:
        process.kill()
    assert not list(temporary.rglob("*")), "files are left"
    assert not list(current.iterdir())


def png(seed=0, size=(40, 60)):
    buffer = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


def ask(address, body=None, **headers):
    """(status, text) of a request."""
    try:
        with urlopen(Request(address, body, headers)) as answer:
            return answer.status, answer.read().decode()
    except HTTPError as error:
        return error.code, error.read().decode()


def status_of(address):
    try:
        with urlopen(address) as answer:
            return answer.status
    except HTTPError as error:
        return error.code


def wait_until(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "this took too long"
        time.sleep(0.2)


def open_files(url, *files):
    """What the viewer gets for these (name, content), as its JavaScript asks for it."""
    keys = [ask(f"{url}/deepmrf/files?name={name}", content)[1] for name, content in files]
    config = json.loads(ask(f"{url}/config")[1])
    uploads = [d for d in config["dependencies"] if d["targets"][0][1] == "upload"]
    event = uploads[len(files) - 1]
    model = next(c["props"]["value"] for c in config["components"] if c["props"].get("label") == "Model")
    call = {
        "data": [model if len(files) == 1 else None],
        "event_data": {"files": keys},
        "fn_index": event["id"],
        "trigger_id": event["targets"][0][0],
        "session_hash": uuid.uuid4().hex[:11],
    }
    status, text = ask(
        f"{url}/gradio_api/queue/join", json.dumps(call).encode(), **{"Content-Type": "application/json"}
    )
    assert status == 200, text
    with urlopen(f"{url}/gradio_api/queue/data?session_hash={call['session_hash']}") as stream:
        for line in stream:
            message = json.loads(line[5:]) if line.startswith(b"data:") else {}
            if message.get("msg") == "process_completed":
                assert message["success"], message
                return message["output"]["data"][-1]
    raise AssertionError("the server ended the stream")


def files_in(folder):
    return [path for path in folder.rglob("*") if path.is_file()]


def test_a_picture_and_its_downloads(url, folders):
    view = open_files(url, ("cat.png", png()))
    assert view["name"] == "cat"
    assert view["downloads"] == ["labels.png", "overlay.jpg", "probabilities.npz"]
    with urlopen(f"{url}/deepmrf/results/{view['session']}/labels.png") as answer:
        assert answer.headers["Content-Disposition"] == "attachment; filename*=utf-8''cat_labels.png"
        assert Image.open(io.BytesIO(answer.read())).size == (60, 40)
    assert not files_in(folders[0])


def test_ten_people_at_once(url):
    with ThreadPoolExecutor(10) as pool:
        views = list(pool.map(lambda seed: open_files(url, (f"{seed}.png", png(seed))), range(10)))
    assert [view["name"] for view in views] == [str(seed) for seed in range(10)]
    assert len({view["picture"] for view in views}) == len({view["session"] for view in views}) == 10


def test_damaged_files_are_sentences_and_leave_nothing(url, folders):
    rng = np.random.default_rng(0)
    good = np.frombuffer(png(), np.uint8)
    for name in ("a.png", "b.jpg", "c.mp4", "d.webp"):
        damaged = good[: rng.integers(10, len(good))].copy()
        damaged[rng.integers(0, len(damaged), 9)] ^= 255
        view = open_files(url, (name, damaged.tobytes()))
        assert re.match(rf"{name} .*[.]$", view["error"]), view["error"]
        assert str(folders[0]) not in view["error"]
    assert open_files(url, ("a.png", png()), ("p.npy", b"\x93NUMPY\x01"))["error"].startswith("p.npy cannot be read")
    assert not files_in(folders[0])


def test_what_is_refused(url, folders):
    assert ask(f"{url}/deepmrf/files?name=x.png", bytes(MAX_BYTES + 1)) == (
        413,
        "x.png has more than 0.2 MB: make it smaller.",
    )
    assert ask(f"{url}/deepmrf/files?name=x.png", b"x", Origin="http://elsewhere.example")[0] == 403
    assert ask(f"{url}/gradio_api/upload", b"x")[0] == 403
    assert ask(f"{url}/deepmrf/results/nobody/labels.png") == (404, "This picture is no longer here: drop it again.")
    session = open_files(url, ("cat.png", png()))["session"]
    assert ask(f"{url}/deepmrf/results/{session}/secrets.txt")[0] == 404
    assert not files_in(folders[0])


@pytest.fixture(scope="module")
def browser():
    """Headless Chromium."""
    driver = pytest.importorskip("playwright.sync_api")
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("there is no Chromium here")
    with driver.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.fixture
def visit(browser, url):
    """visit(): a page of somebody new; all its requests stay on the server, and no script fails."""
    contexts, problems = [], []

    def new_page(**options):
        context = browser.new_context(accept_downloads=True, **options)
        context.set_default_timeout(20_000)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on(
            "request",
            lambda request: request.url.startswith((url, "data:", "blob:")) or problems.append(request.url),
        )
        page.goto(url)
        page.wait_for_selector(".pick:visible")
        return page

    yield new_page
    for context in contexts:
        context.close()
    assert not problems


def viewer(page):
    return page.locator(".viewer:visible")


def wait_for(page, count):
    """Wait until the viewer was drawn so often."""
    page.wait_for_function(
        "(n) => [...document.querySelectorAll('.viewer')].some(v => v.dataset.drawn >= n)", arg=count
    )


def shown(page):
    """The canvas as the browser shows it."""
    return viewer(page).locator("canvas").evaluate("canvas => canvas.toDataURL()")


def drop(page, *paths):
    inputs = viewer(page).locator("input[type=file]")
    for number, path in enumerate(paths):
        inputs.nth(number).set_input_files(path)


def test_a_visit(visit, tmp_path, folders):
    """Upload, hover, slider, parameters, another MRF, downloads, a bad file."""
    page = visit()
    drop(page, upload(tmp_path, "cat.png", png(1, (120, 160))))
    wait_for(page, 1)
    first = shown(page)
    viewer(page).locator("canvas").hover(position={"x": 50, "y": 40})
    assert re.fullmatch(r"network\s*\w+\s*\d+%\s*MRF\s*\w+\s*\d+%", viewer(page).locator(".tip").inner_text())
    viewer(page).locator(".split").fill("900")
    assert shown(page) != first
    page.get_by_label("Window, px").locator("visible=true").last.fill("21")
    page.keyboard.press("Enter")
    wait_for(page, 2)
    page.get_by_label("Strength").locator("visible=true").last.fill("0")
    page.keyboard.press("Enter")
    wait_for(page, 3)
    assert viewer(page).locator(".changes h4").inner_text() == "The MRF changed 0.0% of the pixels"
    page.get_by_text("Back to its own numbers").locator("visible=true").click()
    wait_for(page, 4)
    for mode in ("Changes", "Confidence", "Picture"):
        before = shown(page)
        viewer(page).get_by_role("button", name=mode, exact=True).click()
        assert shown(page) != before
    page.get_by_label("MRF", exact=True).locator("visible=true").first.click()
    page.get_by_role("option", name="dense CRF: voc").click()
    wait_for(page, 5)
    page.get_by_text("Smoothness", exact=True).locator("visible=true").wait_for()
    with page.expect_download() as download:
        viewer(page).get_by_text("labels.png").click()
    assert download.value.suggested_filename == "cat_labels.png"
    assert Image.open(download.value.path()).size == (160, 120)
    drop(page, upload(tmp_path, "bad.png", b"hello"))
    page.wait_for_selector(".error:visible")
    assert viewer(page).locator(".error").inner_text().startswith("bad.png cannot be read as an image (")
    drop(page, upload(tmp_path, "large.png", bytes(MAX_BYTES + 1)))
    page.wait_for_selector(".error:visible >> text=large.png has more than 0.2 MB")
    assert not files_in(folders[0])


def test_a_prediction_is_refined(visit, tmp_path):
    page = visit(viewport={"width": 390, "height": 844})  # a phone
    page.get_by_role("tab", name="Refine").click()
    mask = np.where(np.arange(60) < 27, 0, 255).astype(np.uint8)[None].repeat(40, 0)
    pixels = np.where(np.arange(60) < 30, 0, 255).astype(np.uint8)[None, :, None].repeat(40, 0).repeat(3, 2)
    page.wait_for_selector(".pick:visible >> text=2. Choose")
    drop(page, upload(tmp_path, "a.png", pixels), upload(tmp_path, "m.png", mask))
    wait_for(page, 1)
    assert viewer(page).locator(".note").inner_text() == "m.png was taken for binary masks of 0 and 255."
    assert "5.0%" in viewer(page).locator(".changes li").inner_text()
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


def test_a_clip_has_frames(visit, tmp_path):
    page = visit()
    drop(page, write_clip(tmp_path / "drive.mp4", 3))
    wait_for(page, 1)
    first = shown(page)
    page.get_by_label("Frame").locator("visible=true").last.fill("2")
    page.keyboard.press("Enter")
    wait_for(page, 2)
    assert shown(page) != first
    with page.expect_download() as download:
        viewer(page).get_by_text("overlay.mp4").click()
    assert Path(download.value.path()).stat().st_size > 500


def test_what_the_mrf_has_learned(visit, tmp_path):
    pytest.importorskip("matplotlib")
    page = visit()
    drop(page, upload(tmp_path, "cat.png", png()))
    wait_for(page, 1)
    page.get_by_role("tab", name="What it learned").click()
    page.get_by_role("button", name="Explain").click()
    page.frame_locator("iframe").get_by_role("heading", name="cat", exact=True).wait_for()


def test_two_people_see_their_own_pictures(visit, url, tmp_path):
    pages = [visit(), visit()]
    for number, page in enumerate(pages):
        drop(page, upload(tmp_path, f"{number}.png", png(number, (60, 80))))
    for page in pages:
        wait_for(page, 1)
    before = shown(pages[1])
    assert shown(pages[0]) != before
    pages[0].get_by_label("Strength").locator("visible=true").last.fill("0")
    pages[0].keyboard.press("Enter")
    wait_for(pages[0], 2)
    assert shown(pages[1]) == before
    results = [f"{url}/{viewer(page).locator('.downloads a').first.get_attribute('href')}" for page in pages]
    assert results[0] != results[1]
    pages[0].close()  # and its picture is gone
    wait_until(lambda: status_of(results[0]) == 404)
    assert status_of(results[1]) == 200
