"""For all tests: the signals as a terminal's user has them, and how many examples Hypothesis tries."""

import os
import signal

from hypothesis import settings

# What is started in the background (`nohup`, `&` in a script, some CI runners) ignores these from its parent on, and what it
# starts does, too: rightly for a run, which then goes on, but the tests of what Ctrl-C does could not see anything of it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Where a test does not say: HYPOTHESIS_PROFILE=long tries four times as many.
settings.register_profile("short", max_examples=40)
settings.register_profile("long", max_examples=160)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "short"))
