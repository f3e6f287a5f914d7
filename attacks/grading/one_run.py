"""`guess_bound` under the name of its first module, for scripts that import it."""

from fedgauge.attacks.membership.one_run import guess_bound as guess_bound
