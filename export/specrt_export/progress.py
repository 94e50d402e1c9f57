"""Progress on standard error: what step, how long."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

import click

_SHARES = 1000


class Progress:
    """Announces the steps of an export; a step's line is completed with its duration."""

    def __init__(self, *, stream: TextIO | None = None, clock: Callable[[], float] = time.perf_counter) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._clock = clock

    def say(self, text: str) -> None:
        """Print one line."""
        click.echo(text, file=self._stream)

    @contextmanager
    def step(self, title: str) -> Iterator[None]:
        """Announce a step that runs inside the `with` block."""
        terminal = self._stream.isatty()
        click.echo(f"  {title} ...", file=self._stream, nl=not terminal)
        started = self._clock()
        yield
        took = f"{self._clock() - started:.1f} s"
        click.echo(f"\r\x1b[K  {title}: {took}" if terminal else f"  {title}: {took}", file=self._stream)

    @contextmanager
    def bar(self, title: str, total: int, *, every: int = 1 << 20) -> Iterator[Callable[[int], None]]:
        """Show a bar of `total` bytes, drawn anew after `every`; the block gets a function that advances it."""
        started = self._clock()
        with click.progressbar(length=total, label=f"  {title}", file=self._stream, update_min_steps=every) as bar:
            yield bar.update
        if not self._stream.isatty():
            self.say(f"  {title}: {self._clock() - started:.1f} s")

    @contextmanager
    def share(self, title: str) -> Iterator[Callable[[float], None]]:
        """Show a bar; the block gets a function that is told the share, from 0 to 1, that is done."""
        with self.bar(title, _SHARES, every=_SHARES // 100) as advance:
            done = 0

            def tell(share: float) -> None:
                nonlocal done
                reached = max(done, min(_SHARES, int(share * _SHARES)))
                advance(reached - done)
                done = reached

            yield tell
            tell(1.0)

    @contextmanager
    def bytes(self, title: str) -> Iterator[Callable[[int], None]]:
        """Count bytes of a transfer whose size is not known; silent if there are none."""
        started, count = self._clock(), 0

        def advance(num_bytes: int) -> None:
            nonlocal count
            count += num_bytes
            if self._stream.isatty():
                click.echo(f"\r  {title}: {count / 1e6:.0f} MB", file=self._stream, nl=False)

        yield advance
        if count:
            start = "\r" if self._stream.isatty() else ""
            self.say(f"{start}  {title}: {count / 1e6:.0f} MB, {self._clock() - started:.1f} s")


class Phases:
    """Phases of a task, one inside a step of another, as the share of the outermost that is done."""

    def __init__(self) -> None:
        self._open: dict[str, list[int]] = {}  # steps done, steps in all; outermost first
        self._most = 0.0

    def start(self, name: str, parent: str | None, num_steps: int) -> None:
        """Open a phase inside the current step of `parent`."""
        inside = list(self._open)
        for other in inside[inside.index(parent) + 1 :] if parent in self._open else inside:
            del self._open[other]
        self._open[name] = [0, max(1, num_steps)]

    def step(self, name: str, step: int) -> float:
        """Count a step as done; return the share, which never falls."""
        if name in self._open:
            self._open[name][0] = step + 1
        share, size = 0.0, 1.0
        for done, total in self._open.values():
            share, size = share + size * min(done, total) / total, size / total
        self._most = max(self._most, min(1.0, share))
        return self._most

    def finish(self, name: str) -> None:
        """Close a phase."""
        self._open.pop(name, None)
