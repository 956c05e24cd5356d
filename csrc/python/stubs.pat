# Signatures that nanobind cannot see in _native.pyi: the methods that calls.cpp makes without it.

_native\.GroupBase\._call$:
    \from typing import Any
    def _call(
        self,
        kind: str,
        out: Any,
        sendbuf: Any,
        op: Any,
        root: int,
        algorithm: Any,
        reproducible: bool,
        async_op: bool,
        timeout: Any,
        /,
    ) -> Any:
        \doc

_native\.GroupBase\._repeat$:
    def _repeat(
        self,
        kind: str,
        out: Any,
        sendbuf: Any,
        op: Any,
        root: int,
        algorithm: Any,
        reproducible: bool,
        async_op: bool,
        timeout: Any,
        /,
    ) -> Any:
        \doc

_native\.GroupBase\._(send|send_now|send_object)$:
    def _\1(self, x: Any, peer: Any, tag: Any, timeout: Any, /) -> bool | None:
        \doc

_native\.GroupBase\._see_received$:
    def _see_received(self) -> None:
        \doc

_native\.GroupBase\._(recv|recv_now|recv_object|recv_bytes|isend|irecv|irecv_all|irecv_bytes|peek)$:
    def _\1(self, x: Any, peer: Any, tag: Any, timeout: Any, /) -> Any:
        \doc
