"""Ctrl-C between two steps instead of in the middle of one."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def deferred_interrupts() -> Iterator[Callable[[], bool]]:
    """Inside, the first Ctrl-C only makes the function that is given true, and a second one raises as ever.

    Outside of the main thread, where Python lets no one handle signals, and where a program handles Ctrl-C by itself,
    nothing is deferred.
    """
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield lambda: False
        return
    was_interrupted = False

    def defer(*_: Any) -> None:
        nonlocal was_interrupted
        was_interrupted = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    signal.signal(signal.SIGINT, defer)
    try:
        yield lambda: was_interrupted
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
