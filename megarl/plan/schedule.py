"""The asynchronous schedule as a discrete-event simulation: who is idle how long, by staleness and number of servers.

The rules are those of the loop: how many groups may be under way (megarl/rollout/source.py), that an iteration takes
those that are complete first (scheduler.py), which server a group goes to (collector.py), how many requests are sent at
once and that lower numbers go first (sending.py), first come, first served at a server with so many places, and that
servers pause for new weights. Durations are given: of a token, of training, of a sync.
"""

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from megarl.rollout.sending import Independent

Span = tuple[float, float]
Pace = Callable[[int, bool], float]
"""Tokens a second of each of so many responses that run on a server, where the trainer computes or not"""


@dataclass(frozen=True)
class Durations:
    """Seconds of what is no generation."""

    training: Sequence[float]
    """Log-probs, values and update of each iteration, the last for all that follow"""
    host: float = 0.0
    """What else lies between an iteration's rollout and its sync"""
    sync: float = 0.0
    """The servers pause for as long"""


@dataclass(frozen=True)
class Setting:
    num_iterations: int
    num_prompts: int
    num_responses: int
    max_staleness: int
    num_servers: int
    num_places: int
    """rollout.max_running_requests: responses that a server generates at once"""
    in_waves: bool = False
    """With max_staleness=0 on a CPU: all requests of an iteration are sent at once, each group to the next server"""


@dataclass
class Timeline:
    """When who worked, in seconds; measured of a run or simulated."""

    trainer: list[Span] = field(default_factory=list)
    requests: list[Span] = field(default_factory=list)
    """From when it is sent until its response is there"""
    numbers: list[int] = field(default_factory=list)
    """Of each simulated request: its place, from 0, in the order in which they are begun"""
    paused: list[Span] = field(default_factory=list)
    """Of each server"""
    iterations: list[Span] = field(default_factory=list)

    @property
    def window(self) -> Span:
        """From the second iteration to the last but two, since nothing is begun that a run does not need."""
        return self.iterations[1][0], self.iterations[-3][1]


@dataclass(frozen=True)
class Idle:
    """Shares of the time of a timeline's window."""

    servers: float
    """No request is in flight, or they are paused"""
    places: float
    """Of the servers' places, those without a request, while the servers are not paused"""
    trainer: float
    iteration_s: float


def find_idle(timeline: Timeline, num_places: int) -> Idle:
    """num_places: of all servers."""
    window = timeline.window
    return Idle(
        servers=1 - measure(subtract(timeline.requests, timeline.paused), window),
        places=1 - measure_filled(timeline.requests, timeline.paused, window, num_places),
        trainer=1 - measure(timeline.trainer, window),
        iteration_s=(window[1] - window[0]) / (len(timeline.iterations) - 3),
    )


def unite(spans: Sequence[Span]) -> list[Span]:
    """The same time, in spans that do not overlap, in order."""
    united: list[Span] = []
    for start, end in sorted(spans):
        if united and start <= united[-1][1]:
            united[-1] = (united[-1][0], max(end, united[-1][1]))
        else:
            united.append((start, end))
    return united


def subtract(spans: Sequence[Span], holes: Sequence[Span]) -> list[Span]:
    """The time of `spans` that is in none of `holes`."""
    left = unite(spans)
    for low, high in holes:
        pieces = [piece for a, b in left for piece in ((a, min(b, low)), (max(a, high), b))]
        left = [(a, b) for a, b in pieces if a < b]
    return left


def measure(spans: Sequence[Span], window: Span) -> float:
    """Share of the window that is in one of the spans."""
    inside = [(max(a, window[0]), min(b, window[1])) for a, b in spans]
    return sum(b - a for a, b in unite([(a, b) for a, b in inside if a < b])) / (window[1] - window[0])


def measure_filled(spans: Sequence[Span], paused: Sequence[Span], window: Span, num_places: int) -> float:
    """Mean share of the places that have a request in flight, over the window without the pauses."""
    times = subtract([window], paused)
    ends = sorted([(start, 1) for start, _ in spans] + [(end, -1) for _, end in spans])
    filled, total, num, before = 0.0, sum(b - a for a, b in times), 0, window[0]
    for at, step in ends:
        inside = sum(max(0.0, min(b, at) - max(a, before)) for a, b in times)
        filled += min(num, num_places) * inside
        num, before = num + step, max(before, at)
    return filled / num_places / total


@dataclass
class _Server:
    """All its running responses gain tokens at the same pace, so that one count of tokens says when each ends."""

    num_places: int
    tokens: float = 0.0
    running: list[tuple[float, int]] = field(default_factory=list)
    """A heap: the count at which it ends, request"""
    queue: deque[int] = field(default_factory=deque)
    num_under_way: int = 0
    """Responses of groups that are not complete"""

    def fill(self, lengths: Callable[[int], float]) -> None:
        while self.queue and len(self.running) < self.num_places:
            request = self.queue.popleft()
            heapq.heappush(self.running, (self.tokens + lengths(request), request))


class Simulation:
    """One run. `simulate` is its only use."""

    def __init__(self, setting: Setting, lengths: Sequence[float], pace: Pace, durations: Durations):
        self.setting, self.pace, self.durations = setting, pace, durations
        self.lengths = lambda request: lengths[request % len(lengths)]
        self.servers = [_Server(setting.num_places) for _ in range(setting.num_servers)]
        slots = setting.num_places * setting.num_servers
        self.num_free = slots if setting.in_waves else int(slots * (1 + Independent.SHARE_QUEUED)) + 1
        self.now, self.is_training, self.is_paused = 0.0, False, False
        self.allowed = self.next_group = self.num_complete = 0
        self.left: dict[int, int] = {}
        """Group under way -> its responses that are not there"""
        self.server_of: dict[int, _Server] = {}
        self.unsent: list[int] = []
        """A heap of requests that wait for one of the places of `num_free`"""
        self.sent_at: dict[int, float] = {}
        self.timeline = Timeline()

    def run(self) -> Timeline:
        setting, durations, line = self.setting, self.durations, self.timeline
        for iteration in range(1, setting.num_iterations + 1):
            start = self.now
            ahead = min(setting.max_staleness, setting.num_iterations - iteration)
            self.allowed = setting.num_prompts * (1 + ahead)
            for _ in range(setting.num_prompts):
                self.begin_groups()
                self.advance_until_complete()
                self.num_complete, self.allowed = self.num_complete - 1, self.allowed - 1
            self.begin_groups()
            self.advance(durations.host)
            seconds = durations.training[min(iteration, len(durations.training)) - 1]
            line.trainer.append((self.now, self.now + seconds))
            self.is_training = True
            self.advance(seconds)
            self.is_training, self.is_paused = False, True
            line.paused.append((self.now, self.now + durations.sync))
            self.advance(durations.sync)
            self.is_paused = False
            line.iterations.append((start, self.now))
        return line

    def begin_groups(self) -> None:
        """As many as are allowed to be under way or to wait until they are taken."""
        setting = self.setting
        while len(self.left) + self.num_complete < self.allowed:
            group, self.next_group = self.next_group, self.next_group + 1
            least = min(self.servers, key=lambda server: server.num_under_way)
            self.server_of[group] = self.servers[group % len(self.servers)] if setting.in_waves else least
            self.server_of[group].num_under_way += setting.num_responses
            self.left[group] = setting.num_responses
            for request in range(group * setting.num_responses, (group + 1) * setting.num_responses):
                heapq.heappush(self.unsent, request)
        self.send()

    def send(self) -> None:
        while self.unsent and (self.num_free or self.setting.in_waves):
            request = heapq.heappop(self.unsent)
            self.num_free -= 1
            self.sent_at[request] = self.now
            self.server_of[request // self.setting.num_responses].queue.append(request)
        for server in self.servers:
            server.fill(self.lengths)

    def find_next(self) -> tuple[float, _Server] | None:
        """Seconds until the next response ends, and its server; None: none runs."""
        waits = [
            ((server.running[0][0] - server.tokens) / self.pace(len(server.running), self.is_training), number)
            for number, server in enumerate(self.servers)
            if server.running and not self.is_paused
        ]
        return (min(waits)[0], self.servers[min(waits)[1]]) if waits else None

    def pass_time(self, seconds: float) -> None:
        for server in self.servers:
            if server.running and not self.is_paused:
                server.tokens += seconds * self.pace(len(server.running), self.is_training)
        self.now += seconds

    def end_first(self, server: _Server) -> None:
        """The response of this server that has all its tokens is there."""
        _, request = heapq.heappop(server.running)
        self.timeline.requests.append((self.sent_at.pop(request), self.now))
        self.timeline.numbers.append(request)
        self.num_free += 1
        group = request // self.setting.num_responses
        self.left[group] -= 1
        if not self.left[group]:
            del self.left[group]
            self.server_of.pop(group).num_under_way -= self.setting.num_responses
            self.num_complete += 1
            self.begin_groups()
        self.send()

    def advance(self, seconds: float) -> None:
        end = self.now + seconds
        while (found := self.find_next()) is not None and self.now + found[0] <= end:
            self.pass_time(found[0])
            self.end_first(found[1])
        self.pass_time(max(0.0, end - self.now))

    def advance_until_complete(self) -> None:
        while not self.num_complete:
            found = self.find_next()
            assert found is not None, "a group is under way"
            self.pass_time(found[0])
            self.end_first(found[1])


def simulate(setting: Setting, lengths: Sequence[float], pace: Pace, durations: Durations) -> Timeline:
    """A run of these settings.

    lengths: tokens of the responses, in the order in which they are begun, over and over. With max_staleness=0 nothing
    is begun ahead.
    """
    return Simulation(setting, lengths, pace, durations).run()
