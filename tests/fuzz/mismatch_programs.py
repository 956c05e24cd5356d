"""Random programs of calls for all ranks, and one rank's that differs in one thing.

What must come of a difference is known beforehand:

    EQUAL    it makes none: a call that blocks or does not, a list of arrays or one array, a list without
             buffers, a small message that nobody asks for (it is buffered); every rank gets right data
    TOLD     ranks call different things: every rank raises Mismatch
    ENDED    a message that is asked for never comes, and only the clock can tell: every rank raises Timeout,
             PeerLost or Mismatch
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from mismatch_calls import (
    BLOCKS,
    COALESCED,
    COLLECTIVES,
    DTYPES,
    GROUPS,
    MESSAGE,
    OBJECTS,
    OPS,
    PLAIN_OF,
    QUEUED,
    REDUCING,
    ROOTED,
    Call,
)

from random_programs import fitting

EQUAL, TOLD, ENDED = "EQUAL", "TOLD", "ENDED"
# Where something changes: nothing, inline or staged, one algorithm or another, one segment or several.
NUMELS = (0, 1, 1, 2, 3, 3, 7, 10, 11, 64, 65, 1000, 1000, 20_000)
RAGGED = ("gather", "scatter", "all_to_all", "all_gather_v")
LARGE = 1 << 17  # elements of 8 bytes are some whole segments
PLACES = (0, 1, 2)  # ranks per host; 0: all on one
LAST = 7


@dataclass(frozen=True)
class Case:
    """Programs by rank. odd: the rank that differs.  per_host: see PLACES."""

    size: int
    per_host: int
    odd: int
    change: str
    verdict: str
    programs: tuple[tuple[Call, ...], ...]

    @property
    def agreed(self) -> list[Call]:
        """The collectives that come before ranks differ in one."""
        usual, other = (list(filter(_collective, self.programs[self.odd - one])) for one in (1, 0))
        return usual[: _first(usual, other)]

    @property
    def ragged(self) -> bool:
        """Whether ranks differ in nothing but the size of a block, which only its two ranks know of."""
        usual, other = self.programs[self.odd - 1], self.programs[self.odd]
        at = _first(usual, other)
        one, two = usual[at], other[at]
        return one.kind in RAGGED and replace(one, numels=two.numels) == two


def draw(rng: random.Random) -> Case:
    """A random case; every program ends with a call that no other one equals."""
    size, per_host = rng.choice((2, 2, 3, 4)), rng.choice(PLACES)
    base = [_call(rng, size, 10 * (number + 1)) for number in range(rng.randint(1, 4))]
    last = Call("all_reduce", 990, ("int64",), (LAST,))
    while True:
        odd, change = rng.randrange(size), rng.choice(list(CHANGES))
        place = rng.randrange(len(base))
        usual, other, verdict = base[:], base[:], ""
        found = CHANGES[change](rng, size, odd, base[place])
        if found is None:
            continue
        before, after, verdict = found
        usual[place : place + 1] = before
        other[place : place + 1] = after
        if change == "order":
            if place + 1 == len(base) or not _collective(base[place]) or not _collective(base[place + 1]):
                continue
            other[place : place + 2] = [base[place + 1], base[place]]
            verdict = TOLD
        at = _first(usual, other)
        if verdict != EQUAL and change != "algorithm" and _side_by_side(usual[at:], other[at:]):
            continue
        if verdict == TOLD and not _told(usual[at:], other[at:]):
            verdict = ENDED
        programs = tuple((*(other if rank == odd else usual), last) for rank in range(size))
        return Case(size, per_host, odd, change, verdict, programs)


def without(case: Case, number: int) -> Case:
    """The case without a call, to see whether it fails all the same."""
    programs = tuple(tuple(call for call in calls if call.number != number) for calls in case.programs)
    return replace(case, programs=programs)


def _side_by_side(usual: list[Call], other: list[Call]) -> bool:
    """Whether two calls meet that are alike, or may be: a later one would differ, or none."""
    if not any(map(_collective, (*usual[:1], *other[:1]))):
        return False
    firsts = [
        [replace(call, algorithm=None) for call in filter(_collective, calls)][:1] for calls in (usual, other)
    ]
    return all(firsts) and firsts[0][0].alike() == firsts[1][0].alike()


def _told(usual: list[Call], other: list[Call]) -> bool:
    """Whether a difference is told at once: not where one waits for a message and another in a collective."""
    pairs = list(zip(usual, other, strict=False))
    if pairs and pairs[0][0].kind == pairs[0][1].kind == MESSAGE:
        return True
    return all(map(_collective, (*usual, *other)))


def _first(usual: Sequence[Call], other: Sequence[Call]) -> int:
    return next(
        (place for place, pair in enumerate(zip(usual, other, strict=False)) if pair[0] != pair[1]),
        len(usual),
    )


def _collective(call: Call) -> bool:
    return call.kind != MESSAGE


def _numel(rng: random.Random) -> int:
    return rng.choice(NUMELS)


def _call(rng: random.Random, size: int, number: int, kind: str = "") -> Call:
    kind = kind or rng.choice((*COLLECTIVES, *COLLECTIVES, MESSAGE, MESSAGE, MESSAGE))
    many = rng.randint(1, 4) if kind in COALESCED else 1
    root, peer = rng.sample(range(size), 2)
    members = tuple(rng.sample(range(size), rng.randint(1, size)))
    return Call(
        kind,
        number,
        tuple(rng.choice(DTYPES) for _ in range(many)),
        tuple(_numel(rng) if kind != MESSAGE else rng.choice(NUMELS[:-1]) for _ in range(many)),
        rng.choice(OPS),
        root,
        rng.choice((None, *fitting(kind, size))),
        members if kind == "subgroup" else (),
        peer,
        100 + number,
        kind == MESSAGE and rng.random() < 0.5,
        rng.random() < 0.3,
        rng.random() < 0.3,
    )


# --- what a rank may do differently ----------------------------------------------------------------------

Changed = tuple[list[Call], list[Call], str] | None
"""What all but one rank call, what that one calls, and the verdict; None: not with this call."""
Change = Callable[[random.Random, int, int, Call], Changed]


def _instead(call: Call, other: Call) -> Changed:
    verdict = EQUAL if call.alike() == other.alike() else TOLD
    return [call], [other], verdict


def _kind(rng: random.Random, size: int, odd: int, call: Call) -> Changed:
    if not _collective(call):
        return None
    return _instead(call, _call(rng, size, call.number, rng.choice(COLLECTIVES)))


def _dressed(rng: random.Random, size: int, odd: int, call: Call) -> Changed:
    """Plain, of objects, of several buffers: the same collective in another dress."""
    named = [name for name in COLLECTIVES if PLAIN_OF[name] == call.plain and name != call.kind]
    if call.kind in ("all_gather", "all_gather_v", "all_gather_object", "split"):
        named = [
            one for one in ("all_gather", "all_gather_v", "all_gather_object", "split") if one != call.kind
        ]
    if not named or not _collective(call):
        return None
    if call.kind not in COALESCED and call.kind not in GROUPS:  # as the lengths of objects travel
        call = replace(call, dtypes=("int64",), numels=(1,), algorithm=None)
    some = replace(call, dtypes=call.dtypes[:1], numels=call.numels[:1])
    return _instead(call, replace(some, kind=rng.choice(named), algorithm=None))


def _dtype(rng: random.Random, size: int, odd: int, call: Call) -> Changed:
    if call.kind in (*OBJECTS, *GROUPS, "barrier") or not call.dtypes:
        return None
    at = rng.randrange(len(call.dtypes))
    dtypes = list(call.dtypes)
    dtypes[at] = rng.choice([dtype for dtype in DTYPES if dtype != dtypes[at]])
    return _meant(call, replace(call, dtypes=tuple(dtypes)), odd)


def _size(rng: random.Random, size: int, odd: int, call: Call) -> Changed:
    if call.kind in (*OBJECTS, *GROUPS, "barrier") or not call.numels:
        return None
    if call.kind in BLOCKS and rng.random() < 0.1:
        call = replace(call, dtypes=("float64",), numels=(rng.choice((1, 2)) * LARGE,))
    at = rng.randrange(len(call.numels))
    numels = list(call.numels)
    numels[at] = rng.choice((numels[at] + 1, max(0, numels[at] - 1), numels[at] * 2, 0, numels[at] // 2))
    if call.kind == MESSAGE:  # one that is shorter than its receiver's array is taken
        sent, taken = (numels, call.numels) if odd == call.root else (call.numels, numels)
        if sent[at] <= taken[at]:
            return None
    return _meant(call, replace(call, numels=tuple(numels)), odd)


def _meant(call: Call, other: Call, odd: int) -> Changed:
    """A message matters to its two ranks alone, and holds no array when it holds an object."""
    if call == other or (not _collective(call) and (call.is_object or odd not in (call.root, call.peer))):
        return None
    return [call], [other], TOLD


def _root(rng: random.Random, size: int, odd: int, call: Call) -> Changed:
    if call.plain not in ROOTED:
        return None
    return _instead(call, replace(call, root=rng.choice([r for r in range(size) if r != call.root])))


def _op(rng: random.Random, size: int, odd: int, call: Call) -> Changed:
    if call.plain not in REDUCING or not call.numels:
        return None
    return _instead(call, replace(call, op=rng.choice([op for op in OPS if op != call.op])))


def _algorithm(rng: random.Random, size: int, odd: int, call: Call) -> Changed:
    known = fitting(call.kind, size)
    if len(known) < 2:
        return None
    one, other = rng.sample(known, 2)
    return [replace(call, algorithm=one)], [replace(call, algorithm=other)], TOLD


def _list(rng: random.Random, size: int, odd: int, call: Call) -> Changed:
    """Another order, or one buffer more or fewer."""
    if call.kind not in COALESCED:
        return None
    pairs = list(zip(call.dtypes, call.numels, strict=True))
    how = rng.choice(("order", "order", "more", "fewer"))
    if how == "order":
        rng.shuffle(pairs)
    elif how == "more":
        pairs.insert(rng.randint(0, len(pairs)), (rng.choice(DTYPES), _numel(rng)))
    else:
        pairs.pop(rng.randrange(len(pairs)))
    dtypes, numels = tuple(dtype for dtype, _ in pairs), tuple(numel for _, numel in pairs)
    return _instead(call, replace(call, dtypes=dtypes, numels=numels))


def _members(rng: random.Random, size: int, odd: int, call: Call) -> Changed:
    if call.kind != "subgroup":
        return None
    return _instead(call, replace(call, members=tuple(rng.sample(range(size), rng.randint(1, size)))))


def _order(rng: random.Random, size: int, odd: int, call: Call) -> Changed:
    return [call], [call], ""


def _more(rng: random.Random, size: int, odd: int, call: Call) -> Changed:
    extra = _call(rng, size, call.number + 1)
    if _collective(extra):
        return [call], [call, extra], TOLD
    if odd == extra.root:  # nobody asks for it
        return [call], [call, extra], EQUAL
    return ([call], [call, extra], ENDED) if odd == extra.peer else None


def _fewer(rng: random.Random, size: int, odd: int, call: Call) -> Changed:
    if _collective(call):
        return [call], [], TOLD if call.alike() else EQUAL
    if odd == call.peer:  # nobody asks for it
        return [call], [], EQUAL
    return ([call], [], ENDED) if odd == call.root else None


def _blocking(rng: random.Random, size: int, odd: int, call: Call) -> Changed:
    fits = call.kind in QUEUED or (not _collective(call) and not call.is_object)
    return ([call], [replace(call, queued=not call.queued)], EQUAL) if fits else None


def _spread(rng: random.Random, size: int, odd: int, call: Call) -> Changed:
    return ([call], [replace(call, spread=not call.spread)], EQUAL) if call.kind in BLOCKS else None


def _empty_list(rng: random.Random, size: int, odd: int, call: Call) -> Changed:
    kind = rng.choice(COALESCED)
    return [call], [Call(kind, call.number + 1, (), ()), call], EQUAL


def _object(rng: random.Random, size: int, odd: int, call: Call) -> Changed:
    if _collective(call):
        return None
    call = replace(call, dtypes=("int64",), numels=(1,))
    return _told_by_two(call, replace(call, is_object=not call.is_object), odd)


def _told_by_two(call: Call, other: Call, odd: int) -> Changed:
    return ([call], [other], TOLD) if odd in (call.root, call.peer) else None


def _tag(rng: random.Random, size: int, odd: int, call: Call) -> Changed:
    if _collective(call) or odd not in (call.root, call.peer):
        return None
    return [call], [replace(call, tag=call.tag + 1000)], ENDED


CHANGES: dict[str, Change] = {
    "kind": _kind,
    "dress": _dressed,
    "dtype": _dtype,
    "size": _size,
    "root": _root,
    "op": _op,
    "algorithm": _algorithm,
    "list": _list,
    "members": _members,
    "order": _order,
    "more": _more,
    "fewer": _fewer,
    "blocking": _blocking,
    "spread": _spread,
    "empty list": _empty_list,
    "object message": _object,
    "tag": _tag,
}
