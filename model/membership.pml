// The agreement on the next membership (src/unisono/engine/membership/agreement.py, contact.py). Ranks of one host
// see each other's proposals in shared memory and evict each other by an exchange; between hosts a proposal arrives
// later, and the end of a connection arrives behind the last proposal. Two faults, each a rank that is killed, or is
// stopped and perhaps continues, and one cut between the hosts, all at any moment.
//
// Right: every rank that runs ends with a decision or resigns; ranks of one host decide the same; no two groups are
// complete, that is, decided by all their ranks; no two ranks decide sets without a common rank; and without a cut no
// rank that was never stopped resigns.
//
// seed SETS_NOT_COMPARED ranks 3: a rank decides when all have proposed, whatever they propose
// seed NO_TAKE_OVER ranks 3: a rank does not take over the decision of another one
// seed EVICTED_WITHOUT_EXCHANGE ranks 3: a stopped rank is counted out, though it may decide when it continues
// seed NO_QUORUM: each side of a cut goes on
// seed HALF_IS_ENOUGH: half of the ranks go on, with or without the lowest one
// seed CUT_IS_DEATH: a rank that is cut off counts as one that has ended
// seed OWN_FATE_LATE ranks 3: an evicted rank looks whether it is before it reads the others' proposals

// ranks 2 3 4
// pan 2 -O2
// pan 3 -O2 -DCOLLAPSE
// pan 4 -O2 -DBITSTATE

#ifndef RANKS
#define RANKS 2
#endif
#define ALL ((1 << RANKS) - 1)
#define HOST(r) ((r) >= (RANKS + 1) / 2)
#define NEAR(a, b) (HOST(a) == HOST(b))
#define IN(set, r) ((((set) >> (r)) & 1) == 1)
#define RUNS(r) (!killed[r] && !stopped[r])

#define PROPOSED 0
#define ACKNOWLEDGED 1
#define DECIDED 2
#define RESIGNED 3
#define OPEN 0
#define EVICTED 4

// What each rank publishes, and what the others have seen of it.
byte alive[RANKS], gone[RANKS], phase[RANKS], fate[RANKS];
typedef Seen {
  byte alive[RANKS];
  byte gone[RANKS];
  byte phase[RANKS];
  bit any[RANKS];
}
Seen seen[RANKS];
bit killed[RANKS], stopped[RANKS], ever_stopped[RANKS], cut;
byte faults;

bit begun[RANKS];

inline look(q) {
  seen[me].alive[q] = alive[q];
  seen[me].gone[q] = gone[q];
  seen[me].phase[q] = phase[q];
  seen[me].any[q] = 1
}

inline forget(q) {
  seen[me].alive[q] = 0;
  seen[me].gone[q] = 0;
  seen[me].phase[q] = 0;
  seen[me].any[q] = 0
}

// A proposal that this rank has not seen; of a rank that is out only that it resigns.
#define NEWS(q)                                                                                        \
  (q < RANKS && q != me && begun[q] && !IN(gone[me], q) && (NEAR(me, q) || !cut) &&                    \
   (IN(alive[me], q) || phase[q] == RESIGNED) &&                                                       \
   (!seen[me].any[q] || seen[me].alive[q] != alive[q] || seen[me].gone[q] != gone[q] ||                \
    seen[me].phase[q] != phase[q]))

inline remove(q, for_sure) {
  alive[me] = alive[me] & ~(1 << q);
  if
  :: for_sure -> gone[me] = gone[me] | (1 << q)
  :: else
  fi;
  forget(q);
  phase[me] = PROPOSED;
  fresh = 1
}

// Counts a rank out that has ended, is stopped, or is cut off.
inline count_out(q) {
  if
  :: NEAR(me, q) ->
#ifdef EVICTED_WITHOUT_EXCHANGE
    remove(q, 1)
#else
    if
    :: fate[q] == DECIDED -> look(q); seen[me].phase[q] = DECIDED; fresh = 1
    :: else -> fate[q] = EVICTED; remove(q, 1)
    fi
#endif
  :: else ->
    if
    :: killed[q] && !cut ->
      if
      :: begun[q] -> look(q)
      :: else
      fi;
      if
      :: seen[me].any[q] && seen[me].phase[q] == DECIDED -> fresh = 1
      :: else -> remove(q, 1)
      fi
    :: else ->
#ifdef CUT_IS_DEATH
      remove(q, 1)
#else
      remove(q, 0)
#endif
    fi
  fi
}

#define OUT(q)                                                                 \
  (q < RANKS && q != me && IN(alive[me], q) &&                                 \
   !(seen[me].any[q] && seen[me].phase[q] == DECIDED) &&                       \
   ((NEAR(me, q) && (killed[q] || stopped[q])) || (!NEAR(me, q) && (killed[q] || cut))))

inline count(set, into) {
  into = 0;
  n_ = 0;
  do
  :: n_ < RANKS -> into = into + (((set) >> n_) & 1); n_++
  :: else -> break
  od
}

inline has_quorum(yes) {
  rest_ = ALL & ~gone[me];
  count(alive[me] & rest_, have_);
  count(rest_, of_);
  lowest_ = 0;
  do
  :: !IN(rest_, lowest_) -> lowest_++
  :: else -> break
  od;
#ifdef NO_QUORUM
  yes = 1;
#else
#ifdef HALF_IS_ENOUGH
  yes = (2 * have_ >= of_);
#else
  yes = (2 * have_ > of_ || (2 * have_ == of_ && IN(alive[me], lowest_)));
#endif
#endif
  rest_ = 0; have_ = 0; of_ = 0; lowest_ = 0; n_ = 0
}

#ifdef SETS_NOT_COMPARED
#define SAME(q) 1
#else
#define SAME(q) (seen[me].alive[q] == alive[me] && seen[me].gone[q] == gone[me])
#endif

// Whether every rank of the set has published this set, and is as far.
inline all_agree(far, yes) {
  yes = 1;
  q_ = 0;
  do
  :: q_ < RANKS ->
    if
    :: q_ != me && IN(alive[me], q_) &&
       !(seen[me].any[q_] && SAME(q_) &&
         seen[me].phase[q_] >= far && seen[me].phase[q_] != RESIGNED) -> yes = 0
    :: else
    fi;
    q_++
  :: else -> break
  od;
  q_ = 0
}

// Takes what has come; `advance` of the agreement.
inline advance() {
  q_ = 0;
  do
  :: q_ < RANKS ->
    if
    :: NEAR(me, q_) && NEWS(q_) -> look(q_)
    :: else
    fi;
    q_++
  :: else -> break
  od;
  q_ = 0;
#ifndef OWN_FATE_LATE
  if
  :: fate[me] == EVICTED -> phase[me] = RESIGNED
  :: else
  fi;
#endif
  do
  :: q_ < RANKS && phase[me] < DECIDED ->
    if
#ifndef NO_TAKE_OVER
    :: q_ != me && IN(alive[me], q_) && seen[me].any[q_] && seen[me].phase[q_] == DECIDED ->
      if
      :: IN(seen[me].alive[q_], me) && fate[me] != EVICTED ->
        alive[me] = seen[me].alive[q_];
        gone[me] = seen[me].gone[q_];
        fate[me] = DECIDED;
        phase[me] = DECIDED
      :: else -> phase[me] = RESIGNED
      fi
#endif
    :: else
    fi;
    q_++
  :: else -> break
  od;
  q_ = 0;
  if
  :: phase[me] < DECIDED ->
    old_ = alive[me];
    was_gone_ = gone[me];
    do
    :: q_ < RANKS ->
      if
      :: q_ != me && seen[me].any[q_] && seen[me].phase[q_] == RESIGNED && !IN(gone[me], q_) -> remove(q_, 1)
      :: q_ != me && IN(alive[me], q_) && seen[me].any[q_] && seen[me].phase[q_] != RESIGNED ->
        if
        :: !IN(seen[me].alive[q_], me) -> remove(q_, 0)
        :: else ->
          alive[me] = alive[me] & seen[me].alive[q_];
          gone[me] = gone[me] | seen[me].gone[q_]
        fi
      :: else
      fi;
      q_++
    :: else -> break
    od;
    q_ = 0;
    if
    :: alive[me] != old_ || gone[me] != was_gone_ -> phase[me] = PROPOSED
    :: else
    fi;
    old_ = 0;
    was_gone_ = 0;
    all_agree(PROPOSED, yes_);
    if
    :: phase[me] == PROPOSED && yes_ -> phase[me] = ACKNOWLEDGED
    :: else
    fi;
    all_agree(ACKNOWLEDGED, yes_);
    if
    :: phase[me] == ACKNOWLEDGED && yes_ ->
      has_quorum(yes_);
      if
      :: !yes_ -> phase[me] = RESIGNED
      :: else -> deciding = 1
      fi
    :: else
    fi;
    yes_ = 0
  :: else
  fi;
  fresh = 0
}

#define WORKS (RUNS(me) && phase[me] < DECIDED && !deciding)
#define FAR_NEWS(q) (q < RANKS && !NEAR(me, q) && NEWS(q))
#define NEAR_NEWS(q) (q < RANKS && NEAR(me, q) && NEWS(q))

proctype rank(byte me) {
  byte q_, old_, was_gone_, rest_, have_, of_, lowest_, n_;
  bit yes_, fresh, deciding;
  if
  :: d_step { RUNS(me) -> begun[me] = 1; fresh = 1 }
  :: killed[me]
  fi;
  do
  :: d_step { killed[me] || (RUNS(me) && phase[me] >= DECIDED) -> fresh = 0; deciding = 0 } break
  :: d_step { WORKS && FAR_NEWS(0) -> look(0); fresh = 1 }
  :: d_step { WORKS && OUT(0) -> count_out(0) }
  :: d_step { WORKS && OUT(1) -> count_out(1) }
  :: d_step { WORKS && FAR_NEWS(1) -> look(1); fresh = 1 }
#if RANKS > 2
  :: d_step { WORKS && OUT(2) -> count_out(2) }
  :: d_step { WORKS && FAR_NEWS(2) -> look(2); fresh = 1 }
#endif
#if RANKS > 3
  :: d_step { WORKS && OUT(3) -> count_out(3) }
  :: d_step { WORKS && FAR_NEWS(3) -> look(3); fresh = 1 }
#endif
  :: d_step {
      WORKS && (fresh || fate[me] == EVICTED || NEAR_NEWS(0) || NEAR_NEWS(1) || NEAR_NEWS(2) || NEAR_NEWS(3)) ->
      advance()
    }
#ifdef OWN_FATE_LATE
  :: d_step { WORKS && fate[me] == EVICTED -> phase[me] = RESIGNED }
#endif
  // The exchange, and the publication after it: a rank may be stopped or die in between.
  :: d_step { RUNS(me) && deciding && fate[me] == EVICTED -> phase[me] = RESIGNED; deciding = 0 }
  :: d_step { RUNS(me) && deciding && fate[me] == OPEN -> fate[me] = DECIDED }
  :: d_step { RUNS(me) && deciding && fate[me] == DECIDED -> phase[me] = DECIDED; deciding = 0 }
  od
}

inline fault() {
  if
  :: !killed[0] -> killed[0] = 1
  :: !killed[1] -> killed[1] = 1
  :: !ever_stopped[0] -> stopped[0] = 1; ever_stopped[0] = 1
  :: !ever_stopped[1] -> stopped[1] = 1; ever_stopped[1] = 1
#if RANKS > 2
  :: !killed[2] -> killed[2] = 1
  :: !ever_stopped[2] -> stopped[2] = 1; ever_stopped[2] = 1
#endif
#if RANKS > 3
  :: !killed[3] -> killed[3] = 1
#endif
  fi;
  faults++
}

#define COMPLETE(r) \
  (fate[r] == DECIDED && (!IN(alive[r], 0) || (fate[0] == DECIDED && alive[0] == alive[r])) && \
   (!IN(alive[r], 1) || (fate[1] == DECIDED && alive[1] == alive[r])) && \
   (RANKS < 3 || !IN(alive[r], THIRD) || (fate[THIRD] == DECIDED && alive[THIRD] == alive[r])) && \
   (RANKS < 4 || !IN(alive[r], LAST) || (fate[LAST] == DECIDED && alive[LAST] == alive[r])))
#define LAST (RANKS - 1)
#define THIRD (RANKS > 2 -> 2 : LAST)

inline check_pair(a, b) {
  if
  :: fate[a] == DECIDED && fate[b] == DECIDED ->
    assert((alive[a] & alive[b]) != 0);
    assert(!NEAR(a, b) || alive[a] == alive[b] || !IN(alive[a], b) || !IN(alive[b], a));
    assert(!COMPLETE(a) || !COMPLETE(b) || alive[a] == alive[b])
  :: else
  fi
}

proctype adversary() {
  do
  :: atomic { faults < 2 -> fault() }
  :: atomic { !cut -> cut = 1 }
  :: atomic { stopped[0] -> stopped[0] = 0 }
  :: atomic { stopped[1] -> stopped[1] = 0 }
#if RANKS > 2
  :: atomic { stopped[2] -> stopped[2] = 0 }
#endif
  :: atomic { !stopped[0] && !stopped[1] && !stopped[LAST] && !stopped[THIRD] -> break }
  od
}

#define ENDED(r) (killed[r] || phase[r] >= DECIDED)

init {
  byte r;
  atomic {
    do
    :: r < RANKS -> alive[r] = ALL; r++
    :: else -> break
    od;
    r = 0;
    run rank(0);
    run rank(1);
#if RANKS > 2
    run rank(2);
#endif
#if RANKS > 3
    run rank(3);
#endif
    run adversary()
  }
  d_step {
    ENDED(0) && ENDED(1) && ENDED(THIRD) && ENDED(LAST) && !stopped[0] && !stopped[1] && !stopped[THIRD];
    check_pair(0, 1);
    check_pair(0, LAST);
    check_pair(1, LAST);
    check_pair(0, THIRD);
    check_pair(1, THIRD);
    check_pair(THIRD, LAST);
    do
    :: r < RANKS ->
      assert(cut || killed[r] || ever_stopped[r] || phase[r] == DECIDED);
      r++
    :: else -> break
    od
  }
}
