"""`publish` and `subscribe` in one process: cuts against NumPy, what is refused, deltas, codecs, endings."""

import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import unisono as un
from unisono.engine.publishing.boxes import Box, gap, split, transfers

Arrays = dict[str, Any]


@pytest.fixture
def w() -> np.ndarray[Any, Any]:
    return np.arange(24, dtype=np.float32).reshape(4, 6)


@pytest.fixture
def publication(w: np.ndarray[Any, Any]) -> Iterator[un.Publication]:
    pieces = [un.Piece(w[:, :2], (0, 0), (4, 6)), un.Piece(w[:, 2:], (0, 2), (4, 6))]
    with un.publish("policy", {"w": pieces, "b": np.arange(3), "s": np.array(2)}, delta=True) as made:
        yield made


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    """A box in an array, perhaps empty."""
    ends = [sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
    return Box(tuple(a for a, _ in ends), tuple(b - a for a, b in ends))


@given(st.data())
def test_transfers_fill_what_numpy_slices(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 6), max_size=3)))
    everything = Box((0,) * len(shape), shape)
    whole = np.arange(everything.numel).reshape(shape)
    cut = [part for half in split(everything, 2) for part in split(half, data.draw(st.integers(1, 4)))]
    assert gap(shape, cut) == ""
    held = {box: data.draw(st.lists(st.tuples(st.integers(0, 3), st.just(i)), min_size=1, unique=True))
            for i, box in enumerate(cut)}  # fmt: skip
    near = frozenset(data.draw(st.sets(st.integers(0, 3))))
    wanted = data.draw(boxes(shape))
    out, writes = np.full(wanted.shape, -1), np.zeros(wanted.shape, int)
    for one in transfers(held, wanted, 0, near):
        box = cut[one.piece]
        assert one.rank in near or not {rank for rank, _ in held[box]} & near
        out[one.box.within(wanted)] = whole[box.within(everything)][one.box.within(box)]
        writes[one.box.within(wanted)] += 1
    np.testing.assert_array_equal(out, whole[wanted.within(everything)])
    assert (writes == 1).all()


def test_what_no_subscriber_has_written_ends_nothing(publication: un.Publication) -> None:
    host, _, port = publication.address.rpartition(":")
    with un.TCPStore(host, int(port)) as store:
        for text in ("x", "-1"):  # "x" ended the thread that meets subscribers
            store.set(f"came/{store.add('tickets', 1)}", text)
    with un.subscribe(publication.address, "policy") as subscription:
        assert subscription.get()[0] == 1


def test_a_version_is_taken_in_a_cut_of_ones_own(
    publication: un.Publication, w: np.ndarray[Any, Any]
) -> None:
    def cut(name: str, _: Any) -> Any:
        return {"w": (slice(1, 3), slice(1, 4)), "s": ()}.get(name)

    with un.subscribe(publication.address, "policy", cut=cut) as subscription:
        version, first = subscription.get()
        assert (version, set(first)) == (1, {"w", "s"})
        np.testing.assert_array_equal(first["w"], w[1:3, 1:4])
        w[:, 0] = -1  # not in the cut, but in its first piece
        assert publication.update() == 2
        version, second = subscription.get(newer_than=1)
        np.testing.assert_array_equal(second["w"], w[1:3, 1:4])
        assert second["w"] is not first["w"], "a get leaves alone what the last one returned"
        assert subscription.get()[1]["w"] is second["w"], "nothing is newer"
        with pytest.raises(un.Timeout, match="no version newer than 2"):
            subscription.get(2, timeout=0.05)
        publication.update()
        assert subscription.get(2)[0] == 3


def test_arrays_that_are_given_are_filled(publication: un.Publication, w: np.ndarray[Any, Any]) -> None:
    mine = np.zeros((5, 4), np.float32)[1:, ::2]
    with un.subscribe(publication.address, "policy", into={"w": un.Piece(mine, (0, 3), (4, 6))}) as taken:
        taken.get()
    np.testing.assert_array_equal(mine, w[:, 3:5])


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"cut": {"v": 0}}, "matches no name; there are w, b, s"),
        ({"cut": {"*": 1}}, r"'b' of \(3,\) has no dimension 1"),
        ({"cut": lambda *_: (slice(0, 3, 2),)}, "has the step 2"),
        ({"into": {"v": np.zeros(2)}}, "has no 'v'; it has w, b, s"),
        ({"into": {"w": np.zeros((4, 5), np.float32)}}, r"'w' is <f4 \(4, 6\), and <f4 \(4, 5\) here"),
        ({"into": {"w": np.zeros((4, 6))}}, "and <f8"),
        ({"into": {"w": np.zeros((4, 6), np.float32)}, "cut": {"w": 0}}, "exclude each other"),
        ({"codec": "zip"}, "codec 'zip'"),
    ],
)
def test_what_does_not_fit_is_refused(publication: un.Publication, wrong: Arrays, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        un.subscribe(publication.address, "policy", **wrong)


def test_another_name_and_no_address_are_refused(publication: un.Publication) -> None:
    with pytest.raises(ValueError, match="publishes 'policy', not 'polcy'"):
        un.subscribe(publication.address, "polcy")
    with pytest.raises(ValueError, match="expected HOST:PORT"):
        un.subscribe("localhost", "policy")


@pytest.mark.parametrize(
    ("arrays", "text"),
    [
        ({"w": un.Piece(np.zeros((4, 6)), (0, 0), (4, 7))}, "have 24 of 28 elements"),
        ({"w": un.Piece(np.zeros((4, 6)), (0, 2), (4, 6))}, "is no part of an array"),
        ({"w": [un.Piece(np.zeros(4), (at,), (6,)) for at in (0, 2)]}, "overlap"),
        ({"w": [np.zeros(4), np.zeros(5)]}, "'w' is <f8"),
        ({"w": np.array([None])}, "Python objects"),
        ({"w": "text"}, "expected ndarray"),
        ({}, "no arrays"),
        (3, "expected Mapping"),
    ],
)
def test_what_is_no_cut_is_not_published(arrays: Any, text: str) -> None:
    with pytest.raises((ValueError, TypeError), match=text):
        un.publish("policy", arrays)


def test_an_update_with_other_pieces_changes_nothing(publication: un.Publication) -> None:
    with pytest.raises(ValueError, match="1 pieces, and 4 before|another piece"):
        publication.update({"b": np.arange(3)})
    assert publication.version == 1


def test_a_subscriber_may_come_first() -> None:
    made: list[un.Publication] = []

    def later(port: int) -> None:
        time.sleep(0.3)
        made.append(un.publish("late", {"x": np.ones(3)}, address="127.0.0.1", port=port))

    with un.StoreServer() as free:
        port = free.port
    thread = threading.Thread(target=later, args=(port,))
    thread.start()
    with un.subscribe(f"127.0.0.1:{port}", "late", timeout=60) as subscription:
        assert (subscription.get()[1]["x"] == 1).all()
    thread.join()
    made[0].close()


def test_the_end_of_a_publication_ends_who_waits(publication: un.Publication) -> None:
    subscription = un.subscribe(publication.address, "policy")
    closing = threading.Timer(0.1, publication.close)
    closing.start()
    with pytest.raises(un.PeerLost, match="has closed the group"):
        subscription.get(99, timeout=60)
    closing.join()
    with pytest.raises(un.GroupClosed, match="is closed"):
        subscription.get()
    with pytest.raises(un.GroupClosed, match="is closed"):
        publication.update()
