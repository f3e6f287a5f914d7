"""Checks of an attack's settings, by the names of its fields; a ValueError says what was expected and what came."""


def check_at_least(settings: object, least: int, *names: str) -> None:
    """Whether settings are at least this; None passes."""
    for name in names:
        value = getattr(settings, name)
        if value is not None and not value >= least:
            raise ValueError(f"{name} must {f'be at least {least}' if least else 'not be negative'}, got {value}")


def check_above_zero(settings: object, *names: str) -> None:
    """Whether settings are above 0; None passes."""
    for name in names:
        value = getattr(settings, name)
        if value is not None and not value > 0:
            raise ValueError(f"{name} must be above 0, got {value}")
