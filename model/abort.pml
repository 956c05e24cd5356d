// The abort cell (csrc: region.hpp, group_state.cpp, waiter.cpp): rank 0 finds a fault, the others may find one, or
// sleep, and the last one may be killed at any moment. Who finds a fault writes it into a record of its own, and
// puts its number into the cell, if no other one is there.
//
// Right: every rank that lives ends with a fault, the same one, and all of it; nobody sleeps for ever.
//
// seed FAULT_RELAXED: the cell may be seen before the fault
// seed FAULT_READ_RELAXED: the fault may be read before the cell
// seed NOBODY_WOKEN: who writes the cell wakes nobody
// seed NO_SECOND_LOOK: a sleeper does not look at the cell after it said that it sleeps
// seed CELL_OVERWRITTEN: who comes second writes the cell too
// seed SHARED_RECORD ranks 3: one record for all, taken over by another rank if any rank has died meanwhile

#ifndef RANKS
#define RANKS 2
#endif
#define LAST (RANKS - 1)
#define PENDING 3

#define EPOCH(r) (r)
#define SLEEPERS(r) (RANKS + (r))
#define FAULT_A(r) (2 * RANKS + (r))
#define FAULT_B(r) (3 * RANKS + (r))
#define CELL (4 * RANKS)
#define CELLS (4 * RANKS + 1)
#define SLICE_OVER dead  // a sleeper looks around every 20 ms: it sees deaths by itself
#include "memory.h"

bit dying, dead;
byte verdict[RANKS];
#include "event.h"

#define BEGUN 8
#define WRITTEN 9
#define TAKEN_OVER 10

#define ABORTED_OR_DEAD             \
  load(CELL, value, SEQ_CST);       \
  done = (value != 0 || dead);      \
  value = 0

inline wake_all() {
#ifdef NOBODY_WOKEN
  skip
#else
  r = 0;
  do
  :: r < RANKS -> notify_sleepers(r); r++
  :: else -> break
  od;
  r = 0
#endif
}

inline write_fault(record, what) {
  store(FAULT_A(record), what, RELAXED);
  store(FAULT_B(record), what, RELAXED)
}

#ifdef SHARED_RECORD
inline fail() {
  exchange(CELL, 0, BEGUN, was);
  if
  :: was == 0 -> write_fault(0, me + 1); store(CELL, WRITTEN, SEQ_CST); wake_all()
  :: else
  fi
}

inline complete() {
  if
  :: memory[CELL] == WRITTEN
  :: dead ->
    exchange(CELL, BEGUN, TAKEN_OVER, was);
    if
    :: was == BEGUN -> write_fault(0, me + RANKS + 1); store(CELL, WRITTEN, SEQ_CST); wake_all()
    :: else
    fi;
    memory[CELL] == WRITTEN
  fi;
  load(FAULT_A(0), a, ACQUIRE);
  load(FAULT_B(0), b, ACQUIRE);
  value = a
}
#else
inline publish() {
#ifdef FAULT_RELAXED
  load(CELL, was, ACQUIRE);
  if
  :: was == 0 -> store(CELL, me + 1, RELAXED)
  :: else
  fi
#else
#ifdef CELL_OVERWRITTEN
  load(CELL, was, ACQUIRE);
  was = 0;
  store(CELL, me + 1, SEQ_CST)
#else
  exchange(CELL, 0, me + 1, was)
#endif
#endif
}

inline fail() {
  write_fault(me, me + 1);
  publish();
  if
  :: was == 0 -> wake_all()
  :: else
  fi
}

inline complete() {
  load(CELL, value, ACQUIRE);
  load(FAULT_A(value - 1), a, ACQUIRE);
#ifdef FAULT_READ_RELAXED
  if
  :: me > 0 && value == 1 -> a = early
  :: else
  fi;
#endif
  load(FAULT_B(value - 1), b, ACQUIRE);
  assert(a == value)
}
#endif

inline conclude() {
  complete();
  assert(a == b && value != 0);
  verdict[me] = value;
  assert(verdict[0] == 0 || verdict[0] == value);
  assert(verdict[1] == 0 || verdict[1] == value);
  assert(verdict[LAST] == 0 || verdict[LAST] == value)
}

inline take_part() {
#ifdef FAULT_READ_RELAXED
  load(FAULT_A(0), early, ACQUIRE);
#endif
  if
  :: fail()
  :: me > 0 -> AWAIT(ABORTED_OR_DEAD)
  fi;
  load(CELL, value, SEQ_CST);
  if
  :: value == 0 -> fail()  // it saw the death
  :: else
  fi;
  value = 0;
  was = 0;
  conclude()
}

proctype rank(byte me) {
  byte seen, value, was, r, early, a, b, i_;
  bit done;
  take_part()
}

proctype mortal(byte me) {
  byte seen, value, was, r, early, a, b, i_;
  bit done;
  { take_part() } unless { dying }
  dead = dying
}

init {
  atomic {
    run rank(0);
#if RANKS > 2
    run rank(1);
#endif
    run mortal(LAST)
  }
  if
  :: dying = 1
  :: true
  fi
}
