"""Check the address of a Ray cluster in seconds; Ray itself tries for minutes."""

from __future__ import annotations

import os
import re
import socket
from contextlib import suppress
from pathlib import Path

ADDRESS = r"\[?([^/\s]+?)\]?:(\d{1,5})"
"""HOST:PORT."""
SECONDS_TO_CONNECT = 5.0
"""Also to answer."""
HTTP2_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""What a client of gRPC sends first: the name of the protocol, and a frame without settings."""
SETTINGS_FRAME = 4
"""The type of the frame that a server of gRPC answers with, its fourth byte."""


def check_address(address: str | None) -> str | None:
    """The address for Ray. Raise an OSError where nothing answers at HOST:PORT, or something other than Ray does.

    None is what RAY_ADDRESS says, or the cluster that runs on this machine, which is "auto", or else a new one.
    """
    given = address or os.environ.get("RAY_ADDRESS") or "auto"
    if given == "local":
        return address
    if given == "auto":
        problem = _problem(_recorded_address())
        if problem and address == "auto":
            raise OSError(f"No Ray cluster runs on this machine ({problem}): start one with `ray start --head`.")
        return "local" if problem else address
    if given.startswith("ray://"):
        raise ValueError(
            f"{given} is an address for Ray's client, which cannot run Ray Data: work on a machine of the cluster, "
            "and give auto or HOST:6379."
        )
    if re.fullmatch(ADDRESS, given) is None:
        raise ValueError(f"{given} is no address of a Ray cluster: give HOST:PORT, auto or local.")
    if problem := _problem(given):
        raise OSError(
            f"No Ray cluster answers at {given} ({problem}): `ray start --head` prints its address, usually HOST:6379."
        )
    return address


def _recorded_address() -> str:
    """The address of the last cluster that was started here; "" where there is no record. A crash leaves it behind."""
    folder = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    with suppress(OSError):
        return Path(folder, "ray", "ray_current_cluster").read_text().strip()
    return ""


def _problem(address: str) -> str:
    """Why no cluster can be reached at HOST:PORT; "" where one answers, or where there is no such address."""
    match = re.fullmatch(ADDRESS, address)
    if match is None:
        return ""
    try:
        with socket.create_connection((match[1], int(match[2])), timeout=SECONDS_TO_CONNECT) as connection:
            connection.sendall(HTTP2_GREETING)
            answer = connection.recv(4, socket.MSG_WAITALL)
            return "" if answer[3:] == bytes([SETTINGS_FRAME]) else "something answers, but no Ray"
    except (OSError, OverflowError) as error:  # OverflowError: a port above 65535
        return getattr(error, "strerror", None) or str(error)
