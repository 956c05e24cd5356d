"""The handshake against everybody it has to keep out, and tokens in files."""

import contextlib
import os
import socket
import stat
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from effort import HANG_S, judge_time
from loops import each
from unisono.engine.base import authentication
from unisono.engine.store import tls
from unisono.errors import AuthenticationError

TOKEN = authentication.make_token()


def shake(sock: socket.socket, role: str, **changed: Any) -> authentication.HandshakeResult:
    options: dict[str, Any] = {
        "token": TOKEN,
        "me": f"the one that {role}s",
        "expect": None,
        "job": "j",
        "deadline_s": 5.0,
        **changed,
    }
    return authentication.handshake(sock, options.pop("token"), role=role, **options)


def both(
    connect: dict[str, Any] | None = None, accept: dict[str, Any] | None = None, part: int = 0
) -> list[Any]:
    """What the connecting and the accepting side returned (0: the peer's name, 1: the channel) or raised."""
    results: list[Any] = [None, None]

    def run(index: int, sock: socket.socket, role: str, options: dict[str, Any]) -> None:
        with sock:
            try:
                results[index] = shake(sock, role, **options)[part]
            except AuthenticationError as error:
                results[index] = error

    first, second = socket.socketpair()
    thread = threading.Thread(target=run, args=(0, first, "connect", connect or {}))
    thread.start()
    run(1, second, "accept", accept or {})
    thread.join()
    return results


def test_both_learn_the_other_s_name():
    assert both() == ["the one that accepts", "the one that connects"]
    found = both({"me": "rank 3", "expect": "rank 0"}, {"me": "rank 0", "expect": "rank 3"})
    assert found == ["rank 0", "rank 3"]


def test_both_call_their_channel_alike_and_no_other_one_so():
    one, another = both(part=1), both(part=1)
    assert one[0] == one[1] and another[0] == another[1] and one != another


def encrypted(channels: tuple[str, str]) -> bytes:
    """What a TLS client of one channel gets from a server of another, or of the same."""
    ends = socket.socketpair()
    made = [tls.context(TOKEN, server=server) for server in (False, True)]
    client, server = (
        tls.wrap_socket(end, each, server=bool(i), channel=channels[i])
        for i, (end, each) in enumerate(zip(ends, made, strict=True))
    )

    def serve() -> None:
        with server, contextlib.suppress(OSError):
            server.settimeout(HANG_S)
            server.sendall(b"for the client")

    thread = threading.Thread(target=serve)
    thread.start()
    with client:
        client.settimeout(HANG_S)
        try:
            return client.recv(100)
        finally:
            thread.join()


def test_ends_of_two_connections_cannot_be_joined_under_tls():
    """They have one certificate; who sits on the path sees two handshakes through, then swaps the streams."""
    assert encrypted(("a" * 32, "a" * 32)) == b"for the client"
    with pytest.raises(OSError, match="(?i)unrecognized.name"):
        encrypted(("a" * 32, "b" * 32))


@each(
    "changed",
    [{"token": authentication.make_token()}, {"job": "k"}, {"binding": b"other channel"}, {"token": b""}],
)
def test_another_token_job_or_channel_is_refused_on_both_sides(changed: dict[str, Any]):
    assert all(isinstance(each, AuthenticationError) for each in both(changed))


def test_the_wrong_name_is_refused():
    assert "expected 'rank 1'" in str(both({"expect": "rank 1"})[0])
    assert "expected 'rank 1'" in str(both(None, {"expect": "rank 1"})[1])


def record() -> bytes:
    """Everything a connecting side sent in a good handshake."""
    client, middle = socket.socketpair()
    upstream, server = socket.socketpair()
    said = b""
    with client, middle, upstream, server:
        threads = [
            threading.Thread(target=shake, args=(client, "connect")),
            threading.Thread(target=shake, args=(server, "accept")),
        ]
        for thread in threads:
            thread.start()
        upstream.settimeout(HANG_S)
        middle.settimeout(HANG_S)
        for _ in range(2):
            piece = middle.recv(4096)
            said += piece
            upstream.sendall(piece)
            if len(said) == len(piece):
                middle.sendall(upstream.recv(4096))
        for thread in threads:
            thread.join()
    return said


def test_a_replayed_handshake_fails():
    said = record()
    stranger, server = socket.socketpair()
    with stranger, server:
        stranger.sendall(said)
        with pytest.raises(AuthenticationError, match="proof is wrong"):
            shake(server, "accept")


def test_a_reflected_handshake_fails():
    """A stranger that sends back what it gets has the right nonces and the wrong role."""
    stranger, client = socket.socketpair()

    def reflect() -> None:
        greeting = stranger.recv(4096)
        nonce_and_name = greeting
        stranger.sendall(nonce_and_name + bytes(authentication.PROOF_BYTES))

    with stranger, client:
        thread = threading.Thread(target=reflect)
        thread.start()
        with pytest.raises(AuthenticationError, match="proof is wrong"):
            shake(client, "connect")
        thread.join()
    names, nonces = ("a", "b"), (bytes(32), bytes(32))
    one = authentication.proof(TOKEN, role="accept", job="j", names=names, nonces=nonces)
    assert one != authentication.proof(TOKEN, role="connect", job="j", names=names, nonces=nonces)
    assert one != authentication.proof(TOKEN, role="accept", job="j", names=("ab", ""), nonces=nonces)


@each("said", [b"GET / HTTP/1.1\r\n\r\n" * 10, b"\0" * 100, authentication.MAGIC + b"x" * 300])
def test_another_protocol_is_refused_at_once(said: bytes):
    stranger, server = socket.socketpair()
    with stranger, server:
        stranger.sendall(said)
        stranger.shutdown(socket.SHUT_WR)
        with pytest.raises(AuthenticationError):
            shake(server, "accept")


def test_a_slow_stranger_has_no_more_than_its_time():
    stranger, server = socket.socketpair()
    with stranger, server:
        stranger.sendall(authentication.MAGIC)
        start = time.monotonic()
        with pytest.raises(AuthenticationError, match="silent"):
            shake(server, "accept", deadline_s=0.2)
        judge_time(time.monotonic() - start, 5)


def test_a_token_file_is_made_once_and_for_its_owner_only(tmp_path: Path):
    path = str(tmp_path / "token")
    found: list[bytes] = []
    threads = [
        threading.Thread(target=lambda: found.append(authentication.token_file(path))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and len(set(found)) == 1 and len(found[0]) == 32
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert os.listdir(tmp_path) == ["token"]
    os.chmod(path, 0o640)
    with pytest.raises(ValueError, match="0640"):
        authentication.token_file(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
@each("name", ["token", "link"])
@each("owner", [0, 1001, 64999])
@each("user", [0, 64999])
def test_a_token_file_belongs_to_its_reader_or_to_root(tmp_path: Path, user: int, owner: int, name: str):
    """A secret that is mounted belongs to root, and another user may run the job."""
    token, path = authentication.make_token(), tmp_path / "token"
    path.write_text(token.hex())
    path.chmod(0o600)
    os.chown(path, owner, -1)
    (tmp_path / "link").unlink(missing_ok=True)
    (tmp_path / "link").symlink_to(path)
    with mock.patch("os.geteuid", return_value=user):
        for read in (authentication.read_token_file, authentication.token_file):
            if owner in (0, user):
                assert read(str(tmp_path / name)) == token
                continue
            with pytest.raises(ValueError, match=f"it belongs to user {owner}, and .* user {user}"):
                read(str(tmp_path / name))


def test_bad_token_files_and_texts(tmp_path: Path):
    path = tmp_path / "token"
    for text in ("", "abc", "z" * 64, "00" * 31, "00" * 33):
        path.write_text(text)
        path.chmod(0o600)
        with pytest.raises(ValueError, match="64 hexadecimal digits"):
            authentication.read_token_file(str(path))
    with pytest.raises(ValueError, match="cannot be read"):
        authentication.read_token_file(str(tmp_path / "missing"))
    os.mkfifo(tmp_path / "fifo", 0o600)
    with pytest.raises(ValueError, match="no ordinary file"):
        authentication.read_token_file(str(tmp_path / "fifo"))
    for made in (authentication.read_token_file, authentication.token_file):
        with pytest.raises(ValueError, match="64 hexadecimal digits .*; it is a directory"):
            made(str(tmp_path))
    with pytest.raises(ValueError) as raised:
        authentication.parse_token("5ec12e7")
    assert "5ec12e7" not in str(raised.value)
    assert repr(TOKEN) == str(TOKEN) == f"{TOKEN}" == "(secret)"


def test_the_wait_for_a_token_file_ends(tmp_path: Path):
    said: list[str] = []
    path = tmp_path / "token"
    with pytest.raises(ValueError, match=r"No such file or directory: .*; waited 0\.2 s for it"):
        authentication.await_token_file(str(path), 0.2, said.append)
    path.touch(0o600)
    with pytest.raises(ValueError, match=r"it has 0 digits; waited 0\.2 s for it"):
        authentication.await_token_file(str(path), 0.2, said.append)
    waits = f"{path} has no whole token yet, waiting up to 0.2 s for it"
    assert said == [f"{waits}: node 0 makes it, or it is copied here"] * 2
    with pytest.raises(ValueError, match="No such file"):  # no folder will come
        authentication.await_token_file(str(tmp_path / "no" / "token"), 100.0, said.append)
    path.write_text("ab" * 32)
    assert authentication.await_token_file(str(path), 0.2, said.append) == bytes.fromhex("ab" * 32)
    assert len(said) == 2
