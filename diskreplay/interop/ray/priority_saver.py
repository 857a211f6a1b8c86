"""Priorities of a shard, saved in its store in the background."""

import logging
import threading

import diskreplay as dr
from diskreplay.interop.ray.shared_sampler import SharedSampler

_logger = logging.getLogger("diskreplay")


class PrioritySaver:
    """Saves the priorities that were updated every `every_s` seconds, in a thread that the first sampler starts.

    Samplers and stores are used meanwhile. A failure to save is logged, and surfaces in the next call of `follow`
    or `close`; draws go on.
    """

    def __init__(self, every_s: float) -> None:
        self._every_s, self._end = every_s, threading.Event()
        self._followed: dict[str, tuple[SharedSampler, int]] = {}
        self._thread: threading.Thread | None = None
        self._saving = threading.Lock()
        self._failed: Exception | None = None

    def follow(self, store: dr.Store, saved: str, shared: SharedSampler) -> None:
        """Load what was saved under a name if it is of the sampler's run, delete it if not, and save there from now on.

        A note beside it says of which run it is.
        """
        self._raise()
        if saved in self._followed:
            return
        note = f"{saved}.run"
        if store.read_note(note) == {"run": shared.run}:
            try:
                shared.load(saved)
            except dr.StoreNotFound:
                pass  # it died before anything was saved
        else:
            try:
                store.delete_sampler_state(saved)
            except dr.StoreNotFound:
                pass
            store.write_note(note, {"run": shared.run})
        self._followed[saved] = shared, shared.updates
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="diskreplay-priorities", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while not self._end.wait(self._every_s):
            try:
                self.save()
            except Exception as error:
                _logger.error("priorities were not saved, and would be lost with this shard: %s", error)
                self._failed = error

    def save(self) -> None:
        """Save now what was updated since it was saved last."""
        with self._saving:
            self._save()

    def _save(self) -> None:
        for saved, (shared, updates) in list(self._followed.items()):
            now = shared.updates
            if now != updates:
                shared.save(saved)
                self._followed[saved] = shared, now

    def _raise(self) -> None:
        if (error := self._failed) is not None:
            self._failed = None
            raise error

    def close(self) -> None:
        """Save what is not saved yet, and end the thread."""
        self._end.set()
        if self._thread is not None:
            self._thread.join()
            self.save()
        self._raise()
