"""Addresses of Ray clusters: what is wrong with one is known before Ray tries it for minutes."""

from __future__ import annotations

import socket
import threading

import pytest

from deepmrf.refine import address
from deepmrf.refine.address import HTTP2_GREETING, check_address


@pytest.fixture
def server():
    """server(answer): the address of a server that answers every connection so."""
    sockets = []

    def start(answer):
        listener = socket.create_server(("127.0.0.1", 0))
        sockets.append(listener)

        def serve():
            connection, _ = listener.accept()
            with connection:
                connection.recv(len(HTTP2_GREETING), socket.MSG_WAITALL)
                if answer is None:
                    connection.recv(1)  # says nothing until the other side gives up
                else:
                    connection.sendall(answer)

        threading.Thread(target=serve, daemon=True).start()
        return f"127.0.0.1:{listener.getsockname()[1]}"

    yield start
    for listener in sockets:
        listener.close()


@pytest.fixture(autouse=True)
def record(monkeypatch, tmp_path):
    """record(address): what Ray notes of the cluster on this machine; without a call, nothing."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    (tmp_path / "ray").mkdir()
    return (tmp_path / "ray/ray_current_cluster").write_text


@pytest.fixture
def closed():
    """An address where nothing answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize("given", [None, "auto", "local"])
def test_what_ray_knows_itself(given):
    assert check_address(given) == given


def test_a_cluster_on_this_machine(server, record):
    for given in (None, "auto"):
        record(server(bytes([0, 0, 24, 4, 0, 0, 0, 0, 0])))
        assert check_address(given) == given


def test_a_cluster_that_has_crashed(record, closed):
    record(closed)
    assert check_address(None) == check_address("local") == "local"
    with pytest.raises(OSError, match=r"No Ray cluster runs on this machine \(Connection refused\): start one"):
        check_address("auto")


def test_a_server_of_grpc(server):
    check_address(server(bytes([0, 0, 24, 4, 0, 0, 0, 0, 0])))


@pytest.mark.parametrize("answer", [b"HTTP/1.0 400 Bad Request\r\n\r\n", b"", None])
def test_another_server(server, answer, monkeypatch):
    monkeypatch.setattr(address, "SECONDS_TO_CONNECT", 0.2)
    with pytest.raises(OSError, match=r"No Ray cluster answers at 127.0.0.1:\d+ \((something answers|timed out)"):
        check_address(server(answer))


def test_nothing_answers(monkeypatch, closed):
    with pytest.raises(OSError, match=f"No Ray cluster answers at {closed} .*`ray start --head` prints its address"):
        check_address(closed)
    monkeypatch.setenv("RAY_ADDRESS", closed)
    with pytest.raises(OSError, match="No Ray cluster"):
        check_address(None)


@pytest.mark.parametrize("text", ["nonsense", "10.0.0.9", "host:port", "http://host:8265", "ray://host:10001"])
def test_no_address(text):
    with pytest.raises(ValueError, match=f"{text} is (no address of a Ray cluster|an address for Ray's client)"):
        check_address(text)
