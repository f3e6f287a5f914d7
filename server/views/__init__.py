"""Views of a run as data, for page, report and terminal."""
