"""Serve the page: listen on this machine, receive files, send results, and remove everything at the end.

Besides Gradio's own addresses there are two:

    POST deepmrf/files?name=cat.jpg           a file as the body; answers with its key, which the page hands on
    GET  deepmrf/results/SESSION/labels.png   a result of a session
"""

from __future__ import annotations

import os
import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from deepmrf.cli.page.downloads import download
from deepmrf.cli.page.sessions import Sessions
from deepmrf.cli.page.uploads import MEGABYTE, Inbox, Limits
from deepmrf.data.extras import optional
from deepmrf.data.files import one_line

DEFAULT_PORT = 7860
PORTS_TRIED = 20
"""Where the port is not given, the first free one of so many is taken."""
MEDIA_TYPES = {".png": "image/png", ".jpg": "image/jpeg", ".npz": "application/zip", ".mp4": "video/mp4"}


def serve(
    models: Sequence[str],
    *,
    host: str = "127.0.0.1",
    port: int | None = None,
    device: str | None = None,
    limits: Limits | None = None,
    ready: Callable[[str], object] = print,
) -> None:
    """Serve the page until the process is interrupted.

    models: names as `deepmrf.load` takes them. host: who may connect, "0.0.0.0" for everybody. port: None takes a free
    one from 7860 on, 0 any. ready: called with the page's address.
    """
    listener = _listen(host, port)
    with listener, tempfile.TemporaryDirectory(prefix="deepmrf-app-") as folder:
        # Gradio reads these when it is imported.
        os.environ |= {"GRADIO_TEMP_DIR": folder, "GRADIO_ANALYTICS_ENABLED": "False", "HF_HUB_DISABLE_TELEMETRY": "1"}
        optional("gradio", "The page needs", "app")
        import uvicorn

        sessions = Sessions(models, Path(folder), limits, device)
        sessions.segmenter(models[0])  # an error now, and not in the browser
        config = uvicorn.Config(build_server(sessions), log_level="warning", timeout_graceful_shutdown=1)
        shown = "127.0.0.1" if host in ("0.0.0.0", "::") else host
        ready(f"http://{shown if ':' not in shown else f'[{shown}]'}:{listener.getsockname()[1]}")
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.default_int_handler)  # else it would end before the folder is removed
        with suppress(KeyboardInterrupt):
            uvicorn.Server(config).run(sockets=[listener])


def _listen(host: str, port: int | None) -> socket.socket:
    """A socket on that port, or on the first free one of some."""
    ports = range(DEFAULT_PORT, DEFAULT_PORT + PORTS_TRIED) if port is None else [port]
    for number in ports:
        try:
            family = socket.getaddrinfo(host, number, type=socket.SOCK_STREAM)[0][0]
            return socket.create_server((host, number), family=family)
        except (OSError, OverflowError) as error:
            reason = one_line(error).partition(" (while")[0]
    raise OSError(f"{host}, port {ports[-1]} cannot be listened on ({reason}): choose another host or port.")


def build_server(sessions: Sessions) -> Any:
    """The ASGI application: Gradio's page and the two addresses of files."""
    gradio = optional("gradio", "The page needs", "app")
    from fastapi import FastAPI

    from deepmrf.cli.page.page import CSS, build_page

    inbox = Inbox(sessions.folder)
    server = FastAPI(openapi_url=None)
    _add_routes(server, sessions, inbox)
    fonts = {"font": ("system-ui", "sans-serif"), "font_mono": ("ui-monospace", "monospace")}
    theme = gradio.themes.Default(primary_hue="indigo", neutral_hue="slate", **fonts)
    page = build_page(sessions, inbox)
    page.queue(max_size=200, api_open=False)
    options = {
        "theme": theme,
        "css": CSS,
        "ssr_mode": False,
        "pwa": False,
        "mcp_server": False,
        "footer_links": [],
        "run_history": False,
    }
    gradio.mount_gradio_app(server, page, "/", show_error=False, enable_monitoring=False, **options)
    return _guarded(server)


def _guarded(server: Any) -> Any:
    """The same application, which takes no uploads of Gradio's, and nothing that pages of other sites send."""
    from starlette.datastructures import Headers
    from starlette.responses import PlainTextResponse

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            headers = Headers(scope=scope)
            origin = headers.get("origin")
            foreign = origin is not None and urlsplit(origin).netloc != headers.get("host")
            if foreign or scope["path"].rstrip("/").endswith("/upload"):
                await PlainTextResponse("This is not allowed here.", 403)(scope, receive, send)
                return
        await server(scope, receive, send)

    return answer


def _add_routes(server: Any, sessions: Sessions, inbox: Inbox) -> None:
    from starlette.concurrency import run_in_threadpool
    from starlette.requests import Request
    from starlette.responses import PlainTextResponse, Response

    async def receive(request: Request) -> Response:
        name = request.query_params.get("name", "")
        key, path = inbox.add(name)
        size, largest = 0, sessions.limits.file_bytes
        try:
            with path.open("wb") as file:
                async for chunk in request.stream():
                    size += len(chunk)
                    if size > largest:
                        message = f"{path.name} has more than {largest / MEGABYTE:.3g} MB: make it smaller."
                        inbox.discard(key)
                        return PlainTextResponse(message, 413)
                    file.write(chunk)
        except BaseException:  # the browser went away
            inbox.discard(key)
            raise
        return PlainTextResponse(key)

    async def send(request: Request) -> Response:
        name = request.path_params["name"]
        try:
            session = sessions[request.path_params["session"]]
            content = await run_in_threadpool(download, session, name)
        except (KeyError, ValueError, OSError, ImportError) as error:
            return PlainTextResponse(str(error.args[0] if error.args else error), 404)
        disposition = f"attachment; filename*=utf-8''{quote(f'{session.clip.name}_{name}')}"
        headers = {"Content-Disposition": disposition, "Cache-Control": "no-store"}
        return Response(content, media_type=MEDIA_TYPES[Path(name).suffix], headers=headers)

    server.router.add_route("/deepmrf/files", receive, methods=["POST"])
    server.router.add_route("/deepmrf/results/{session}/{name}", send, methods=["GET"])
