"""Display of a run at work: a line of the terminal that is kept up to date, or plain lines."""
