"""Property tests have no time limit per example: machines that run tests are busy."""

from hypothesis import settings

settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")
