"""Token-by-token decode actors, written apart from the product and as slowly as their definition reads."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from rlhfless.models.plan import Migration
from rlhfless.models.profile import Profile


@dataclass
class Response:
    """One response as the reference sees it."""

    prompt: int
    length: int
    group: int
    cached: int = 0
    ready: float = 0.0
    number: int = 0
    generated: int = 0
    finish: float = float("inf")


@dataclass
class TokenByToken:
    """One actor that looks at every response in every iteration."""

    profile: Profile
    prefix_caching: bool = True
    share_prompt_kv: bool = False
    clock: float = 0.0
    preemptions: int = 0
    prefill_tokens: int = 0
    iterations: int = 0
    tokens: int = 0
    running: list[Response] = field(default_factory=list)
    queue: list[Response] = field(default_factory=list)

    def interpolate(self, values: tuple[float, ...], b: int) -> float:
        knots = self.profile.decode.batch
        if b <= knots[0] or len(knots) == 1:
            return values[0]
        for i in range(1, len(knots)):
            if b <= knots[i] or i == len(knots) - 1:
                slope = (values[i] - values[i - 1]) / (knots[i] - knots[i - 1])
                return max(values[i - 1] + slope * (b - knots[i - 1]), 0.0)
        raise AssertionError

    def capacity_used(self, responses: list[Response]) -> int:
        used = sum(r.generated for r in responses)
        if self.share_prompt_kv:
            return used + sum({r.group: r.prompt for r in responses}.values())
        return used + sum(r.prompt for r in responses)

    def prefill_seconds(self, pieces: list[tuple[int, int]]) -> float:
        cost = self.profile.prefill
        scale = cost.gpus / self.profile.actor.gpus
        tokens = sum(m for _, m in pieces)
        if tokens == 0:
            return 0.0
        batches = -(-tokens // cost.max_batch_tokens)
        self.prefill_tokens += tokens
        return cost.fixed_seconds * batches + scale * sum(
            cost.token_seconds * m + cost.token2_seconds * ((c + m) ** 2 - c**2) for c, m in pieces
        )

    def run(self, waiting: list[Response]) -> None:
        self.queue = list(waiting)
        while self.queue or self.running:
            self.iteration()

    def next_boundary(self) -> float:
        """When the actor does something next: now, or when what it waits for arrives."""
        if self.running or self.queue[0].ready <= self.clock:
            return self.clock
        return self.queue[0].ready

    def iteration(self) -> None:
        """Admit, prefill, preempt, and give every running response a token; or wait for an arrival."""
        shape = self.profile.actor
        decode = self.profile.decode
        pieces = []
        now = self.clock
        while self.queue and len(self.running) < shape.max_running and self.queue[0].ready <= now:
            newcomer = self.queue[0]
            one_more_each = len(self.running) + 1
            if self.capacity_used([*self.running, newcomer]) + one_more_each > shape.kv_capacity_tokens:
                break
            self.queue.pop(0)
            on_actor = newcomer.cached
            if self.prefix_caching and any(r.group == newcomer.group for r in self.running):
                on_actor = max(on_actor, newcomer.prompt)
            pieces.append((on_actor, newcomer.prompt + newcomer.generated - on_actor))
            self.running.append(newcomer)
        self.clock += self.prefill_seconds(pieces)
        if not self.running:
            self.clock = self.queue[0].ready
            return
        while self.capacity_used(self.running) + len(self.running) > shape.kv_capacity_tokens:
            victim = self.running.pop()
            victim.cached = 0
            self.queue.insert(0, victim)
            self.preemptions += 1
        b = len(self.running)
        k = sum(r.prompt + r.generated for r in self.running)
        self.clock += (
            self.interpolate(decode.base_seconds, b)
            + self.interpolate(decode.kv_token_seconds, b) * k
            + decode.host_overhead_seconds
        )
        self.iterations += 1
        for r in self.running:
            r.generated += 1
            self.tokens += 1
            if r.generated == r.length:
                r.finish = self.clock
        self.running = [r for r in self.running if r.generated < r.length]


@dataclass
class Actor(TokenByToken):
    """An actor among others: what it was given, and whether it may still be cut or take anything in."""

    own: list[Response] = field(default_factory=list)
    slots: int = 0
    may_be_cut: bool = True
    closed: bool = False
    was_cut: bool = False
    release: float = 0.0

    def left(self, now: float) -> int:
        return sum(r.finish > now for r in self.own)

    def open_slots(self, now: float) -> int:
        left = self.left(now)
        return max(self.slots - left, 0) if left and not self.closed else 0


@dataclass(frozen=True)
class Sent:
    """Responses that left one actor for another."""

    source: int
    target: int
    responses: list[Response]
    tokens: int
    sent: float
    ready: float


@dataclass
class LocalCut:
    """Actors that iterate side by side, and a controller that looks at them whenever a response completes.

    The rules are those that the docstring of ``models.plan.Migration`` states, taken one by one.
    """

    actors: list[Actor]
    rule: Migration
    seconds: Callable[[int, int, float], float]
    kv_bytes: float
    sent: list[Sent] = field(default_factory=list)

    def run(self) -> None:
        most = self.actors[0].profile.actor.max_running
        given = [len(actor.own) for actor in self.actors]
        for number, actor in enumerate(self.actors):
            actor.queue = list(actor.own)
            actor.slots = min(given[number], most) if self.rule.slots == "assigned" else most
            actor.may_be_cut = self.rule.rule == "local" and not (number == 0 and self.rule.keep_first)
        seen = -math.inf
        while True:
            working = [actor for actor in self.actors if actor.queue or actor.running]
            finished = {r.finish for actor in self.actors for r in actor.own if math.isfinite(r.finish)}
            instant = min((time for time in finished if time > seen), default=math.inf)
            if all(actor.next_boundary() >= instant for actor in working):
                if math.isinf(instant):
                    break
                seen = instant
                self.decide(instant, given)
            else:
                min(working, key=Actor.next_boundary).iteration()
        for actor in self.actors:
            if not actor.was_cut:
                actor.release = max(actor.release, actor.clock)

    def decide(self, now: float, given: list[int]) -> None:
        while True:
            due = []
            for number, actor in enumerate(self.actors):
                counted = len(actor.own) if self.rule.count_moved else given[number]
                done = len(actor.own) - actor.left(now)
                needed = max(math.ceil(self.rule.threshold * counted - 1e-9), 1)
                if actor.may_be_cut and not actor.was_cut and done >= needed:
                    due.append(number)
            open_slots = [actor.open_slots(now) for actor in self.actors]
            fits = []
            for number in due:
                left, room = self.actors[number].left(now), sum(open_slots) - open_slots[number]
                if left and (left <= room or (self.rule.partial and room)):
                    fits.append((left, number))
            if not fits:
                break
            self.cut(min(fits)[1], now, open_slots)
        if not self.rule.wait_for_slots:
            for number in due:
                self.actors[number].may_be_cut = False

    def cut(self, source: int, now: float, room: list[int]) -> None:
        actor = self.actors[source]
        actor.closed = True
        room[source] = 0
        goes_on = actor.left(now) > sum(room)
        weight = list(room) if self.rule.target == "most_slots" else [a.left(now) for a in self.actors]
        clock = max(actor.clock, now)
        running, leaving = list(actor.running), actor.running + actor.queue
        if goes_on:
            advanced = sorted(leaving, key=lambda r: (-r.generated, r.number))[: sum(room)]
            leaving = [r for r in leaving if any(r is other for other in advanced)]
        actor.was_cut = not goes_on or not leaving
        for waiting_or_running in (actor.running, actor.queue):
            waiting_or_running[:] = [
                r for r in waiting_or_running if all(r is not other for other in leaving)
            ]
        goes: dict[int, int] = {}
        for response in sorted(leaving, key=lambda r: -r.generated):
            target = max((j for j in range(len(room)) if room[j]), key=lambda j: (weight[j], -j))
            goes[id(response)] = target
            room[target] -= 1
            weight[target] += -1 if self.rule.target == "most_slots" else 1
        left_at = clock
        for target in sorted(set(goes.values())):
            rows = [r for r in leaving if goes[id(r)] == target]
            for r in rows:
                r.cached = r.prompt + r.generated if any(r is other for other in running) else r.cached
                r.cached = r.cached if self.rule.kv == "transfer" else 0
            tokens = sum(r.cached for r in rows)
            clock = max(clock, *(r.ready for r in rows))
            if tokens:
                clock += self.seconds(source, target, tokens * self.kv_bytes)
            for r in rows:
                r.ready = clock
                actor.own = [other for other in actor.own if other is not r]
            self.actors[target].own += rows
            self.actors[target].queue += rows
            self.sent.append(Sent(source, target, rows, tokens, left_at, clock))
        actor.release = clock
