/*
 * Heads, branches, merges, lost answers and the fences of garbage collection.
 *
 * One row stands for all data: every manifest has the value of the row as of its commit. A head
 * object holds a Version; each write of it is another Version, so comparing two is comparing
 * ETags. A request that was sent may land late or never, and its sender may never hear of it.
 * `make model` checks the commands at the end: those that expect nothing find nothing within
 * their bounds, and each planted flaw gives a counterexample.
 */
module branches

open util/ordering[Version] as versions
open util/ordering[Manifest] as manifests

// -- what never changes once it is written ---------------------------------------------------

sig Name {}
one sig Main extends Name {}

/* A branch from its creation to its deletion; the same name again is another one. */
sig Incarnation { name: Name }
one sig Trunk extends Incarnation {} { name = Main }

sig Value {}

sig Manifest {
  parent: lone Manifest,
  on: Incarnation,
  value: Value
}

/* One commit on the parent with the net changes of a branch. */
sig Merge extends Manifest {
  from: Incarnation,
  source: Manifest
}

/* What a head object holds. `floor`: the oldest manifest whose files are needed; a purge raises
   it. `over`: the version that the write expects (If-Match), none for If-None-Match: *. */
sig Version {
  of: Incarnation,
  tip: Manifest,
  floor: Manifest,
  base: lone Manifest,
  upper: lone Version,
  over: lone Version,
  leaving: lone Version // itself where the branch is about to be deleted
}

// -- what changes ----------------------------------------------------------------------------

one sig Store {
  var head: Name -> lone Version
}
var sig Stored in Manifest {}     // objects that are there
var sig Drafted in Manifest {}    // names drawn so far
var sig Written in Version {}     // versions drawn so far
var sig Flying in Version {}      // requests on their way
var sig Acknowledged in Manifest {}
var sig Standing in Incarnation {} // branches whose creation was acknowledged

sig Writer {
  var seen: lone Version,
  var draft: lone Manifest,
  var sent: lone Version
}

one sig Gc {
  var listed: set Manifest,
  var fenced: Name -> lone Version,
  var closed: lone Gc // heads were listed once more, and all of them are fenced
}

/* What a run may get wrong; none in a run that must be right. */
abstract sig Flaw {}
lone sig BlindHeadWrite, NoFence, BaseForgotten, PublishWithoutRecompare, MergeFromFork,
  DeleteWithoutMark extends Flaw {}

fact chains {
  no m: Manifest | m in m.^parent
  no v: Version | v in v.^over or v in v.^upper
  all v: Version | v.leaving in v
}

fun chain[m: Manifest]: set Manifest { m.*parent }

/* What a version needs to be readable, and a merge of it to be decided. */
fun needed[v: Version]: set Manifest {
  { m: chain[v.tip] | v.floor in chain[m] } + v.base
}

/* The last merge of a branch that the parent's chain up to `t` has. */
fun lastMerge[t: Manifest, i: Incarnation]: lone Merge {
  { m: chain[t] & Merge | m.from = i and no n: chain[t] & Merge | n.from = i and m in n.^parent }
}

/* What the branch has seen of the row: as it forked, or as it was when it was merged last. Not
   the parent's row of then, which may hold a change that the branch never saw. */
fun agreed[t: Manifest, i: Incarnation, fork: Manifest]: lone Manifest {
  some lastMerge[t, i] => lastMerge[t, i].source else fork
}

fun compared[t: Manifest, i: Incarnation, fork: Manifest]: lone Manifest {
  some MergeFromFork => fork else agreed[t, i, fork]
}

// -- steps -----------------------------------------------------------------------------------

pred sameStore { head' = head and Stored' = Stored }
pred sameNames { Drafted' = Drafted and Written' = Written }
pred sameFlights { Flying' = Flying }
pred sameAnswers { Acknowledged' = Acknowledged and Standing' = Standing }
pred sameGc { listed' = listed and fenced' = fenced and closed' = closed }
pred sameWriters[ws: set Writer] {
  all w: ws | w.seen' = w.seen and w.draft' = w.draft and w.sent' = w.sent
}
pred put[n: Name, v: Version] { Store.head' = Store.head - n -> Version + n -> v }
pred idle[w: Writer] { no w.seen' and no w.draft' and no w.sent' }

pred nothingUnderWay {
  no Flying and no Acknowledged
  no seen and no draft and no sent
  no listed and no fenced and no closed
}

/* A storage with its first commit. */
pred empty {
  let m = manifests/first, v = versions/first {
    Stored = m and Drafted = m and Store.head = Main -> v and Written = v and Standing = Trunk
  }
}

/* One with a branch that has a commit of its own. */
pred forked {
  let m = manifests/first, own = m.next, v = versions/first, b = v.next {
    Stored = m + own and Drafted = m + own and Written = v + b and Standing = Trunk + b.of
    Store.head = Main -> v + b.of.name -> b
    b.of != Trunk and b.of.name != Main and own.parent = m and own.on = b.of and own not in Merge
    b.tip = own and b.floor = m and b.base = m and b.upper = v and no b.over and no b.leaving
  }
}

pred init {
  nothingUnderWay
  empty or forked
  let m = manifests/first | no m.parent and m.on = Trunk and m not in Merge
  let m = manifests/first, v = versions/first {
    v.of = Trunk and v.tip = m and v.floor = m and no v.base and no v.upper
    no v.over and no v.leaving
  }
}

pred read[w: Writer, n: Name] {
  no w.seen and some Store.head[n] and no Store.head[n].leaving
  w.seen' = Store.head[n] and no w.draft' and no w.sent'
  sameStore and sameNames and sameFlights and sameAnswers and sameGc and sameWriters[Writer - w]
}

/* Names are drawn in order: which one is drawn makes no difference. */
pred fresh[m: Manifest] { m not in Drafted and m.prevs in Drafted }

/* A commit on the head that was read: its parts and manifest go up before the CAS. */
pred commit[w: Writer, m: Manifest] {
  some w.seen and no w.draft and fresh[m]
  m not in Merge and m.parent = w.seen.tip and m.on = w.seen.of
  w.draft' = m and w.seen' = w.seen and no w.sent'
  Stored' = Stored + m and Drafted' = Drafted + m
  head' = head and Written' = Written
  sameFlights and sameAnswers and sameGc and sameWriters[Writer - w]
}

/* A merge: the parent's head was read first, the branch's head is read now. */
pred merge[w: Writer, m: Merge, n: Name] {
  some w.seen and no w.draft and fresh[m]
  let ours = w.seen, theirs = Store.head[n] {
    some theirs and theirs.upper.of = ours.of and theirs.of in Standing
    m.parent = ours.tip and m.on = ours.of and m.from = theirs.of and m.source = theirs.tip
    let base = compared[ours.tip, theirs.of, theirs.base],
        isNew = (theirs.tip.value not in base.value + ours.tip.value => Gc else none) {
      some isNew implies ours.tip.value = base.value // else a conflict: refused
      some isNew implies m.value = theirs.tip.value else m.value = ours.tip.value
    }
  }
  w.draft' = m and w.seen' = w.seen and no w.sent'
  Stored' = Stored + m and Drafted' = Drafted + m
  head' = head and Written' = Written
  sameFlights and sameAnswers and sameGc and sameWriters[Writer - w]
}

pred draw[v: Version] { v not in Written and v.prevs in Written and Written' = Written + v }

pred send[w: Writer, v: Version] {
  some w.draft and no w.sent and draw[v]
  v.of = w.seen.of and v.tip = w.draft and v.floor = w.seen.floor and v.base = w.seen.base
  v.upper = w.seen.upper and v.over = w.seen and no v.leaving
  w.sent' = v and w.seen' = w.seen and w.draft' = w.draft
  Flying' = Flying + v
  sameStore and Drafted' = Drafted and sameAnswers and sameGc and sameWriters[Writer - w]
}

/* The store takes a request, or refuses it, or it never arrives. */
pred land[v: Version] {
  v in Flying and Flying' = Flying - v
  let n = v.of.name, now = Store.head[n] |
    (now = v.over or (some BlindHeadWrite and some now and now.of = v.of))
      implies put[n, v] else head' = head
  Stored' = Stored
  sameNames and sameAnswers and sameGc and sameWriters[Writer]
}

pred vanish[v: Version] {
  v in Flying and Flying' = Flying - v
  sameStore and sameNames and sameAnswers and sameGc and sameWriters[Writer]
}

/* What the writer does for an answer, lost or not: it looks. */
pred lookCommitted[w: Writer] {
  some w.sent and some w.draft
  let now = Store.head[w.sent.of.name] | now.of = w.sent.of and w.draft in chain[now.tip]
  Acknowledged' = Acknowledged + w.draft and Standing' = Standing
  idle[w]
  sameStore and sameNames and sameFlights and sameGc and sameWriters[Writer - w]
}

/* Another version stands and ours is not below it: lost for ever, and what was drafted may go. */
pred lookLost[w: Writer] {
  some w.sent and some w.draft
  let now = Store.head[w.sent.of.name] {
    some now and now.of = w.sent.of and now != w.seen and w.draft not in chain[now.tip]
  }
  Stored' = Stored - w.draft and head' = head
  idle[w]
  sameNames and sameFlights and sameAnswers and sameGc and sameWriters[Writer - w]
}

/* The flaw: a merge that found its parent moved is published on the new head as it is. */
pred rebase[w: Writer, m: Merge] {
  some PublishWithoutRecompare and some w.sent and w.draft in Merge and fresh[m]
  let now = Store.head[w.sent.of.name] {
    some now and now.of = w.sent.of and now != w.seen and w.draft not in chain[now.tip]
    m.parent = now.tip and m.on = w.draft.on and m.from = w.draft.from
    m.source = w.draft.source and m.value = w.draft.value
    w.seen' = now and w.draft' = m and no w.sent'
  }
  Stored' = Stored + m and Drafted' = Drafted + m
  head' = head and Written' = Written
  sameFlights and sameAnswers and sameGc and sameWriters[Writer - w]
}

/* Killed, or out of patience with an outcome that nobody knows: nothing is deleted. */
pred leave[w: Writer] {
  some w.seen and idle[w]
  sameStore and sameNames and sameFlights and sameAnswers and sameGc and sameWriters[Writer - w]
}

pred create[w: Writer, v: Version, n: Name] {
  some w.seen and no w.draft and no w.sent and n != Main and draw[v]
  v.of.name = n and v.of not in Written.of
  v.tip = w.seen.tip and v.floor = w.seen.floor and v.base = w.seen.tip and v.upper = w.seen
  no v.over and no v.leaving
  w.sent' = v and w.seen' = w.seen and no w.draft'
  Flying' = Flying + v
  sameStore and Drafted' = Drafted and sameAnswers and sameGc and sameWriters[Writer - w]
}

/* The parent is read again: only if it is there and no purge came between does the branch stand. */
pred confirm[w: Writer] {
  some w.sent and no w.draft and Store.head[w.sent.of.name].of = w.sent.of
  let parent = Store.head[w.seen.of.name] {
    parent.of = w.seen.of and parent.floor = w.seen.floor and no parent.leaving
  }
  Standing' = Standing + w.sent.of and Acknowledged' = Acknowledged
  idle[w]
  sameStore and sameNames and sameFlights and sameGc and sameWriters[Writer - w]
}

/* Otherwise it goes again, and whoever asked is told. */
pred withdraw[w: Writer] {
  some w.sent and no w.draft and w.sent.of not in Standing
  let n = w.sent.of.name | Store.head[n].of = w.sent.of and head' = head - Store -> n -> Version
  idle[w]
  Stored' = Stored
  sameNames and sameFlights and sameAnswers and sameGc and sameWriters[Writer - w]
}

/* Deleting marks the head first, so that a child that is being made finds the mark. */
pred mark[w: Writer, v: Version] {
  some w.seen and no w.draft and no w.sent and w.seen.of.name != Main and w.seen.of in Standing
  Store.head[w.seen.of.name] = w.seen and draw[v]
  v.of = w.seen.of and v.tip = w.seen.tip and v.floor = w.seen.floor and v.base = w.seen.base
  v.upper = w.seen.upper and v.over = w.seen and v.leaving = v
  put[v.of.name, v] and Stored' = Stored
  w.seen' = v and no w.draft' and no w.sent'
  Drafted' = Drafted
  sameFlights and sameAnswers and sameGc and sameWriters[Writer - w]
}

fun children[i: Incarnation]: set Incarnation { { c: Store.head[Name].of | upperOf[c] = i } }
fun upperOf[i: Incarnation]: set Incarnation { (Store.head[i.name] & of.i).upper.of }

/* Children are looked for after the mark; `sent` notes that there were none. */
pred lookForChildren[w: Writer] {
  some w.seen and no w.draft and no w.sent and w.seen.of.name != Main
  some DeleteWithoutMark or some w.seen.leaving
  no children[w.seen.of]
  w.sent' = w.seen and w.draft' = w.draft and w.seen' = w.seen
  sameStore and sameNames and sameFlights and sameAnswers and sameGc and sameWriters[Writer - w]
}

pred delete[w: Writer] {
  some w.sent and w.sent = w.seen and Store.head[w.seen.of.name] = w.seen
  head' = head - Store -> w.seen.of.name -> Version and Stored' = Stored
  Standing' = Standing - w.seen.of and Acknowledged' = Acknowledged
  idle[w]
  sameNames and sameFlights and sameGc and sameWriters[Writer - w]
}

/* Main's old files are merged into new ones, and readers need the old ones no more. */
pred purge[v: Version] {
  draw[v]
  let now = Store.head[Main] {
    now.floor != now.tip
    v.of = Trunk and v.tip = now.tip and v.floor = now.tip and no v.base and no v.upper
    v.over = now and no v.leaving
    put[Main, v]
  }
  Stored' = Stored and Drafted' = Drafted
  sameFlights and sameAnswers and sameGc and sameWriters[Writer]
}

pred gcList {
  no Gc.listed
  Gc.listed' = Stored and no fenced' and no closed'
  sameStore and sameNames and sameFlights and sameAnswers and sameWriters[Writer]
}

/* A head is rewritten as it is, so that no CAS from before can win, and is a root. */
pred gcFence[n: Name, v: Version] {
  some Gc.listed and no Gc.closed and some Store.head[n] and no Gc.fenced[n]
  let now = Store.head[n] {
    some NoFence implies { v = now and head' = head and Written' = Written } else {
      draw[v]
      v.of = now.of and v.tip = now.tip and v.floor = now.floor and v.base = now.base
      v.upper = now.upper and v.over = now and (some v.leaving iff some now.leaving)
      put[n, v]
    }
    Gc.fenced' = Gc.fenced + n -> v
  }
  listed' = listed and closed' = closed and Stored' = Stored and Drafted' = Drafted
  sameFlights and sameAnswers and sameWriters[Writer]
}

/* Heads are listed again at the end: one that came meanwhile is fenced too. */
pred gcClose {
  some Gc.listed and no Gc.closed and some Gc.fenced
  all n: Name | some Store.head[n] implies
    (some Gc.fenced[n] or (some BaseForgotten and n != Main))
  Gc.closed' = Gc and listed' = listed and fenced' = fenced
  sameStore and sameNames and sameFlights and sameAnswers and sameWriters[Writer]
}

pred gcSweep {
  some Gc.closed
  let roots = (some BaseForgotten => { m: chain[Gc.fenced[Main].tip] | Gc.fenced[Main].floor in chain[m] }
               else { m: Manifest | some v: Gc.fenced[Name] | m in needed[v] }) |
    Stored' = Stored - (Gc.listed - roots)
  head' = head and no listed' and no fenced' and no closed'
  sameNames and sameFlights and sameAnswers and sameWriters[Writer]
}

pred stutter {
  sameStore and sameNames and sameFlights and sameAnswers and sameGc and sameWriters[Writer]
}

pred step {
  stutter
  or (some w: Writer | lookCommitted[w] or lookLost[w] or leave[w] or confirm[w] or withdraw[w]
      or lookForChildren[w] or delete[w])
  or (some w: Writer, n: Name | read[w, n])
  or (some w: Writer, m: Manifest | commit[w, m])
  or (some w: Writer, m: Merge, n: Name | merge[w, m, n])
  or (some w: Writer, m: Merge | rebase[w, m])
  or (some w: Writer, v: Version | send[w, v] or mark[w, v])
  or (some w: Writer, v: Version, n: Name | create[w, v, n])
  or (some v: Version | land[v] or vanish[v] or purge[v])
  or (some n: Name, v: Version | gcFence[n, v])
  or gcList or gcClose or gcSweep
}

fact behaviour { init and always step }

// -- what is promised ------------------------------------------------------------------------

/* What was acknowledged stays on its chain for as long as the branch is there. */
pred nothingLost {
  always all m: Acknowledged | let now = Store.head[m.on.name] |
    now.of = m.on implies m in chain[now.tip]
}

/* A branch that stands can be read and merged: garbage collection took nothing that it needs. */
pred nothingNeededIsGone {
  always all n: Name | let now = Store.head[n] |
    (some now and now.of in Standing) implies needed[now] in Stored
}

/* A merge replaces the parent's row only where the parent has not changed it since both agreed. */
pred overwritesNothing {
  always all m: Merge & chain[Store.head[Main].tip] | m.value != m.parent.value implies
    (some v: of.(m.from) | m.parent.value = agreed[m.parent, m.from, v.base].value)
}

/* No commit of a branch becomes main's: a publication is one commit. */
pred oneCommitEach {
  always chain[Store.head[Main].tip].on in Trunk
}

/* A branch that stands has its parent. */
pred nobodyOrphaned {
  always all n: Name | let now = Store.head[n] |
    (some now and now.of in Standing - Trunk) implies Store.head[now.upper.of.name].of = now.upper.of
}

// -- what is asked ---------------------------------------------------------------------------

/* Every trace has just so many states: standing still is a step, so shorter ones are among them. */

/* The model is alive: all of it can happen. */
run Published { no Flaw and forked and eventually (some Acknowledged & Merge and some Gc.closed) }
  for 2 but 3 Manifest, 5 Version, 1 Writer, 11..11 steps expect 1
run Forked { no Flaw and empty and eventually some Standing - Trunk }
  for 2 but 1 Manifest, 2 Version, 1 Writer, 6..6 steps expect 1

check NothingLost { no Flaw implies nothingLost }
  for 2 but 4 Manifest, 5 Version, 10..10 steps expect 0
check NothingNeededIsGone { no Flaw implies nothingNeededIsGone }
  for 2 but 3 Manifest, 5 Version, 10..10 steps expect 0
check OverwritesNothing { no Flaw implies overwritesNothing }
  for 2 but 5 Manifest, 5 Version, 10..10 steps expect 0
check OneCommitEach { no Flaw implies oneCommitEach }
  for 2 but 4 Manifest, 5 Version, 10..10 steps expect 0
check NobodyOrphaned { no Flaw implies nobodyOrphaned }
  for 3 but 2 Manifest, 5 Version, 2 Writer, 9..9 steps expect 0

/* A flaw each, and what it breaks. Where much has to happen first, the rest of the world rests. */
pred undisturbed {
  always (no Gc.listed and Standing' = Standing and Store.head.Version' = Store.head.Version
          and no leaving)
}

check BlindHeadWriteLoses { (Flaw = BlindHeadWrite and empty) implies nothingLost }
  for 1 but 3 Manifest, 4 Version, 2 Writer, 11..11 steps expect 1
check NoFenceDeletes { (Flaw = NoFence and empty) implies nothingNeededIsGone }
  for 1 but 2 Manifest, 2 Version, 1 Writer, 9..9 steps expect 1
check BaseForgottenDeletes { (Flaw = BaseForgotten and forked) implies nothingNeededIsGone }
  for 2 but 3 Manifest, 5 Version, 1 Writer, 10..10 steps expect 1
check WithoutRecompareOverwrites { (Flaw = PublishWithoutRecompare and forked and undisturbed) implies overwritesNothing }
  for 2 but 5 Manifest, 5 Version, 2 Writer, 12..12 steps expect 1
check MergeFromForkOverwrites { (Flaw = MergeFromFork and forked and undisturbed) implies overwritesNothing }
  for 2 but 5 Manifest, 5 Version, 1 Writer, 15..15 steps expect 1
check DeleteWithoutMarkOrphans { (Flaw = DeleteWithoutMark and forked) implies nobodyOrphaned }
  for 3 but 2 Manifest, 3 Version, 2 Writer, 9..9 steps expect 1
