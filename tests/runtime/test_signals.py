"""What listens for signals leaves its caller's process as it was."""

import subprocess
import sys

SCRIPT = """
import os, signal, threading
from pipefit.runtime.signals import Stop, listen
os.environ["PIPEFIT_GRACE_S"] = "3600"
stop = Stop()
unlisten = listen(stop, None, ctrl_c=True)
{between}
unlisten()
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
assert not [thread for thread in threading.enumerate() if thread.name == "pipefit-signals"]
print(stop.requested, signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)
"""


def _printed(between: str) -> str:
    command = [sys.executable, "-c", SCRIPT.format(between=between)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout.strip()


def test_the_former_handlers_are_back_when_nobody_listens_any_more() -> None:
    assert _printed("os.kill(os.getpid(), signal.SIGTERM)") == "True True"


def test_a_signal_that_somebody_else_handles_since_ends_nothing() -> None:
    theirs = "signal.signal(signal.SIGTERM, lambda *_: None)\n"
    assert _printed(theirs + "os.kill(os.getpid(), signal.SIGTERM)\n" * 2) == "False False"
