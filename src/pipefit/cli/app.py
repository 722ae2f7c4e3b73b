"""The verbs by name, and the handling of their errors."""

from __future__ import annotations

import atexit
import contextlib
import errno
import gc
import inspect
import os
import sys
from importlib import import_module
from typing import Any, Literal

from cyclopts import App, Parameter
from cyclopts.exceptions import CycloptsError, MissingArgumentError

import pipefit
from pipefit.cli.answer import FINDING, FINE, INTERNAL_ERROR, USAGE, Answer, is_first, printable
from pipefit.cli.configuration import from_file
from pipefit.cli.options import exact, shown
from pipefit.cli.version import version_text
from pipefit.errors import CommunicationError, InfeasibleError, NonFiniteLossError, PipefitError

VERBS = (
    "train", "run", "check", "rehearse", "cut", "compare", "profile", "plan", "draw", "verify", "simulate",
    "synthesize", "schedules", "study", "reproduce", "course", "site", "report", "generate", "watch", "links",
    "fit-machine", "doctor",
)  # fmt: skip
"""Every verb in the order of the help; the module `pipefit.cli.VERB` holds it as `command` (with _ for -)."""

_WORK = {
    "check": "training by a pipeline and by one process",
    "cut": "building the model, and proving its cut",
    "doctor": "looking at the machine",
    "draw": "drawing",
    "fit-machine": "fitting the machine to its runs",
    "generate": "reading the model, and writing",
    "links": "measuring links and devices",
    "plan": "searching for the best plan",
    "profile": "measuring the layers",
    "rehearse": "rehearsing",
    "report": "writing the page",
    "simulate": "simulating",
    "synthesize": "searching for the best schedule",
    "verify": "verifying",
}
"""The work of the verbs that report no progress of their own."""

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""A disk that is full, or a limit on what a user or a process may write."""

_FINDINGS = (NonFiniteLossError, InfeasibleError, CommunicationError)


def make_app(tokens: list[str]) -> App:
    """The application for these arguments: with the verb that they name, or with all."""
    app = App(
        name="pipefit",
        help="Fit a model to the hardware you have and train it: pipeline parallelism as programs that are proved, "
        "simulated, drawn and run.\n\nStart with: pipefit draw 1f1b -p 4 -m 8",
        version=version_text,
        help_format="plaintext",
        verbose=False,
        default_parameter=Parameter(converter=exact, negative=(), show_default=shown),
        config=from_file,
        # Ctrl-C is handled below, for all verbs alike.
        suppress_keyboard_interrupt=False,
    )
    verbs = [_verb(tokens)]
    if not verbs[0]:
        verbs = list(VERBS)
        app.command(_install_completion, name="--install-completion", sort_key=len(VERBS))
    for verb in verbs:
        command = import_module(f"pipefit.cli.{verb.replace('-', '_')}").command
        app.command(command, name=verb, sort_key=VERBS.index(verb), help=_flowing(command.__doc__))
    return app


def _install_completion(*, shell: Literal["bash", "zsh", "fish"] | None = None) -> Answer:
    """Install completion of verbs and options for your shell.

    Args:
        shell: Default: the one that runs this.
    """
    from cyclopts.completion.detect import ShellDetectionError

    try:
        path = make_app([]).install_completion(shell=shell)
    except ShellDetectionError:
        raise PipefitError("--install-completion: the shell is not known; give --shell bash, zsh or fish") from None
    except OSError as problem:
        raise PipefitError(f"{problem.filename}: cannot be written: {problem.strerror}") from None
    return Answer({}, f"wrote {path}, and a line in your shell's start-up file that reads it; begin a new shell")


def _flowing(text: str | None) -> str:
    """A docstring without its arguments, with paragraphs wrapped by the terminal."""
    paragraphs = inspect.cleandoc(text or "").partition("\n\nArgs:")[0].split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def run(arguments: list[str] | None = None) -> int:
    """Parses, runs and prints; every failure becomes a message on stderr and an exit code."""
    tokens = sys.argv[1:]
    if arguments is not None:
        tokens = arguments
    verb = _verb(tokens)
    doing = ""
    if arguments is None:
        _let_print()
        doing = _WORK.get(verb, "")
        if verb in ("draw", "simulate", "verify"):
            # Of the millions of small objects of a large program no cycle is worth looking for, now or at the end.
            gc.disable()
            atexit.register(gc.freeze)
    try:
        with _saying(doing):
            return _dispatch(tokens)
    except CycloptsError as problem:
        chain = " ".join(problem.command_chain or ())
        words = ["Try: pipefit", *(problem.command_chain or ()), "--help"]
        return _complain(chain, f"{str(problem).strip()}\n{' '.join(words)}", USAGE)
    except (PipefitError, CommunicationError) as problem:
        return _complain(verb, str(problem), _code_of(problem))
    except (BrokenPipeError, SystemExit) as problem:
        # The reader (head, less) has ended: no message, now or when Python flushes at exit. Printing the help ends so.
        if isinstance(problem, SystemExit) and not isinstance(problem.__context__, BrokenPipeError):
            raise
        _close_stdout()
        return 128 + 13
    except KeyboardInterrupt as problem:  # with a hint for resuming, if there is one
        return _complain(verb, "; ".join(["interrupted", *map(str, problem.args)]), 130)
    except Exception as problem:  # an unexpected error: a mistake of pipefit, which is reported with its traceback
        if isinstance(problem, OSError) and problem.errno == errno.ENAMETOOLONG:
            return _complain(verb, f"{str(problem.filename)[:40]}…: the file name is too long", USAGE)
        if isinstance(problem, OSError) and problem.errno in _FULL:
            _close_stdout()
            where = problem.filename or "a file, or standard output"
            return _complain(verb, f"{where}: cannot be written: {problem.strerror}", USAGE)
        path = _keep_evidence(problem, tokens)
        text = f"this is a mistake of pipefit itself: {type(problem).__name__}: {problem}".rstrip(": ")
        return _complain(verb, f"{text}\nPlease report it with the file {path}", INTERNAL_ERROR)


def _let_print() -> None:
    """Standard output and error take every text: nothing is printed where they are closed.

    Characters that the encoding of the terminal does not have are replaced.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            # It takes the number of the closed one, which the next file would get, also in processes that are started.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.set_inheritable(nowhere, True)
            setattr(sys, name, os.fdopen(nowhere, "w", encoding="utf-8"))
        else:
            stream.reconfigure(errors="replace")


def _saying(what: str) -> contextlib.AbstractContextManager[object]:
    """The context of a command, which says on stderr what it does, if that takes long; "": it says nothing."""
    if not (what and is_first()):
        return contextlib.nullcontext()
    from pipefit.cli.heartbeat import Heartbeat

    heartbeat = Heartbeat(sys.stderr)
    heartbeat.doing(what)
    return heartbeat


def _keep_evidence(problem: BaseException, arguments: list[str]) -> str:
    """Writes versions, the command and the traceback to a new file, and returns its path."""
    import platform
    import shlex
    import tempfile
    import traceback

    lines = [
        f"pipefit {pipefit.__version__}, Python {platform.python_version()}, {platform.platform()}",
        f"torch {getattr(sys.modules.get('torch'), '__version__', 'not imported')}",
        f"command: pipefit {shlex.join(arguments)}",
        "",
        *traceback.format_exception(problem),
    ]
    handle, path = tempfile.mkstemp(prefix="pipefit-error-", suffix=".log")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write("\n".join(lines))
    return path


def _dispatch(tokens: list[str]) -> int:
    if tokens[:1] == ["run"]:
        from pipefit.cli.run import prepare

        tokens = prepare(tokens)
    try:
        command, bound, _ = make_app(tokens).parse_args(tokens, print_error=False, exit_on_error=False)
    except MissingArgumentError:
        if tokens[:1] == ["draw"]:
            from pipefit.cli.draw import check_name

            check_name(tokens[1:])
        raise
    wants_json = bool(bound.arguments.get("json"))
    quiet: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    if wants_json:
        # Output of a user's model or a library must not get between the lines of the JSON object.
        quiet = contextlib.redirect_stdout(sys.stderr)
    with quiet:
        result: Any = command(*bound.args, **bound.kwargs)
    if not isinstance(result, Answer):
        return FINE
    if is_first():
        text = result.show(wants_json).rstrip("\n")
        if text:
            _write(printable(text, colours=True) + "\n")
    return result.code


def _write(text: str) -> None:
    """Writes all of the text to standard output, or reports why it cannot."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as problem:
        _close_stdout()
        raise PipefitError(f"cannot write to standard output: {problem.strerror}") from None


def _code_of(problem: Exception) -> int:
    """The exit code of an error; a run finds a loss that is not finite, a plan that does not fit, a lost rank."""
    outcomes = sys.modules.get("pipefit.runtime.outcomes")
    if isinstance(problem, _FINDINGS) or (outcomes and isinstance(problem, outcomes.LaunchError)):
        return FINDING
    return USAGE


def _verb(tokens: list[str]) -> str:
    if tokens and tokens[0] in VERBS:
        return tokens[0]
    return ""


def _complain(verb: str, message: str, code: int) -> int:
    name = f"pipefit {verb}".rstrip()
    with contextlib.suppress(OSError):
        print(printable(f"{name}: {message}"), file=sys.stderr, flush=True)
    return code


def _close_stdout() -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
