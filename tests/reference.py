"""A token-by-token decode actor, written apart from the product and as slowly as its definition reads."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlhfless.models.profile import Profile


@dataclass
class Response:
    """One response as the reference sees it."""

    prompt: int
    length: int
    group: int
    cached: int = 0
    ready: float = 0.0
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
    running: list[Response] = field(default_factory=list)

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
        shape = self.profile.actor
        decode = self.profile.decode
        queue = list(waiting)
        while queue or self.running:
            pieces = []
            now = self.clock
            while queue and len(self.running) < shape.max_running and queue[0].ready <= now:
                newcomer = queue[0]
                one_more_each = len(self.running) + 1
                if self.capacity_used([*self.running, newcomer]) + one_more_each > shape.kv_capacity_tokens:
                    break
                queue.pop(0)
                on_actor = newcomer.cached
                if self.prefix_caching and any(r.group == newcomer.group for r in self.running):
                    on_actor = max(on_actor, newcomer.prompt)
                pieces.append((on_actor, newcomer.prompt + newcomer.generated - on_actor))
                self.running.append(newcomer)
            self.clock += self.prefill_seconds(pieces)
            if not self.running:
                self.clock = queue[0].ready
                continue
            while self.capacity_used(self.running) + len(self.running) > shape.kv_capacity_tokens:
                victim = self.running.pop()
                victim.cached = 0
                queue.insert(0, victim)
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
                if r.generated == r.length:
                    r.finish = self.clock
            self.running = [r for r in self.running if r.generated < r.length]
