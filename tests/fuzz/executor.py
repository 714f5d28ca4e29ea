"""The process that runs calls: `python -m tests.fuzz.executor [EXTENSION]`. It may crash or hang.

It reads one call per line, as Python source, and answers each with a line: OK, or the failure as a
JSON string. EXTENSION is a sanitized extension to load instead of the normal one.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path

OK = "ok"
READY = "ready"


def failure_of(source: str) -> str | None:
    """Runs a call. Returns None if its check passes, otherwise the exception as text."""
    from tests.fuzz.calls import parse

    call = parse(source)
    try:
        call.check()
    except AssertionError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - an unexpected exception is a finding
        frames = traceback.format_exception(error)
        return f"{type(error).__name__}: {error}\n{''.join(frames[-3:])}"
    return None


def main() -> None:
    # Libraries print to stdout; answers need a stream of their own.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    _prepare(sys.argv[1:])
    print(READY, file=answers)
    for line in sys.stdin:
        failure = failure_of(line)
        print(OK if failure is None else json.dumps(failure), file=answers)


def _prepare(extension: list[str]) -> None:
    """Loads every backend: the interpreter, the emulator or the sanitized extension."""
    os.environ.setdefault("TRITON_INTERPRET", "1")
    if extension:
        from tests.support import libraries

        libraries.install_extension(Path(*extension))
    import tests.fuzz.campaign  # defines the classes of all calls
    import tests.support.backends  # noqa: F401 - installs the emulator
    from tests.support import triton_interpreter

    triton_interpreter.install()


if __name__ == "__main__":
    main()
