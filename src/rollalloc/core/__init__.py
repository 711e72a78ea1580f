"""The core decides which prompts get how many rollouts, which rollouts are stopped, and which are trained on.

It needs only numpy: no I/O, no clock, no logging, no threads, no torch. This page explains how it works, and why. What
a driver and a rule must do, and the laws, are in docs/protocol.md.

Two calls, one state
====================
The state of a run is one object, `run.Run`. A driver has two calls. `Allocator.tell` records what happened: this
rollout ended, the weights changed. `Allocator.ask` returns what to do next: generate, stop, free, train, or end. Apart
from loading a saved state, nothing else changes the state. An answer depends only on the recipe, the prompts, the seed
and the calls before it.

The core never calls the driver. A core that pushes orders into an engine would have to know the engine's queue,
threads and clock. Because the driver pulls, one core serves a loop of ten lines, an asynchronous engine, a remote
service, and TRL on several processes. There, each process has a copy of the core, and the copies stay equal because
they get the same calls. The driver also says how much it wants (`capacity`). What the core has decided beyond that is
*owed*: it has not been ordered, so it can still be taken back before it costs a token, if a stop rule has seen enough
or the budget is spent.

The two calls need not alternate. A synchronous driver tells a thousand results and asks once. An asynchronous driver
tells one result, asks with the number of its free slots, and often there is nothing to do.

The life of a group
===================
A group is one visit of one prompt, with all rollouts that are ordered for it. A prompt that is drawn again gets a new
group.

    (drawn) --ask: size--> RUNNING --tell: NEXT--> WAITING --ask: promote, size--> RUNNING (in the next stage)
                           RUNNING --tell: TRAIN--> READY --ask: promote, rows, advantage--> TRAINED
                           RUNNING, WAITING, READY --DROP, too old, not needed, prompt gone--> DROPPED

`group.FOLLOWING` has the table of legal moves, and only `Flight.move` changes a phase. It also updates every index (which
groups wait, how many run), so that no index can disagree with the groups.

`tell` looks at one group at a time. It adds the result to the group and asks the judge of the group's stage. It does
so after every event, so that a verdict does not depend on how many events a driver puts into one call. When a group
ends, the rules that learn are shown it, and its prompt goes back to the pool. `Updated` drops the groups that are now
too old.

`ask` makes the choices among groups: which of them go on, which prompts are drawn, how many rollouts they get, which
are trained on. It also asks the stop rules, because an answer of theirs is an action. If a stop rule stops a rollout,
the judge is asked at once, because the group may now be complete.

Three things surprise here:

- NEXT lets the group's running rollouts continue, and their results still count. One of them may have begun under much
  older weights, and makes a waiting group too old when it ends. The group is then dropped before more is paid for it.
- TRAIN and DROP stop the running rollouts. A stopped rollout is not over: the driver must still tell how it ended, and
  until then it is in `Flight.stopped`, even if its group has long been trained on. Its tokens count, its score does
  not.
- DRAWN lasts only while one `ask` runs. If the budget has no room for a drawn prompt, the group is forgotten, and the
  prompt is kept in `Run.drawn`, with what the prompt rule expected of it. It gets the first group that there is room
  for.

When a batch is made
====================
`ask` makes a full batch if no other batch is out and enough groups are ready, and if the promote rule of the last
stage chooses enough of them. Such a rule may choose none, to wait for a better group.

Without staleness (`max_staleness=0`), the batch also waits until no group is running. Otherwise it would contain the
groups that ended first, which are the groups with short rollouts. Everything that waits is then dropped as surplus,
and nothing is ordered before `Updated`, because it would be too old to train on.

With staleness, groups that are left over wait for the next batch. While a batch is out, `choose` leaves out groups
that the awaited update will make too old: rollouts ordered for them would be thrown away.

An `ask` that returns a batch returns no orders. A synchronous driver trains first, so its next rollouts come from the
new weights. An asynchronous driver asks again at once.

A batch with fewer groups is made only if nothing runs and no more groups are opened (`Allocator._resolve`).

If the recipe replays, `Updated` keeps rows of the batch in `Run.kept`, and their payload is not released; each batch
ends with a random part of these. Whether the policy has moved too far away from them depends on log-probabilities,
which the core does not see. So with a gate, the driver measures it when the batch is out, and tells `Moved`, the only
event that changes a batch which is out: if the gate is shut, its replayed rows are left out, stay in `Run.kept` as they
were, and no batch has any before the version `Run.replay_from`.

If the recipe has a limit on length, each group gets its own when it is opened, and keeps it in all its stages
(`Group.limit`, `Order.limit`). The engine stops what reaches it; the core only learns from what has no limit, since
right rollouts that a limit let through say nothing about those that it cut. Groups with and without a limit take turns
by their number and not by chance, so that a batch mostly has one limit, and lasts no longer than that.

What one `ask` does
===================
1. Ask the stop rules about the groups that changed (`Flight.touched`).
2. If the budget is spent, take back what is owed.
3. Make a full batch, if there can be one.
4. Otherwise decide: groups that wait, the latest stage first, then new prompts. Late stages come first because what
   was paid for their groups is lost if they get too old.
5. If nothing runs and nothing was decided, find out what that means (`_resolve`).
6. Hand out orders, as many as the capacity allows, and list what to stop and what to free.

Steps 3 and 4 call the recipe's rules, which is slow. `Run.settled` says that the last decision moved no group, and
that `Run.changed` has not been called since. Then a new decision would move no group either: decisions are about the
groups that wait and the number that run, and a result without a verdict changes neither. So `ask` ends early in two
cases, which are most calls of an asynchronous driver:

- The run is settled, a rollout is running, no stop rule is to be asked, there is nothing to stop or free, and nothing
  is owed. There is nothing to do. A rollout must be running, because otherwise step 5 is due.
- The same, but rollouts are owed, and the recipe has no budget. Only the capacity changed, so step 6 is all that is
  left. With a budget, step 2 might be due.

Both only save time: without them, every answer is the same. Three more shortcuts are of this kind. A judge that waits
for whole groups is not asked before (`Run.patient_S`). A stop rule is not asked before it can stop anything
(`Run.stops_from_S`). A random generator is built when a rule first draws from it (`seeds.rng_when_used`).

How a run ends
==============
If no more groups can be opened, there is a reason for it, a `run.Halt`. By itself it ends nothing: running
groups may still fill the batch. It matters when no rollout is running, the driver owes no event, and no batch is out.
`Halt.ends` then says what follows:

- `Ends.RUN` (the budget is spent, no prompt may be drawn, or too many prompts in a row gave no group to train on or no
  score): make a short batch of the groups that are ready. If none is ready, the run is over.
- `Ends.BATCH` (`max_candidates` prompts were tried for this batch): make a short batch. If no group is ready, begin to
  count again and draw more, because a limit of a batch must not end the run.
- `Ends.NOTHING` (a framework's loader must offer prompts first): raise `NoProgress`, even if groups are ready, because
  more prompts may complete the batch. It is the driver's turn.

Without such a reason, groups that are ready make a short batch too. If none is ready, a rule of the recipe is at
fault: a promote rule lets no group go on, or the intake rule opens none. `ask` then raises `NoProgress` with the
rule's name, because after an empty answer the driver would wait for ever.

Randomness
==========
No random generator lives longer than one call of a rule. Each is made from the run's seed, a purpose and ids, such as
(seed, "rows", group). So a draw does not depend on the draws before it: a group's rows stay the same if another group
ends first, if a rule draws more numbers than it used to, or if the run was saved and loaded in between. There is no
random state to save. Rules see rollouts sorted by id, not in the order in which they ended, for the same reason.

Saving, and why a resume is exact
=================================
`saved_state.dump` writes all that later answers depend on: groups with their results, prompts with their records and
epochs, budgets, accounts, what rules remember, the batch that is out, and what is not yet handed out. Of the recipe
and the data set it has only a description and digests, and a load names each difference. The indexes of `Flight` and
the counts of `PromptPool` are not saved, because they follow from the rest. `Run.settled` is not saved either: after a
load, `ask` decides once more. If the last decision moved no group, this one moves none, because it sees the same state
and draws the same numbers.

Running rollouts are not saved, only their ids. `Allocator.outstanding` repeats their orders, and the driver generates
them again under the same ids. The conformance kit runs each recipe twice, saves and loads one of the two at random
moments, and requires equal answers (law 6).
"""
