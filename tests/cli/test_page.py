"""`deepmrf app` as a user types it; tests/cli/page/test_server.py visits the page."""

from __future__ import annotations

import socket

import pytest
from typer.testing import CliRunner

from deepmrf.cli import app
from deepmrf.cli.page import server
from deepmrf.cli.page.server import _listen
from deepmrf.models.names import bundled


@pytest.fixture
def served(monkeypatch):
    """What `serve` was called with."""
    calls = []

    def serve(models, *, ready, **options):
        calls.append((models, options))
        ready("http://127.0.0.1:7860")

    monkeypatch.setattr(server, "serve", serve)
    return calls


def test_the_bundled_models_on_this_machine_alone(served, monkeypatch):
    opened = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    result = CliRunner().invoke(app, ["app"])
    assert result.exit_code == 0, result.output
    assert result.output == "Open http://127.0.0.1:7860 in a browser; Ctrl-C ends it.\n"
    models, options = served[0]
    assert models == bundled()
    assert options["host"] == "127.0.0.1"
    assert options["port"] is None
    assert not opened


def test_options(served, monkeypatch):
    opened = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    words = ["-m", "animals", "-m", "mine", "--host", "0.0.0.0", "--port", "80", "--max-megabytes", "2", "--open"]
    CliRunner().invoke(app, ["app", *words, "--max-megapixels", "0.5", "--device", "cpu"])
    models, options = served[0]
    assert (models, options["host"], options["port"], options["device"]) == (["animals", "mine"], "0.0.0.0", 80, "cpu")
    assert (options["limits"].file_bytes, options["limits"].pixels) == (2_000_000, 500_000)
    assert opened == ["http://127.0.0.1:7860"]


def test_a_port_that_is_taken():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(OSError, match=rf"^127.0.0.1, port {port} cannot be listened on \(Address already in use\)"):
            _listen("127.0.0.1", port)
    for host, port in (("no.such.host.invalid", 0), ("127.0.0.1", 70000)):
        with pytest.raises(OSError, match=r"cannot be listened on \(.+\): choose another host or port\.$"):
            _listen(host, port)
    with _listen("127.0.0.1", None) as first, _listen("127.0.0.1", None) as second:
        assert first.getsockname()[1] != second.getsockname()[1]
