"""What a run shows, as data: the page, the report and the terminal render it."""
