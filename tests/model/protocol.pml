/* How the ranks of a group share the slots of their arenas (ffi/cuda/epoch.cuh; docs/design.md section 5), for spin.
 *
 * All ranks run the same program: OPS operations, each whole or split-phase. The dones may come in any order, but an
 * operation whose slot a start still uses comes after that start's done. XLA's stream runs whole operations and starts.
 * The dones run on a stream of their own, at any time after their starts; at a join, XLA's stream waits for a done.
 *
 * A launch is a loop that takes the steps of its thread blocks in any order. A step is one action that other ranks can
 * notice: a store to a peer, or a load of words that peers write. So stores arrive in any order, but all of them arrive
 * before their kernel ends.
 *
 * The parameters (tests/test_model.py has the combinations that are checked):
 *
 *   RANKS (2, 3), SLOTS, OPS (at most 6)
 *   ROWLESS      the first ROWLESS ranks may have no row for their peers
 *   STARTS       at most STARTS of the operations are split-phase
 *   ONE_SENDER   one block notifies the peers and sends rows; otherwise, one block notifies, and another one sends
 *   ROUNDS       a block sends rows only after it has read the peers' notifications of the same epoch (a combine in
 *                rounds); not with ONE_SENDER
 *   FAULT        rank 0 may stop anywhere, and a start may have no done; a time-out comes when nothing else can happen
 *   HASTE        a time-out may come during any wait
 *   WITHOUT      the rule below that a run leaves out; the run must then fail (a mutant)
 *
 * The model does not contain: the error of two launches of XLA's stream that overlap, work stealing, the hold after a
 * start, ranks that forward the rows of others into a third rank's slots (over a network), how a unit shows that it
 * is empty, epochs that wrap, and the numbers of the rows of a round. */

/* The rules that the protocol relies on. */
#define NOTHING 0
#define CLAIM 1                    /* a block that does not know that a slot is free waits for the peers' words */
#define NEWEST_IS_WHOLE 2          /* a slot is known to be free only if the operation before this one was whole, */
#define WHOLE_SLOT 3               /* and only if the slot's former operation was whole */
#define LATER_WORDS 4              /* a word may be newer than the one that a block waits for */
#define END_OF_KERNEL 5            /* units are empty before a rank notifies its peers of the next operation */
#define READING_BEFORE_FINISHING 6 /* a done tells that it has read the slot only after it has read it */
#define TELLING_OF_WHOLES 7        /* the next launch tells that a whole operation has read its rows */
#define TELLING_OF_DONES 8         /* a done tells that it has read its rows */
#define ONE_TELLER 9               /* a launch tells of the whole operation before it, not of what dones have noted */
#define WARNING 10                 /* a rank that fails tells the peers */
#define LOOKING_AT_FAILED 11       /* a rank that is told waits no more */
#define NOTIFYING_FIRST 12         /* a rank notifies the peers without waiting for their notifications */
#ifndef WITHOUT
#define WITHOUT NOTHING
#endif
#ifndef ROWLESS
#define ROWLESS RANKS
#endif
#ifndef STARTS
#define STARTS OPS
#endif

#define bit_of(i) (1 << (i))
#define ALL (bit_of(RANKS) - 1)
#define OTHERS (ALL & ~bit_of(self))
#define LAST (SLOTS + OPS) /* epoch; the first is SLOTS + 1, so that the former epochs of the slots are at least 1 */
#define slot_of(epoch) ((epoch) % SLOTS)

/* What a stream does next: a launch, which is WHOLE, START or DONE + epoch; or JOIN + epoch, which is no launch. */
#define WHOLE 1
#define START 2
#define DONE 2
#define JOIN (DONE + LAST)
#define takes_epoch (item <= START)
#define is_done (item > DONE && item <= JOIN)
#define is_join (item > JOIN)

/* Blocks that send. */
#define NOTIFIER 1
#define ROW_SENDER 2
#ifdef ONE_SENDER
#define SENDERS NOTIFIER
#else
#define SENDERS (NOTIFIER | ROW_SENDER)
#endif

typedef Source { /* what a peer has sent into a slot */
  byte notified; /* the epoch of its notification */
  bit row_comes; /* the notification says so */
  byte unit;     /* 0: empty; otherwise the epoch of a row */
  byte finished  /* the newest epoch whose rows the peer has read in its own slot */
}
typedef Slot {
  Source from[RANKS];
  byte read /* the newest epoch of which all rows have been taken */
}
typedef Rank {
  Slot slot[SLOTS];
  byte newest_epoch, left; /* of the launch that began last; of the one that ended last */
  byte whole_slots;
  bit newest_is_whole;
  bit failed;
  bit done[LAST + 1];    /* the operation's done has ended */
  bit has_row[LAST + 1]; /* the operation has a row for its peers */
  bit late[SLOTS]        /* of a mutant: units that are not emptied yet */
}

Rank rank[RANKS];
bit dies;     /* rank 0 may stop */
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

#define has_read(p) \
  (mine.from[p].finished == epoch - SLOTS || \
   mine.from[p].finished > epoch - SLOTS && WITHOUT != LATER_WORDS)
#define slot_is_free for_all(has_read)

#define has_sent(p) (p == self || mine.from[p].notified == epoch && (!mine.from[p].row_comes || mine.from[p].unit != 0))
#define all_have_sent for_all(has_sent)

#define has_notified(p) (p == self || mine.from[p].notified == epoch)
#define all_have_notified for_all(has_notified)
#ifdef ROUNDS
#define may_send_rows all_have_notified
#else
#define may_send_rows 1
#endif
#define may_notify (WITHOUT != NOTIFYING_FIRST || all_have_notified)

/* --- a launch begins -------------------------------------------------------------------------------------------- */

inline enter_epoch() {
  epoch = own.newest_epoch + 1;
  slot = slot_of(epoch);
  senders = (item == WHOLE -> SENDERS : 0);
  claims = senders;
  if
  :: (own.newest_is_whole || WITHOUT == NEWEST_IS_WHOLE) &&
     ((own.whole_slots & bit_of(slot)) || WITHOUT == WHOLE_SLOT) || WITHOUT == CLAIM -> claims = 0
  :: else
  fi;
  receives = item == WHOLE;
  if
  :: own.newest_is_whole ->
    told = epoch - 1;
    own.slot[slot_of(told)].from[self].finished = told;
    tells = (WITHOUT == TELLING_OF_WHOLES || WITHOUT == ONE_TELLER -> 0 : OTHERS)
  :: else
  fi;
  looks = WITHOUT == ONE_TELLER;
  own.newest_epoch = epoch;
  own.newest_is_whole = item == WHOLE;
  own.whole_slots = (own.whole_slots & ~bit_of(slot)) | (item == WHOLE -> bit_of(slot) : 0);
  may_send(senders & ~claims);
  senders = 0
}

inline enter_started() {
  slot = slot_of(epoch);
  assert(own.failed || mine.from[self].finished < epoch);
  claims = SENDERS;
  receives = 1;
  finishes = 1
}

/* From here on, blocks write into the peers' slots. */
inline may_send(blocks) {
  if
  :: (blocks) & NOTIFIER -> notifies = OTHERS
  :: else
  fi;
  if
  :: ((blocks) & ROW_SENDER) && own.has_row[epoch] -> sends_row = OTHERS
  :: else
  fi
}

inline claim(block) {
  claims = claims & ~block;
  may_send(block)
}

/* --- it sends and receives -------------------------------------------------------------------------------------- */

inline store_row(p) {
  assert(of_peer(p).unit == 0);
  of_peer(p).unit = epoch
}

/* No slot is overwritten before it is read. (spin itself checks that no rank waits forever.) */
inline notify(p) {
  assert(rank[p].slot[slot].read == epoch - SLOTS);
  notifies = notifies & ~bit_of(p);
  of_peer(p).notified = epoch;
  of_peer(p).row_comes = own.has_row[epoch];
#ifdef ONE_SENDER /* The receiver waits for both, so their order does not matter. */
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

/* Takes all rows in one step: no peer is told before all rows are taken. */
inline receive() {
  receives = 0;
  for (p : 0 .. RANKS - 1) {
    if
    :: p != self && mine.from[p].row_comes ->
      assert(mine.from[p].unit == epoch);
      mine.from[p].row_comes = 0;
      own.late[slot] = WITHOUT == END_OF_KERNEL;
      mine.from[p].unit = (own.late[slot] -> epoch : 0)
    :: else
    fi
  }
  p = 0;
  mine.read = epoch
}

/* Of a mutant, with two slots: empties the late units of slot s. Any launch of the rank may do it, at any time. */
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
  tells = (WITHOUT == TELLING_OF_DONES -> 0 : OTHERS)
}

#define may_finish \
  (finishes && (!receives && !claims && !notifies && !sends_row || WITHOUT == READING_BEFORE_FINISHING))

inline tell(peer) {
  tells = tells & ~bit_of(peer);
  rank[peer].slot[slot_of(told)].from[self].finished = told;
  for (p : 0 .. SLOTS - 1) {
    if
    :: seen[p] -> rank[peer].slot[p].from[self].finished = seen[p]
    :: else
    fi
  }
  p = 0
}

/* Of a mutant: a launch tells of all slots what it sees in its own words. */
inline look_at_words() {
  looks = 0;
  for (p : 0 .. SLOTS - 1) {
    seen[p] = own.slot[p].from[self].finished
  }
  p = 0;
  told = seen[0];
  tells = OTHERS
}

#define is_waiting (receives && !all_have_sent || claims && !slot_is_free || sends_row && !may_send_rows)
#if defined(HASTE)
#define gives_up is_waiting
#elif defined(FAULT)
#define gives_up (timeout && is_waiting)
#endif

/* Without HASTE, only one rank times out: it tells the others, and they wait no more. */
inline fail() {
#ifndef HASTE
  assert(!time_is_up);
#endif
  time_is_up = 1;
  own.failed = 1;
  warns = (WITHOUT == WARNING -> 0 : OTHERS)
}

#define knows_of_failure (own.failed && WITHOUT != LOOKING_AT_FAILED)

inline warn(p) {
  warns = warns & ~bit_of(p);
  rank[p].failed = 1
}

inline leave() {
  if
  :: takes_epoch -> own.left = epoch
  :: is_done -> own.done[epoch] = 1
  fi;
  if
  :: item == WHOLE || is_done -> own.has_row[epoch] = 0
  :: else
  fi;
  claims = 0; notifies = 0; sends_row = 0; receives = 0; finishes = 0; tells = 0; looks = 0;
  item = 0; epoch = 0; slot = 0; told = 0;
  for (p : 0 .. SLOTS - 1) {
    seen[p] = 0
  }
  p = 0
}

/* --- the program ------------------------------------------------------------------------------------------------ */

/* What the two streams of each rank, XLA's and that of the dones, will launch. The program is chosen step by step. */
chan todo[RANKS * 2] = [2 * OPS] of { byte };
#define my_todo todo[self * 2 + of_dones]

byte planned = SLOTS; /* epoch */
short started;        /* bits of the starts whose join has not come */
short undone;         /* bits of the starts whose done has not come */
byte num_started;
bit is_complete;

#define waits_for_slot(epoch) (started & bit_of((epoch) - SLOTS))

#define done_options(i)                                              \
  :: (undone & bit_of(SLOTS + i)) && !waits_for_slot(SLOTS + i) ->   \
     undone = undone & ~bit_of(SLOTS + i);                           \
     add(DONE + SLOTS + i, 1)                                        \
  :: started & ~undone & bit_of(SLOTS + i) ->                        \
     started = started & ~bit_of(SLOTS + i);                         \
     add(JOIN + SLOTS + i, 0)

inline add(launch, stream) {
  for (p : 0 .. RANKS - 1) {
    todo[p * 2 + stream] ! launch
  }
  p = 0
}

inline plan() {
  if
  :: planned < LAST && !waits_for_slot(planned + 1) -> planned++; add(WHOLE, 0)
  :: planned < LAST && num_started < STARTS ->
     planned++; num_started++;
     started = started | bit_of(planned);
     undone = undone | bit_of(planned);
     add(START, 0)
  done_options(1)
  done_options(2)
  done_options(3)
  done_options(4)
  done_options(5)
  done_options(6)
  :: planned == LAST && !started -> is_complete = 1
#ifdef FAULT
  :: planned < LAST && waits_for_slot(planned + 1) -> planned++; add(WHOLE, 0)
  :: planned == LAST && started -> is_complete = 1
#endif
  fi
}

/* A done comes after its start. */
#define may_go_on (is_join -> own.done[epoch] : own.left >= epoch)

/* --- a stream --------------------------------------------------------------------------------------------------- */

#define for_peer(p)                                                       \
  :: d_step { (notifies & bit_of(p)) && may_notify -> notify(p) }         \
  :: d_step { (sends_row & bit_of(p)) && may_send_rows -> send_row(p) }   \
  :: d_step { (tells & bit_of(p)) && !(claims & NOTIFIER) -> tell(p) }    \
  :: d_step { warns & bit_of(p) -> warn(p) }

proctype Stream(byte self; bit of_dones) {
  byte item, epoch, slot, p, senders;
  byte claims;                             /* blocks that must wait until slots are free */
  byte notifies, sends_row, tells, warns;  /* peers */
  byte told;
  bit receives, finishes;
  bit looks;                               /* of a mutant */
  byte seen[SLOTS];

next:
  atomic {
    do
    :: nempty(my_todo) -> my_todo ? item; break
    :: empty(my_todo) && !is_complete && !of_dones -> plan()
    :: empty(my_todo) && is_complete -> goto end_of_program
    od;
    if
    :: knows_of_failure -> goto next
    :: else
    fi;
    if
    :: takes_epoch ->
      if
      :: self < ROWLESS -> own.has_row[own.newest_epoch + 1] = 0
      :: own.has_row[own.newest_epoch + 1] = 1
      fi;
      skip; /* no jump may lead into a d_step */
      d_step { enter_epoch() }
    :: else ->
      epoch = item - (is_join -> JOIN : DONE);
      if
      :: may_go_on
      :: knows_of_failure && !may_go_on -> epoch = 0; goto next
      :: self == 0 && has_died && !may_go_on -> goto end_of_program
      fi;
      if
      :: is_join -> own.done[epoch] = 0; epoch = 0; goto next
      :: else
      fi;
      skip;
      d_step { enter_started() }
    fi
  }
  do
  :: d_step { (claims & NOTIFIER) && slot_is_free -> claim(NOTIFIER) }
#ifndef ONE_SENDER
  :: d_step { (claims & ROW_SENDER) && slot_is_free -> claim(ROW_SENDER) }
#endif
  for_peer(0)
  for_peer(1)
#if RANKS > 2
  for_peer(2)
#endif
  :: d_step { receives && all_have_sent -> receive() }
  :: d_step { may_finish -> finish() }
  :: d_step { own.late[0] -> leave_empty(0) }
  :: d_step { own.late[1] -> leave_empty(1) }
  :: d_step { looks && !(claims & NOTIFIER) -> look_at_words() }
#ifdef gives_up
  :: atomic { gives_up && !own.failed -> fail() }
#endif
  :: d_step { knows_of_failure && !warns -> leave() } break
#ifdef FAULT
  :: self == 0 && dies -> goto stop
#endif
  :: d_step {
       !claims && !notifies && !sends_row && !receives && !finishes && !tells && !looks && !warns -> leave()
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
      run Stream(r, 1)
    }
    r = 0
  }
}
