// Sleeping and waking (csrc: waiter.cpp, group_state.hpp, shm.cpp): the other ranks send rank 0 messages over FIFOs of
// one entry, so that both ends have to wait for each other and may sleep. Rank 0 takes from each in turn and has
// one event count for all.
//
// Right: nobody sleeps for ever, whatever the moment at which he lies down.
//
// seed NUMBER_RELEASE: the sender asks who sleeps before its message can be seen
// seed ACKED_RELEASE: the receiver asks who sleeps before its acknowledgement can be seen
// seed SLEEPERS_RELEASE: the sleeper looks again before the others can see that it sleeps
// seed LOOK_ACQUIRE: the sleeper's look is an acquire load only, which may come before it said that it sleeps
// seed NO_SECOND_LOOK: the sleeper does not look again after it said so
// seed EPOCH_READ_LATE: the epoch to sleep on is read after the second look
// seed EPOCH_NOT_RAISED: who wakes does not raise the epoch

#ifndef RANKS
#define RANKS 2
#endif
#if RANKS > 2
#define MESSAGES 1
#else
#define MESSAGES 3
#endif
#define PENDING 2

#define EPOCH(r) (r)
#define SLEEPERS(r) (RANKS + (r))
#define NUMBER(r) (2 * RANKS + (r))
#define ACKED(r) (3 * RANKS + (r))
#define CELLS (4 * RANKS)
#include "memory.h"
#include "event.h"

#ifdef NUMBER_RELEASE
#define NUMBER_ORDER RELEASE
#else
#define NUMBER_ORDER SEQ_CST
#endif
#ifdef ACKED_RELEASE
#define ACKED_ORDER RELEASE
#else
#define ACKED_ORDER SEQ_CST
#endif

#ifdef LOOK_ACQUIRE
#define LOOK_ORDER ACQUIRE
#else
#define LOOK_ORDER SEQ_CST
#endif

#define ROOM                             \
  load(ACKED(me), value, LOOK_ORDER);    \
  done = (value + 1 == m);               \
  value = 0
#define COME                             \
  load(NUMBER(peer), value, LOOK_ORDER); \
  done = (value == m);                   \
  value = 0

proctype sender(byte me) {
  byte m = 1, seen, value, awake_, i_;
  bit done;
  do
  :: m <= MESSAGES ->
    AWAIT(ROOM);
    store(NUMBER(me), m, NUMBER_ORDER);
    notify(0);
    m++
  :: else -> break
  od
  AWAIT(ROOM)
}

active proctype receiver() {
  byte me = 0, m = 1, peer, seen, value, awake_, i_;
  bit done;
  do
  :: m <= MESSAGES ->
    peer = 1;
    do
    :: peer < RANKS ->
      AWAIT(COME);
      store(ACKED(peer), m, ACKED_ORDER);
      notify(peer);
      peer++
    :: else -> break
    od;
    m++
  :: else -> break
  od
}

init {
  atomic {
    run sender(1);
#if RANKS > 2
    run sender(2)
#endif
  }
}
