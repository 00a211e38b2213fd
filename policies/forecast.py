"""What splits of a step over actors take and cost on given lengths, in microseconds each: a planner's view.

The replay is exact and takes milliseconds a step. A policy that weighs fifty splits on a handful of guesses of
the lengths has ten milliseconds for all of them. The kernel here keeps what decides between splits: the
iteration time with its KV term, slots and KV capacity with preemption, the actors' start (weights, prefill,
the prompts' KV), prefill on the actor, and the local cut. It leaves out the transfer of moved responses, the
rest of the iteration in which a cut falls, batches of prefill, and shared prompt KV; a prompt's KV, once
prefilled on an actor, stays there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numba import njit

from rlhfless.models.plan import ActorPlan, Learner, Migration, Plan, allocate
from rlhfless.policies.base import StepView
from rlhfless.policies.place import Placement, Places
from rlhfless.traces.trace import FloatArray, IntArray

_COLOCATED, _NEAR, _FAR = 0, 1, 2


@dataclass(frozen=True)
class Forecast:
    """Times and costs of splits of one step under one placement and start-up lead.

    Attributes
    ----------
    view
        The step.
    cached_tokens
        Prompt tokens whose KV each response finds on its actor, shape (responses,).
    prefill_seconds
        Seconds of the prefill actor, 0 where every actor prefills its own prompts.
    place
        Where actors go; group 0 of a split is the one with most work.
    lead_seconds
        How long before the learner's end functions are invoked.
    learning_seconds
        How long the learning stage under way is expected to take. Where it is given, functions that have cooled
        down until they are invoked start cold; None: all are warm.

    """

    view: StepView
    cached_tokens: IntArray
    prefill_seconds: float
    place: Placement
    lead_seconds: float
    learning_seconds: float | None = None
    _known_starts: dict[int, tuple[FloatArray, IntArray, FloatArray]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __call__(
        self, splits: Sequence[Sequence[IntArray]], lengths: IntArray, migration: Migration
    ) -> tuple[FloatArray, FloatArray]:
        """Return generation seconds and GPU seconds of decoding, shape (splits, guesses) each.

        Parameters
        ----------
        splits
            Rows of the batch by actor, in falling order of work; every row in exactly one actor.
        lengths
            Guesses of the response tokens, shape (guesses, responses).
        migration
            The rule for stragglers; any rule but ``local`` counts as none.

        """
        view, profile = self.view, self.view.profile
        counts = [len(groups) for groups in splits]
        for count in set(counts).difference(self._known_starts):
            self._known_starts[count] = self._starts(count)
        ready, link, invoked = (
            np.concatenate([self._known_starts[count][part] for count in counts]) for part in range(3)
        )
        generated = np.zeros(len(view), dtype=np.int64) if view.generated is None else view.generated
        room = np.maximum(profile.actor.kv_capacity_tokens - view.prompt_tokens, generated + 1)
        links, kv_bytes = profile.links, profile.memory.kv_bytes_per_token
        scale = profile.prefill.gpus / profile.actor.gpus
        seconds, held, beside = _forecast(
            np.concatenate([rows for groups in splits for rows in groups]),
            np.concatenate([np.cumsum([len(rows) for rows in groups]) for groups in splits]),
            np.concatenate(([0], np.cumsum(counts))),
            np.minimum(lengths, room),
            generated,
            view.prompt_tokens,
            view.tree.group,
            self.cached_tokens,
            ready,
            link,
            invoked,
            (
                self.prefill_seconds,
                np.array([0.0, links.within_node.latency_seconds, links.between_nodes.latency_seconds]),
                np.array(
                    [0.0]
                    + [kv_bytes / one.bytes_per_second for one in (links.within_node, links.between_nodes)]
                ),
                view.options.kv_transfer == "in_turn",
            ),
            (
                *profile.decode_tables,
                profile.actor.max_running,
                float(profile.actor.kv_capacity_tokens),
                profile.prefill.token_seconds * scale,
                profile.prefill.token2_seconds * scale,
                view.options.engine.prefix_caching,
            ),
            (
                migration.threshold if migration.rule == "local" else 2.0,
                migration.slots == "assigned",
                migration.target == "most_slots",
                migration.count_moved,
                migration.keep_first,
            ),
        )
        gpu_seconds = held * profile.actor.gpus
        if view.options.billing.learner_waiting:
            gpu_seconds = gpu_seconds + view.learner_gpus * seconds - beside * profile.actor.gpus
        return seconds, gpu_seconds

    def _starts(self, actors: int) -> tuple[FloatArray, IntArray, FloatArray]:
        """Return when each actor has its weights, the link that serves it, and when it is invoked."""
        view, profile = self.view, self.view.profile
        places = self.place(view, np.arange(actors, 0, -1, dtype=np.float64))
        per_node, gpus = view.cluster.gpus_per_node, profile.actor.gpus
        learner_nodes = -(-view.learner_gpus // per_node)
        spare = [
            min(max((node + 1) * per_node - view.learner_gpus, 0), per_node)
            for node in range(view.cluster.nodes)
        ]
        warm_seconds = self._warm_seconds(places)
        ready, invoked = np.full((2, actors), self.prefill_seconds)
        link = np.full(actors, _COLOCATED)
        for actor, (node, colocated) in enumerate(places):
            if colocated:
                continue
            near = node < learner_nodes
            link[actor] = _NEAR if near else _FAR
            # On GPUs of the learner a function cannot be invoked before learning and prefill are over.
            if spare[node] >= gpus:
                spare[node] -= gpus
                invoked[actor] = -self.lead_seconds
            weights = profile.links.within_node if near else profile.links.between_nodes
            warm = invoked[actor] <= warm_seconds[actor]
            functions = profile.functions
            startup = functions.warm_start_seconds if warm else functions.cold_start_seconds
            ready[actor] = max(invoked[actor] + startup, 0.0) + weights.seconds(profile.memory.weight_bytes)
        return ready, link, invoked

    def _warm_seconds(self, places: Places) -> FloatArray:
        """Return until when each actor's function stays warm, in seconds since the step's start."""
        if self.learning_seconds is None:
            return np.full(len(places), np.inf)
        view, nothing = self.view, np.empty(0, dtype=np.int64)
        plan = Plan(
            step=view.step,
            policy="",
            platform="serverless",
            actors=tuple(
                ActorPlan(view.profile.actor.gpus, node, nothing, colocated=colocated)
                for node, colocated in places
            ),
            learner=Learner(gpus=view.learner_gpus),
        )
        gpus = allocate(plan, view.cluster, "forecast").actors
        return np.array([view.warm(own) for own in gpus]) - self.learning_seconds


@njit(cache=True)
def _forecast(  # type: ignore[no-untyped-def]  # pragma: no cover
    order, ends, offsets, lengths, generated, prompt, group, cached, ready, link, invoked, transfer, costs, rule
):  # fmt: skip
    """Return last end, actors' held seconds, and those of co-located actors, for all splits and guesses.

    Split ``s`` has the actors ``offsets[s]:offsets[s + 1]``; ``ends`` are where their rows end in the split's
    part of ``order``.
    """
    splits, guesses, n = len(offsets) - 1, len(lengths), len(prompt)
    seconds, held, beside = np.zeros((3, splits, guesses))
    for split in range(splits):
        first, last = offsets[split], offsets[split + 1]
        bounds = np.zeros(last - first + 1, np.int64)
        bounds[1:] = ends[first:last]
        rows = order[split * n : (split + 1) * n]
        start, unpaid = _arrivals(
            rows, bounds, prompt, generated, group, cached, ready[first:last], link[first:last], transfer,
            costs[6],
        )  # fmt: skip
        for guess in range(guesses):
            end = _decode(rows, bounds, lengths[guess], generated, prompt, start, unpaid.copy(), costs, rule)
            seconds[split, guess] = end.max()
            for actor in range(last - first):
                time = end[actor] - invoked[first + actor]
                held[split, guess] += time
                if link[first + actor] == 0:
                    beside[split, guess] += time
    return seconds, held, beside


@njit(cache=True)
def _arrivals(rows, bounds, prompt, generated, group, cached, ready, link, transfer, prefix_caching):  # type: ignore[no-untyped-def]  # pragma: no cover
    """Return when each actor has weights and the prompts' KV, and what each response must prefill there."""
    prefilled, latency, token_seconds, in_turn = transfer
    actors = len(bounds) - 1
    start = ready.copy()
    unpaid = np.zeros(len(prompt))
    free = np.full(3, prefilled)
    holder = np.full(group.max() + 1, -1)
    for actor in range(actors):
        sent = 0
        for position in range(bounds[actor], bounds[actor + 1]):
            r = rows[position]
            unpaid[r] = generated[r]
            if holder[group[r]] != actor:
                holder[group[r]] = actor
                sent += cached[r]
                unpaid[r] += prompt[r] - cached[r]
            elif not prefix_caching:
                unpaid[r] += prompt[r] - cached[r]
        if link[actor] != 0:
            start[actor] = max(start[actor], prefilled)
            if sent > 0:
                if in_turn:
                    start[actor] = max(start[actor], free[link[actor]])
                start[actor] += latency[link[actor]] + sent * token_seconds[link[actor]]
                free[link[actor]] = start[actor]
    return start, unpaid


@njit(cache=True)
def _catch_up(actor, now, clock, iteration, resident, running, base, kv):  # type: ignore[no-untyped-def]  # pragma: no cover
    """Decode on an actor until ``now``, by a real number of iterations."""
    gap, b = now - clock[actor], running[actor]
    if gap <= 0.0:
        return
    if b > 0:
        growth = kv[b] * b
        linear = base[b] + kv[b] * resident[actor] - 0.5 * growth
        n = 2.0 * gap / (linear + np.sqrt(linear * linear + 2.0 * growth * gap))
        iteration[actor] += n
        resident[actor] += n * b
    clock[actor] = now


@njit(cache=True)
def _decode(order, bounds, length, generated, prompt, start, unpaid, costs, rule):  # type: ignore[no-untyped-def]  # pragma: no cover
    """Return when each actor is released.

    Each actor keeps its running responses sorted by the iteration in which they end, the next one last, and
    its waiting ones in a linked list. The next event of all actors, a completion or a full KV cache, is found
    by looking at each.
    """
    base, kv, max_running, capacity, prefill_token, prefill_token2, _ = costs
    threshold, assigned_slots, most_slots, count_moved, keep_first = rule
    actors, n = len(bounds) - 1, len(length)
    after, turn = np.full((2, n), -1)
    head, tail = np.full((2, actors), -1)
    left, done, running, assigned = np.zeros((4, actors), np.int64)
    for a in range(actors):
        left[a] = assigned[a] = bounds[a + 1] - bounds[a]
        if left[a]:
            head[a], tail[a] = order[bounds[a]], order[bounds[a + 1] - 1]
        for position in range(bounds[a], bounds[a + 1] - 1):
            after[order[position]] = order[position + 1]
    original = assigned.copy()
    slots = np.full(actors, max_running)
    if assigned_slots:
        slots = np.minimum(slots, original)
    remaining = (length - generated).astype(np.float64)
    ends_at = np.zeros((actors, max_running))
    active = np.zeros((actors, max_running), np.int64)
    turns = 0
    iteration, resident, steps = np.zeros((3, actors))
    clock, end = start.copy(), start.copy()
    due = np.full(actors, np.inf)
    full = np.zeros(actors, np.bool_)
    changed, admitting = np.ones((2, actors), np.bool_)
    cuttable = np.full(actors, threshold <= 1.0)
    if keep_first:
        cuttable[0] = False
    # Whether some actor may have passed its threshold and waits for slots.
    over = False
    while True:
        for a in range(actors):
            if not changed[a]:
                continue
            changed[a] = False
            while admitting[a] and head[a] >= 0 and running[a] < max_running:
                r = head[a]
                tokens = prompt[r] + length[r] - remaining[r]
                if running[a] > 0 and resident[a] + tokens + running[a] + 1 > capacity:
                    break
                head[a] = after[r]
                if unpaid[r] > 0:
                    cached = tokens - unpaid[r]
                    clock[a] += prefill_token * unpaid[r] + prefill_token2 * (tokens**2 - cached**2)
                    unpaid[r] = 0.0
                resident[a] += tokens
                key, place = iteration[a] + remaining[r], running[a]
                while place > 0 and ends_at[a, place - 1] < key:
                    ends_at[a, place], active[a, place] = ends_at[a, place - 1], active[a, place - 1]
                    place -= 1
                ends_at[a, place], active[a, place] = key, r
                turn[r] = turns
                turns += 1
                running[a] += 1
            if head[a] < 0:
                tail[a] = -1
            admitting[a] = True
            b = running[a]
            if b == 0:
                due[a] = np.inf
                continue
            steps[a] = ends_at[a, b - 1] - iteration[a]
            room = np.floor((capacity - resident[a]) / b)
            full[a] = b > 1 and room < steps[a]
            if full[a]:
                steps[a] = max(room, 0.0)
            due[a] = (
                clock[a]
                + steps[a] * (base[b] + kv[b] * resident[a])
                + kv[b] * b * 0.5 * steps[a] * (steps[a] - 1)
            )
        a = int(np.argmin(due))
        now = due[a]
        if now == np.inf:
            return end
        clock[a] = now
        iteration[a] += steps[a]
        resident[a] += running[a] * steps[a]
        changed[a] = True
        if full[a]:
            latest = 0
            for place in range(running[a]):
                if turn[active[a, place]] > turn[active[a, latest]]:
                    latest = place
            r = active[a, latest]
            remaining[r] = ends_at[a, latest] - iteration[a]
            unpaid[r] = prompt[r] + length[r] - remaining[r]
            resident[a] -= unpaid[r]
            running[a] -= 1
            for place in range(latest, running[a]):
                ends_at[a, place], active[a, place] = ends_at[a, place + 1], active[a, place + 1]
            after[r] = head[a]
            head[a] = r
            if tail[a] < 0:
                tail[a] = r
            # It left for want of room: nothing is admitted before the next completion.
            admitting[a] = False
            continue
        while running[a] > 0 and ends_at[a, running[a] - 1] <= iteration[a] + 1e-6:
            r = active[a, running[a] - 1]
            running[a] -= 1
            resident[a] -= prompt[r] + length[r]
            left[a] -= 1
            done[a] += 1
        end[a] = now
        counted = assigned[a] if count_moved else original[a]
        over = over or (cuttable[a] and done[a] >= np.ceil(threshold * counted - 1e-9))
        while over:
            source = -1
            over = False
            for i in range(actors):
                if not cuttable[i] or left[i] == 0:
                    continue
                counted = assigned[i] if count_moved else original[i]
                if done[i] < max(np.ceil(threshold * counted - 1e-9), 1):
                    continue
                over = True
                room = 0
                for j in range(actors):
                    if j != i and left[j] > 0:
                        room += max(slots[j] - left[j], 0)
                if left[i] <= room and (source < 0 or left[i] < left[source]):
                    source = i
            if source < 0:
                break
            _catch_up(source, now, clock, iteration, resident, running, base, kv)
            moved = np.empty(left[source], np.int64)
            progress = np.empty(left[source])
            count = running[source]
            for place in range(count):
                r = active[source, place]
                remaining[r] = max(ends_at[source, place] - iteration[source], 1e-3)
                moved[place] = r
            r = head[source]
            while r >= 0:
                moved[count] = r
                count += 1
                r = after[r]
            for place in range(count):
                progress[place] = length[moved[place]] - remaining[moved[place]]
            cuttable[source] = False
            head[source] = tail[source] = -1
            running[source] = left[source] = slots[source] = 0
            due[source] = np.inf
            end[source] = clock[source]
            opened, weight = np.zeros((2, actors), np.int64)
            for j in range(actors):
                if left[j] > 0:
                    opened[j] = max(slots[j] - left[j], 0)
                    weight[j] = opened[j] if most_slots else left[j]
            for place in np.argsort(-progress, kind="mergesort"):
                target = -1
                for j in range(actors):
                    if opened[j] > 0 and (target < 0 or weight[j] > weight[target]):
                        target = j
                opened[target] -= 1
                weight[target] += -1 if most_slots else 1
                r = moved[place]
                after[r] = -1
                if tail[target] < 0:
                    head[target] = r
                else:
                    after[tail[target]] = r
                tail[target] = r
                left[target] += 1
                assigned[target] += 1
                if not changed[target]:
                    changed[target] = True
                    _catch_up(target, now, clock, iteration, resident, running, base, kv)
