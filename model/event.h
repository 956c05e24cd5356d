// The event count a rank sleeps on (`Waiter::sleep_once`, `notify`), over memory.h. There are no slices here:
// a wake-up that is lost is a deadlock, which Spin finds, not a delay of 20 ms.
//
// EPOCH(rank) and SLEEPERS(rank) are fields of the memory. A process that waits has `byte seen` and `bit done`; one
// that notifies has `byte awake_`. One thread sleeps on each, so a store does for the engine's atomic add, of which
// C++ says no more. SLICE_OVER: what else ends a sleep.

#ifndef SLICE_OVER
#define SLICE_OVER 0
#endif

bit asleep[RANKS];

// In the kernel: to compare and to fall asleep is one step.
inline futex_wait(rank, seen_epoch) {
  atomic {
    if
    :: memory[EPOCH(rank)] == seen_epoch -> asleep[rank] = 1
    :: else
    fi
  }
  (!asleep[rank] || SLICE_OVER);
  asleep[rank] = 0
}

inline notify_sleepers(rank) {
#ifndef EPOCH_NOT_RAISED
  add(EPOCH(rank), 1);
#endif
  asleep[rank] = 0
}

inline notify(rank) {
  load(SLEEPERS(rank), awake_, SEQ_CST);
  if
  :: awake_ != 0 -> notify_sleepers(rank)
  :: else
  fi
}

// Until `check`, a macro that sets `done`, has set it.
#define AWAIT(check)                                  \
  do                                                  \
  :: check;                                           \
    if                                                \
    :: done -> break                                  \
    :: else -> SLEEP(check)                           \
    fi;                                               \
    if                                                \
    :: done -> break                                  \
    :: else                                           \
    fi                                                \
  od;                                                 \
  done = 0

#ifdef EPOCH_READ_LATE
#define READ_EARLY
#define READ_LATE load(EPOCH(me), seen, SEQ_CST);
#else
#define READ_EARLY load(EPOCH(me), seen, SEQ_CST);
#define READ_LATE
#endif

#ifdef SLEEPERS_RELEASE
#define ENTER store(SLEEPERS(me), 1, RELEASE)
#define LEAVE store(SLEEPERS(me), 0, RELEASE)
#else
#define ENTER store(SLEEPERS(me), 1, SEQ_CST)
#define LEAVE store(SLEEPERS(me), 0, SEQ_CST)
#endif

#ifdef NO_SECOND_LOOK
#define LOOK_AGAIN(check)
#else
#define LOOK_AGAIN(check) check;
#endif

#define SLEEP(check)                \
  READ_EARLY                        \
  ENTER;                            \
  LOOK_AGAIN(check)                 \
  READ_LATE                         \
  if                                \
  :: !done -> futex_wait(me, seen); \
    check                           \
  :: else                           \
  fi;                               \
  seen = 0;                         \
  LEAVE
