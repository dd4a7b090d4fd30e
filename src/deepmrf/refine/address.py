"""Check the address of a Ray cluster in seconds; Ray itself tries for minutes."""

from __future__ import annotations

import os
import re
import socket

SECONDS_TO_CONNECT = 5.0
"""Also to answer."""
HTTP2_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""What a client of gRPC sends first: the name of the protocol, and a frame without settings."""
SETTINGS_FRAME = 4
"""The type of the frame that a server of gRPC answers with, its fourth byte."""


def check_address(address: str | None) -> None:
    """Raise an OSError where nothing answers at HOST:PORT, or something other than Ray does.

    None is what RAY_ADDRESS says, or this machine. "auto" and "local" are left to Ray, which knows at once.
    """
    address = address or os.environ.get("RAY_ADDRESS")
    if address in (None, "", "auto", "local"):
        return
    if address.startswith("ray://"):
        raise ValueError(
            f"{address} is an address for Ray's client, which cannot run Ray Data: work on a machine of the cluster, "
            "and give auto or HOST:6379."
        )
    match = re.fullmatch(r"\[?([^/\s]+?)\]?:(\d{1,5})", address)
    if match is None:
        raise ValueError(f"{address} is no address of a Ray cluster: give HOST:PORT, auto or local.")
    problem = "something answers, but no Ray"
    try:
        with socket.create_connection((match[1], int(match[2])), timeout=SECONDS_TO_CONNECT) as connection:
            connection.sendall(HTTP2_GREETING)
            if connection.recv(4, socket.MSG_WAITALL)[3:] == bytes([SETTINGS_FRAME]):
                return
    except (OSError, OverflowError) as error:  # OverflowError: a port above 65535
        problem = getattr(error, "strerror", None) or str(error)
    raise OSError(
        f"No Ray cluster answers at {address} ({problem}): `ray start --head` prints its address, usually HOST:6379."
    )
