"""The events of a run folder, digested as they come. Reads each byte once and never writes."""

from __future__ import annotations

from hpctrain.run import events
from hpctrain.run.file_tail import Tail
from hpctrain.run.folder import RunDir
from hpctrain.run.progress import Digest


class Following:
    """Both event files of one run."""

    def __init__(self, run: RunDir) -> None:
        self.tails = [Tail(run.events), Tail(run.monitor_events)]
        self.digest = Digest()
        self.decoder = events.Decoder()

    @property
    def is_behind(self) -> bool:
        """Whether there is more than the last look took."""
        return any(tail.is_behind for tail in self.tails)

    def look(self) -> Digest:
        """Takes in a portion of what is new; what the events come to so far.

        Raises:
            UserError: the files may not be read.
        """
        restarts = self._restarts()
        portions = [tail.lines() for tail in self.tails]
        if self._restarts() != restarts:  # another run in the same place
            self.digest, self.decoder = Digest(), events.Decoder()
        for portion in portions:
            for event in self.decoder.events(portion.split(b"\n")):
                self.digest.add(event)
        return self.digest

    def catch_up(self) -> Digest:
        """Takes in all that is there."""
        self.look()
        while self.is_behind:
            self.look()
        return self.digest

    def _restarts(self) -> int:
        return sum(tail.restarts for tail in self.tails)
