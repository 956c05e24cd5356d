// Memory with its orders, for Spin, which by itself knows only one order of all things.
//
// Every rank has a buffer of stores that the others do not see yet. A relaxed store becomes visible at any time,
// also before earlier ones; a release store only after all earlier ones of its rank. A sequentially consistent
// store is a release store, and no sequentially consistent load of its rank comes before it is visible: that, and
// no more, is what C++ says of the two. A rank sees its own stores at once. Loads are in order: where an acquire
// is left out, the model says itself which load may come first. An atomic add or exchange waits for all earlier
// stores, as a release does.
//
// Before including this: CELLS (how many shared fields there are), RANKS, and PENDING (how many stores of a rank
// may be under way at once, at most 3). A process that stores or loads has `byte me, i_`: its rank, a counter.

#define RELAXED 0
#define RELEASE 1
#define ACQUIRE 1
#define SEQ_CST 2

typedef Stores {
  byte count;
  byte strict;  // how many of them are sequentially consistent
  byte at[PENDING];
  byte value[PENDING];
  byte order[PENDING];
}

byte memory[CELLS];
Stores stores[RANKS];

inline store(where, what, how) {
  atomic {
    stores[me].count < PENDING ->
    stores[me].at[stores[me].count] = where;
    stores[me].value[stores[me].count] = what;
    stores[me].order[stores[me].count] = how;
    stores[me].strict = stores[me].strict + (how == SEQ_CST);
    stores[me].count++
  }
}

inline load(where, into, how) {
  atomic {
    (how != SEQ_CST || stores[me].strict == 0) ->
    into = memory[where];
    i_ = 0;
    do
    :: i_ < stores[me].count ->
      if
      :: stores[me].at[i_] == where -> into = stores[me].value[i_]
      :: else
      fi;
      i_++
    :: else -> break
    od;
    i_ = 0
  }
}

// Behind it no store becomes visible before one that was before it.
inline fence_release() { stores[me].count == 0 }

inline add(where, delta) {
  atomic { stores[me].count == 0 -> memory[where] = memory[where] + (delta) }
}

// `was`: what was there; the exchange has happened if that is `expected`.
inline exchange(where, expected, what, was) {
  atomic {
    stores[me].count == 0 ->
    was = memory[where];
    if
    :: was == (expected) -> memory[where] = what
    :: else
    fi
  }
}

// Makes one pending store visible. It may overtake those before it, unless it is a release store, or one of
// them is to the same field.
inline become_visible(rank, which) {
  d_step {
    memory[stores[rank].at[which]] = stores[rank].value[which];
    stores[rank].strict = stores[rank].strict - (stores[rank].order[which] == SEQ_CST);
    j_ = which;
    do
    :: j_ + 1 < stores[rank].count ->
      stores[rank].at[j_] = stores[rank].at[j_ + 1];
      stores[rank].value[j_] = stores[rank].value[j_ + 1];
      stores[rank].order[j_] = stores[rank].order[j_ + 1];
      j_++
    :: else -> break
    od;
    stores[rank].count--;
    stores[rank].at[stores[rank].count] = 0;
    stores[rank].value[stores[rank].count] = 0;
    stores[rank].order[stores[rank].count] = 0;
    j_ = 0
  }
}

#define FIELD(r, k) stores[r].at[k]
#define FIRST(r) atomic { stores[r].count > 0 -> become_visible(r, 0) }
#define SECOND(r)                                                                                     \
  atomic {                                                                                            \
    stores[r].count > 1 && stores[r].order[1] == RELAXED && FIELD(r, 1) != FIELD(r, 0) -> become_visible(r, 1) \
  }
#define THIRD(r)                                                                                           \
  atomic {                                                                                                 \
    stores[r].count > 2 && stores[r].order[2] == RELAXED && FIELD(r, 2) != FIELD(r, 0) && FIELD(r, 2) != FIELD(r, 1) \
      -> become_visible(r, 2)                                                                              \
  }

active proctype visibility() {
  byte j_;
end:
  do
  :: FIRST(0)
  :: SECOND(0)
  :: THIRD(0)
  :: FIRST(1)
  :: SECOND(1)
  :: THIRD(1)
#if RANKS > 2
  :: FIRST(2)
  :: SECOND(2)
  :: THIRD(2)
#endif
  od
}
