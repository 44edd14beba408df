"""Transformers' server: changes to what it answers, made as soon as its modules are imported."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from types import ModuleType
from typing import Any

from .on_import import when_imported

logger = logging.getLogger(__name__)

# Where Transformers has its server, and what generates for it.
APP_MODULE = "transformers.cli.serving.server"
GENERATION_MODULE = "transformers.cli.serving.utils"


def answer_wrong_values() -> None:
    """Makes the server answer a `ValueError` or `TypeError` with a status of 400 and its message, not with 500."""
    when_imported(APP_MODULE, _handle_wrong_values)


def check_streams(check: Callable[[Any, Any], None]) -> None:
    """Makes the server call a function before it begins to stream, while an error still gives a status.

    Args:
        check: Gets the model and the generation config of a request.
    """
    when_imported(GENERATION_MODULE, functools.partial(_check_before_streaming, check=check))


def _handle_wrong_values(server: ModuleType) -> None:
    build = _found(server, "build_server")
    if build is None:
        return

    @functools.wraps(build)
    def build_server(*args: Any, **kwargs: Any) -> Any:
        app = build(*args, **kwargs)
        for error_type in (ValueError, TypeError):
            app.add_exception_handler(error_type, _refuse)
        return app

    server.build_server = build_server  # type: ignore[attr-defined]


def _found(owner: Any, name: str) -> Any:
    """A function of the server; None, with a warning, if this version has no such function."""
    function = getattr(owner, name, None)
    if function is None:
        from .private import warn_of_missing

        warn_of_missing(name, "Wrong requests are answered as Transformers does")
    return function


async def _refuse(request: Any, error: Exception) -> Any:
    from fastapi.responses import JSONResponse

    logger.warning("A request was refused.", exc_info=error)
    return JSONResponse({"detail": str(error)}, status_code=400)


def _check_before_streaming(utils: ModuleType, check: Callable[[Any, Any], None]) -> None:
    stream = _found(getattr(utils, "GenerateManager", None), "generate_streaming")
    if stream is None:
        return
    signature = inspect.signature(stream)

    @functools.wraps(stream)
    def generate_streaming(*args: Any, **kwargs: Any) -> Any:
        named = signature.bind(*args, **kwargs).arguments
        check(named["model"], named["gen_config"])
        return stream(*args, **kwargs)

    utils.GenerateManager.generate_streaming = generate_streaming
