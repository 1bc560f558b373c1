/* How the ranks of a group share the slots of their arenas (ffi/cuda/protocol.cuh; docs/design.md, section 5), for spin.
 *
 * All ranks run the same program: OPS operations, each whole or in halves, dones in any order, of which none needs a
 * slot whose start is done only later. A launch is a loop that takes the steps of its thread blocks in any order. A
 * step is what other ranks can tell from the one before: a store to a peer, or a look at words that peers write. So
 * stores come in any order, but before their kernel ends.
 *
 * tests/test_model.py says which of these settings are checked together:
 *
 *   RANKS (2, 3), SLOTS, OPS
 *   ONE_SENDER   a block both announces and sends rows; else each has a block of its own
 *   OVERLAP      dones run beside the launches that take an epoch; else a rank runs one launch after the other
 *   FAULT        rank 0 may stop anywhere, a start may never be done; time is up when nothing else can happen
 *   HASTE        time may be up whenever something is waited for
 *   WITHOUT_...  a mutant: the protocol without one of its orders, which must fail
 *
 * What is not here: the turns that launches take (one process runs those of a rank), how a unit shows that it is empty,
 * and epochs that wrap. */

#define bit_of(i) (1 << (i))
#define ALL (bit_of(RANKS) - 1)
#define OTHERS (ALL & ~bit_of(self))
#define LAST (SLOTS + OPS) /* epoch; the first is SLOTS + 1, so that what the slots held before is no less than 1 */
#define slot_of(epoch) ((epoch) % SLOTS)

/* Launches; DONE + epoch. */
#define WHOLE 1
#define START 2
#define DONE 3

/* Blocks that send. */
#define ANNOUNCER 1
#define ROW_SENDER 2
#ifdef ONE_SENDER
#define SENDERS ANNOUNCER
#else
#define SENDERS (ANNOUNCER | ROW_SENDER)
#endif

typedef Place { /* for what a peer sends into a slot */
  byte op;       /* epoch of its announcement */
  bit row_comes; /* told with it */
  byte unit;     /* 0: empty, else the epoch of a row */
  byte finished  /* epoch that the peer has read last in its own slot */
}
typedef Slot {
  Place from[RANKS];
  byte read /* what the protocol upholds: epoch of which all has been taken */
}
typedef Rank {
  Slot slot[SLOTS];
  byte newest_epoch, left; /* begun last; of the launch that ended last */
  byte whole_slots;
  bit newest_is_whole;
  bit failed;
  byte ticket[LAST + 1]; /* the blocks of a start that have sent */
  bit has_row[LAST + 1]; /* of an operation, for its peers */
  bit late[SLOTS]        /* of a mutant: units that are yet to be left empty */
}

Rank rank[RANKS];
bit dies;     /* rank 0 does */
bit has_died;
bit time_is_up;

#define own rank[self]
#define mine own.slot[slot] /* this rank's memory for the operation */
#define of_peer(p) rank[p].slot[slot].from[self]

#if RANKS == 2
#define for_all(what) (what(0) && what(1))
#else
#define for_all(what) (what(0) && what(1) && what(2))
#endif

/* A peer may be through with this operation, too, before a block that has nothing for it asks. */
#ifdef WITHOUT_LATER_WORDS
#define has_read(p) (mine.from[p].finished == epoch - SLOTS)
#else
#define has_read(p) (mine.from[p].finished >= epoch - SLOTS)
#endif
#define slot_is_free for_all(has_read)

#define has_sent(p) (p == self || mine.from[p].op == epoch && (!mine.from[p].row_comes || mine.from[p].unit != 0))
#define all_have_sent for_all(has_sent)

/* --- a launch begins -------------------------------------------------------------------------------------------- */

inline enter_epoch() {
  epoch = own.newest_epoch + 1;
  slot = slot_of(epoch);
#if defined(WITHOUT_NEWEST_IS_WHOLE)
  claims = (own.whole_slots & bit_of(slot) -> 0 : SENDERS);
#elif defined(WITHOUT_WHOLE_SLOT)
  claims = (own.newest_is_whole -> 0 : SENDERS);
#elif defined(WITHOUT_CLAIM)
  claims = 0;
#else
  claims = (own.newest_is_whole && (own.whole_slots & bit_of(slot)) -> 0 : SENDERS);
#endif
  receives = half == WHOLE;
  if
  :: own.newest_is_whole ->
    told = epoch - 1;
    own.slot[slot_of(told)].from[self].finished = told;
#ifndef WITHOUT_TELLING_OF_WHOLES
    tells = OTHERS
#endif
  :: else
  fi;
  own.newest_epoch = epoch;
  own.newest_is_whole = half == WHOLE;
  own.whole_slots = (own.whole_slots & ~bit_of(slot)) | (half == WHOLE -> bit_of(slot) : 0);
  may_send(SENDERS & ~claims)
}

inline enter_done() {
  slot = slot_of(epoch);
  assert(own.failed || mine.from[self].finished < epoch);
#ifndef WITHOUT_TICKET
  claims = SENDERS & ~own.ticket[epoch];
#endif
  receives = 1;
  finishes = 1
}

/* From now on, blocks write into the peers' slots. */
inline may_send(blocks) {
  if
  :: (blocks) & ANNOUNCER -> announces = OTHERS
  :: else
  fi;
  if
  :: ((blocks) & ROW_SENDER) && own.has_row[epoch] -> sends_row = OTHERS
  :: else
  fi;
  if
  :: half == START -> own.ticket[epoch] = own.ticket[epoch] | (blocks)
  :: else
  fi
}

/* A start does not wait: it leaves to its done what it may not send. */
#ifdef WITHOUT_LEAVING_TO_DONE
#define may_ask slot_is_free
#else
#define may_ask (half == START || slot_is_free)
#endif
inline claim(block) {
  claims = claims & ~block;
  if
  :: slot_is_free -> may_send(block)
  :: else
  fi
}

/* --- it sends and receives -------------------------------------------------------------------------------------- */

inline store_row(p) {
  assert(of_peer(p).unit == 0);
  of_peer(p).unit = epoch
}

inline announce(p) {
  assert(rank[p].slot[slot].read == epoch - SLOTS);
  announces = announces & ~bit_of(p);
  of_peer(p).op = epoch;
  of_peer(p).row_comes = own.has_row[epoch];
#ifdef ONE_SENDER /* The receiver waits for both: which comes first makes no difference. */
  if
  :: own.has_row[epoch] -> store_row(p)
  :: else
  fi
#endif
}

inline send_row(p) {
  assert(rank[p].slot[slot].read == epoch - SLOTS);
  sends_row = sends_row & ~bit_of(p);
  store_row(p)
}

/* Takes all rows at once: nobody is told before the launch ends. */
inline receive() {
  receives = 0;
  for (p : 0 .. RANKS - 1) {
    if
    :: p != self && mine.from[p].row_comes ->
      mine.from[p].row_comes = 0;
      assert(mine.from[p].unit == epoch);
#ifdef WITHOUT_END_OF_KERNEL
      own.late[slot] = 1
#else
      mine.from[p].unit = 0
#endif
    :: else
    fi
  }
  p = 0;
  mine.read = epoch
}

inline leave_empty(s) {
  own.late[s] = 0;
  for (p : 0 .. RANKS - 1) {
    own.slot[s].from[p].unit = 0
  }
  p = 0
}

/* --- it ends ---------------------------------------------------------------------------------------------------- */

/* The last block of a done. */
inline finish() {
  finishes = 0;
  mine.from[self].finished = epoch;
  told = epoch;
#ifndef WITHOUT_TELLING_OF_DONES
  tells = OTHERS
#endif
}

#ifdef WITHOUT_READING_BEFORE_FINISHING
#define may_finish finishes
#else
#define may_finish (finishes && !receives && !claims && !announces && !sends_row)
#endif

#ifdef WITHOUT_OWN_WORDS_ONLY
/* Every launch tells of all slots, as it has seen them. */
inline look_at_words() {
  looks = 0;
  for (p : 0 .. SLOTS - 1) {
    words[p] = own.slot[p].from[self].finished
  }
  p = 0;
  tells = OTHERS
}
inline tell(peer) {
  tells = tells & ~bit_of(peer);
  if
  :: half < DONE ->
    for (p : 0 .. SLOTS - 1) {
      rank[peer].slot[p].from[self].finished = words[p]
    }
    p = 0
  :: else -> rank[peer].slot[slot].from[self].finished = told
  fi
}
#else
inline tell(peer) {
  tells = tells & ~bit_of(peer);
  rank[peer].slot[slot_of(told)].from[self].finished = told
}
#endif

#define is_waiting (receives && !all_have_sent || claims && !slot_is_free)
#if defined(HASTE)
#define gives_up is_waiting
#elif defined(FAULT)
#define gives_up (timeout && is_waiting)
#endif

/* Only one rank's time is ever up: it tells the others, and whoever knows waits no more. */
inline fail() {
#ifndef HASTE
  assert(!time_is_up);
#endif
  time_is_up = 1;
  own.failed = 1;
#ifndef WITHOUT_WARNING
  warns = OTHERS
#endif
}

inline warn(p) {
  warns = warns & ~bit_of(p);
  rank[p].failed = 1
}

inline leave() {
  if
  :: half < DONE -> own.left = epoch
  :: else -> own.ticket[epoch] = 0
  fi;
  if
  :: half != START -> own.has_row[epoch] = 0
  :: else
  fi;
  claims = 0; announces = 0; sends_row = 0; receives = 0; finishes = 0; tells = 0; looks = 0;
  half = 0; epoch = 0; slot = 0; told = 0
}

/* --- the program ------------------------------------------------------------------------------------------------ */

/* What the streams of all ranks have yet to launch. It is made up as they go. */
#ifdef OVERLAP
#define STREAMS 2
#else
#define STREAMS 1
#endif
chan todo[RANKS * STREAMS] = [2 * OPS] of { byte };
#define my_todo todo[self * STREAMS + of_dones]

byte planned = SLOTS; /* epoch */
short started;        /* of these, the starts that have no done */
bit is_complete;

#define waits_for_slot(epoch) (started & bit_of((epoch) - SLOTS))
#ifdef OVERLAP /* Where a done stands among launches of the other stream makes no difference. */
#define is_time_for_dones (planned == LAST || waits_for_slot(planned + 1))
#else
#define is_time_for_dones true
#endif

#define done_option(i)                                                                                      \
  :: is_time_for_dones && (started & bit_of(SLOTS + i)) && !waits_for_slot(SLOTS + i) ->                    \
     started = started & ~bit_of(SLOTS + i);                                                                \
     add(DONE + SLOTS + i, STREAMS - 1)

inline add(launch, stream) {
  for (p : 0 .. RANKS - 1) {
    todo[p * STREAMS + stream] ! launch
  }
  p = 0
}

inline plan() {
  if
  :: planned < LAST && !waits_for_slot(planned + 1) -> planned++; add(WHOLE, 0)
  :: planned < LAST -> planned++; started = started | bit_of(planned); add(START, 0)
  done_option(1)
  done_option(2)
  done_option(3)
  done_option(4)
  :: planned == LAST && !started -> is_complete = 1
#ifdef FAULT
  :: planned < LAST && waits_for_slot(planned + 1) -> planned++; add(WHOLE, 0)
  :: planned == LAST && started -> is_complete = 1
#endif
  fi
}

/* --- a stream --------------------------------------------------------------------------------------------------- */

#define for_peer(p)                                                             \
  :: d_step { announces & bit_of(p) -> announce(p) }                            \
  :: d_step { sends_row & bit_of(p) -> send_row(p) }                            \
  :: d_step { (tells & bit_of(p)) && !(claims & ANNOUNCER) -> tell(p) }         \
  :: d_step { warns & bit_of(p) -> warn(p) }

proctype Stream(byte self; bit of_dones) {
  byte half, epoch, slot, p;
  byte claims;                            /* blocks that have to ask first */
  byte announces, sends_row, tells, warns; /* peers */
  byte told;
  bit receives, finishes, looks;
#ifdef WITHOUT_OWN_WORDS_ONLY
  byte words[SLOTS];
#endif

next:
  atomic {
    do
    :: nempty(my_todo) -> my_todo ? half; break
    :: empty(my_todo) && !is_complete -> plan()
    :: empty(my_todo) && is_complete -> goto end_of_program
    od;
    if
    :: half < DONE ->
      if
      :: own.has_row[own.newest_epoch + 1] = 0
      :: own.has_row[own.newest_epoch + 1] = 1
      fi;
      skip; /* no jump may lead into a d_step */
      d_step { enter_epoch() }
#ifdef WITHOUT_OWN_WORDS_ONLY
      tells = 0;
      looks = 1
#endif
    :: else ->
      epoch = half - DONE;
      if
      :: own.left >= epoch
      :: self == 0 && has_died -> goto end_of_program
      fi;
      skip;
      d_step { enter_done() }
    fi
  }
  do
  :: d_step { (claims & ANNOUNCER) && may_ask -> claim(ANNOUNCER) }
#ifndef ONE_SENDER
  :: d_step { (claims & ROW_SENDER) && may_ask -> claim(ROW_SENDER) }
#endif
  for_peer(0)
  for_peer(1)
#if RANKS > 2
  for_peer(2)
#endif
  :: d_step { receives && all_have_sent -> receive() }
  :: d_step { may_finish -> finish() }
#ifdef WITHOUT_END_OF_KERNEL
  :: d_step { own.late[0] -> leave_empty(0) }
  :: d_step { own.late[1] -> leave_empty(1) }
#endif
#ifdef WITHOUT_OWN_WORDS_ONLY
  :: d_step { looks && !(claims & ANNOUNCER) -> look_at_words() }
#endif
#ifdef gives_up
  :: d_step { gives_up && !own.failed -> fail() }
#ifndef WITHOUT_LOOKING_AT_FAILED
  :: d_step { own.failed && !warns -> leave() } break
#endif
#endif
#ifdef FAULT
  :: self == 0 && dies -> goto stop
#endif
  :: d_step {
       !claims && !announces && !sends_row && !receives && !finishes && !tells && !looks && !warns -> leave()
     }
     break
  od;
  goto next;
stop:
  has_died = 1;
end_of_program:
  skip
}

init {
  byte epoch, r, p;
  atomic {
    for (r : 0 .. RANKS - 1) {
      rank[r].newest_epoch = SLOTS;
      rank[r].left = SLOTS;
      for (epoch : 1 .. SLOTS) {
        rank[r].slot[slot_of(epoch)].read = epoch;
        for (p : 0 .. RANKS - 1) {
          rank[r].slot[slot_of(epoch)].from[p].finished = epoch
        }
      }
    }
#ifdef FAULT
    if
    :: dies = 0
    :: dies = 1
    fi;
#endif
    epoch = 0;
    p = 0;
    for (r : 0 .. RANKS - 1) {
      run Stream(r, 0);
#ifdef OVERLAP
      run Stream(r, 1)
#endif
    }
    r = 0
  }
}
