// Closing (csrc: engine.cpp, channels.cpp, waiter.cpp): rank 0 sends every other rank MESSAGES messages and
// leaves. The last one is sent with zero copy: it lies in memory of rank 0, which it overwrites when all have
// completed it or when it has left, whichever comes first. The others want these messages, or one more.
//
// Right: what was sent before arrives, who wants one more learns that rank 0 has left, and memory that was
// overwritten is never taken for the message.
//
// seed LEFT_READ_LAST: the receiver looks for the message first, and then whether its sender has left
// seed LEFT_EARLY: rank 0 says that it has left before it has sent its last message
// seed NOBODY_WOKEN: who leaves wakes nobody
// seed SENDER_ASKED_FIRST: the receiver asks whether the sender has left before it has copied
// seed NO_FENCE: memory that was published for zero copy may be seen overwritten before its sender has left

#ifndef RANKS
#define RANKS 2
#endif
#define LAST (RANKS - 1)
#if RANKS > 2
#define MESSAGES 1
#else
#define MESSAGES 2
#endif
#define PENDING 3

#define EPOCH(r) (r)
#define SLEEPERS(r) (RANKS + (r))
#define NUMBER(r) (2 * RANKS + (r))
#define RETURNED(r) (3 * RANKS + (r))
#define LEFT (4 * RANKS)
#define DATA_A (4 * RANKS + 1)
#define DATA_B (4 * RANKS + 2)
#define CELLS (4 * RANKS + 3)
#include "memory.h"
#include "event.h"

#define ZERO_COPY 7
#define OVERWRITTEN 9

#ifdef LEFT_EARLY
#define SAY_EARLY store(LEFT, 1, SEQ_CST);
#define SAY_LAST
#else
#define SAY_EARLY
#define SAY_LAST store(LEFT, 1, SEQ_CST);
#endif

active proctype leaver() {
  byte me = 0, m = 1, r, awake_, i_;
  memory[DATA_A] == ZERO_COPY && memory[DATA_B] == ZERO_COPY;
  do
  :: m <= MESSAGES ->
    if
    :: m == MESSAGES -> SAY_EARLY skip
    :: else
    fi;
    r = 1;
    do
    :: r < RANKS -> store(NUMBER(r), m, SEQ_CST); notify(r); r++
    :: else -> break
    od;
    m++
  :: else -> break
  od;
  m = 0;
  r = 0;
  if
  :: memory[RETURNED(1)] && memory[RETURNED(LAST)]  // it waited for what it published
  :: true                                           // its operation has failed
  fi;
  SAY_LAST
#ifndef NO_FENCE
  fence_release();
#endif
  store(DATA_A, OVERWRITTEN, RELAXED);
  store(DATA_B, OVERWRITTEN, RELAXED);
#ifdef NOBODY_WOKEN
  skip
#else
  r = 1;
  do
  :: r < RANKS -> notify_sleepers(r); r++
  :: else -> break
  od
#endif
}

#define LOOK_FOR_MESSAGE load(NUMBER(me), value, SEQ_CST)
#define LOOK_FOR_LEFT load(LEFT, left, SEQ_CST)

#ifdef LEFT_READ_LAST
#define COME                    \
  LOOK_FOR_MESSAGE;             \
  LOOK_FOR_LEFT;                \
  done = (value >= m || left);  \
  come = (value >= m);          \
  value = 0
#else
#define COME                    \
  LOOK_FOR_LEFT;                \
  LOOK_FOR_MESSAGE;             \
  done = (value >= m || left);  \
  come = (value >= m);          \
  value = 0
#endif

inline copy_lent() {
  load(DATA_A, a, ACQUIRE);
  load(DATA_B, b, ACQUIRE)
}

inline borrow() {
#ifdef SENDER_ASKED_FIRST
  LOOK_FOR_LEFT;
  copy_lent();
#else
  copy_lent();
  LOOK_FOR_LEFT;
#endif
  if
  :: left
  :: else -> assert(a == ZERO_COPY && b == ZERO_COPY); store(RETURNED(me), 1, SEQ_CST)
  fi;
  a = 0;
  b = 0
}

proctype receiver(byte me) {
  byte m = 1, wanted, seen, value, left, a, b, i_;
  bit done, come;
  if
  :: wanted = MESSAGES
  :: wanted = MESSAGES + 1
  fi;
  do
  :: m <= wanted ->
    AWAIT(COME);
    assert(come == (m <= MESSAGES));
    left = 0;
    if
    :: m == MESSAGES -> borrow()
    :: else
    fi;
    left = 0;
    come = 0;
    m++
  :: else -> break
  od
}

init {
  atomic {
    memory[DATA_A] = ZERO_COPY;
    memory[DATA_B] = ZERO_COPY;
    run receiver(1);
#if RANKS > 2
    run receiver(2)
#endif
  }
}
