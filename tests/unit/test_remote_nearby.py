"""Switchyards on the local network: found only when asked, and only those that announce themselves."""

import socket
import struct
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.remote import nearby
from engine.remote.nearby import Announcer, Nearby, look_around

HERE = ("127.0.0.1", 0)


@pytest.fixture
def announcer() -> Iterator[Announcer]:
    found = Announcer("Rack in the cellar", 8490, is_https=True, group=HERE)
    found.start()
    yield found
    found.stop()


def test_who_announces_itself_is_found(announcer: Announcer) -> None:
    found = look_around(group=("127.0.0.1", announcer.port), listen_s=0.5)
    assert found == (Nearby("Rack in the cellar", "https://127.0.0.1:8490/v1"),)


def test_names_are_cut_to_what_fits_and_cannot_harm() -> None:
    long = Announcer("ü" * 60 + "\x1b[2J", 1, is_https=False, group=HERE)
    long.start()
    (found,) = look_around(group=("127.0.0.1", long.port), listen_s=0.5)
    long.stop()
    assert found.url == "http://127.0.0.1:1/v1"
    assert set(found.name) == {"ü"}


def test_nobody_answers() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind(HERE)
        assert look_around(group=silent.getsockname(), listen_s=0.1) == ()
        assert look_around(cancelled=lambda: True, group=silent.getsockname()) == ()


def test_nonsense_is_no_server() -> None:
    answers = (b"", b"\0" * 12, b"\xff" * 500, struct.pack(">6H", 0, 0x8400, 0, 9, 0, 0) + b"\xc0\x0c")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as strange:
        strange.bind(HERE)

        def reply() -> None:
            _packet, sender = strange.recvfrom(9000)
            for answer in answers:
                strange.sendto(answer, sender)

        thread = threading.Thread(target=reply)
        thread.start()
        assert look_around(group=strange.getsockname(), listen_s=0.3) == ()
        thread.join()


@given(st.binary(max_size=300))
def test_any_packet_is_survived(packet: bytes) -> None:
    nearby._asks(packet)
    nearby._answer_in(packet, "10.0.0.5")
    nearby._answer_in(struct.pack(">6H", 0, 0x8400, 0, 3, 0, 0) + packet, "10.0.0.5")


def test_questions_of_others_are_not_answered(announcer: Announcer) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        asking.settimeout(0.3)
        other = struct.pack(">6H", 7, 0, 1, 0, 0, 0) + b"\x05_http\x04_tcp\x05local\0" + struct.pack(">HH", 12, 1)
        asking.sendto(other, ("127.0.0.1", announcer.port))
        with pytest.raises(TimeoutError):
            asking.recvfrom(9000)
