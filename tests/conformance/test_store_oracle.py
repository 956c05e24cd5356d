"""Whatever is done to a store, a dict knows the answer."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from stores import KINDS, Place
from unisono.engine.store import FileStore, TCPStore
from unisono.errors import StoreError

TEXT = st.sampled_from(["a", "b", "c", "a/b"])
VALUES = st.one_of(st.binary(max_size=20), st.integers(-5, 5).map(lambda n: str(n).encode()))


class Machine(RuleBasedStateMachine):
    """Whatever is done to two clients of one store, a dict knows the answer."""

    kind = ""
    folder = Path()
    serial = 0

    def __init__(self) -> None:
        super().__init__()
        type(self).serial += 1
        folder = self.folder / str(self.serial)
        folder.mkdir()
        self.place = Place(self.kind, folder)
        self.clients = [self.place.open(), self.place.open()]
        self.model: dict[str, bytes] = {}

    def teardown(self) -> None:
        self.place.close()

    @rule(who=st.integers(0, 1), key=TEXT, value=VALUES)
    def set(self, who: int, key: str, value: bytes) -> None:
        self.clients[who].set(key, value)
        self.model[key] = value

    @rule(who=st.integers(0, 1), key=TEXT, amount=st.integers(-3, 3))
    def add(self, who: int, key: str, amount: int) -> None:
        try:
            total = int(self.model.get(key, b"0")) + amount
        except ValueError:
            with pytest.raises(StoreError):
                self.clients[who].add(key, amount)
            return
        assert self.clients[who].add(key, amount) == total
        self.model[key] = str(total).encode()

    @rule(who=st.integers(0, 1), key=TEXT, expected=VALUES, desired=VALUES)
    def compare_set(self, who: int, key: str, expected: bytes, desired: bytes) -> None:
        held = self.model.get(key)
        if held == expected or (held is None and not expected):
            self.model[key] = desired
        assert self.clients[who].compare_set(key, expected, desired) == self.model.get(key, expected)

    @rule(who=st.integers(0, 1), key=TEXT)
    def delete(self, who: int, key: str) -> None:
        assert self.clients[who].delete_key(key) == (self.model.pop(key, None) is not None)

    @rule(who=st.integers(0, 1), keys=st.lists(TEXT, max_size=3))
    def look(self, who: int, keys: list[str]) -> None:
        client = self.clients[who]
        assert client.check(keys) == all(key in self.model for key in keys)
        assert len(client) == len(self.model)
        for key in keys:
            assert client.peek(key) == self.model.get(key)
            if key in self.model:
                assert client.get(key, timeout_s=0) == self.model[key]


@pytest.mark.parametrize("kind", KINDS)
def test_a_dict_is_the_oracle(kind: str, tmp_path: Path) -> None:
    machine = type("Machine", (Machine,), {"kind": kind, "folder": tmp_path})
    check = machine.TestCase()
    check.settings = settings(
        max_examples=12, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
    )
    check.runTest()


@given(pairs=st.dictionaries(st.text(max_size=8), st.binary(max_size=64), max_size=8))
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_key_and_value_survives_the_file_and_the_wire(
    pairs: dict[str, bytes], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("pairs") / "store"
    with TCPStore("127.0.0.1", 0, is_server=True) as tcp, FileStore(path) as file, FileStore(path) as reader:
        for key, value in pairs.items():
            tcp[key] = value
            file[key] = value
        assert {key: tcp[key] for key in pairs} == {key: reader[key] for key in pairs} == pairs
