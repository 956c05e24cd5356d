// A FIFO and the staging memory (csrc: region.hpp, shm.cpp): rank 0 sends MESSAGES messages, to rank 1 or, with
// three ranks, to both others. The second and third lie in the staging memory, which has room for one, the
// others travel in their slots. Each message is two words, so that half of one is seen. How a rank waits is the matter of wake.pml.
//
// Right: every receiver gets every message once, whole and in order, and nobody waits for ever.
//
// seed NUMBER_RELAXED: the entry's number may be seen before its bytes
// seed NUMBER_READ_RELAXED: the receiver may read the bytes before the number
// seed ACKED_RELAXED: the receiver may say that it is done before it has read
// seed ROOM_UNCHECKED: the sender writes one slot more than the FIFO has
// seed STAGING_FREED_BY_FIRST ranks 3: the staging memory is free when the first receiver is done

#ifndef RANKS
#define RANKS 2
#endif
#define RECEIVERS (RANKS - 1)
#define ENTRIES 2
#define MESSAGES 5
#define PENDING 3

#define STAGED(m) ((m) == 2 || (m) == 3)
#define STAGED_A 0
#define STAGED_B 1
#define FIFO(r) (2 + ((r) - 1) * 7)
#define ENTRY(r, m) (FIFO(r) + (((m) - 1) % ENTRIES) * 3)
#define NUMBER(r, m) ENTRY(r, m)
#define WORD_A(r, m) (ENTRY(r, m) + 1)
#define WORD_B(r, m) (ENTRY(r, m) + 2)
#define ACKED(r) (FIFO(r) + 6)
#define CELLS (2 + RECEIVERS * 7)
#include "memory.h"

#ifdef NUMBER_RELAXED
#define NUMBER_ORDER RELAXED
#else
#define NUMBER_ORDER SEQ_CST
#endif
#ifdef ROOM_UNCHECKED
#define IN_FLIGHT (ENTRIES + 1)
#else
#define IN_FLIGHT ENTRIES
#endif
#ifdef STAGING_FREED_BY_FIRST
#define STAGING_FREE(m) (memory[ACKED(1)] >= (m) || memory[ACKED(RECEIVERS)] >= (m))
#else
#define STAGING_FREE(m) (memory[ACKED(1)] >= (m) && memory[ACKED(RECEIVERS)] >= (m))
#endif

active proctype sender() {
  byte me = 0, m = 1, r, staged;
  do
  :: m <= MESSAGES ->
    r = 1;
    do
    :: r <= RECEIVERS -> memory[ACKED(r)] + IN_FLIGHT >= m; r++
    :: else -> break
    od;
    if
    :: STAGED(m) ->
      (staged == 0 || STAGING_FREE(staged));
      staged = m;
      store(STAGED_A, m, RELAXED);
      store(STAGED_B, m, RELAXED)
    :: else
    fi;
    r = 1;
    do
    :: r <= RECEIVERS ->
      if
      :: !STAGED(m) -> store(WORD_A(r, m), m, RELAXED); store(WORD_B(r, m), m, RELAXED)
      :: else
      fi;
      store(NUMBER(r, m), m, NUMBER_ORDER);
      r++
    :: else -> break
    od;
    m++
  :: else -> break
  od
}

inline read_words() {
  if
  :: !STAGED(m) -> a = memory[WORD_A(me, m)]; b = memory[WORD_B(me, m)]
  :: else -> a = memory[STAGED_A]; b = memory[STAGED_B]
  fi
}

inline arrive() { memory[NUMBER(me, m)] == m }

proctype receiver(byte me) {
  byte m = 1, a, b;
  do
  :: m <= MESSAGES ->
#ifdef NUMBER_READ_RELAXED
    if
    :: read_words(); arrive()
    :: arrive(); read_words()
    fi;
#else
    arrive();
#ifdef ACKED_RELAXED
    if
    :: store(ACKED(me), m, RELEASE); read_words()
    :: read_words()
    fi;
#else
    read_words();
#endif
#endif
    assert(a == m && b == m);
    a = 0;
    b = 0;
    store(ACKED(me), m, SEQ_CST);
    m++
  :: else -> break
  od
}

init {
  atomic {
    run receiver(1);
#if RANKS > 2
    run receiver(2)
#endif
  }
}
