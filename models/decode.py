"""The decode time of actors, from event to event.

An actor runs iterations. At an iteration boundary it

1. admits waiting responses in plan order while a slot is free and the resident tokens of all running ones,
   the newcomer's tokens, and one new token for each fit the KV capacity; whatever part of the admitted
   responses' KV is not on the actor is prefilled first, which stalls it;
2. preempts the most recently admitted responses until all running ones can take one more token; a preempted
   response loses its KV and goes to the head of the queue;
3. spends ``tau(b, k) = base(b) + kv(b) * k`` seconds, after which each of the ``b`` running responses has
   one token more and those that reach their length leave.

Between two events (admission, preemption, completion, arrival) ``b`` is constant and ``k`` grows by ``b`` an
iteration, so ``n`` iterations take ``n * (base + kv * k) + kv * b * n * (n - 1) / 2`` seconds. The kernel
jumps over them; its cost grows with the responses and preemptions, not with the tokens.

Batched prefill is chunked: ``m`` tokens make ``ceil(m / max_batch_tokens)`` batches, and a prompt may span
two. The prompt part of a response is free while another response of its group runs on the same actor
(``prefix_caching``).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numba import njit

from rlhfless.models.profile import Profile
from rlhfless.traces.errors import InputError
from rlhfless.traces.trace import FloatArray, IntArray

# Positions in an actor's integer and float state.
_HEAD, _TAIL, _STACKED, _RUNNING, _ITERATION = 0, 1, 2, 3, 4
_RESIDENT, _HELD_TOKENS, _FINISHED = 5, 6, 7
_PREFILL_TOKENS, _PREEMPTIONS, _TOKENS, _RESIDENT_SUM = 8, 9, 10, 11
_PEAK_RUNNING, _PEAK_HELD = 12, 13
_INTEGERS = 14
_CLOCK, _PREFILL_SECONDS, _DECODE_SECONDS = 0, 1, 2
_FLOATS = 3

_WAITING, _ACTIVE, _DONE = 0, 1, 2
_NEVER = np.iinfo(np.int64).max
_ID_BITS = np.int64(31)
_ID_MASK = np.int64(2**31 - 1)


@dataclass(frozen=True)
class EngineOptions:
    """How the inference engine treats prompt KV.

    ``prefix_caching``: a prompt whose KV another running response of its group holds on the same actor is
    not prefilled again. ``share_prompt_kv``: the KV capacity counts such a prompt once; otherwise every
    response counts in full. The iteration time always counts every running response's tokens in full, since
    attention reads them for each.
    """

    prefix_caching: bool = True
    share_prompt_kv: bool = False


@njit(cache=True)
def _iterations_until(clock, base, kv, running, resident, until, at_most):  # type: ignore[no-untyped-def]  # pragma: no cover
    """Return the least n in 1..at_most whose n iterations end at or after ``until`` (or ``at_most``)."""
    first = base + kv * resident
    growth = kv * running
    gap = until - clock
    if gap <= 0.0:
        return 1
    # growth/2 * n^2 + (first - growth/2) * n = gap, solved in the form that is stable for small growth.
    linear = first - 0.5 * growth
    root = np.sqrt(linear * linear + 2.0 * growth * gap)
    denominator = linear + root
    if denominator <= 0.0 or 2.0 * gap / denominator >= at_most:
        return at_most
    n = max(int(np.ceil(2.0 * gap / denominator)), 1)
    while n > 1 and clock + (n - 1) * first + growth * (n - 1) * (n - 2) * 0.5 >= until:
        n -= 1
    while n < at_most and clock + n * first + growth * n * (n - 1) * 0.5 < until:
        n += 1
    return min(n, at_most)


@njit(cache=True)
def _advance(  # type: ignore[no-untyped-def]  # pragma: no cover
    ints,
    floats,
    queue,
    stack,
    held,
    prompt,
    length,
    group,
    generated,
    cached,
    ready,
    status,
    finish_iteration,
    finish,
    base,
    kv,
    max_running,
    capacity,
    prefill_fixed,
    prefill_token,
    prefill_token2,
    max_batch_tokens,
    prefix_caching,
    share_prompt_kv,
    stop_time,
    stop_finished,
):
    """Run one actor to the first boundary where a stop condition holds, or to its end.

    ``held`` counts the running responses of each group; it is zero on entry and on exit, so that all actors
    share one array.
    """
    head, tail, stacked, running = ints[_HEAD], ints[_TAIL], ints[_STACKED], ints[_RUNNING]
    iteration, resident, held_tokens = ints[_ITERATION], ints[_RESIDENT], ints[_HELD_TOKENS]
    finished, clock = ints[_FINISHED], floats[_CLOCK]
    # One integer a heap entry: the iteration in which a response finishes, then the response.
    heap = [np.int64(0) for _ in range(0)]
    for position in range(stacked):
        r = stack[position]
        if status[r] == _ACTIVE:
            heap.append((finish_iteration[r] << _ID_BITS) | r)
            held[group[r]] += 1
    heapq.heapify(heap)

    while finished < stop_finished and clock < stop_time and (running > 0 or head < tail):
        boundary = clock
        prefill_tokens = np.int64(0)
        prefill_seconds = 0.0
        while head < tail and running < max_running:
            r = queue[head]
            if ready[r] > boundary:
                break
            tokens = prompt[r] + generated[r]
            shared = held[group[r]] > 0
            counted = generated[r] if (share_prompt_kv and shared) else tokens
            if held_tokens + counted + running + 1 > capacity:
                break
            head += 1
            on_actor = cached[r]
            if prefix_caching and shared and on_actor < prompt[r]:
                on_actor = prompt[r]
            new = tokens - on_actor
            if new > 0:
                prefill_tokens += new
                prefill_seconds += prefill_token * new + prefill_token2 * (
                    float(tokens) * tokens - float(on_actor) * on_actor
                )
            held[group[r]] += 1
            resident += tokens
            held_tokens += counted
            running += 1
            status[r] = _ACTIVE
            finish_iteration[r] = iteration + length[r] - generated[r]
            stack[stacked] = r
            stacked += 1
            heapq.heappush(heap, (finish_iteration[r] << _ID_BITS) | r)
        if prefill_tokens > 0:
            batches = (prefill_tokens + max_batch_tokens - 1) // max_batch_tokens
            prefill_seconds += prefill_fixed * batches
            clock += prefill_seconds
            ints[_PREFILL_TOKENS] += prefill_tokens
            floats[_PREFILL_SECONDS] += prefill_seconds

        if running == 0:
            # Only arrivals still under way: wait for the first one.
            if ready[queue[head]] >= stop_time:
                break
            clock = ready[queue[head]]
            continue

        preempted = False
        while held_tokens + running > capacity:
            stacked -= 1
            r = stack[stacked]
            if status[r] != _ACTIVE:
                continue
            generated[r] = length[r] - (finish_iteration[r] - iteration)
            held[group[r]] -= 1
            resident -= prompt[r] + generated[r]
            held_tokens -= generated[r]
            if not (share_prompt_kv and held[group[r]] > 0):
                held_tokens -= prompt[r]
            running -= 1
            status[r] = _WAITING
            cached[r] = 0
            head -= 1
            queue[head] = r
            ints[_PREEMPTIONS] += 1
            preempted = True

        # A preempted response leaves a stale entry behind.
        while (
            status[heap[0] & _ID_MASK] != _ACTIVE
            or finish_iteration[heap[0] & _ID_MASK] != heap[0] >> _ID_BITS
        ):
            heapq.heappop(heap)
        n = min((heap[0] >> _ID_BITS) - iteration, (capacity - held_tokens) // running)
        b_base, b_kv = base[running], kv[running]
        if head < tail and running < max_running:
            arrival = ready[queue[head]]
            if preempted or boundary < arrival <= clock:
                n = np.int64(1)
            elif arrival > clock:
                n = _iterations_until(clock, b_base, b_kv, running, resident, arrival, n)
        if stop_time < np.inf:
            n = _iterations_until(clock, b_base, b_kv, running, resident, stop_time, n)
        seconds = n * (b_base + b_kv * resident) + b_kv * running * (n * (n - 1) * 0.5)
        clock += seconds
        floats[_DECODE_SECONDS] += seconds
        ints[_TOKENS] += n * running
        ints[_RESIDENT_SUM] += n * resident + running * (n * (n - 1) // 2)
        iteration += n
        resident += n * running
        held_tokens += n * running
        ints[_PEAK_RUNNING] = max(ints[_PEAK_RUNNING], running)
        ints[_PEAK_HELD] = max(ints[_PEAK_HELD], held_tokens)

        while len(heap) > 0 and heap[0] >> _ID_BITS <= iteration:
            entry = heapq.heappop(heap)
            r = entry & _ID_MASK
            if status[r] != _ACTIVE or finish_iteration[r] != entry >> _ID_BITS:
                continue
            status[r] = _DONE
            generated[r] = length[r]
            finish[r] = clock
            held[group[r]] -= 1
            resident -= prompt[r] + length[r]
            held_tokens -= length[r]
            if not (share_prompt_kv and held[group[r]] > 0):
                held_tokens -= prompt[r]
            running -= 1
            finished += 1

    # Only running responses stay on the stack: one that is done may come back, here or on another actor.
    kept = 0
    for position in range(stacked):
        r = stack[position]
        if status[r] == _ACTIVE:
            held[group[r]] = 0
            generated[r] = length[r] - (finish_iteration[r] - iteration)
            stack[kept] = r
            kept += 1
    stacked = kept
    ints[_HEAD], ints[_TAIL], ints[_STACKED], ints[_RUNNING] = head, tail, stacked, running
    ints[_ITERATION], ints[_RESIDENT], ints[_HELD_TOKENS] = iteration, resident, held_tokens
    ints[_FINISHED], floats[_CLOCK] = finished, clock


_Costs = tuple[FloatArray, FloatArray, int, int, float, float, float, int, bool, bool]


def kernel_costs(profile: Profile, options: EngineOptions) -> _Costs:
    """Return the kernel's cost arguments."""
    base, kv = profile.decode_tables
    prefill = profile.prefill
    # Prefill costs hold on the profile's prefill GPUs; a decode actor has its own count.
    scale = prefill.gpus / profile.actor.gpus
    return (
        base,
        kv,
        profile.actor.max_running,
        profile.actor.kv_capacity_tokens,
        prefill.fixed_seconds,
        prefill.token_seconds * scale,
        prefill.token2_seconds * scale,
        prefill.max_batch_tokens,
        options.prefix_caching,
        options.share_prompt_kv,
    )


@dataclass
class _Actor:
    """Mutable state of one actor; the meaning of the entries is the kernel's."""

    ints: IntArray
    floats: FloatArray
    queue: IntArray
    stack: IntArray

    def copy(self) -> _Actor:
        return _Actor(self.ints.copy(), self.floats.copy(), self.queue.copy(), self.stack.copy())


@dataclass(frozen=True)
class ActorCounts:
    """What an actor has done so far.

    ``iterations`` is the number of decode iterations, ``tokens`` the responses' tokens they made, and
    ``resident_sum`` the resident KV tokens summed over the iterations, so that the decode time of affine
    costs is ``base0 * iterations + slope * tokens + kv * resident_sum``. ``peak_running`` and
    ``peak_kv_tokens`` are the most responses that ran at once and the most KV tokens they held at once.
    """

    clock: float
    prefill_seconds: float
    decode_seconds: float
    iterations: int
    tokens: int
    resident_sum: int
    prefill_tokens: int
    preemptions: int
    finished: int
    peak_running: int
    peak_kv_tokens: int


class DecodePool:
    """The decode actors of one step and their responses.

    Parameters
    ----------
    profile
        Costs, for all actors or one profile each; those then differ in the actors' size only.
    prompt_tokens, response_tokens, group
        One entry per response; ``group`` numbers the prompts from 0, so that responses to one prompt share
        its KV.
    actors
        How many actors there are.
    options
        How the engine treats prompt KV.

    Raises
    ------
    InputError
        When a response cannot fit the KV capacity of any actor even alone; when it is added to an actor that it
        does not fit.

    """

    def __init__(
        self,
        profile: Profile | Sequence[Profile],
        prompt_tokens: IntArray,
        response_tokens: IntArray,
        group: IntArray,
        actors: int,
        options: EngineOptions | None = None,
    ) -> None:
        options = options or EngineOptions()
        n = len(prompt_tokens)
        self.profiles = [profile] * actors if isinstance(profile, Profile) else list(profile)
        roomiest = int(np.argmax(self.capacity))
        # Copies, since the kernel is compiled once more for arrays that are read-only.
        self.prompt_tokens = np.array(prompt_tokens, dtype=np.int64)
        self.response_tokens = np.array(response_tokens, dtype=np.int64)
        self.group = np.array(group, dtype=np.int64)
        self.refuse(np.arange(n), roomiest)
        self.generated = np.zeros(n, dtype=np.int64)
        self.cached = np.zeros(n, dtype=np.int64)
        self.ready = np.zeros(n, dtype=np.float64)
        self.finish = np.full(n, np.inf)
        self.owner = np.full(n, -1, dtype=np.int64)
        self._status = np.zeros(n, dtype=np.int8)
        self._finish_iteration = np.zeros(n, dtype=np.int64)
        self._held = np.zeros(int(self.group.max()) + 1 if n else 0, dtype=np.int64)
        self._share_prompt_kv = options.share_prompt_kv
        if isinstance(profile, Profile):
            self._costs = [kernel_costs(profile, options)] * actors
        else:
            self._costs = [kernel_costs(own, options) for own in self.profiles]
        empty = np.empty(0, dtype=np.int64)
        self._actors = [
            _Actor(np.zeros(_INTEGERS, dtype=np.int64), np.zeros(_FLOATS), empty, empty)
            for _ in range(actors)
        ]

    def __len__(self) -> int:
        return len(self._actors)

    @property
    def max_running(self) -> IntArray:
        """How many responses each actor runs at once, shape (actors,)."""
        return np.array([own.actor.max_running for own in self.profiles], dtype=np.int64)

    @property
    def capacity(self) -> IntArray:
        """KV tokens that each actor holds, shape (actors,)."""
        return np.array([own.actor.kv_capacity_tokens for own in self.profiles], dtype=np.int64)

    def refuse(self, rows: IntArray, actor: int) -> None:
        """Raise InputError for the largest of the rows, if it does not fit the actor."""
        profile = self.profiles[actor]
        whole = self.prompt_tokens[rows] + self.response_tokens[rows]
        capacity = profile.actor.kv_capacity_tokens
        if len(rows) and int(whole.max()) > capacity:
            row = int(np.argmax(whole))
            raise InputError(
                f"response {rows[row]} needs {whole[row]} KV tokens, an actor of profile {profile.name} "
                f"holds {capacity}"
            )

    def start(self, actor: int, time: float) -> None:
        """Set the clock of an actor that has not run yet."""
        self._actors[actor].floats[_CLOCK] = time

    def add(self, actor: int, responses: IntArray, ready: float = 0.0) -> None:
        """Append responses to an actor's queue, in admission order; they can be admitted from ``ready`` on."""
        state = self._actors[actor]
        responses = np.asarray(responses, dtype=np.int64)
        self.refuse(responses, actor)
        active = state.stack[: state.ints[_STACKED]]
        waiting = np.concatenate((state.queue[state.ints[_HEAD] : state.ints[_TAIL]], responses))
        # In front of the queue is room for the running ones, which may be preempted.
        state.queue = np.concatenate((np.zeros_like(active), waiting))
        state.stack = np.concatenate((active, np.zeros_like(waiting)))
        state.ints[_HEAD], state.ints[_TAIL] = len(active), len(state.queue)
        state.ints[_STACKED] = len(active)
        self.ready[responses] = ready
        self.owner[responses] = actor
        self._status[responses] = _WAITING

    def run(self, actor: int, *, until: float = np.inf, finished: int = _NEVER) -> float:
        """Run an actor to its end, or to the first boundary at or after ``until`` or with ``finished`` done.

        Returns the actor's clock.
        """
        state = self._actors[actor]
        _advance(
            state.ints,
            state.floats,
            state.queue,
            state.stack,
            self._held,
            self.prompt_tokens,
            self.response_tokens,
            self.group,
            self.generated,
            self.cached,
            self.ready,
            self._status,
            self._finish_iteration,
            self.finish,
            *self._costs[actor],
            until,
            finished,
        )
        return float(state.floats[_CLOCK])

    def remove(self, actor: int, responses: IntArray | None = None) -> tuple[IntArray, IntArray]:
        """Take unfinished responses off an actor: all of them, or the given ones.

        Returns the running and the waiting ones among them, each in the actor's order. The running ones'
        KV is ``prompt + generated`` tokens each; where it goes is the caller's business (``cached``).
        """
        state = self._actors[actor]
        stack = state.stack[: state.ints[_STACKED]]
        queue = state.queue[state.ints[_HEAD] : state.ints[_TAIL]]
        active = stack.copy()
        if responses is not None:
            active = active[np.isin(active, responses)]
            waiting = queue[np.isin(queue, responses)]
        else:
            waiting = queue.copy()
        if len(active):
            tokens = self.prompt_tokens[active] + self.generated[active]
            state.ints[_RESIDENT] -= int(tokens.sum())
            state.ints[_RUNNING] -= len(active)
            self._status[active] = _WAITING
            left = stack[np.isin(stack, active, invert=True)]
            state.stack[: len(left)] = left
            state.ints[_STACKED] = len(left)
            state.ints[_HELD_TOKENS] = self._counted_tokens(left)
        kept = queue[np.isin(queue, waiting, invert=True)]
        tail = int(state.ints[_TAIL])
        state.queue[tail - len(kept) : tail] = kept
        state.ints[_HEAD] = tail - len(kept)
        return active, waiting

    def _counted_tokens(self, running: IntArray) -> int:
        """Return the KV tokens that the running responses count against the capacity."""
        tokens = int(self.generated[running].sum())
        if self._share_prompt_kv:
            _, first = np.unique(self.group[running], return_index=True)
            return tokens + int(self.prompt_tokens[running[first]].sum())
        return tokens + int(self.prompt_tokens[running].sum())

    def counts(self, actor: int) -> ActorCounts:
        """Return what an actor has done so far."""
        state = self._actors[actor]
        return ActorCounts(
            clock=float(state.floats[_CLOCK]),
            prefill_seconds=float(state.floats[_PREFILL_SECONDS]),
            decode_seconds=float(state.floats[_DECODE_SECONDS]),
            iterations=int(state.ints[_ITERATION]),
            tokens=int(state.ints[_TOKENS]),
            resident_sum=int(state.ints[_RESIDENT_SUM]),
            prefill_tokens=int(state.ints[_PREFILL_TOKENS]),
            preemptions=int(state.ints[_PREEMPTIONS]),
            finished=int(state.ints[_FINISHED]),
            peak_running=int(state.ints[_PEAK_RUNNING]),
            peak_kv_tokens=int(state.ints[_PEAK_HELD]),
        )

    def copy(self) -> DecodePool:
        """Return an independent copy of the state, to look ahead from."""
        twin = object.__new__(DecodePool)
        twin.__dict__.update(self.__dict__)
        for name in ("generated", "cached", "ready", "finish", "owner", "_status", "_finish_iteration"):
            setattr(twin, name, getattr(self, name).copy())
        twin._held = self._held.copy()
        twin._actors = [actor.copy() for actor in self._actors]
        return twin


@njit(cache=True)
def _falling_block(queue, prompt, length, cached, base, kv, max_running, capacity):  # type: ignore[no-untyped-def]  # pragma: no cover
    """Return the end of a block that runs whole from the start, its lengths falling; -1 for any other block.

    Nothing waits, is prefilled or is preempted then, and each completion is the next response from the back.
    """
    if len(queue) > max_running:
        return -1.0
    whole = np.int64(0)
    for position in range(len(queue)):
        r = queue[position]
        if cached[r] < prompt[r] or (position and length[r] > length[queue[position - 1]]):
            return -1.0
        whole += prompt[r] + length[r]
    if whole > capacity:
        return -1.0
    resident = np.int64(0)
    for r in queue:
        resident += prompt[r]
    seconds = 0.0
    done = np.int64(0)
    for running in range(len(queue), 0, -1):
        r = queue[running - 1]
        n = length[r] - done
        if n > 0:
            seconds += n * (base[running] + kv[running] * resident)
            seconds += kv[running] * running * (n * (n - 1) * 0.5)
            resident += n * running
            done = length[r]
        resident -= prompt[r] + length[r]
    return seconds


@njit(cache=True)
def block_ends(bounds, order, prompt, length, group, cached, costs):  # type: ignore[no-untyped-def]  # pragma: no cover
    n = len(prompt)
    ends = np.zeros(len(bounds) - 1)
    generated = np.zeros(n, dtype=np.int64)
    ready = np.zeros(n)
    status = np.zeros(n, dtype=np.int8)
    finish_iteration = np.zeros(n, dtype=np.int64)
    finish = np.zeros(n)
    own = cached.copy()
    held = np.zeros(group.max() + 1 if n else 0, dtype=np.int64)
    for block in range(len(bounds) - 1):
        queue = order[bounds[block] : bounds[block + 1]].copy()
        ends[block] = _falling_block(queue, prompt, length, cached, costs[0], costs[1], costs[2], costs[3])
        if ends[block] >= 0.0:
            continue
        # Blocks may overlap: planning asks for many splits of one batch.
        for r in queue:
            generated[r] = 0
            own[r] = cached[r]
        ints = np.zeros(_INTEGERS, dtype=np.int64)
        ints[_TAIL] = len(queue)
        floats = np.zeros(_FLOATS)
        _advance(
            ints, floats, queue, queue.copy(), held, prompt, length, group, generated, own, ready, status,
            finish_iteration, finish, costs[0], costs[1], costs[2], costs[3], costs[4], costs[5], costs[6],
            costs[7], costs[8], costs[9], np.inf, _NEVER,
        )  # fmt: skip
        ends[block] = floats[_CLOCK]
    return ends


def block_times(
    profile: Profile,
    prompt_tokens: IntArray,
    response_tokens: IntArray,
    group: IntArray,
    blocks: Sequence[IntArray],
    cached_tokens: IntArray,
    options: EngineOptions | None = None,
) -> FloatArray:
    """Return the seconds each block of responses takes on an actor of its own, shape (blocks,).

    The fast path for planning, on predicted lengths: the same kernel as :class:`DecodePool`, without its
    state. Lengths that would not fit an actor are cut to its capacity, since a prediction may exceed it.

    Raises
    ------
    InputError
        When a prompt leaves no room for a single token.

    """
    capacity = profile.actor.kv_capacity_tokens
    if len(prompt_tokens) and int(prompt_tokens.max()) >= capacity:
        raise InputError(
            f"a prompt of {int(prompt_tokens.max())} tokens leaves no room for a response, an actor of profile "
            f"{profile.name} holds {capacity}"
        )
    length = np.minimum(response_tokens, capacity - prompt_tokens)
    prompt, group, cached = (np.array(v, dtype=np.int64) for v in (prompt_tokens, group, cached_tokens))
    bounds = np.concatenate(([0], np.cumsum([len(block) for block in blocks]))).astype(np.int64)
    order = np.concatenate(blocks).astype(np.int64)
    ends: FloatArray = block_ends(
        bounds, order, prompt, length, group, cached, kernel_costs(profile, options or EngineOptions())
    )
    return ends


def decode_one(
    profile: Profile,
    prompt_tokens: IntArray,
    response_tokens: IntArray,
    group: IntArray,
    options: EngineOptions | None = None,
    cached_tokens: IntArray | None = None,
) -> tuple[FloatArray, ActorCounts]:
    """Decode a batch on one actor from time 0, all of it waiting in the given order.

    Returns the finish time of each response, in seconds, shape (n,), and the actor's counts.
    """
    pool = DecodePool(profile, prompt_tokens, response_tokens, group, 1, options)
    if cached_tokens is not None:
        pool.cached[:] = cached_tokens
    pool.add(0, np.arange(len(prompt_tokens), dtype=np.int64))
    pool.run(0)
    return pool.finish, pool.counts(0)
