"""A client in a real deployment: its owner's file, its guard, its own grading, its part of a secure sum."""
