// A zero-copy transfer (csrc: zero_copy.hpp, zero_copy.cpp): rank 0 sends MESSAGES messages of UNITS units to
// rank 1. Both copy units, each from the sender's memory to the receiver's, and claim them first. The receiver
// may stop early. One transfer's fields serve all messages. The announcement in the FIFO is that of fifo.pml.
//
// Right: a receiver that waited has every unit of its message; after a receiver has stopped, nobody writes into
// its memory; nobody waits for ever.
//
// ranks 2
//
// seed RESET_AFTER_NUMBER ranks 2: the fields are reset when the message is announced already
// seed TARGET_RELAXED ranks 2: the target may be seen before what the receiver wrote there itself
// seed COMPLETED_RELAXED ranks 2: a unit may count as copied before its bytes are seen
// seed UNCLAIMED ranks 2: a rank reads which unit is next, and takes it in a second step
// seed STOPS_AT_ONCE ranks 2: a receiver that stops does not wait for the units that are claimed
// seed NOT_CLOSED ranks 2: a receiver that stops lets the sender claim further units

#define UNITS 2
#define MESSAGES 2
#define PENDING 3
#define NUMBER 0
#define ACKED 1
#define TARGET 2
#define CLAIMED 3
#define COMPLETED 4
#define SOURCE_OF(unit) (5 + (unit))
#define BYTES_OF(unit) (5 + UNITS + (unit))
#define CELLS (5 + 2 * UNITS)
#include "memory.h"

#define CLOSED 8
#define STALE 200  // what the receiver's memory has before
#define OTHER 201  // what it has after the receiver stopped, and uses it for something else
#define NONE 255

bool sender_ended;

#ifdef TARGET_RELAXED
#define TARGET_ORDER RELAXED
#else
#define TARGET_ORDER SEQ_CST
#endif

#define OWN(which, where) (stores[me].count > which && FIELD(me, which) == where)

// An exchange with acquire: earlier stores of this rank may become visible later, but not one to this field.
inline claim(unit) {
#ifdef UNCLAIMED
  load(CLAIMED, unit, RELAXED);
  if
  :: unit < UNITS -> store(CLAIMED, unit + 1, RELAXED)
  :: else -> unit = NONE
  fi
#else
  atomic {
    !OWN(0, CLAIMED) && !OWN(1, CLAIMED) && !OWN(2, CLAIMED) ->
    unit = memory[CLAIMED];
    if
    :: unit < UNITS -> memory[CLAIMED] = unit + 1
    :: else -> unit = NONE
    fi
  }
#endif
}

inline copy(unit) {
  load(SOURCE_OF(unit), value, RELAXED);
  store(BYTES_OF(unit), value, RELAXED);
#ifdef COMPLETED_RELAXED
  atomic { memory[COMPLETED] = memory[COMPLETED] + 1 }
#else
  add(COMPLETED, 1)
#endif
}

inline reset() {
  store(TARGET, 0, RELAXED);
  store(CLAIMED, 0, RELAXED);
  store(COMPLETED, 0, RELAXED)
}

active proctype sender() {
  byte me = 0, i_, m = 1, unit, value, seen;
  do
  :: m <= MESSAGES ->
    store(SOURCE_OF(0), m, RELAXED);
    store(SOURCE_OF(1), m, RELAXED);
#ifdef RESET_AFTER_NUMBER
    store(NUMBER, m, SEQ_CST);
    reset();
#else
    reset();
    store(NUMBER, m, SEQ_CST);
#endif
    do
    :: memory[ACKED] >= m -> break
    :: load(TARGET, seen, SEQ_CST);
      if
      :: seen != 0 && memory[CLAIMED] < UNITS ->
        claim(unit);
        if
        :: unit != NONE -> copy(unit)
        :: else
        fi
      :: memory[ACKED] >= m
      fi
    od;
    m++
  :: else -> break
  od;
  stores[0].count == 0 -> sender_ended = true
}

inline finish() {
  memory[COMPLETED] == UNITS;
  load(BYTES_OF(0), value, RELAXED);
  assert(value == m);
  load(BYTES_OF(1), value, RELAXED);
  assert(value == m)
}

inline stop_early() {
  atomic {
    stores[me].count == 0 ->
    begun = memory[CLAIMED];
#ifndef NOT_CLOSED
    memory[CLAIMED] = begun + CLOSED
#endif
  };
#ifndef STOPS_AT_ONCE
  memory[COMPLETED] >= begun;
#endif
  store(BYTES_OF(0), OTHER, RELAXED);
  store(BYTES_OF(1), OTHER, RELAXED);
  stopped = true
}

active proctype receiver() {
  byte me = 1, i_, m = 1, unit, value, begun;
  bool stopped;
  do
  :: m <= MESSAGES && !stopped ->
    memory[NUMBER] == m;
    store(BYTES_OF(0), STALE, RELAXED);
    store(BYTES_OF(1), STALE, RELAXED);
    store(TARGET, 1, TARGET_ORDER);
    do
    :: claim(unit);
      if
      :: unit != NONE -> copy(unit)
      :: else -> finish(); break
      fi
    :: m == MESSAGES -> stop_early(); break
    od;
    store(ACKED, m, SEQ_CST);
    m++
  :: else -> break
  od;
  if
  :: stopped ->
    sender_ended && stores[1].count == 0;
    assert(memory[BYTES_OF(0)] == OTHER && memory[BYTES_OF(1)] == OTHER)
  :: else
  fi
}
