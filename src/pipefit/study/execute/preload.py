"""What the fork server of a study does once everything is loaded: SIGTERM, too, is the study's to answer."""

import signal

signal.signal(signal.SIGTERM, signal.SIG_IGN)
